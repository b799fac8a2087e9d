"""ECR: which endpoint issues a host's token, and whose keys sign the request. The service runs on loopback."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from yarl import URL

from artifacts.credentials.clouds.amazon_ecr import Amazon, Service, find_ecr_service
from artifacts.credentials.clouds.aws_container_credentials import FULL
from artifacts.credentials.docker_config import Login
from artifacts.credentials.sigv4 import Asked, Keys, Scope, sign_request
from artifacts.registry_errors import DeniedError, PolicyError
from tests.support.fakes.cloud_services import Services
from tests.support.fakes.registry import StillClock

pytestmark = pytest.mark.standard

HOST = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"
PLAIN = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s3cret-key"}
TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        (HOST, "https://api.ecr.eu-central-1.amazonaws.com/"),
        ("123456789012.dkr.ecr.us-gov-west-1.amazonaws.com", "https://api.ecr.us-gov-west-1.amazonaws.com/"),
        ("123456789012.dkr.ecr-fips.us-east-1.amazonaws.com", "https://ecr-fips.us-east-1.amazonaws.com/"),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "https://api.ecr.cn-north-1.amazonaws.com.cn/"),
        ("123456789012.dkr.ecr.eusc-de-east-1.amazonaws.eu", "https://api.ecr.eusc-de-east-1.amazonaws.eu/"),
        ("123456789012.dkr-ecr.eu-west-1.on.aws", "https://ecr.eu-west-1.api.aws/"),
        ("123456789012.dkr-ecr-fips.us-west-2.on.aws", "https://ecr-fips.us-west-2.api.aws/"),
        ("public.ecr.aws", "https://api.ecr-public.us-east-1.amazonaws.com/"),
        ("12345678901.dkr.ecr.eu-central-1.amazonaws.com", None),
        (f"{HOST}.evil.example", None),
        (f"{HOST}:444", None),
        ("123456789012.dkr.ecr.evil.example/.amazonaws.com", None),
        ("123456789012.dkr.ecr.evil.amazonaws.com", None),
        ("evil.public.ecr.aws", None),
        ("s3.eu-central-1.amazonaws.com", None),
    ],
)
def test_ecr_host_name_determines_the_token_endpoint_and_others_have_none(host: str, endpoint: str | None) -> None:
    found = find_ecr_service(host)
    assert (None if found is None else found.endpoint) == endpoint
    assert Amazon({}, Path("/nobody")).applies(host) is (endpoint is not None)


def amazon(there: Services, home: Path, env: dict[str, str], seen: list[Service] | None = None) -> Amazon:
    def at(asked: Service) -> str:
        if seen is not None:
            seen.append(asked)
        return f"{there.url}/"

    return Amazon(env, home, at, StillClock())


def data(text: str, lasts_s: float = 43_200.0) -> dict[str, object]:
    token = base64.b64encode(text.encode()).decode()
    return {"authorizationToken": token, "expiresAt": StillClock().unix_s() + lasts_s, "proxyEndpoint": "https://x"}


async def test_ecr_token_is_requested_with_a_signed_request(tmp_path: Path) -> None:
    async with Services().serving() as there:
        there.replies["/"] = (200, {"authorizationData": [data("AWS:pass:word")]})
        login, lasts_s = await amazon(there, tmp_path, PLAIN).fetch(HOST)
        assert (login.user, login.password, lasts_s) == ("AWS", "pass:word", 43_200.0)
        (asked,) = there.asked
        assert (asked.method, asked.body) == ("POST", "{}")
        headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": TARGET}
        scope = Scope("eu-central-1", "ecr")
        want = sign_request(
            Asked("POST", URL(f"{there.url}/"), headers, b"{}"),
            Keys("AKIA1", "s3cret-key"),
            scope,
            StillClock().unix_s(),
        )
        assert {name: asked.headers[name.lower()] for name in want} == want
        assert "s3cret-key" not in str(asked)


async def test_token_for_public_ecr_is_requested_in_us_east_1(tmp_path: Path) -> None:
    async with Services().serving() as there:
        there.replies["/"] = (200, {"authorizationData": data("AWS:pw")})
        seen = list[Service]()
        login, _ = await amazon(there, tmp_path, PLAIN, seen).fetch("public.ecr.aws")
        assert (login.user, login.password) == ("AWS", "pw")
        assert (seen[0].region, seen[0].name) == ("us-east-1", "ecr-public")
        assert there.asked[0].headers["x-amz-target"] == "SpencerFrontendService.GetAuthorizationToken"
        assert "/us-east-1/ecr-public/aws4_request" in there.asked[0].headers["authorization"]


async def test_aws_container_keys_are_used_if_no_other_aws_keys_exist(tmp_path: Path) -> None:
    async with Services().serving() as there:
        there.replies["/"] = (200, {"authorizationData": [data("AWS:pw")]})
        there.replies["/v1/credentials"] = (200, {"AccessKeyId": "ASIA7", "SecretAccessKey": "s", "Token": "session"})
        env = {FULL: f"{there.url}/v1/credentials"}
        login, _ = await amazon(there, tmp_path, env).fetch(HOST)
        assert (login.password, login.whose) == ("pw", "AWS")
        assert there.asked[1].headers["x-amz-security-token"] == "session"
        assert "Credential=ASIA7/" in there.asked[1].headers["authorization"]
        login, _ = await amazon(there, tmp_path, env | PLAIN).fetch(HOST)
        assert (len(there.asked), login.whose) == (3, "AWS AKIA1")


async def test_ecr_login_without_aws_keys_is_anonymous_and_lists_key_sources(tmp_path: Path) -> None:
    async with Services().serving() as there:
        login, _ = await amazon(there, tmp_path, {}).fetch(HOST)
        assert login == Login(note=login.note)
        assert login.note.startswith("AWS: no keys were found; provide keys: AWS_ACCESS_KEY_ID, a profile, IRSA")
        assert there.asked == []


async def test_ecr_login_error_names_the_failed_step_and_hides_secrets(tmp_path: Path) -> None:
    async with Services().serving() as there:
        role = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/nobody", "AWS_ROLE_ARN": "models"}
        with pytest.raises(
            PolicyError, match=f"{HOST}: AWS: the AWS keys that sign requests cannot be obtained: .*AWS_ROLE_ARN"
        ):
            await amazon(there, tmp_path, role).fetch(HOST)
        fault = {"__type": "com.amazon.coral#AccessDeniedException", "message": "s3cret-key"}
        there.replies["/"] = (400, fault)
        with pytest.raises(
            DeniedError,
            match=r"in region eu-central-1: refused \(400 AccessDeniedException\); .*ecr:",
        ) as one:
            await amazon(there, tmp_path, PLAIN).fetch(HOST)
        with pytest.raises(DeniedError, match="ecr-public:GetAuthorizationToken and sts:GetServiceBearerToken"):
            await amazon(there, tmp_path, PLAIN).fetch("public.ecr.aws")
        errors = [str(one.value)]
        odds: list[object] = [{"authorizationData": []}, {"authorizationData": [data("s3cret-key")]}, b"s3cret-key"]
        for odd in odds:
            there.replies["/"] = (200, odd)
            with pytest.raises(DeniedError, match="the response is not a token") as two:
                await amazon(there, tmp_path, PLAIN).fetch(HOST)
            errors.append(str(two.value))
        assert not any("s3cret" in error for error in errors)
