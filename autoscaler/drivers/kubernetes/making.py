"""What a start asks of the API server: a Replica's pod and its claims, of what is known and set now. No I/O.

Owns where each part of it comes from. What the pod looks like is `pods`'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autoscaler.drivers.base import Launcher, NodeSupply
from autoscaler.drivers.kubernetes import claims, declared, pods, weights
from autoscaler.drivers.kubernetes.api import Object
from autoscaler.drivers.kubernetes.inventory import Inventory
from autoscaler.model import Model
from autoscaler.nodewants import Laid
from autoscaler.settings import Settings
from autoscaler.sizing import given
from autoscaler.world import Replica

PORT = pods.PORTS[0]
SOMEWHERE = Laid("", "weights.gguf")
"""Of weights that are on no node yet: as good as any, for whoever only looks."""


class Making(NamedTuple):
    """Of one driver."""

    launch: Launcher
    image: Callable[[Model], str]
    settings: Callable[[], Settings]
    inventory: Inventory | None
    supply: NodeSupply

    def obstacle(self, model: Model) -> str:
        """What makes its launch impossible; empty: nothing is known to."""
        if reason := self.supply.obstacle(model):
            return reason
        try:
            self.launch(weights.located(model, SOMEWHERE) if self.supply.brings(model) else model, pods.HOST, PORT)
        except Exception as error:  # noqa: BLE001 - launch is foreign: whatever it raises is a failed start
            return str(error)
        return ""

    def __call__(self, replica: Replica, model: Model, laid: Laid | None) -> tuple[Object, tuple[Object, ...]]:
        """The pod, and the claims that it names. Raises what `launch` and `image` do."""
        settings, known = self.settings(), self.inventory
        ranked = settings.priority_class(model.spec.priority)
        asks = declared.fields(settings.nodes, replica, ranked) if known is None else known.fields(replica, ranked)
        part = given(model, replica, asks and asks.memory_fraction)
        there = model if laid is None else weights.located(model, laid)
        launch = self.launch(there, pods.HOST, pods.port_of(replica.id), part)
        where = declared.selector_of(settings.nodes, replica.slices)
        named = None if ranked is None else ranked.name
        pod = pods.manifest(replica, model, launch, self.image(model), settings.pod, where, named, asks)
        return pod if laid is None else weights.mounted(pod, laid), tuple(claims.wanted(replica, asks))
