"""Keys that sign requests to AWS or to an S3-compatible store. I/O.

Keys are looked up in AWS's order: the environment, a workload's identity (a web identity token as IRSA mounts it, which
STS exchanges for keys), the profile in `~/.aws/credentials`. The region comes from the environment or the config file.
Files are read on every lookup, expiring keys are renewed before they expire, and no secret is logged. The instance
metadata service is not used: link-local addresses are never contacted.
"""

from __future__ import annotations

import asyncio
import configparser
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from yarl import URL

from artifacts.credentials.sigv4 import Keys
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Limits, Site, Transport
from artifacts.http.url_policy import get_origin, is_loopback, parse_untrusted_url
from artifacts.http.xml import BadXmlError, Element, parse_xml
from artifacts.registry_errors import BrokenError, DeniedError, PolicyError

REGION = "us-east-1"
"""Default region."""
FILE_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = 256 << 10
RENEW_S = 300.0
"""Keys are renewed this long before they expire."""
_REGION = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_ROLE = re.compile(r"arn:[a-z0-9-]+:iam:[a-z0-9-]*:[0-9]*:role/[!-~]{1,512}")
"""Amazon's role ARNs have no region; MinIO's have the server's."""
_FAULT = re.compile(r"[A-Za-z]{1,64}")


class Own(NamedTuple):
    """Settings of a private STS-compatible service."""

    endpoint: str | None = None
    """STS endpoint if AWS_ENDPOINT_URL_STS is not set."""
    ca: Path | None = None
    """CA certificates trusted in addition to the system's."""


