"""Google Artifact Registry and Container Registry: logins from the metadata server. I/O.

The token is that of the machine's service account or, on GKE with workload identity, that of the pod's; the request is
the same. Sources: https://cloud.google.com/compute/docs/metadata/querying-metadata,
https://cloud.google.com/artifact-registry/docs/docker/authentication.
"""

from __future__ import annotations

import re

import msgspec

from artifacts.credentials.clouds.cloud import ABSENT_S, Granted, decode_reply
from artifacts.credentials.clouds.metadata import NobodyError, fetch_metadata
from artifacts.credentials.docker_config import Login
from artifacts.http.retry import Pace
from artifacts.registry_errors import DeniedError, UnreachableError

NAME = "Google Cloud"
USER = "oauth2accesstoken"
METADATA = "metadata.google.internal"
PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
FLAVOR = {"Metadata-Flavor": "Google"}
FIX = (
    "run as a service account with the role Artifact Registry Reader (on GKE: workload identity), or "
    "`pilotlight weights login` with a key"
)
_HOST = re.compile(r"(?:[a-z0-9-]{1,63}\.)?gcr\.io|[a-z0-9-]{1,63}\.pkg\.dev")


class _Token(msgspec.Struct, frozen=True):
    access_token: str
    expires_in: float


class Google:
    """Implements `Cloud`. `at`: host of the metadata server, optionally with a port."""

    def __init__(self, at: str = METADATA, pace: Pace | None = None) -> None:
        self._at = at
        self._pace = pace or Pace()

    def applies(self, host: str) -> bool:
        """See `Cloud.applies`."""
        return _HOST.fullmatch(host) is not None

    async def fetch(self, host: str) -> Granted:
        """See `Cloud.fetch`."""
        step = f"{host}: {NAME}: the metadata server"
        try:
            found = await fetch_metadata(f"http://{self._at}{PATH}", FLAVOR, self._pace)
        except NobodyError:
            return Granted(Login(note=f"{NAME}: no metadata server was found; {FIX}"), ABSENT_S)
        except UnreachableError as error:
            raise UnreachableError(f"{step}: {error}; {FIX}") from None
        if found.headers.get("Metadata-Flavor") != "Google":
            return Granted(Login(note=f"{NAME}: no metadata server was found; {FIX}"), ABSENT_S)
        if found.status != 200:
            raise DeniedError(f"{step} returned no token ({found.status}): no service account is available; {FIX}")
        token = decode_reply(found, _Token, step)
        return Granted(Login(USER, token.access_token, whose=NAME), token.expires_in)
