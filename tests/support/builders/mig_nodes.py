"""Nodes whose GPUs may be repartitioned, Models that wait for that, and Plans that do it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autoscaler.planner.plan import plan
from autoscaler.queries.mig_status import configs_of
from autoscaler.rearrange.mig_repartition import WAIT_S
from autoscaler.slicing.mig_geometry import GEOMETRIES
from autoscaler.spec.pod import Resources
from autoscaler.state.actions import CutNode
from autoscaler.state.mig import CutOrder, MigNode
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId, Slice, World
from tests.support.builders.slices import mig_node
from tests.support.builders.worlds import T0, gateway, level, model, world

H100 = GEOMETRIES["H100-80"]
PRODUCT = "NVIDIA-H100-80GB-HBM3"
SMALL = ("1g.10gb",) * 7
CONFIG = "as-it-was"


def slices(node: str = "n1", **cuts: str) -> list[Slice]:
    """The Slices of a node with that many of each profile: `_1g_10gb="7"`."""
    from autoscaler.slicing import slicers

    facts = mig_node(PRODUCT, None, **cuts)._replace(name=NodeId(node))
    return [replace(one, labels_known=True) for one in slicers.list_slices(facts)]


def cuttable(name: str = "n1", **fields: Any) -> MigNode:
    """A node with one GPU, in the state in which mig-manager left it."""
    facts = {"product": PRODUCT, "gpus": 1, "config": CONFIG, "state": "success", "strategy": "mixed", **fields}
    return MigNode(name=name, **facts)


def town(
    *nodes: MigNode, there: list[Slice] | None = None, want_gi: float = 30.0, wait_s: float = WAIT_S,
    held: list[Any] | None = None, **fields: Any,
) -> World:  # fmt: skip
    """A `World` with a Model that fits no 10 GB partition, and for which a request has waited."""
    big = model("big", want_gi)
    found = slices(_1g_10gb="7") if there is None else there
    waits = gateway(levels=[level("big", waiting=1, wait_s=wait_s)])
    return world(
        [big], found, held or [], [waits], cuttable={one.name: one for one in nodes or (cuttable(),)}, **fields
    )  # fmt: skip


def order(at: World, now_s: float = T0) -> CutNode | None:
    found = [one for one in plan(at, now_s).actions if isinstance(one, CutNode)]
    assert len(found) <= 1
    return found[0] if found else None


def why(at: World, now_s: float = T0) -> str:
    (unmet,) = plan(at, now_s).unmet
    assert not unmet.never
    return unmet.reason


def asked(tries: int = 1, at_s: float = T0 - 1, cuts: tuple[tuple[str, ...], ...] = (("3g.40gb", "3g.40gb"),)) -> Any:
    """An order that its node reports: the fields of Cuttable."""
    config = configs_of(cuts)[0]
    made = CutOrder(node="n1", config=config, cuts=cuts, tries=tries, asked_s=at_s)
    return {"config": config, "order": made}


def host_amounts(cores: int, left: int) -> dict[NodeId, HostResources]:
    """The host resources of node n1, and how many cores the pods of others leave free."""
    return {NodeId("n1"): HostResources(cores * 1000, 64 << 30, left * 1000, 64 << 30)}


def many(names: list[str], memory_gi: float = 9.0, **fields: Any) -> dict[str, Any]:
    """One Model per name, each with queued requests: `models` and `gateways` of a `World`."""
    waits = gateway(levels=[level(name, waiting=1, wait_s=WAIT_S) for name in names])
    return {"models": [model(name, memory_gi, **fields) for name in names], "gateways": [waits]}


def cores(many: int) -> dict[str, Any]:
    return {"resources": Resources(requests={"cpu": str(many)})}
