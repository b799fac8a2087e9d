"""Starts that cannot create a pod yet: those waiting for weights, and those rejected recently. Async, no I/O.

`WeightsWaits` holds starts whose weights are being fetched to the node (`NodeSupply`); a start that is stopped
meanwhile creates no pod. `RefusedStarts` keeps rejections that every start of the same spec would get. To prevent retry
storms, they block further starts for `REFUSED_S`, or until a ResourceQuota or LimitRange of the namespace changes. Time
is an argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Final, Protocol

from autoscaler.agent_contract import Laid
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import NodeSupply
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.model import Model
from autoscaler.state.world import ClusterFacts, Replica

FETCHING_WEIGHTS = "its weights are being fetched to its node"


class WeightsListener(Protocol):
    """Receives the results of waiting for weights."""

    def start_waits(self, replica: Replica, reason: str) -> None:
        """The weights are being fetched."""

    def weights_came(self, replica: Replica, model: Model, laid: Laid | None) -> None:
        """The weights are available, on the node (`laid`) or in volumes (None)."""

    def weights_failed(self, replica: Replica, reason: str) -> None:
        """The weights could not be fetched."""


class InVolumes:
    """A `NodeSupply` for clusters where all weights are in volumes of pods."""

    def brings(self, _model: Model) -> Collection[str]:
        """Return nothing: no part must be fetched."""
        return ()

    def __call__(self, replica: Replica, model: Model, report: Callable[[str], None]) -> Awaitable[Laid] | None:
        """Return None: there is nothing to wait for."""

    def obstacle(self, _model: Model) -> str:
        """Return no obstacle."""
        return ""

    def mounting(self) -> ClusterFacts:
        """Return the defaults."""
        return ClusterFacts()


VOLUMES = InVolumes()


class WeightsWaits:
    """Starts of one driver that wait for weights."""

    def __init__(self, supply: NodeSupply, listener: WeightsListener) -> None:
        self._supply = supply
        self._listener = listener
        self._over: dict[ReplicaId, asyncio.Event] = {}
        """The waiting starts; an event is set once its start is stopped."""

    def begin(self, replica: Replica, model: Model) -> Iterator[Coroutine[object, object, None]]:
        """Yield the coroutine to run as a task; yield nothing if the weights are available."""
        if replica.id in self._over:
            self._listener.start_waits(replica, FETCHING_WEIGHTS)
            return
        report = self._listener.start_waits
        fetch = self._supply(replica, model, lambda progress: report(replica, f"{FETCHING_WEIGHTS}: {progress}"))
        if fetch is None:
            self._listener.weights_came(replica, model, None)
            return
        self._over[replica.id] = asyncio.Event()
        self._listener.start_waits(replica, FETCHING_WEIGHTS)
        yield self._wait(replica, model, fetch)

    def stop(self, id: ReplicaId) -> None:
        """Cancel a waiting start."""
        if id in self._over:
            self._over[id].set()

    def forget(self) -> None:
        """Forget all waiting starts, whose tasks have been cancelled."""
        self._over.clear()

    async def _wait(self, replica: Replica, model: Model, fetch: Awaitable[Laid]) -> None:
        over = self._over[replica.id]
        getting, ending = asyncio.ensure_future(fetch), asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if over.is_set():
                return
            laid = getting.result()
        except Exception as error:  # noqa: BLE001 - foreign code: any exception is a failed start
            reraise_memory_error(error)
            self._listener.weights_failed(replica, f"its weights: {error}")
        else:
            self._listener.weights_came(replica, model, laid)
        finally:
            getting.cancel()
            ending.cancel()
            await asyncio.wait({getting})
            self._over.pop(replica.id, None)


REFUSED_S = 60.0
PASSING = ("exceeded quota", "status unknown for quota", "error looking up service account")
"""Parts of 403 messages about temporary conditions: a ResourceQuota that is exhausted or new, a namespace whose service
account does not exist yet.
"""
POLICIES: Final = ("resourcequotas", "limitranges")


def is_temporary(message: str) -> bool:
    """Return whether a rejected start waits: the message of the API server names a temporary condition."""
    return any(part in message for part in PASSING)


class RefusedStarts:
    """The last rejection of each model."""

    def __init__(self) -> None:
        self._known: dict[ModelName, tuple[str, float, str]] = {}
        """Model -> (spec hash, expiry, reason)."""

    def note(self, model: ModelName, spec_hash: str, reason: str, now_s: float) -> None:
        """Record that a start of this spec was rejected."""
        self._known[model] = (spec_hash, now_s + REFUSED_S, reason)

    def reason(self, model: Model, now_s: float) -> str:
        """Return the reason of a recent rejection of the model's current spec; empty if there is none."""
        spec_hash, until_s, reason = self._known.get(model.name, ("", 0.0, ""))
        return reason if spec_hash == model.spec_hash() and now_s < until_s else ""

    def forget(self) -> None:
        """Forget all rejections after a change of policies."""
        self._known.clear()


class Policies:
    """Watches the ResourceQuotas and LimitRanges of a namespace.
    `changed` is called when a limit changes; changes of usage are ignored.
    """

    def __init__(self, api: Api, namespace: str, changed: Callable[[], None]) -> None:
        def on_change(_: list[Change[Object]]) -> None:
            changed()

        self._watches = [
            Watched(api, f"/api/v1/namespaces/{namespace}/{kind}", _spec, on_change, optional=True) for kind in POLICIES
        ]

    async def run(self) -> None:
        """Watch until cancelled. Without the permission to watch, a rejection lasts `REFUSED_S`."""
        async with asyncio.TaskGroup() as tasks:
            for watched in self._watches:
                tasks.create_task(watched.run())


def _spec(found: Object) -> Object:
    spec: Object = found["spec"]
    return spec