class AwsKeys:
    """Keys found in one environment. Keep the instance: it caches keys from STS."""

    def __init__(
        self,
        env: Mapping[str, str],
        home: Path,
        pace: Pace | None = None,
        limits: Limits | None = None,
        *,
        own: Own | None = None,
    ) -> None:
        """`own`: the STS service to use instead of Amazon's."""
        self._env, self._home, self._own = env, home, own or Own()
        self._pace, self._limits = pace or Pace(), limits or Limits()
        self._asking = asyncio.Lock()
        self._given: Given | None = None

    async def keys(self) -> Keys | None:
        """Return the keys; None means unsigned requests. Raises PolicyError, DeniedError, UnreachableError."""
        env = self._env
        if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
            return Keys(env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], env.get("AWS_SESSION_TOKEN", ""))
        if env.get("AWS_WEB_IDENTITY_TOKEN_FILE") and env.get("AWS_ROLE_ARN"):
            return await self._of_role(Path(env["AWS_WEB_IDENTITY_TOKEN_FILE"]), env["AWS_ROLE_ARN"])
        row = await asyncio.to_thread(self._profile, self._file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("",))
        if row.get("aws_access_key_id") and row.get("aws_secret_access_key"):
            return Keys(row["aws_access_key_id"], row["aws_secret_access_key"], row.get("aws_session_token", ""))
        if env.get("AWS_PROFILE"):
            raise DeniedError("AWS_PROFILE names a profile that has no keys in ~/.aws/credentials")
        return None

    async def region(self) -> str:
        """Return the region from the environment or `~/.aws/config`. Raises PolicyError."""
        found = self._env.get("AWS_REGION") or self._env.get("AWS_DEFAULT_REGION")
        if not found:
            row = await asyncio.to_thread(self._profile, self._file("AWS_CONFIG_FILE", "config"), ("profile ", ""))
            found = row.get("region") or REGION
        if not _REGION.fullmatch(found):
            raise PolicyError("the region for AWS (AWS_REGION, ~/.aws/config) is invalid; expected e.g. eu-central-1")
        return found

    def _file(self, name: str, usual: str) -> Path:
        return Path(self._env[name]) if self._env.get(name) else self._home / ".aws" / usual

    def _profile(self, path: Path, begins: tuple[str, ...]) -> Mapping[str, str]:
        """Return the selected profile's settings; `begins`: prefixes of its section name. Raises PolicyError."""
        parser = configparser.RawConfigParser(strict=False)
        try:
            with path.open("rb") as file:
                parser.read_string(file.read(FILE_BYTES_MAX).decode())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise PolicyError(f"{path}: {error.strerror}") from None
        except (configparser.Error, UnicodeDecodeError):  # the parser's message quotes lines of the file
            raise PolicyError(f"{path}: not a valid file of AWS profiles") from None
        name = self._env.get("AWS_PROFILE") or "default"
        return next((dict(parser[begin + name]) for begin in begins if parser.has_section(begin + name)), {})

    async def _of_role(self, token: Path, role: str) -> Keys:
        async with self._asking:
            if self._given is None or self._pace.unix_s() >= self._given.until_unix_s - RENEW_S:
                self._given = await self._asked(token, role)
            return self._given.keys

    async def _asked(self, token: Path, role: str) -> Given:
        """Call AssumeRoleWithWebIdentity, which is unsigned: the token authenticates the caller."""
        if not _ROLE.fullmatch(role):
            raise PolicyError("AWS_ROLE_ARN is not a role; expected an ARN such as arn:aws:iam::123456789012:role/name")
        try:
            proof = (await asyncio.to_thread(token.read_bytes))[:FILE_BYTES_MAX].decode().strip()
        except (OSError, UnicodeDecodeError):
            raise PolicyError(f"{token}: the web identity token cannot be read (AWS_WEB_IDENTITY_TOKEN_FILE)") from None
        endpoint = self._env.get("AWS_ENDPOINT_URL_STS") or self._own.endpoint or self._sts(await self.region())
        url = parse_untrusted_url(f"{endpoint.rstrip('/')}/")
        if url.scheme == "http" and not is_loopback(url.raw_host or ""):
            raise PolicyError(
                "AWS_ENDPOINT_URL_STS (or AWS_ENDPOINT_URL) is plain HTTP, over which no token is sent; use https"
            )
        session = self._env.get("AWS_ROLE_SESSION_NAME") or f"pilotlight-{secrets.token_hex(4)}"
        body = {
            "Action": "AssumeRoleWithWebIdentity", "Version": "2011-06-15", "RoleArn": role,
            "RoleSessionName": session, "WebIdentityToken": proof,
        }  # fmt: skip
        return await self._answered(url, urlencode(body).encode())

    def _sts(self, region: str) -> str:
        end = ".cn" if region.startswith("cn-") else ""
        return f"https://sts.{region}.amazonaws.com{end}"

    async def _answered(self, url: URL, body: bytes) -> Given:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        tries, said = Tries(self._pace), str(get_origin(url))
        site = Site(said, plain_http=url.scheme == "http", ca=self._own.ca)
        async with Transport(site, self._limits) as transport:
            while True:
                try:
                    async with await transport.secret(url, headers=headers, body=body) as answer:
                        text = await answer.whole(ANSWER_BYTES_MAX, "keys")
                        break
                except BrokenError as error:
                    await tries.again(error)
        try:
            found = parse_xml(text)
        except BadXmlError:
            raise DeniedError(f"{said}: answered {answer.status} with an invalid body instead of keys") from None
        if answer.status != 200:
            code = found.one("Error", "Code")
            shown = code if _FAULT.fullmatch(code) else "no reason"
            raise DeniedError(f"{said}: returned no keys for the role in AWS_ROLE_ARN: {answer.status} {shown}")
        return _given(found, said)


@dataclass(frozen=True, slots=True)
class Given:
    """Keys, and when they expire."""

    keys: Keys = field(repr=False)
    until_unix_s: float


def _given(found: Element, said: str) -> Given:
    way = ("AssumeRoleWithWebIdentityResult", "Credentials")
    access, secret, session, until = (
        found.one(*way, name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
    )
    try:
        ends = datetime.fromisoformat(until)
    except ValueError:
        ends = None
    if not access or not secret or ends is None or ends.tzinfo is None:
        raise DeniedError(f"{said}: returned invalid keys")
    return Given(Keys(access, secret, session), ends.timestamp())
