"""Finds the API server collections that the product watches, by running the code that watches them.

`OWNERS` builds every component that has a watch. `recorded` records each watch that is made, with its place in the
source, and `sites` finds all such places in the source: a test compares the two, so that each kind has a fuzz target.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from kubernetes.aio import client

from autoscaler.documents import parse
from autoscaler.drivers import probes
from autoscaler.drivers.kubernetes.adoption.driver import AdoptedDriver
from autoscaler.drivers.kubernetes.adoption.objects import WorkloadSeen, read_workload
from autoscaler.drivers.kubernetes.adoption.workload import Mode, Workload
from autoscaler.drivers.kubernetes.adoption.workload_runner import Means, Runner
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.inventory.declared_devices import DeclaredDevices
from autoscaler.drivers.kubernetes.inventory.disruption_budgets import Disruptions
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.inventory.mig_manager import NodeCutter
from autoscaler.drivers.kubernetes.inventory.node_cordons import NodeCordons
from autoscaler.kubernetes.api import Api, Object, UnreachableError
from autoscaler.kubernetes.gateway_pods import GatewayPods
from autoscaler.kubernetes.kubeconfig import ApiAccess
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.kubernetes.resources.document_merge import Installation
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher
from autoscaler.kubernetes.resources.kubeai_watcher import KubeaiModels
from autoscaler.kubernetes.safe_decoding import read_event
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.kubernetes.watch import INITIAL_END, Watched
from autoscaler.providers.cro import objects
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, Settings
from pilotlight.processes.cluster import build_pod_launch, require_image
from pilotlight.processes.cluster_documents import decode_kubeai_model
from pilotlight.provider_kubernetes_client import Objects
from tests.fuzz.inputs.kubernetes_objects import DEPLOYMENT
from tests.support.builders.worlds import GI, T0, model, world

ROOT: Final = Path(parse.__file__).parents[2]
"""Root of the tested product: this tree, or the compiled one."""
PACKAGES: Final = ("autoscaler", "pilotlight")
NAMESPACE: Final = "models"
STREAMS_MAX: Final = 3
MAKERS: Final = frozenset({"Watched", "self._kinds.add"})
"""Calls in the source that make a watch."""
BOOKMARK: Final = ("BOOKMARK", {"metadata": {"resourceVersion": "9", "annotations": {INITIAL_END: "true"}}})


class DoneError(BaseException):
    """The watch has delivered all events."""


class LineApi(Api):
    """An API server whose watches deliver one line as an event, and that answers no other request."""

    def __init__(self, line: bytes) -> None:
        super().__init__(ApiAccess(client.Configuration(host="http://fuzz")))
        self._line = line
        self._streams = 0

    async def _send(  # noqa: PLR0917  as in its base class
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str], headers: Mapping[str, str],
        within_s: float, bytes_max: int | None,
    ) -> bytes:  # fmt: skip
        del data, query, headers, within_s, bytes_max
        raise UnreachableError(f"{method} {path}: no server responds")

    async def _stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str], silent_s: float
    ) -> AsyncGenerator[tuple[str, Object | Unreadable]]:
        """The line, and again when the watch resumes from the list."""
        del path, headers, silent_s
        self._streams += 1
        if self._streams > STREAMS_MAX:  # after an error event of the server
            raise DoneError
        try:
            yield read_event(self._line)
        except (ValueError, RecursionError) as error:
            raise DoneError from error
        if "sendInitialEvents" not in query:
            raise DoneError
        yield BOOKMARK


class Made(NamedTuple):
    """A watch and the place in the source that made it."""

    file: str
    line: int
    path: str
    watched: Watched[Any]  # each of its own type


@contextlib.contextmanager
def recorded() -> Iterator[list[Made]]:
    """Record the watches that are made while the context is active."""
    made, original = list[Made](), Watched.__init__

    def note(self: Watched[Any], api: Api, path: str, *more: Any, **query: Any) -> None:
        original(self, api, path, *more, **query)
        frames = (frame for frame in reversed(traceback.extract_stack(limit=3)[:-1]))
        place = next(frame for frame in frames if not frame.filename.endswith("/watch_set.py"))
        made.append(Made(Path(place.filename).relative_to(ROOT).as_posix(), place.lineno or 0, path, self))

    with mock.patch.object(Watched, "__init__", note):
        yield made


def sites() -> Iterator[tuple[str, range]]:
    """Each place in the source that makes a watch: its file and its lines."""
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        text = path.read_text()
        if path.name == "watch_set.py" or not any(f"{name}(" in text for name in MAKERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                yield path.relative_to(ROOT).as_posix(), range(node.lineno, (node.end_lineno or node.lineno) + 1)


def followed() -> list[str]:
    """The arguments of the capacity providers' calls of `ApiServer.follow`: paths and readers."""
    texts = (path.read_text() for path in (ROOT / "autoscaler/providers").rglob("*.py"))
    nodes = (node for text in texts if "follow(" in text for node in ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return sorted(
        ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).endswith("follow") and call.args
    )


