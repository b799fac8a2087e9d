"""Fetches weights into a node's store, or inspects them in a registry, with the node's credentials. I/O.

Decides which logins are tried, and in which order, from the Settings and the pull secrets of the engines' namespace.
Weights already in the store are not fetched again, and are provided only to namespaces that their registry admits. The
number of concurrent fetches is limited. Secrets are read for each fetch with the agent's service account and are
neither kept nor logged. `pilotlight.agent.weights.keeper` decides what is fetched and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from artifacts.credentials.docker_config import Config, parse_pull_secret
from artifacts.credentials.keychain import Keychain, try_each_login
from artifacts.disk.thread_wait import run_in_thread
from artifacts.fetch.fetch import Lies, Ways, fetch_artifact, find_stored_copy, parse_remote_source
from artifacts.fetch.registry import Came, OnProgress, Registries
from artifacts.peers.client import Peering
from artifacts.reference import Reference
from artifacts.registry_errors import DeniedError, UnreachableError
from artifacts.store.copies import Copy
from artifacts.store.layout import ForbiddenError
from artifacts.store.store import AWAY_WAIT_S, Store
from autoscaler.agent_contract import WeightsReport, WeightsRequest
from autoscaler.spec.settings import Weights
from pilotlight.agent.weights.inspect import HEADERS_MAX, Headers, inspect_artifact
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.agent.weights.report_limits import truncate_reasons
from pilotlight.models.registry_access import build_registries
from pilotlight.models.weights_fetch import HEADERS

PULLS_MAX = 4
"""Artifacts fetched concurrently; others wait."""
LOOKS_MAX = 2
"""Artifacts inspected concurrently. An inspection needs at most 10 MiB of memory while it reads a header, whatever the
header's size (`artifacts.fetch.remote_header`)."""

T = TypeVar("T")
SecretOf = Callable[[str], Awaitable[Config]]
"""Returns the logins of a pull secret. If it raises, the pull fails with its message as the reason."""


class Brought(NamedTuple):
    """The result of a request for weights."""

    copy: Copy
    """Held until it is closed."""
    was_here: bool
    """Whether the store had it already."""


