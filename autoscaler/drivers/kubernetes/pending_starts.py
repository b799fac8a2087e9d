"""Starts that wait until their weights are on their node, before there is a pod. Async, no I/O.

Owns who waits, and that a stop ends it: what is stopped meanwhile is never created. How weights come is `NodeSupply`'s.

Starts that were refused, for reasons that no other start of the same spec can do anything about: no storm of tries.

Owns for how long that is in the way of the next ones: REFUSED_S, or until a ResourceQuota or a LimitRange of the
namespace changes. Time is an argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import Final, Protocol

from autoscaler.agent_contract import Laid
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import NodeSupply
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.model import Model
from autoscaler.state.world import ClusterFacts, Replica

BRINGING = "its weights are brought to its node"


class WeightsListener(Protocol):
    """Who is told what comes of it."""

    def start_waits(self, replica: Replica, reason: str) -> None:
        """They are on their way."""

    def weights_came(self, replica: Replica, model: Model, laid: Laid | None) -> None:
        """They are there; None: in volumes."""

    def weights_failed(self, replica: Replica, reason: str) -> None:
        """They will not come."""


class InVolumes:
    """A NodeSupply where all weights lie in volumes of pods."""

    def brings(self, _model: Model) -> Collection[str]:
        """As NodeSupply."""
        return ()

    def __call__(self, replica: Replica, model: Model, told: Callable[[str], None]) -> Awaitable[Laid] | None:
        """As NodeSupply."""

    def obstacle(self, _model: Model) -> str:
        """As NodeSupply."""
        return ""

    def mounting(self) -> ClusterFacts:
        """As NodeSupply."""
        return ClusterFacts()


VOLUMES = InVolumes()


class Bringing:
    """Of one driver."""

    def __init__(self, supply: NodeSupply, hears: WeightsListener) -> None:
        self._supply = supply
        self._hears = hears
        self._over: dict[ReplicaId, asyncio.Event] = {}
        """Of those that wait; set: it is stopped."""

    def begin(self, replica: Replica, model: Model) -> Iterator[Coroutine[object, object, None]]:
        """What is to be run as a task; nothing where there is nothing to wait for."""
        if replica.id in self._over:
            self._hears.start_waits(replica, BRINGING)
            return
        coming = self._supply(replica, model, partial(self._tell, replica))
        if coming is None:
            self._hears.weights_came(replica, model, None)
            return
        self._over[replica.id] = asyncio.Event()
        self._hears.start_waits(replica, BRINGING)
        yield self._bring(replica, model, coming)

    def stop(self, id: ReplicaId) -> None:
        """It is wanted no more."""
        if id in self._over:
            self._over[id].set()

    def forget(self) -> None:
        """All tasks have ended, some before they began."""
        self._over.clear()

    def _tell(self, replica: Replica, how_far: str) -> None:
        self._hears.start_waits(replica, f"{BRINGING}: {how_far}")

    async def _bring(self, replica: Replica, model: Model, coming: Awaitable[Laid]) -> None:
        over = self._over[replica.id]
        getting, ending = asyncio.ensure_future(coming), asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if over.is_set():
                return
            laid = getting.result()
        except Exception as error:  # noqa: BLE001 - supply is foreign, as launch is: whatever it raises is a failed start
            self._hears.weights_failed(replica, f"its weights: {error}")
        else:
            self._hears.weights_came(replica, model, laid)
        finally:
            getting.cancel()
            ending.cancel()
            await asyncio.wait({getting})
            self._over.pop(replica.id, None)


REFUSED_S = 60.0
POLICIES: Final = ("resourcequotas", "limitranges")


class RefusedStarts:
    """The last such reason of each Model."""

    def __init__(self) -> None:
        self._known: dict[ModelName, tuple[str, float, str]] = {}
        """Model -> (spec hash, until when, why)."""

    def note(self, model: ModelName, spec_hash: str, reason: str, now_s: float) -> None:
        """A start of that spec was refused."""
        self._known[model] = (spec_hash, now_s + REFUSED_S, reason)

    def reason(self, model: Model, now_s: float) -> str:
        """What stands in the way of it as it is now; empty: nothing is known."""
        spec_hash, until_s, reason = self._known.get(model.name, ("", 0.0, ""))
        return reason if spec_hash == model.spec_hash() and now_s < until_s else ""

    def forget(self) -> None:
        """What is allowed has changed."""
        self._known.clear()


class Policies:
    """Watches the ResourceQuotas and LimitRanges of a namespace. `changed` is called when what one allows changes; how
    much of a quota is used does not matter here.
    """

    def __init__(self, api: Api, namespace: str, changed: Callable[[], None]) -> None:
        def hear(_: list[Change[Object]]) -> None:
            changed()

        self._watches = [
            Watched(api, f"/api/v1/namespaces/{namespace}/{kind}", _spec, hear, optional=True) for kind in POLICIES
        ]

    async def run(self) -> None:
        """Until cancelled. Without the rights for it a refusal lasts REFUSED_S."""
        async with asyncio.TaskGroup() as tasks:
            for watched in self._watches:
                tasks.create_task(watched.run())


def _spec(found: Object) -> Object:
    spec: Object = found["spec"]
    return spec