# --- owners of watches -----------------------------------------------------------------------------------------------


Owner = Callable[[Api], Awaitable[Callable[[], object]]]
"""Makes its watches. Returns a function that uses all values that they have delivered."""


def _nothing(*_: object) -> None:
    """A callback that does nothing."""


async def _customs(api: Api) -> Callable[[], object]:
    made = DocumentWatcher(api, parse.read_document, Installation(_nothing), heard=_nothing)
    return lambda: (made.models, made.tenants, made.wrong)


async def _kubeai(api: Api) -> Callable[[], object]:
    made = KubeaiModels(api, partial(decode_kubeai_model, NAMESPACE), Installation(_nothing))
    return lambda: (made.found, made.wrong)


async def _driver(api: Api) -> Callable[[], object]:
    KubernetesDriver(api, NAMESPACE, build_pod_launch, require_image, lambda: T0, inventory=False)
    return _nothing


async def _inventory(api: Api) -> Callable[[], object]:
    made = Inventory(
        api, NAMESPACE, Settings, is_ours=lambda _: False, held=tuple, changed=_nothing, hosts_changed=_nothing
    )
    return made.look


async def _quotas(api: Api) -> Callable[[], object]:
    DeclaredDevices(api, NAMESPACE, _nothing, world)
    return _nothing


async def _disruptions(api: Api) -> Callable[[], object]:
    Disruptions(api, NAMESPACE, _nothing)
    return _nothing


async def _cordons(api: Api) -> Callable[[], object]:
    NodeCordons(api, api, _nothing, lambda: T0)
    return _nothing


async def _cutter(api: Api) -> Callable[[], object]:
    device = NodeDevice(model="a", memory_bytes=Bytes(GI))
    kind = NodeKind(selector={}, device=device, slicing=NodeSlicing(kind="mig", cut=True))
    return NodeCutter(api, api, _nothing, lambda: Settings(nodes=(kind,)), lambda: T0).look_again


async def _gateways(api: Api) -> Callable[[], object]:
    GatewayPods(api, NAMESPACE, _nothing)
    return _nothing


async def _lease(api: Api) -> Callable[[], object]:
    await _begun(Elector(api, NAMESPACE, "pilotlight", "a", lambda: T0).run(_Process()))
    return _nothing


async def _adoption(api: Api) -> Callable[[], object]:
    made = AdoptedDriver(
        api, None, _nothing, hold_s=lambda: 1.0, clock=lambda: T0, whose=lambda *_: "another installation serves it"
    )
    made._listens = True  # evaluates workloads; those of another installation get no watch of their own

    def use() -> None:
        faults = [candidate.fault for candidate in made._candidates.values() if candidate.fault]
        assert not faults, faults

    return use


async def _runner(api: Api) -> Callable[[], object]:
    seen = read_workload("Deployment", DEPLOYMENT)
    if not isinstance(seen, WorkloadSeen):
        raise TypeError("the Deployment is not adopted")
    with mock.patch.object(Runner, "_pods_changed", _nothing):  # it would probe the pods
        Runner(Workload(seen, model("ada"), Mode.LEVEL), Means(api, _nothing, lambda: T0, probes.Pace(lambda: T0)))
    return _nothing


async def _objects(api: Api) -> Callable[[], object]:
    server = Objects(api, api)
    for path, read in FOLLOWED.values():
        await _begun(server.follow(path, read, _nothing))
    return _nothing


FOLLOWED: Final[dict[str, tuple[str, Callable[[Object], object]]]] = {
    "REQUESTS": (objects.REQUESTS, partial(objects.watched_request_state, provider="cro")),
    "RESOURCES": (objects.RESOURCES, partial(objects.watched_resource_state, model="NVIDIA-A100-PCIE-80GB")),
}
OWNERS: Final[tuple[Owner, ...]] = (
    _customs, _kubeai, _driver, _inventory, _quotas, _disruptions, _cordons, _cutter, _gateways, _lease, _adoption,
    _runner, _objects,
)  # fmt: skip


async def _begun(running: Coroutine[Any, Any, None]) -> None:
    """Run it until it has made its watches, and cancel it before their first request."""
    task = asyncio.create_task(running)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Process:
    """A process that takes part in no election."""

    def lease_seconds(self) -> int:
        return 15

    def heard(self) -> Collection[int]:
        return ()

    def lead(self, epoch: int) -> None:
        del epoch

    async def follow(self) -> None:
        return
