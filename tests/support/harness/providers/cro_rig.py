"""A rack behind the simulated composable resource operator (CRO): a `Rig` of the Provider contract, in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

from msgspec.structs import replace

from autoscaler.providers.cro.objects import REQUESTS, RESOURCES
from autoscaler.providers.cro.provider import NODES, CroFabric
from autoscaler.providers.kubernetes_access import Object
from autoscaler.providers.provider import Provider
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Price, Settings
from autoscaler.state.capacity import LeaseId, Listed, ReleaseOrder
from autoscaler.state.world import DeviceId, NodeId, Nodes, Slice, SliceId, World
from tests.contracts.provider import order
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.cro import NONE_FREE, FakeCro
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.harness.async_tests import AsyncTest

MODEL = "NVIDIA-A100-PCIE-40GB"
NODE = "w1"
UNIX_S = 1_800_000_000.0
SETTINGS = Settings(
    nodes=(NodeKind(selector={}, device=NodeDevice(model=MODEL, memory_bytes=Bytes(40 << 30)), devices_max=4),),
    prices=(Price(device="A100", per_hour=4.0), Price(device="A100", per_hour=1.5, bought="fabric")),
)


def node(name: str = NODE, **status: object) -> Object:
    """A Node object as the API server returns it."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}], **status}
    return {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": ready}


def world(settings: Settings = SETTINGS, devices: int = 1) -> World:
    """A `World` with node w1 and that many counted GPUs."""
    found = [
        Slice(
            id=SliceId(f"{NODE}/gpu{at}"), device=DeviceId(f"{NODE}/gpu{at}"), node=NodeId(NODE),
            memory_bytes=40 << 30, product=MODEL,
        )
        for at in range(devices)
    ]  # fmt: skip
    return World(epoch=1, settings=settings, nodes=Nodes(slices={one.id: one for one in found}))


class Rack:
    """The rig of the contract: an API server, the operator and a fabric, in virtual time."""

    def __init__(self) -> None:
        self.server: PlayedServer
        self.cro: FakeCro
        self.used: set[str] = set()
        self.world = world()

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """See Rig."""

        async def whole() -> None:
            now = asyncio.get_running_loop().time
            self.server = PlayedServer(lambda: UNIX_S + now())
            self.server.put(f"{NODES}/{NODE}", node())
            self.cro = FakeCro(self.server, now, {MODEL: 3})
            task = asyncio.create_task(self.cro.run())
            await scenario
            task.cancel()

        run(whole())

    def provider(self) -> Provider:
        """See Rig."""
        return CroFabric("rack", MODEL, self.server, lambda: self.world)

    async def until(self, right: Callable[[dict[str, Listed]], bool], within_s: float = 120.0) -> dict[str, Listed]:
        """Waits until the listed capacity orders satisfy the predicate; returns them."""
        async with asyncio.timeout(within_s):
            while not right(found := {one.name: one for one in await self.provider().list()}):
                await asyncio.sleep(0.5)
        return found

    async def until_here(self, name: str) -> None:
        """See Rig."""
        await self.until(lambda leases: leases[name].phase == "here")

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        await self.until(lambda leases: name not in leases)

    def use(self, name: str) -> None:
        """See Rig."""
        pod = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}], "nodeName": NODE}
        self.server.put("/api/v1/namespaces/a/pods/b", {"metadata": {"namespace": "a"}, "spec": pod})

    def leave_little(self) -> None:
        """See Rig."""
        self.cro.pool[MODEL] = 0
        body = {"spec": {"type": "gpu", "model": MODEL, "target_node": "w9"}, "status": {"state": "Attaching"}}
        body["status"]["error"] = NONE_FREE
        self.server.put(f"{RESOURCES}/gpu-of-another", body)

    def go_away(self) -> None:
        """See Rig."""
        self.server.away = True

    # --- beyond the contract ------------------------------------------------------------------------------------------

    def request(self) -> Object:
        """The only request."""
        (found,) = [one for path, one in self.server.objects.items() if path.startswith(REQUESTS)]
        return found

    def resources(self) -> list[Object]:
        """All resources, sorted by name."""
        return [one for path, one in sorted(self.server.objects.items()) if path.startswith(RESOURCES)]

    async def another_asks(self, node: str, size: int = 1) -> None:
        """Creates a request of Dynamic Device Scaling for a node."""
        spec = {"type": "gpu", "model": MODEL, "size": size, "target_node": node}
        self.server.put(f"{REQUESTS}/theirs", {"spec": {"resource": spec}})

    def allowed(self) -> PlayedServer:
        """A server with the same objects whose client may change them."""
        other = PlayedServer(self.server.unix_s)
        other.objects = self.server.objects
        return other

    async def another(self, size: int) -> None:
        """Creates a request of Dynamic Device Scaling that already has that many Devices."""
        await self.another_asks(NODE, size)
        while [one.get("status", {}).get("state") for one in self.resources()] != ["Online"] * size:
            await asyncio.sleep(0.5)


def in_rack(test: AsyncTest) -> Callable[..., None]:
    """Runs an asynchronous test in its fixture `rack`."""

    @functools.wraps(test)
    def synchronous(rack: Rack, **fixtures: object) -> None:
        rack.run(test(rack, **fixtures))

    return synchronous


async def ordered(rack: Rack, number: int = 0, devices: int = 1) -> str:
    """Orders that many devices now; returns the name of the capacity order."""
    provider = rack.provider()
    offer = (await provider.offers())[0]
    made = replace(order(offer, number), devices=devices)
    await provider.acquire(made)
    return made.id.name


async def given_back(rack: Rack, name: str, *, force: bool = False) -> None:
    """Releases that capacity order."""
    await rack.provider().release(ReleaseOrder(id=LeaseId("rack", name), epoch=1, force=force))
