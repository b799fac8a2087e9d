"""Sources of AWS keys. STS is a server on loopback."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from artifacts.credentials.aws_keys import REGION, AwsKeys, Own
from artifacts.credentials.sigv4 import Keys
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Registries
from artifacts.registry_errors import DeniedError, PolicyError
from tests.support.fakes.registry import FakeRegistry, StillClock
from tests.support.net.certificates import OURS, sides, write_authority

pytestmark = pytest.mark.standard

ROLE = "arn:aws:iam::123456789012:role/models"
GIVEN = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>ASIA{n}</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
REFUSED = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>the-token not so</Message></Error></ErrorResponse>"
PLAIN = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s1"}


def home(tmp_path: Path, credentials: str = "", config: str = "") -> Path:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(credentials)
    (folder / "config").write_text(config)
    return tmp_path


PROFILES = """[default]
aws_access_key_id = AKIADEFAULT
aws_secret_access_key = one%two
[work]
aws_access_key_id = AKIAWORK
aws_secret_access_key = s
aws_session_token = t
"""


async def test_aws_keys_in_the_environment_take_precedence_over_files(tmp_path: Path) -> None:
    there = home(tmp_path, PROFILES)
    assert await AwsKeys(PLAIN | {"AWS_SESSION_TOKEN": "t"}, there).keys() == Keys("AKIA1", "s1", "t")
    assert await AwsKeys({}, there).keys() == Keys("AKIADEFAULT", "one%two")
    assert await AwsKeys({"AWS_PROFILE": "work"}, there).keys() == Keys("AKIAWORK", "s", "t")
    elsewhere = {"AWS_SHARED_CREDENTIALS_FILE": str(there / ".aws" / "credentials")}
    assert await AwsKeys(elsewhere, tmp_path / "missing").keys() == Keys("AKIADEFAULT", "one%two")
    assert await AwsKeys({}, tmp_path / "missing").keys() is None


async def test_aws_profile_missing_from_the_config_files_raises_denied_error(tmp_path: Path) -> None:
    with pytest.raises(DeniedError, match="AWS_PROFILE"):
        await AwsKeys({"AWS_PROFILE": "other"}, home(tmp_path, PROFILES)).keys()


async def test_malformed_aws_credentials_file_error_hides_the_file_content(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="not a valid file of AWS profiles") as caught:
        await AwsKeys({}, home(tmp_path, "aws_secret_access_key = s3cret\n")).keys()
    assert "s3cret" not in str(caught.value)


async def test_aws_region_in_the_environment_takes_precedence_over_the_profile(tmp_path: Path) -> None:
    there = home(tmp_path, config="[default]\nregion = eu-west-1\n[profile work]\nregion = eu-central-1\n")
    assert await AwsKeys({"AWS_REGION": "a-1", "AWS_DEFAULT_REGION": "b-1"}, there).region() == "a-1"
    assert await AwsKeys({"AWS_DEFAULT_REGION": "b-1"}, there).region() == "b-1"
    assert await AwsKeys({}, there).region() == "eu-west-1"
    assert await AwsKeys({"AWS_PROFILE": "work"}, there).region() == "eu-central-1"
    assert await AwsKeys({}, tmp_path / "missing").region() == REGION
    with pytest.raises(PolicyError, match="region"):
        await AwsKeys({"AWS_REGION": "x.evil.example/"}, there).region()


class Sts(FakeRegistry):
    """A fake STS: gives keys to callers with the right token, and records requests in `bodies`."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, list[str]]] = []
        self.until = "2026-01-01T00:00:00Z"
        self.always["POST", "/"] = self.give

    async def give(self, request: web.Request) -> web.Response:
        body = parse_qs(await request.text())
        self.bodies.append(body)
        if body.get("WebIdentityToken") != ["the-token"]:
            return web.Response(status=403, text=REFUSED)
        return web.Response(text=GIVEN.format(n=len(self.bodies), until=self.until))


def identity(tmp_path: Path, sts: Sts, token: str = "the-token") -> dict[str, str]:  # noqa: S107 -- a test token
    (tmp_path / "token").write_text(f"{token}\n")
    return {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": ROLE,
        "AWS_ENDPOINT_URL_STS": sts.url,
    }


async def test_workload_identity_keys_are_cached_and_renewed_before_expiry(tmp_path: Path) -> None:
    clock = StillClock()
    async with Sts().serving() as sts:
        keys = AwsKeys(identity(tmp_path, sts), tmp_path, clock)
        assert await keys.keys() == Keys("ASIA1", "s", "t")
        assert await keys.keys() == Keys("ASIA1", "s", "t")
        assert len(sts.bodies) == 1
        assert sts.bodies[0]["RoleArn"] == [ROLE]
        assert sts.bodies[0]["Action"] == ["AssumeRoleWithWebIdentity"]
        sts.until = "1994-11-06T08:53:00Z"  # less than five minutes after the clock's time
        late = AwsKeys(identity(tmp_path, sts), tmp_path, clock)
        assert (await late.keys(), await late.keys()) == (Keys("ASIA2", "s", "t"), Keys("ASIA3", "s", "t"))


async def test_sts_denial_raises_an_error_that_hides_the_token(tmp_path: Path) -> None:
    async with Sts().serving() as sts:
        with pytest.raises(DeniedError, match="403 AccessDenied") as caught:
            await AwsKeys(identity(tmp_path, sts, "wrong-token"), tmp_path, StillClock()).keys()
        assert "token not" not in str(caught.value)
        assert "wrong-token" not in str(caught.value)
        sts.until = "soon"
        with pytest.raises(DeniedError, match="invalid"):
            await AwsKeys(identity(tmp_path, sts), tmp_path, StillClock()).keys()


async def test_invalid_web_identity_settings_fail_without_an_sts_request(tmp_path: Path) -> None:
    async with Sts().serving() as sts:
        with pytest.raises(PolicyError, match="AWS_ROLE_ARN"):
            await AwsKeys(identity(tmp_path, sts) | {"AWS_ROLE_ARN": "models"}, tmp_path).keys()
        plain = identity(tmp_path, sts) | {"AWS_ENDPOINT_URL_STS": "http://sts.example"}
        with pytest.raises(PolicyError, match=r"AWS_ENDPOINT_URL_STS .* is plain HTTP"):
            await AwsKeys(plain, tmp_path).keys()
        (tmp_path / "token").unlink()
        removed = {**identity(tmp_path, sts), "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "missing")}
        with pytest.raises(PolicyError, match="the web identity token"):
            await AwsKeys(removed, tmp_path).keys()
        assert sts.bodies == []


async def test_web_identity_keys_are_requested_from_a_custom_aws_endpoint(tmp_path: Path) -> None:
    """A MinIO role is in the server's region, and the server's certificate authority is private."""
    async with Sts().serving(sides().server) as sts:
        env = identity(tmp_path, sts) | {"AWS_ROLE_ARN": "arn:minio:iam:eu-test-1::role/k-Xz_9"}
        url = env.pop("AWS_ENDPOINT_URL_STS")
        ca = write_authority(tmp_path, OURS)
        ways = Ways(Registries(pace=StillClock(), ca=ca), env | {"AWS_ENDPOINT_URL": url}, tmp_path)
        assert await ways.aws.keys.keys() == Keys("ASIA1", "s", "t")
        with pytest.raises(PolicyError, match="its certificate is not valid"):
            await AwsKeys(env, tmp_path, StillClock(), own=Own(url)).keys()
