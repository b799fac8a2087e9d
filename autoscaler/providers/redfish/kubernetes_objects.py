"""Kubernetes objects of a Redfish fabric: login (Secret), Notes (ConfigMap), nodes that can have devices. I/O.

The chart mounts the Secret, since the autoscaler may not read Secrets from the API server. It is read for each session.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from autoscaler.capacity.attachable_nodes import DEVICES_MAX, AttachableNode, Groups, list_attachable_nodes
from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError, ApiServer, Object
from autoscaler.providers.redfish.client import Login
from autoscaler.providers.redfish.inventory import StoredMarks
from autoscaler.spec.settings import Settings

NODES = "/api/v1/nodes"
NOTES = "pilotlight-fabric"
"""The ConfigMap: one key per provider, with one line per block."""
SECRETS = Path("/secrets")
"""Where the chart mounts Secrets, each in a folder of its name."""
FILE_BYTES_MAX = 1 << 20
Key = Callable[[str], Awaitable[str | None]]
"""Reads one key of a Secret by name; None: it does not exist; empty: unreadable."""


class RedfishCredentialsError(Exception):
    """A login or a CA certificate is not available; `str()` names the Secret or file and the missing content."""


class RedfishCredentials:
    """Login and TLS of one provider's service. Raises RedfishCredentialsError.
    The mounted Secret contains username, password and, for a private CA, `ca.crt`; `ca_file` replaces the latter.
    """

    def __init__(
        self, secret: str | None, ca_file: str | None, secrets: Path = SECRETS, key: Key | None = None
    ) -> None:
        """`key`: reads the Secret; by default from the folder where it is mounted."""
        self._secret, self._folder = secret, secrets / (secret or "")
        self._key = self._mounted if key is None else key
        self._ca_file = None if ca_file is None else Path(ca_file)

    async def login(self) -> Login | None:
        """Return the login (`client.Logins`)."""
        if self._secret is None:
            return None
        user, password = await self._key("username"), await self._key("password")
        if not user or not password:
            raise RedfishCredentialsError(f"Secret {self._secret} does not exist, or lacks username or password")
        return Login(user, password)

    async def tls(self) -> ssl.SSLContext:
        """Return the TLS context (`client.Tls`)."""
        if self._ca_file is not None:
            pem = await asyncio.to_thread(_text, self._ca_file)
        else:
            pem = None if self._secret is None else await self._key("ca.crt")
        where = self._ca_file or f"ca.crt of Secret {self._secret}"
        if pem is None and self._ca_file is not None:
            raise RedfishCredentialsError(f"caFile {where} cannot be read")
        try:
            return ssl.create_default_context(cadata=None if pem is None else _certificates(pem))
        except ssl.SSLError:
            fix = "add the CA certificate, or omit it to trust the CAs of the system"
            raise RedfishCredentialsError(f"{where} contains no valid PEM certificate: {fix}") from None

    async def _mounted(self, name: str) -> str | None:
        return await asyncio.to_thread(_text, self._folder / name)


def _certificates(pem: str) -> str:
    """Remove non-ASCII characters, which comments between certificates may contain.
    Raises SSLError if nothing remains: with an empty text the system's CAs would be trusted.
    """
    ascii_ = pem.encode("ascii", "ignore").decode()
    if not ascii_.strip():
        raise ssl.SSLError("no certificates")
    return ascii_


def _text(path: Path) -> str | None:
    """Read a file; None: it does not exist; empty: it is unreadable or not text."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode().rstrip("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError):
        return ""


class ConfigMapNotes:
    """The Notes of one provider of one installation. An earlier version used the provider's name alone as the key."""

    def __init__(self, server: ApiServer, namespace: str, provider: str) -> None:
        self._server, self._old = server, provider
        installation = server.owner.installation
        self._key = f"{installation}.{provider}" if installation else provider
        self._all = f"/api/v1/namespaces/{namespace}/configmaps"

    async def read(self) -> StoredMarks:
        """Read the marks and their version."""
        found = await self._server.find(f"{self._all}/{NOTES}")
        if found is None:
            return StoredMarks({}, "")
        data = found.get("data") or {}
        lines = str(data.get(self._key, data.get(self._old, ""))).splitlines()
        marks = {path: text for path, space, text in (line.partition(" ") for line in lines) if space}
        return StoredMarks(marks, found["metadata"]["resourceVersion"])

    async def write(self, noted: StoredMarks) -> bool:
        """Replace the marks; False if the ConfigMap has changed."""
        text = "".join(f"{path} {mark}\n" for path, mark in sorted(noted.marks.items()))
        data = {self._old: None, self._key: text or None}
        metadata: Object = {"name": NOTES}
        try:
            if noted.version:
                body = {"metadata": {"resourceVersion": noted.version}, "data": data}
                await self._server.patch(f"{self._all}/{NOTES}", body)
            else:
                made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
                await self._server.create(self._all, {**made, "data": {k: v for k, v in data.items() if v}})
        except AnswerError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True


class OpenSites:
    """Ready and schedulable nodes, and how many devices they can have: DEVICES_MAX if that is not configured."""

    def __init__(
        self, server: ApiServer, settings: Callable[[], Settings], groups: Callable[[], Groups] = dict
    ) -> None:
        self._server, self._settings, self._groups = server, settings, groups

    async def __call__(self, nodes: Collection[str]) -> Mapping[str, AttachableNode]:
        """Return those of these nodes that can have devices (`provider.Sites`)."""
        if len(nodes) == 1:
            found = await self._server.find(f"{NODES}/{next(iter(nodes))}")
            there = [] if found is None else [found]
        else:
            there = [one for one in await self._server.items(NODES) if one["metadata"]["name"] in nodes]
        return list_attachable_nodes(there, self._settings(), DEVICES_MAX, self._groups())
