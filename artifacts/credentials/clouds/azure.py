"""Azure Container Registry: logins from a workload identity or a managed identity. I/O.

Entra ID issues a token for the identity, either in exchange for the token that Kubernetes mounts
(AZURE_FEDERATED_TOKEN_FILE) or through the machine's metadata service (managed identity). The registry exchanges it for
its own identity token. Sources: https://github.com/Azure/acr/blob/main/docs/AAD-OAuth.md,
https://learn.microsoft.com/entra/identity-platform (client credentials with a federated credential; managed identities,
how to use a token over HTTP).
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec
from yarl import URL

from artifacts.credentials.clouds.cloud import ABSENT_S, Granted, Step, decode_reply, post_request
from artifacts.credentials.clouds.metadata import NobodyError, fetch_metadata
from artifacts.credentials.docker_config import Login
from artifacts.http.retry import Pace
from artifacts.http.url_policy import is_loopback, parse_untrusted_url
from artifacts.registry_errors import DeniedError, PolicyError, UnreachableError

NAME = "Azure"
AUDIENCE = "https://containerregistry.azure.net"
AUTHORITY = "https://login.microsoftonline.com"
METADATA = "http://169.254.169.254"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
LASTS_S, LASTS_S_MAX = 3600.0, 10_800.0
"""Lifetime of an identity token without an expiry, and the maximum (the registry's own limit)."""
TOKEN_BYTES_MAX = 64 << 10
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
FIX = "give the pod a workload identity, or the machine a managed identity, with role AcrPull, or use `weights login`"
_HOST = re.compile(r"[a-z0-9][a-z0-9-]{3,61}[a-z0-9]\.azurecr\.(?:io|cn|us)")
_ID = re.compile(r"[A-Za-z0-9.-]{1,255}")
_CODE = re.compile(rb"AADSTS[0-9]{1,8}")


class _Token(msgspec.Struct, frozen=True):
    access_token: str


class _Exchanged(msgspec.Struct, frozen=True):
    refresh_token: str


class _Claims(msgspec.Struct, frozen=True):
    exp: float


class Azure:
    """Implements `Cloud` for one environment."""

    def __init__(
        self,
        env: Mapping[str, str],
        metadata_at: str = METADATA,
        registry_at: Callable[[str], str] = "https://{}".format,
        pace: Pace | None = None,
    ) -> None:
        self._env, self._metadata_at, self._registry_at = env, metadata_at, registry_at
        self._pace = pace or Pace()

    def applies(self, host: str) -> bool:
        """See `Cloud.applies`."""
        return _HOST.fullmatch(host) is not None

    async def fetch(self, host: str) -> Granted:
        """See `Cloud.fetch`."""
        file, client, tenant = (
            self._env.get(f"AZURE_{one}", "") for one in ("FEDERATED_TOKEN_FILE", "CLIENT_ID", "TENANT_ID")
        )
        if file and client and tenant:
            return await self._exchanged(host, await self._federated(host, Path(file), client, tenant), tenant)
        found = await self._managed(host, client)
        return Granted(found, ABSENT_S) if isinstance(found, Login) else await self._exchanged(host, found, tenant)

    async def _federated(self, host: str, file: Path, client: str, tenant: str) -> str:
        """Exchange the token mounted by Kubernetes for an Entra ID token."""
        step = f"{host}: {NAME}: workload identity"
        proof = await asyncio.to_thread(_mounted, file, step)
        if not _ID.fullmatch(tenant):
            raise PolicyError(f"{step}: AZURE_TENANT_ID is not a valid tenant ID or domain name")
        authority = parse_untrusted_url(f"{(self._env.get('AZURE_AUTHORITY_HOST') or AUTHORITY).rstrip('/')}/")
        if authority.scheme != "https" and not is_loopback(authority.raw_host or ""):
            raise PolicyError(f"{step}: AZURE_AUTHORITY_HOST is not https; no token is sent there")
        form = {
            "grant_type": "client_credentials", "client_id": client, "scope": f"{AUDIENCE}/.default",
            "client_assertion_type": ASSERTION, "client_assertion": proof,
        }  # fmt: skip
        url = authority.joinpath(tenant, "oauth2/v2.0/token", encoded=True)
        fix = "check AZURE_CLIENT_ID, AZURE_TENANT_ID and the identity's federated credential"
        found = await post_request(url, FORM, urlencode(form).encode(), self._pace, Step(f"{step}: Entra ID", fix))
        if found.status != 200:
            code = _CODE.search(found.text)
            said = f"{found.status} {code[0].decode()}" if code else str(found.status)
            raise DeniedError(f"{step}: Entra ID returned no token ({said}); {fix}")
        return decode_reply(found, _Token, f"{step}: Entra ID").access_token

    async def _managed(self, host: str, client: str) -> str | Login:
        """Return an Entra ID token for the machine, or an anonymous login if it has no identity."""
        step = f"{host}: {NAME}: the machine's metadata service"
        query = f"api-version=2018-02-01&resource={quote(AUDIENCE, safe='')}"
        query += f"&client_id={quote(client, safe='')}" if client else ""
        url = f"{self._metadata_at}/metadata/identity/oauth2/token?{query}"
        try:
            found = await fetch_metadata(url, {"Metadata": "true"}, self._pace)
        except NobodyError:
            return Login(note=f"{NAME}: no identity was found; {FIX}")
        except UnreachableError as error:
            raise UnreachableError(f"{step}: {error}; {FIX}") from None
        # The machine has no identity, or several and none is selected, or another cloud's service responded.
        if found.status != 200:
            several = "" if client else " (if it has several, select one with AZURE_CLIENT_ID)"
            return Login(note=f"{NAME}: the machine has no identity to use: {found.status}{several}; {FIX}")
        return decode_reply(found, _Token, step).access_token

    async def _exchanged(self, host: str, token: str, tenant: str) -> Granted:
        """Exchange an Entra ID token for the registry's own token."""
        step, fix = f"{host}: {NAME}: the exchange for a token of the registry", "give the identity the role AcrPull"
        form = {"grant_type": "access_token", "service": host, "access_token": token}
        form |= {"tenant": tenant} if tenant else {}
        url = URL(f"{self._registry_at(host)}/oauth2/exchange", encoded=True)
        found = await post_request(url, FORM, urlencode(form).encode(), self._pace, Step(step, fix))
        if found.status != 200:
            raise DeniedError(f"{step} is refused ({found.status}); {fix} on this registry")
        identity = decode_reply(found, _Exchanged, step).refresh_token
        return Granted(Login(identity_token=identity, whose=NAME), _lasts_s(identity, self._pace.unix_s()))


def _mounted(file: Path, step: str) -> str:
    try:
        with file.open("rb") as mounted:
            text = mounted.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if not 0 < len(text) <= TOKEN_BYTES_MAX:
        raise PolicyError(f"{step}: AZURE_FEDERATED_TOKEN_FILE contains no token: annotate the service account")
    return text


def _lasts_s(token: str, now_unix_s: float) -> float:
    """Return the remaining lifetime by the token's `exp` claim; unverified, since it only schedules the renewal."""
    try:
        middle = token.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)), type=_Claims)
    except (IndexError, ValueError, RecursionError):
        return LASTS_S
    return min(max(claims.exp - now_unix_s, 0.0), LASTS_S_MAX)