class Fetching:
    """Fetches into the store at `root`."""

    def __init__(self, root: Path, secret_of: SecretOf, metrics: StoreMetrics, clock: Callable[[], float]) -> None:
        self._root = root
        self._secret_of = secret_of
        self._metrics = metrics
        self._clock = clock
        self.peering: Callable[[str], Awaitable[Peering | None]] = _alone
        """Returns the peers that may have an artifact; called for each pull."""
        self._ways: tuple[Weights, Store, Ways] | None = None
        self._opening, self._pulls = asyncio.Lock(), asyncio.Semaphore(PULLS_MAX)
        self._looks, self._headers = asyncio.Semaphore(LOOKS_MAX), Headers()
        self._seen: dict[WeightsRequest, WeightsReport] = {}
        """The last inspection with header, by request."""

    async def bring(self, request: WeightsRequest, settings: Weights, report: OnProgress) -> Brought:
        """Return a held copy, fetched if necessary. Raises RegistryError, BadManifestError, StoreError, DiskError,
        SignersError, and what `secret_of` raises.
        """

        async def work(of: Lies, store: Store, by: Ways) -> Brought:
            with contextlib.suppress(ForbiddenError):  # the tag may have moved since: resolve it again
                kept = await find_stored_copy(of, store, by, allow_unsafe=request.allow_unsafe)
                if kept is not None:
                    return Brought(kept, was_here=True)
            return Brought(await self._obtained(request, of, store, by, report), was_here=False)

        return await self._let_in(request, settings, work)

    async def look(self, request: WeightsRequest, settings: Weights, *, header: bool) -> WeightsReport:
        """Inspect an artifact. With `header`, also read its memory metadata. Such an inspection may wait for others and
        falls back to the last result if a registry does not answer, since no start depends on it. Raises as `bring`.
        """

        async def work(of: Lies, _store: Store, by: Ways) -> WeightsReport:
            folder = self._root / HEADERS / hashlib.sha256(repr(request).encode()).hexdigest() if header else None
            async with self._looks if header else contextlib.nullcontext():
                return truncate_reasons(
                    await inspect_artifact(WeightsReport(**request._asdict()), of, by, folder, self._headers)
                )

        if not header:
            return await self._let_in(request, settings, work)
        before = self._seen.pop(request, None)
        try:
            async with asyncio.timeout(AWAY_WAIT_S if before is not None else None):
                found = await self._let_in(request, settings, work)
        except (UnreachableError, TimeoutError):
            if before is None:
                raise
            found = before
        self._seen[request] = found
        if len(self._seen) > HEADERS_MAX:
            del self._seen[next(iter(self._seen))]
        return found

    async def _let_in(
        self, request: WeightsRequest, settings: Weights, work: Callable[[Lies, Store, Ways], Awaitable[T]]
    ) -> T:  # fmt: skip
        """Run `work` with each login in turn; for the Hub and buckets, with the agent's own credentials."""
        of = parse_remote_source(request.artifact)
        store, ways = await self._opened(settings)
        if not isinstance(of, Reference):
            return await work(of, store, ways)
        secrets = [await self._secret_of(request.pull_secret)] if request.pull_secret else []

        async def tried(keychain: Keychain) -> T:
            by = dataclasses.replace(ways, registries=dataclasses.replace(ways.registries, keychain=keychain))
            try:
                return await work(of, store, by)
            except ForbiddenError as error:  # the registry rejects this login; the next may be admitted
                raise DeniedError(str(error)) from None

        return await try_each_login(secrets, of.host, of.repository, ways.registries.keychain, tried)

    async def _obtained(self, request: WeightsRequest, of: Lies, store: Store, by: Ways, report: OnProgress) -> Copy:
        began_s, came_bytes = self._clock(), 0

        def came(now: Came) -> None:
            nonlocal came_bytes
            came_bytes = now.bytes
            report(now)

        try:
            async with self._pulls:
                copy = await self._fetched(request, of, store, by, came)
        except Exception:
            self._metrics.pulled(self._clock() - began_s, came_bytes, well=False)
            raise
        self._metrics.pulled(self._clock() - began_s, came_bytes, well=True)
        return copy

    async def _fetched(self, request: WeightsRequest, of: Lies, store: Store, by: Ways, report: OnProgress) -> Copy:
        among = await self.peering(f"oci://{of}" if isinstance(of, Reference) else str(of))
        if among is not None:
            by = dataclasses.replace(by, registries=dataclasses.replace(by.registries, peering=among))
        try:
            return await fetch_artifact(of, store, by, report, allow_unsafe=request.allow_unsafe)
        finally:
            if among is not None:
                self._metrics.from_peers(among.given.total())

    async def _opened(self, settings: Weights) -> tuple[Store, Ways]:
        """Return the store and its access as in the Settings. Raises StoreError, SignersError."""
        async with self._opening:
            if self._ways is None or self._ways[0] != settings:
                store = Store(self._root, bytes_max=settings.store_bytes_max, evicted=self._metrics.evicted)
                ways = await run_in_thread(lambda: build_fetch_access(build_registries(settings)))
                self._ways = (settings, await run_in_thread(store.open), ways)
                store.settle_soon()
            return self._ways[1:]


def build_fetch_access(registries: Registries) -> Ways:
    """Return access with this process's logins for the Hub and buckets."""
    return Ways(registries, os.environ, Path.home())


async def _alone(_artifact: str) -> Peering | None:
    """Return no peers."""
    return None


class NoSecretError(Exception):
    """A pull secret cannot be read; `str()` says which, why, and what to do."""


class PullSecrets:
    """Reads pull secrets of one namespace; None: reading them is not allowed here."""

    def __init__(self, namespace: str | None, kubeconfig: Path | None = None) -> None:
        self._namespace = namespace
        self._kubeconfig = kubeconfig

    async def __call__(self, name: str) -> Config:
        """Return the logins of a secret. Raises NoSecretError, PolicyError."""
        if self._namespace is None:
            raise NoSecretError(
                f"pull secret {name}: this node's agent may not read pull secrets: set its --pull-secrets NAMESPACE"
            )
        from autoscaler.kubernetes.api import Api, ApiError, UnreachableError
        from autoscaler.kubernetes.kubeconfig import ApiAccessError, load_api_access  # imported here: an optional extra

        try:
            async with Api(await load_api_access(self._kubeconfig)) as api:
                found = await api.get(f"/api/v1/namespaces/{self._namespace}/secrets/{name}")
        except (ApiAccessError, UnreachableError) as error:
            raise NoSecretError(f"pull secret {name}: {error}") from None
        except ApiError as error:
            hint = ": add it to the chart's agent.pullSecrets" if error.status == 403 else ""
            raise NoSecretError(f"pull secret {name} of namespace {self._namespace}: {error.reason}{hint}") from None
        return parse_pull_secret(found.get("type", ""), found.get("data") or {}, f"pull secret {name}")
