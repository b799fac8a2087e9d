"""Repartitions the GPUs of nodes through NVIDIA's mig-manager (GPU operator), by a ConfigMap and a node label. I/O.

mig-manager reads one ConfigMap per cluster, so installations share it. This module writes our configurations into it
and keeps all others: names of ours begin with `pilotlight-` and a hash of the installation. The rest of the program
uses names without that hash; this module adds and removes it.

An order is one write to a Node: the labels `nvidia.com/mig.config` and `.state`, and the annotation
`pilotlight.dev/cut`, by which later leaders recognize it. An order is written only if the node is unchanged since the
decision and no pod uses its devices. Otherwise it is refused with a reason. Makes no decisions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.pod_writer import Pauses
from autoscaler.drivers.resilient_tasks import start_contained_task
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.queries.mig_status import PREFIX, TRIES_MAX, configs_of
from autoscaler.slicing.mig import CONFIG, PRODUCT, STATE, STRATEGY, build_mig_config_map, build_mig_parted_config
from autoscaler.slicing.mig_geometry import geometry_of
from autoscaler.spec.installation_ownership import ANYBODYS, Ownership
from autoscaler.spec.settings import NodeKind, Settings, kind_of
from autoscaler.spec.yaml import YamlError
from autoscaler.spec.yaml import parse_yaml as read_yaml
from autoscaler.state.mig import FAILED, SUCCESS, CutOrder, CutRefused, CuttableSeen, MigNode

ANNOTATION = "pilotlight.dev/cut"
WRITTEN = "pilotlight.dev/written"
"""Annotation of the ConfigMap: time of the last addition, in Unix seconds."""
FILE = "config.yaml"
SETTLE_S = 120.0
"""Time after a write to a ConfigMap in which a kubelet may still show its pods the previous content."""
KEPT_MAX = 60
"""Our configurations kept in the ConfigMap; beyond that, those that no node and no order names are removed."""
EARLIER = re.compile(PREFIX + r"[0-9a-f]{10}-[0-9]")
"""Names that an earlier version wrote, without the hash of an installation."""
TRIES = 20
"""Maximum attempts of a conflicting write: kubelets write to nodes, too."""
RETRIED_S_MAX = 60.0
"""How long an order is retried after the first failure of an unavailable server, before it counts as refused."""
RIGHTS = "grant the permissions of chart value `cutting.enabled`"

_log = logging.getLogger("pilotlight.autoscaler.inventory")
Observe = Callable[[tuple[CuttableSeen | CutRefused, ...]], None]
T = TypeVar("T")


class MigOrderNote(msgspec.Struct, frozen=True, kw_only=True):
    """The annotation of a Node about its last order."""

    config: str
    cuts: tuple[tuple[str, ...], ...]
    tries: int
    asked_unix_s: float


class AnnotatedNode(NamedTuple):
    """The facts kept about a Node."""

    seen: NodeSeen
    note: str


def _by_us(kind: NodeKind) -> bool:
    """Return whether mig-manager repartitions these nodes. For kind `dra`, the DRA driver creates claimed parts."""
    return kind.slicing is not None and kind.slicing.cut and kind.slicing.kind == "mig"


class RepartitionRefusedError(Exception):
    """An order cannot be given now. `str()` gives the reason, as the end of a sentence about its node."""


class NodeCutter:
    """Executes repartitioning orders. `writes` must be fenced by our leadership; `reads` need not be."""

    def __init__(
        self,
        writes: Api,
        reads: Api,
        observe: Observe,
        settings: Callable[[], Settings],
        clock: Callable[[], float] = time.monotonic,
        *,
        settle_s: float = SETTLE_S,
        owner: Ownership = ANYBODYS,
    ) -> None:
        self._writes = writes
        self._reads = reads
        self._observe = observe
        self._settings = settings
        self._clock = clock
        self._settle_s = settle_s
        self._owner = owner
        self._mine = PREFIX + (f"{owner.suffix[1:]}-" if owner.suffix else "")
        """Prefix of our configurations."""
        self._ordered: dict[str, frozenset[str]] = {}
        """By node: the names of the configuration of its last order, which the watch may not show yet."""
        self._nodes = Watched(reads, NODES, read_annotated_node, self._changed)
        self._wanted = asyncio.Event()
        """Set once Settings allow repartitioning."""
        self._tasks = asyncio.TaskGroup()
        self._orders = set[asyncio.Task[None]]()
        self._reported: tuple[MigNode, ...] = ()
        self._asked_s: dict[str, float] = {}
        """Annotation -> time of the order by our clock, cached so that it does not vary."""

    async def run(self) -> None:
        """Observe until cancelled; send no request before Settings allow repartitioning."""
        self.look_again()
        await self._wanted.wait()
        async with self._tasks as tasks:
            tasks.create_task(self._nodes.run())

    def look_again(self) -> None:
        """Re-evaluate after a change of Settings."""
        if any(_by_us(kind) for kind in self._settings().nodes):
            self._wanted.set()
        self._report()

    async def follow(self) -> None:
        """Stop leading. Returns when no order is in progress any more."""
        under_way = list(self._orders)
        for order in under_way:
            order.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def cut(self, order: CutOrder) -> None:
        """Give an order, as in `autoscaler.drivers.driver.Cutter`."""
        task = start_contained_task(self._tasks, self._give(order), partial(self._failed, order.node))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    # --- observations -------------------------------------------------------------------------------------------------

    def _changed(self, changes: list[Change[AnnotatedNode]]) -> None:
        del changes
        self._report()

    def _report(self) -> None:
        kinds = self._settings().nodes
        found = [
            self._cuttable(node, kind)
            for node in self._nodes.items.values()
            if (kind := kind_of(node.seen.labels, kinds)) is not None and _by_us(kind)
        ]
        eligible = tuple(sorted(found, key=lambda one: one.name))
        if eligible != self._reported:
            self._reported = eligible
            self._observe((CuttableSeen(nodes=eligible),))

    def _cuttable(self, node: AnnotatedNode, kind: NodeKind) -> MigNode:
        seen, label = node.seen, node.seen.labels.get(CONFIG, "")
        config = self._config(label)
        noted = read_order_note(node)
        order = None
        if noted is not None and noted.config == label:
            asked_s = self._asked_s.setdefault(node.note, noted.asked_unix_s + self._clock() - self._reads.unix_s())
            tries = noted.tries if self._is_ours(label) else TRIES_MAX
            order = CutOrder(node=seen.name, config=config, cuts=noted.cuts, tries=tries, asked_s=asked_s)
        return MigNode(
            name=seen.name, product=seen.labels.get(PRODUCT, kind.device.model), gpus=kind.device.count, config=config,
            state=seen.labels.get(STATE, ""), strategy=seen.labels.get(STRATEGY, ""), usable=seen.usable,
            labels=seen.labels, taints=seen.taints, order=order,
        )  # fmt: skip

    def _label(self, config: str) -> str:
        """Return the name of one of our configurations in the ConfigMap and on nodes."""
        return self._mine + config.removeprefix(PREFIX)

    def _is_ours(self, label: str) -> bool:
        """Return whether this installation or an earlier version wrote the configuration name. An order of another
        installation is reported with TRIES_MAX attempts: its node stays closed, and we do not retry it.
        """
        return label.startswith(self._mine) or EARLIER.fullmatch(label) is not None

    def _config(self, label: str) -> str:
        """Return the name, without the installation, of the configuration that a node names."""
        return PREFIX + label.removeprefix(self._mine) if label.startswith(self._mine) else label

    # --- orders -------------------------------------------------------------------------------------------------------

    async def _give(self, order: CutOrder) -> None:
        try:
            await asyncio.sleep(await self._retried(order, partial(self._write_config_map, order)))
            await self._retried(order, partial(self._write_node_order, order))
        except RepartitionRefusedError as error:
            reason = str(error)
        except ApiError as error:
            reason = f"the API server rejected it: {error.reason}" + (f": {RIGHTS}" if error.status == 403 else "")
        except (UnreachableError, FencedError):
            reason = "the API server could not be reached"
        else:
            _log.info(
                "event=repartitioning_started node=%s config=%s attempt=%d",
                order.node, self._label(order.config), order.tries,
            )  # fmt: skip
            return
        self._failed(order.node, reason)

    async def _retried(self, order: CutOrder, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again, with growing pauses, while the server is unable to answer."""
        pauses, ends_s = Pauses(), 0.0
        while True:
            try:
                return await ask()
            except (ApiError, UnreachableError) as error:
                ends_s = ends_s or self._clock() + RETRIED_S_MAX
                if self._clock() >= ends_s or (isinstance(error, ApiError) and not error.is_transient):
                    raise
                _log.warning("event=repartitioning_retried node=%s error=%s", order.node, error)
            await pauses.rest()

    def _failed(self, node: str, reason: str) -> None:
        _log.warning("event=repartitioning_failed node=%s reason=%s", node, reason)
        self._observe((CutRefused(node=node, reason=reason),))

    async def _write_config_map(self, order: CutOrder) -> float:
        """Ensure that the ConfigMap has the configuration. Return the seconds until mig-manager is sure to read it."""
        place = self._settings().cutting
        base = f"/api/v1/namespaces/{place.namespace}/configmaps"
        wanted, wall_s = self._configurations(order), self._reads.unix_s()
        self._ordered[order.node] = frozenset(wanted)
        for left in range(TRIES - 1, -1, -1):
            try:
                found = await self._reads.get(f"{base}/{place.config_map}")
            except ApiError as error:
                if error.status != 404:
                    raise
                made = build_mig_config_map(
                    place.config_map, place.namespace, {"version": "v1", "mig-configs": ALL_OFF | wanted}
                )
                made["metadata"]["annotations"] = {WRITTEN: f"{wall_s:.0f}"}
                if await self._is_written(self._writes.create(base, self._owner.label(made)), left):
                    return self._settle_s
                continue
            there = _there(found)
            if wanted.items() <= there["mig-configs"].items():
                said = (found["metadata"].get("annotations") or {}).get(WRITTEN, "0")
                written_s = float(said) if said.isdecimal() else wall_s  # written by others: treated as new
                return min(max(0.0, written_s + self._settle_s - wall_s), self._settle_s)
            after = there | {"mig-configs": self._pruned(there["mig-configs"]) | wanted}
            change: Object = {
                "metadata": {
                    "resourceVersion": found["metadata"]["resourceVersion"], "annotations": {WRITTEN: f"{wall_s:.0f}"},
                },
                "data": {FILE: yaml.safe_dump(after, sort_keys=False)},
            }  # fmt: skip
            if await self._is_written(self._writes.patch(f"{base}/{place.config_map}", change), left):
                return self._settle_s
        raise RepartitionRefusedError(f"other clients changed its ConfigMap in each of {TRIES} attempts")

    def _configurations(self, order: CutOrder) -> dict[str, Any]:
        """Return the ordered configuration under each of its names: a retry needs a different name."""
        product = next((one.product for one in self._reported if one.name == order.node), "")
        geometry = geometry_of(product)
        if geometry is None:
            raise RepartitionRefusedError(f"the MIG geometry of {product or 'its GPU'} is not known")
        return {
            name: build_mig_parted_config(name, geometry, dict(enumerate(order.cuts)))["mig-configs"][name]
            for name in map(self._label, configs_of(order.cuts))
        }

    def _pruned(self, there: dict[str, Any]) -> dict[str, Any]:
        """Remove our configurations that no node and no order names, if there are more than `KEPT_MAX`. Those of other
        installations stay: an installation writes its configuration minutes before its node names it.
        """
        ours = {
            name for name in there if EARLIER.fullmatch(name) or (self._owner.suffix and name.startswith(self._mine))
        }
        if len(ours) <= KEPT_MAX:
            return there
        named = {node.seen.labels.get(CONFIG, "") for node in self._nodes.items.values()}.union(*self._ordered.values())
        return {name: one for name, one in there.items() if name in named or name not in ours}

    async def _write_node_order(self, order: CutOrder) -> None:
        """Write the order on its node if the node is idle and unchanged since the decision."""
        path, label = f"{NODES}/{order.node}", self._label(order.config)
        for left in range(TRIES - 1, -1, -1):
            found = await self._reads.get(path)
            if self._is_given(order, found):  # by a write whose answer was lost
                return
            await self._check(order, found)
            note = MigOrderNote(
                config=label, cuts=order.cuts, tries=order.tries, asked_unix_s=self._reads.unix_s()
            )  # fmt: skip
            change: Object = {
                "metadata": {
                    "resourceVersion": found["metadata"]["resourceVersion"],
                    "labels": {CONFIG: label, STATE: PENDING},
                    "annotations": {ANNOTATION: msgspec.json.encode(note).decode()},
                }
            }
            if await self._is_written(self._writes.patch(path, change), left):
                return

    @staticmethod
    async def _is_written(write: Awaitable[object], left: int) -> bool:
        """Await a write. Return whether it succeeded; False if the object had changed and attempts are left."""
        try:
            await write
        except ApiError as error:
            if error.status != 409 or not left:
                raise
            return False
        return True

    def _is_given(self, order: CutOrder, found: Object) -> bool:
        """Return whether the node has this very order."""
        node = read_annotated_node(found)
        note = read_order_note(node)
        return (
            note is not None
            and note.config == self._label(order.config) == node.seen.labels.get(CONFIG)
            and (note.cuts, note.tries) == (order.cuts, order.tries)
        )

    async def _check(self, order: CutOrder, found: Object) -> None:
        """Raise `RepartitionRefusedError` if the order must not be written."""
        seen = nodes.read_node(found)
        if self._config(seen.labels.get(CONFIG, "")) != order.before:
            raise RepartitionRefusedError("another client changed its MIG configuration")
        if seen.labels.get(STATE, "") not in {SUCCESS, FAILED} or not seen.usable:
            raise RepartitionRefusedError("it is not ready to be repartitioned")
        query = {"fieldSelector": f"spec.nodeName={order.node},status.phase!=Succeeded,status.phase!=Failed"}
        async for page in self._reads.pages("/api/v1/pods", query):
            if page.unreadable:
                raise RepartitionRefusedError(
                    f"pod {page.unreadable[0].namespace}/{page.unreadable[0].name} cannot be read"
                )
            for pod in page.items:
                if other_pods.read_other_pod(pod) is not None:
                    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                    raise RepartitionRefusedError(f"pod {name} uses its devices")


