"""Amazon ECR, private and public: logins from GetAuthorizationToken. I/O.

Keys come from the environment, a web identity (IRSA), a profile, or the container credentials endpoint (EKS Pod
Identity, ECS). Sources: https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_GetAuthorizationToken.html, the
same page for ECR Public, https://docs.aws.amazon.com/general/latest/gr/ecr.html (endpoints).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from yarl import URL

from artifacts.credentials.aws_keys import AwsKeys
from artifacts.credentials.clouds.aws_container_credentials import PodKeys
from artifacts.credentials.clouds.cloud import ABSENT_S, Granted, Step, post_request
from artifacts.credentials.docker_config import Login
from artifacts.credentials.sigv4 import Asked, Keys, Scope, sign_request
from artifacts.http.retry import Pace
from artifacts.registry_errors import DeniedError, RegistryError

NAME = "AWS"
PUBLIC = "public.ecr.aws"
FIX = (
    "provide keys: AWS_ACCESS_KEY_ID, a profile, IRSA or EKS Pod Identity, with ecr:GetAuthorizationToken; or use "
    "`weights login`"
)
_HOST = re.compile(
    r"[0-9]{12}\.dkr[.-]ecr(?P<fips>-fips)?\.(?P<region>[a-z]{2,5}(?:-[a-z0-9]+){1,4})\."
    r"(?P<end>amazonaws\.com|amazonaws\.com\.cn|amazonaws\.eu|on\.aws|on\.amazonwebservices\.com\.cn)"
)
_DUAL_STACK = {"on.aws": "api.aws", "on.amazonwebservices.com.cn": "api.amazonwebservices.com.cn"}
_CODE = re.compile(rb'"__type"\s*:\s*"(?:[A-Za-z0-9.]{1,80}#)?([A-Za-z]{1,64})"')


class Service(NamedTuple):
    """The ECR service that issues tokens for a registry host."""

    endpoint: str
    region: str
    name: str
    target: str


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    authorization_token: str
    expires_at: float


class _Said(msgspec.Struct, frozen=True, rename="camel"):
    authorization_data: list[_Data] | _Data


def find_ecr_service(host: str) -> Service | None:
    """Return the ECR service of a registry host; None if the host is not an ECR registry."""
    if host == PUBLIC:  # its tokens are issued only in us-east-1
        region = "us-east-1"
        target = "SpencerFrontendService.GetAuthorizationToken"
        return Service(f"https://api.ecr-public.{region}.amazonaws.com/", region, "ecr-public", target)
    found = _HOST.fullmatch(host)
    if found is None:
        return None
    region, end, name = found["region"], found["end"], f"ecr{found['fips'] or ''}"
    if end in _DUAL_STACK:
        at = f"{name}.{region}.{_DUAL_STACK[end]}"
    else:
        at = f"{'' if found['fips'] else 'api.'}{name}.{region}.{end}"
    target = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
    return Service(f"https://{at}/", region, "ecr", target)


class Amazon:
    """Implements `Cloud` for one environment. `at` returns the URL of a service."""

    def __init__(
        self,
        env: Mapping[str, str],
        home: Path,
        at: Callable[[Service], str] = lambda one: one.endpoint,
        pace: Pace | None = None,
    ) -> None:
        self._at = at
        self._pace = pace or Pace()
        self._own = AwsKeys(env, home, self._pace)
        self._pod = PodKeys(env, self._pace)

    def applies(self, host: str) -> bool:
        """See `Cloud.applies`."""
        return find_ecr_service(host) is not None

    async def fetch(self, host: str) -> Granted:
        """See `Cloud.fetch`."""
        asked = find_ecr_service(host)
        if asked is None:
            raise ValueError(host)
        try:
            keys = await self._own.keys() or await self._pod.keys()
        except RegistryError as error:
            raise type(error)(f"{host}: {NAME}: the AWS keys that sign requests cannot be obtained: {error}") from None
        if keys is None:
            return Granted(Login(note=f"{NAME}: no keys were found; {FIX}"), ABSENT_S)
        return await self._token(host, asked, keys)

    async def _token(self, host: str, asked: Service, keys: Keys) -> Granted:
        step = f"{host}: {NAME} GetAuthorizationToken in region {asked.region}"
        url, body, now_unix_s = URL(self._at(asked), encoded=True), b"{}", self._pace.unix_s()
        headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": asked.target}
        proven = sign_request(Asked("POST", url, headers, body), keys, Scope(asked.region, asked.name), now_unix_s)
        found = await post_request(url, proven, body, self._pace, Step(step, FIX))
        if found.status != 200:
            code = _CODE.search(found.text)
            said = f"{found.status} {code[1].decode()}" if code else str(found.status)
            needs = " and sts:GetServiceBearerToken" if asked.name == "ecr-public" else ""
            raise DeniedError(
                f"{step}: refused ({said}); the keys need the right {asked.name}:GetAuthorizationToken{needs}"
            )
        try:
            data = msgspec.json.decode(found.text, type=_Said).authorization_data
            one = data if isinstance(data, _Data) else data[0]
            user, colon, password = base64.b64decode(one.authorization_token, validate=True).decode().partition(":")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError, binascii.Error):
            colon = ""
        if not colon:
            raise DeniedError(f"{step}: the response is not a token")
        whose = NAME if keys.access.startswith("ASIA") else f"{NAME} {keys.access}"  # temporary key ids change all day
        return Granted(Login(user, password, whose=whose), max(one.expires_at - now_unix_s, 0.0))
