"""Keys from a container's credentials service: which URLs are allowed, which token is sent, and when keys expire."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts.credentials.clouds.aws_container_credentials import AUTHORIZATION, FROM_FILE, FULL, RELATIVE, PodKeys
from artifacts.credentials.sigv4 import Keys
from artifacts.registry_errors import DeniedError, PolicyError, UnreachableError
from tests.support.fakes.cloud_services import Services
from tests.support.fakes.registry import StillClock

pytestmark = pytest.mark.standard

PATH = "/v1/credentials"
SAID = {"AccessKeyId": "ASIA1", "SecretAccessKey": "s3cret", "Token": "t", "AccountId": "123456789012"}


async def test_pod_identity_keys_are_fetched_once_with_the_mounted_token(tmp_path: Path) -> None:
    async with Services().serving() as there:
        (tmp_path / "token").write_text("mounted\n")
        there.replies[PATH] = (200, {**SAID, "Expiration": "2026-01-01T00:00:00Z"})
        env = {FULL: f"{there.url}{PATH}", FROM_FILE: str(tmp_path / "token"), AUTHORIZATION: "not this"}
        pod = PodKeys(env, StillClock())
        assert await pod.keys() == Keys("ASIA1", "s3cret", "t")
        assert await pod.keys() == Keys("ASIA1", "s3cret", "t")
        assert [(one.method, one.path, one.headers["authorization"]) for one in there.asked] == [
            ("GET", PATH, "mounted")
        ]


async def test_expiring_pod_identity_keys_are_fetched_again_with_the_new_token(tmp_path: Path) -> None:
    async with Services().serving() as there:
        token = tmp_path / "token"
        there.replies[PATH] = (200, {**SAID, "Expiration": "1994-11-06T08:53:00Z"})  # expires within five minutes
        pod = PodKeys({FULL: f"{there.url}{PATH}", FROM_FILE: str(token)}, StillClock())
        for text in ("one", "two"):
            token.write_text(text)
            await pod.keys()
        assert [one.headers["authorization"] for one in there.asked] == ["one", "two"]


async def test_no_keys_are_fetched_without_pod_identity_settings() -> None:
    assert await PodKeys({}).keys() is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({FULL: "http://keys.example/v1"}, "contacted over https only"),
        ({FULL: "http://169.254.169.254/latest"}, "contacted over https only"),
        ({FULL: "http://10.0.0.7/v1"}, "contacted over https only"),
        ({FULL: "ftp://127.0.0.1/v1"}, "is not a URL"),
        ({FULL: "http://me:pw@127.0.0.1/v1"}, "is not a URL"),
        ({FULL: "nothing"}, "is not a URL"),
        ({RELATIVE: "@evil.example/x"}, "is not a path"),
        ({RELATIVE: "//evil example"}, "is not a path"),
        ({FULL: "http://127.0.0.1:1/v1", AUTHORIZATION: "a\r\nb"}, "contains no token"),
        ({FULL: "http://127.0.0.1:1/v1", FROM_FILE: "/nobody/token"}, "contains no token"),
    ],
)
async def test_unsafe_pod_identity_urls_and_tokens_are_rejected(env: dict[str, str], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        await PodKeys(env, StillClock()).keys()


@pytest.mark.parametrize(
    "url", ["http://169.254.170.23/v1/credentials", "http://[fd00:ec2::23]/v1/credentials", "https://keys.example/v1"]
)
def test_pod_identity_urls_allowed_by_aws_are_accepted(url: str) -> None:
    assert PodKeys({FULL: url})._url() == url
    assert PodKeys({FULL: url, RELATIVE: "/v2/credentials/1"})._url() == "http://169.254.170.2/v2/credentials/1"


async def test_pod_identity_service_error_hides_the_response_body() -> None:
    async with Services().serving() as there:
        pod = PodKeys({FULL: f"{there.url}{PATH}"}, StillClock())
        there.replies[PATH] = (403, b"s3cret")
        with pytest.raises(DeniedError, match=r"returned no keys \(403\); has the service account a role") as one:
            await pod.keys()
        there.replies[PATH] = (200, b"s3cret")
        with pytest.raises(DeniedError, match="the response is not a key") as two:
            await pod.keys()
        assert "s3cret" not in f"{one.value}{two.value}"
    with pytest.raises(UnreachableError, match="no response"):
        await PodKeys({FULL: "http://127.0.0.1:1/v1"}, StillClock()).keys()