PENDING = "pending"
"""mig-manager's initial state, written so that the state of the previous repartitioning is not taken for a result."""
ALL_OFF = {"all-disabled": [{"devices": "all", "mig-enabled": False}]}
"""The GPU operator's default configuration of nodes, which every such ConfigMap must contain."""


def read_annotated_node(node: Object) -> AnnotatedNode:
    """Parse a Node and its annotation."""
    return AnnotatedNode(nodes.read_node(node), (node["metadata"].get("annotations") or {}).get(ANNOTATION, ""))


def read_order_note(node: AnnotatedNode) -> MigOrderNote | None:
    """Return our last order; None if there was none."""
    if not node.note:
        return None
    try:
        return msgspec.json.decode(node.note, type=MigOrderNote)
    except (msgspec.DecodeError, RecursionError) as error:
        _log.warning("event=annotation_invalid node=%s annotation=%s error=%s", node.seen.name, ANNOTATION, error)
        return None


def _there(found: Object) -> dict[str, Any]:
    """Return the configurations in a ConfigMap. Raises `RepartitionRefusedError` if it is something else."""
    try:
        parsed = read_yaml((found.get("data") or {}).get(FILE, "{}"))
    except YamlError as error:
        raise RepartitionRefusedError(f"its ConfigMap's {FILE} cannot be read: {error}") from None
    one = parsed[0] if len(parsed) == 1 else None
    if not isinstance(one, dict) or not isinstance(one.get("mig-configs", {}), dict):
        raise RepartitionRefusedError(f"its ConfigMap's {FILE} is not a mig-parted configuration")
    return {"version": "v1", **one, "mig-configs": one.get("mig-configs", {})}
