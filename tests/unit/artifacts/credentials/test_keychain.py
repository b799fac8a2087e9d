"""Kubernetes pull secrets: both formats, and several per pod in the order in which the kubelet tries them."""

from __future__ import annotations

import base64
import contextlib
import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from artifacts.credentials.docker_config import AuthConfig, Config, Login, list_logins, parse_pull_secret
from artifacts.credentials.keychain import Chain, Keychain, Known, try_each_login
from artifacts.http.transport import Site
from artifacts.registry import manifests
from artifacts.registry.client import Client
from artifacts.registry.manifests import RawManifest
from artifacts.registry_errors import AbsentError, DeniedError, PolicyError
from tests.support.fakes.registry import FakeRegistry

JSON, OLD = "kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"
HOST = "reg.example"


def entry(user: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:pw".encode()).decode()}


def secret(type: str = JSON, **users: str) -> Config:
    """Return a pull secret with these registries and users; `__` stands for /, `star` for *."""
    keys = {key.replace("__", "/").replace("star", "*").replace("_", "."): user for key, user in users.items()}
    auths = {key: entry(user) for key, user in keys.items()}
    text = json.dumps(auths if type == OLD else {"auths": auths, "credsStore": "evil"})
    name = ".dockercfg" if type == OLD else ".dockerconfigjson"
    return parse_pull_secret(type, {name: base64.b64encode(text.encode()).decode()})


@pytest.mark.parametrize("type", [JSON, OLD])
def test_credential_helpers_named_in_a_pull_secret_are_ignored(type: str) -> None:
    found = secret(type, reg_example="a")
    assert list_logins([found], HOST, "team/model") == [Login("a", "pw")]
    assert list_logins([found], "other.example", "team/model") == []
    assert (found.creds_store, found.cred_helpers) == ("", {})


@pytest.mark.parametrize(
    ("type", "data", "message"),
    [
        ("Opaque", {".dockerconfigjson": "e30="}, "its type is not"),
        (JSON, {}, r"\.dockerconfigjson is missing or invalid"),
        (JSON, {".dockercfg": "e30="}, r"\.dockerconfigjson is missing or invalid"),
        (JSON, {".dockerconfigjson": "s3cret%"}, "is missing or invalid"),
        (JSON, {".dockerconfigjson": base64.b64encode(b"s3cret").decode()}, "not a JSON object with logins"),
        (OLD, {".dockercfg": base64.b64encode(b'[{"s3cret":1}]').decode()}, "not a JSON object with logins"),
        (OLD, {".dockercfg": base64.b64encode(b'{"a": {"auth": 7}}').decode()}, "not a JSON object with logins"),
    ],
)
def test_malformed_pull_secret_error_names_it_and_hides_its_content(
    type: str, data: dict[str, str], message: str
) -> None:
    with pytest.raises(PolicyError, match=f"secret team/regcred: .*{message}") as refused:
        parse_pull_secret(type, data, "secret team/regcred")
    assert "s3cret" not in str(refused.value)


@given(st.sampled_from([JSON, OLD]), st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_pull_secret_is_parsed_or_raises_policy_error(type: str, text: bytes) -> None:
    name = ".dockercfg" if type == OLD else ".dockerconfigjson"
    with contextlib.suppress(PolicyError):
        list_logins([parse_pull_secret(type, {name: base64.b64encode(text).decode()})], HOST, "team/model")


def test_logins_are_ordered_by_specificity_then_secret_order() -> None:
    one = secret(reg_example="wide", star_example="star")
    two = secret(reg_example__team="narrow", reg_example="second", reg_example__other="not")
    assert [found.user for found in list_logins([one, two], HOST, "team/model")] == ["narrow", "wide", "second", "star"]
    assert [found.user for found in list_logins([two, one], HOST, "team/model")] == ["narrow", "second", "wide", "star"]
    assert [found.user for found in list_logins([one, one], HOST, "team/model")] == ["wide", "star"]


async def tried(secrets: list[Config], fails: dict[str, Exception], rest: Keychain) -> tuple[list[str], str | None]:
    seen = list[str]()

    async def do(chain: Keychain) -> str:
        found = await chain.login(HOST, "team/model")
        other = await chain.login("mirror.example", "team/model")
        assert (other.user if other else None) == "node"
        user = found.user if found else "nobody"
        seen.append(user)
        if user in fails:
            raise fails[user]
        return user

    try:
        return seen, await try_each_login(secrets, HOST, "team/model", rest, do)
    except (DeniedError, AbsentError):
        return seen, None


async def test_pull_secret_logins_are_tried_in_order_before_anonymous_access() -> None:
    rest = Chain([Known("mirror.example", Login("node", "pw"))])
    secrets = [secret(reg_example="a"), secret(reg_example="b")]
    denied, absent = DeniedError("no"), AbsentError("none")
    assert await tried(secrets, {}, rest) == (["a"], "a")
    assert await tried(secrets, {"a": denied}, rest) == (["a", "b"], "b")
    assert await tried(secrets, {"a": absent, "b": denied}, rest) == (["a", "b", "nobody"], "nobody")
    assert await tried(secrets, {"a": denied, "b": denied, "nobody": denied}, rest) == (["a", "b", "nobody"], None)
    assert await tried([], {}, rest) == (["nobody"], "nobody")


async def test_error_other_than_denied_or_not_found_stops_login_attempts() -> None:
    async def do(chain: Keychain) -> str:
        seen.append(chain)
        raise PolicyError("odd")

    seen = list[Keychain]()
    with pytest.raises(PolicyError, match="odd"):
        await try_each_login([secret(reg_example="a"), secret(reg_example="b")], HOST, "x", Chain(), do)
    assert len(seen) == 1


@pytest.mark.standard
async def test_logins_after_the_accepted_login_are_not_tried() -> None:
    right = Login("b", "pw").basic

    def judge(request: web.Request) -> web.StreamResponse | None:
        requested = {"WWW-Authenticate": 'Basic realm="x"'}
        return None if request.headers.get("Authorization") == right else web.Response(status=401, headers=requested)

    async def do(chain: Keychain) -> RawManifest:
        async with Client(Site(fake.host), chain) as client:
            return await manifests.fetch_manifest(client, "team/model", "v1")

    async with FakeRegistry().serving() as fake:
        fake.manifest("team/model", "v1", b"{}")
        fake.judge = judge
        secrets = [Config({fake.host: AuthConfig(username=user, password="pw")}) for user in ("a", "b", "c")]
        assert (await try_each_login(secrets, fake.host, "team/model", Chain(), do)).body == b"{}"
        assert right in [one.headers.get("authorization") for one in fake.seen]
        assert Login("c", "pw").basic not in [one.headers.get("authorization") for one in fake.seen]
        with pytest.raises(DeniedError, match="rejects the login"):
            await try_each_login(secrets[::2], fake.host, "team/model", Chain(), do)
