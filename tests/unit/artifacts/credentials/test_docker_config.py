"""Logins from config files, credential helpers and secrets: which host each applies to, and that none is shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from artifacts.credentials import docker_config
from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import ConfigFiles, list_config_paths
from artifacts.registry_errors import PolicyError
from tests.support.fakes.credential_helper import program

HUB = "https://index.docker.io/v1/"


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def login(auths: dict[str, dict[str, str]], host: str, repository: str = "team/model") -> str:
    """Return the user of the login that is found, or - if there is none."""
    found = docker_config.parse_config(json.dumps({"auths": auths}), "config.json")
    one = docker_config.find_login(found, host, repository, "config.json")
    return "-" if one is None else one.user


@pytest.mark.parametrize(
    ("auths", "host", "user"),
    [
        ({"reg.example": auth("a", "p")}, "reg.example", "a"),
        ({"https://reg.example/v2/": auth("a", "p")}, "reg.example", "a"),
        ({"reg.example": auth("a", "p")}, "reg.example:5000", "-"),
        ({"reg.example:5000": auth("a", "p")}, "reg.example:5000", "a"),
        ({"reg.example": auth("a", "p")}, "evil-reg.example", "-"),
        ({HUB: auth("a", "p")}, "registry-1.docker.io", "a"),
        ({"docker.io": auth("a", "p")}, "docker.io", "a"),
        ({"reg.example/team": auth("b", "p"), "reg.example": auth("a", "p")}, "reg.example", "b"),
        ({"reg.example/tea": auth("b", "p"), "reg.example": auth("a", "p")}, "reg.example", "a"),
        ({"reg.example": {}}, "reg.example", "-"),
        ({"*.example": auth("a", "p")}, "reg.example", "-"),
    ],
)
def test_login_entry_applies_only_to_its_own_host(auths: dict[str, dict[str, str]], host: str, user: str) -> None:
    assert login(auths, host) == user


@pytest.mark.parametrize(
    ("key", "host", "fits"),
    [
        ("*.example.com", "reg.example.com", True),
        ("*.example.com", "a.reg.example.com", False),
        ("*.*.example.com", "a.reg.example.com", True),
        ("reg*.example.com", "reg7.example.com", True),
        ("*.example.com", "reg.example.com:5000", False),
        ("*.example.com:5000", "reg.example.com:5000", True),
        ("*", "reg.example.com", False),
        ("*.example.com/team", "reg.example.com", True),
        ("*.example.com/other", "reg.example.com", False),
    ],
)
def test_pull_secret_wildcard_matches_within_one_host_label(key: str, host: str, *, fits: bool) -> None:
    secret = docker_config.parse_config(json.dumps({"auths": {key: auth("a", "p")}}), "secret")
    assert docker_config.list_logins([secret], host, "team/model") == ([Login("a", "p")] if fits else [])


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"auths": 3}', "{" * 9999, '{"credsStore": "../evil"}'),
        *('{"credHelpers": {"x": "a b"}}', '{"auths":{"x":{"auth":7}}}'),
    ],
)
def test_malformed_config_error_names_the_file_and_hides_its_content(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^/home/me/config.json: ") as refused:
        docker_config.parse_config(text, "/home/me/config.json")
    assert "evil" not in str(refused.value)


@pytest.mark.parametrize(
    "bad", ["%%%", base64.b64encode(b"nocolon").decode(), base64.b64encode(b"\xff\xfe:x").decode()]
)
def test_malformed_auth_is_rejected_without_showing_its_value(bad: str) -> None:
    with pytest.raises(PolicyError, match="not USER:PASSWORD in base64") as refused:
        login({"reg.example": {"auth": bad}}, "reg.example")
    assert bad not in str(refused.value)


def helper_script(**words: str) -> str:
    return f"cat >asked; cat <<'E'\n{json.dumps(words)}\nE"


@pytest.mark.standard
async def test_credential_helper_returns_the_login_for_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"credHelpers": {"reg.example": "fake"}, "auths": {"other.example": auth("o", "p")}}))
    program(tmp_path, monkeypatch, helper_script(ServerURL="reg.example", Username="me", Secret="pw"))
    files = ConfigFiles([tmp_path / "none.json", path])
    assert await files.login("reg.example", "x") == Login("me", "pw")
    assert (tmp_path / "asked").read_text() == "reg.example"
    assert await files.login("other.example", "x") == Login("o", "p")
    path.write_text(json.dumps({"credsStore": "fake"}))
    program(tmp_path, monkeypatch, helper_script(Username="<token>", Secret="refresh"))
    assert await files.login("docker.io", "x") == Login(identity_token="refresh")
    assert (tmp_path / "asked").read_text() == HUB
    program(tmp_path, monkeypatch, "echo 'credentials not found in native keychain'; exit 1")
    assert await files.login("reg.example", "x") is None


def test_environment_variables_override_the_config_file_paths() -> None:
    home = Path("/home/me")
    assert list_config_paths({}, home) == [home / ".config/containers/auth.json", home / ".docker/config.json"]
    env = {"DOCKER_CONFIG": "/d", "XDG_RUNTIME_DIR": "/run/user/1"}
    assert list_config_paths(env, home)[0] == Path("/run/user/1/containers/auth.json")
    assert list_config_paths(env, home)[-1] == Path("/d/config.json")
    assert list_config_paths({"REGISTRY_AUTH_FILE": "/a"}, home) == [Path("/a")]
