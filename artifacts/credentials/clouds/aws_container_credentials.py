"""AWS keys from the container credentials endpoint: EKS Pod Identity and ECS. I/O.

Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html. As AWS requires, plain HTTP
is used only for loopback and AWS's own addresses; the authorization token is read for every request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import datetime
from math import inf
from pathlib import Path

import msgspec
from yarl import URL

from artifacts.credentials.aws_keys import RENEW_S, Given
from artifacts.credentials.clouds.cloud import decode_reply
from artifacts.credentials.clouds.metadata import NobodyError, fetch_metadata
from artifacts.credentials.sigv4 import Keys
from artifacts.http.retry import Pace
from artifacts.http.url_policy import is_loopback, normalize_host
from artifacts.registry_errors import DeniedError, PolicyError, UnreachableError

ECS = "http://169.254.170.2"
HOSTS = frozenset({"169.254.170.2", "169.254.170.23", "fd00:ec2::23"})
"""Endpoints of ECS and EKS."""
TOKEN_BYTES_MAX = 64 << 10
FULL, RELATIVE = "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
AUTHORIZATION, FROM_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
_PATH = re.compile(r"/[A-Za-z0-9._~/?=&%-]{0,1024}")


class _Said(msgspec.Struct, frozen=True, rename="pascal"):
    access_key_id: str
    secret_access_key: str
    token: str = ""
    expiration: datetime | None = None


class PodKeys:
    """Keys of one environment. Keep the instance: it caches keys until shortly before they expire."""

    def __init__(self, env: Mapping[str, str], pace: Pace | None = None) -> None:
        self._env = env
        self._pace = pace or Pace()
        self._asking = asyncio.Lock()
        self._given: Given | None = None

    async def keys(self) -> Keys | None:
        """Return the keys; None outside of such a container. Raises PolicyError, DeniedError, UnreachableError."""
        url = self._url()
        if url is None:
            return None
        async with self._asking:
            if self._given is None or self._pace.unix_s() >= self._given.until_unix_s - RENEW_S:
                self._given = await self._asked(url)
            return self._given.keys

    def _url(self) -> str | None:
        relative, full = self._env.get(RELATIVE, ""), self._env.get(FULL, "")
        if relative:  # AWS gives this one precedence
            if not _PATH.fullmatch(relative):
                raise PolicyError(f"{RELATIVE} is not a path")
            return ECS + relative
        if not full:
            return None
        try:
            url = URL(full, encoded=True)
            host = normalize_host(url.raw_host or "")
        except ValueError:
            host = ""
        if not host or url.scheme not in {"http", "https"} or url.user is not None:
            raise PolicyError(f"{FULL} is not a URL")
        if url.scheme == "http" and host not in HOSTS and not is_loopback(host):
            raise PolicyError(f"{FULL} names a host that is contacted over https only")
        return full

    async def _asked(self, url: str) -> Given:
        token = await self._token()
        headers = {"Authorization": token} if token else {}
        step = "the container credentials endpoint (EKS Pod Identity, ECS)"
        try:
            found = await fetch_metadata(url, headers, self._pace)
        except NobodyError:
            raise UnreachableError(f"{step}: no response; does its agent run on this node?") from None
        except UnreachableError as error:
            raise UnreachableError(f"{step}: {error}") from None
        if found.status != 200:
            raise DeniedError(f"{step}: returned no keys ({found.status}); has the service account a role?")
        said = decode_reply(found, _Said, step, "a key")
        until = inf if said.expiration is None else said.expiration.timestamp()
        return Given(Keys(said.access_key_id, said.secret_access_key, said.token), until)

    async def _token(self) -> str:
        file = self._env.get(FROM_FILE, "")
        if not file:
            text = self._env.get(AUTHORIZATION, "")
        else:
            text = await asyncio.to_thread(_read, Path(file))
        if (file and not text) or not text.isascii() or (text and not text.isprintable()):
            raise PolicyError(f"{FROM_FILE if file else AUTHORIZATION}: contains no token")
        return text


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            text = opened.read(TOKEN_BYTES_MAX + 1)
    except OSError:
        return ""
    return text.decode("ascii", "replace").strip() if len(text) <= TOKEN_BYTES_MAX else ""
