"""Quota in a Kueue queue: the provider contract, and how Kueue handles pending, admitted and deleted workloads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.providers import order_annotations
from autoscaler.providers.kubernetes_access import Object
from autoscaler.providers.kueue import objects as kueue_objects
from autoscaler.providers.kueue.provider import KueuePlaces
from autoscaler.providers.provider import Provider, RefusedError
from autoscaler.providers.provisioning_request.provider import WAIT_MAX
from autoscaler.spec.capacity import Kueue, ProviderSettings
from autoscaler.spec.pod import GPU
from autoscaler.spec.settings import NodeSlicing
from autoscaler.state.capacity import NO_MARKS, Listed
from autoscaler.state.world import World
from tests.contracts.provider import ProviderContract, order, release
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.fakes.kubernetes.kueue import NEWEST, FakeKueue
from tests.support.harness.async_tests import run_in
from tests.support.harness.providers.provisioning_request_rig import NAMESPACE, PODS, UNIX_S, pod_of, settings

QUEUES = f"/apis/{NEWEST}/namespaces/{NAMESPACE}/localqueues"
WORKLOADS = f"/apis/{NEWEST}/namespaces/{NAMESPACE}/workloads"


class KueueRig:
    """A `Rig` in virtual time; the simulated Kueue runs every second."""

    def __init__(self, gpus: int = 2, version: str = kueue_objects.VERSIONS[0]) -> None:
        self.gpus, self.version, self.settings = gpus, version, settings(4)
        self.server: PlayedServer
        self.kueue: FakeKueue

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        async def whole() -> None:
            clock = asyncio.get_running_loop().time
            self.server = PlayedServer(lambda: UNIX_S + clock())
            self.server.put(f"/apis/{kueue_objects.API}", {"versions": [{"version": self.version}]})
            queues = QUEUES.replace(kueue_objects.VERSIONS[0], self.version)
            self.server.put(f"{queues}/serving", {"spec": {"clusterQueue": "gpus"}})
            self.kueue = FakeKueue(self.server, NAMESPACE, clock, {"w1": self.gpus}, version=self.version)
            await scenario

        run(whole())

    def provider(self) -> KueuePlaces:
        named = ProviderSettings(name="queue", kueue=Kueue(local_queue="serving"))
        return KueuePlaces(named, self.server, NAMESPACE, lambda: World(epoch=1, settings=self.settings), pod_of)

    async def go_on(self, seconds: float = 2.0) -> None:
        """Let Kueue run for `seconds`."""
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            await self.kueue.step()

    async def until_here(self, name: str) -> None:
        await self.go_on(4.0)
        assert {one.name: one.phase for one in await self.provider().list()}[name] == "here"

    async def until_gone(self, name: str) -> None:
        await self.go_on()

    def use(self, name: str) -> None:
        """Let a replica's pod take the place of the placeholder."""
        kept = self.server.objects.pop(f"{PODS}/{name}")
        one = kueue_objects.read_place(kept)
        assert one is not None
        marks = kueue_objects.place_to_lease(one, None, "serving").marks
        assert marks.instead == name
        taker = {
            "metadata": {"labels": marks.labels, "annotations": marks.annotations},
            "spec": {
                "nodeName": "w1", "schedulingGates": [{"name": gate} for gate in marks.gates],
                "containers": [{"name": "engine", "resources": {"limits": {GPU: "1"}}}],
            },
        }  # fmt: skip
        self.server.put(f"{PODS}/replica", taker)

    def leave_little(self) -> None:
        self.server.change(f"{QUEUES}/serving", {"spec": {"stopPolicy": "Hold"}})

    def go_away(self) -> None:
        self.server.away = True


class TestKueuePlaces(ProviderContract):
    @pytest.fixture
    def rig(self) -> KueueRig:
        return KueueRig()


@pytest.mark.parametrize(
    ("slicing", "share"), [(None, 1), (NodeSlicing(kind="timeslice", replicas=3), 3), (NodeSlicing(kind="hami"), 1)]
)
def test_each_offer_is_for_one_replica_on_one_gpu_or_gpu_share(slicing: NodeSlicing | None, share: int) -> None:
    """Otherwise other replicas are expected to fit there too, wait for it, and order their own capacity only later."""
    rig, defaults = KueueRig(), settings()
    rig.settings = replace(defaults, nodes=(replace(defaults.nodes[0], slicing=slicing),))

    async def scenario() -> None:
        (offer,) = await rig.provider().offers()
        assert (offer.parts, offer.shared, offer.memory_bytes) == (1, False, (24 << 30) // share)
        assert offer.device_bytes == (24 << 30 if share > 1 else 0), "who needs a whole one has no use for it"
        assert offer.price_per_hour == pytest.approx(0.5 / share)

    rig.run(scenario())


async def only(provider: Provider) -> Listed:
    (one,) = await provider.list()
    return one


async def ordered(rig: KueueRig, number: int = 0, devices: int = 1) -> tuple[KueuePlaces, str]:
    provider = rig.provider()
    made = replace(order((await provider.offers())[0], number), devices=devices)
    await provider.acquire(made)
    return provider, made.id.name


@run_in(KueueRig)
async def test_order_creates_a_gated_single_pod_group_in_the_local_queue(rig: KueueRig) -> None:
    _, name = await ordered(rig)
    pod: Object = rig.server.objects[f"{PODS}/{name}"]
    assert pod["metadata"]["labels"] == {
        "app": "engine", "app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/place": name,
        "pilotlight.dev/capacity": "queue", "kueue.x-k8s.io/queue-name": "serving",
        "kueue.x-k8s.io/pod-group-name": name,
    }  # fmt: skip
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "1"
    spec = pod["spec"]
    assert spec["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
    assert spec["nodeSelector"] == {"pool": "l4"}
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "4"}, "limits": {GPU: "1"}}
    assert spec["containers"][0]["command"] == ["sleep", "infinity"]


@run_in(partial(KueueRig, version="v1beta1"))
async def test_provider_uses_an_older_kueue_api_and_fails_without_kueue(rig: KueueRig) -> None:
    provider, _ = await ordered(rig, devices=3)
    rig.kueue.most = 2
    await rig.go_on()
    assert (await only(provider)).says.startswith("Kueue can never admit its Workload"), "its Workload is read"
    await provider.release(release(order((await provider.offers())[0], 0)))
    del rig.server.objects[f"/apis/{kueue_objects.API}"]
    with pytest.raises(RefusedError, match="Kueue is not installed"):
        await provider.offers()


@run_in(partial(KueueRig, gpus=1))
async def test_order_waiting_for_quota_is_delivered_once_another_is_released(rig: KueueRig) -> None:
    provider, first = await ordered(rig)
    await rig.until_here(first)
    _, second = await ordered(rig, 1)
    await rig.go_on()
    waits = {one.name: one for one in await provider.list()}[second]
    assert (waits.phase, waits.committed) == ("coming", False)
    assert waits.says == "it waits for quota (WaitingForQuota: insufficient unused quota)"
    await provider.release(release(order((await provider.offers())[0])))
    await rig.until_here(second)


@run_in(partial(KueueRig, gpus=1))
async def test_unscheduled_placeholder_can_be_replaced_only_if_it_has_quota(rig: KueueRig) -> None:
    """A workload that is waiting for quota has no capacity to take over."""
    rig.kueue.schedules = False
    provider, first = await ordered(rig)
    await rig.go_on()
    _, second = await ordered(rig, 1)
    await rig.go_on()
    shown = {one.name: one for one in await provider.list()}
    assert {one.phase for one in shown.values()} == {"coming"}
    assert (shown[first].marks.instead, shown[first].marks.gates) == (first, (kueue_objects.GATE,))
    assert shown[second].marks == NO_MARKS


@run_in(partial(KueueRig, gpus=1))
async def test_offers_stop_at_the_maximum_of_pending_placeholder_pods(rig: KueueRig) -> None:
    for number in range(WAIT_MAX + 1):
        await ordered(rig, number)
        await rig.go_on(3.0)
    assert await rig.provider().offers() == ()
    assert [one.phase for one in await rig.provider().list()].count("here") == 1


@run_in(KueueRig)
async def test_order_larger_than_any_quota_fails_with_a_reason(rig: KueueRig) -> None:
    rig.kueue.most = 1
    provider, _ = await ordered(rig, devices=2)
    await rig.go_on()
    shown = await only(provider)
    assert shown.phase == "failed"
    assert shown.says == "Kueue can never admit its Workload (ExceedsMaxQuota: insufficient quota for nvidia.com/gpu)"


@run_in(KueueRig)
async def test_rejected_admission_check_fails_the_order(rig: KueueRig) -> None:
    rig.kueue.checks_s, rig.kueue.check_message = 30.0, "ETA 300 s"
    provider, name = await ordered(rig)
    await rig.go_on(5.0)
    shown = await only(provider)
    assert (shown.phase, shown.says) == ("coming", "it has quota, and waits for admission checks (prov: ETA 300 s)")
    await rig.go_on(30.0)
    assert (await only(provider)).phase == "here"
    rig.kueue.rejects = True
    _, second = await ordered(rig, 1)
    await rig.go_on(5.0)
    shown = {one.name: one for one in await provider.list()}[second]
    assert shown.phase == "failed", name
    assert shown.says == "Kueue deactivated its Workload (Deactivated: DeactivatedDueToAdmissionCheck)"


@run_in(partial(KueueRig, gpus=1))
async def test_order_stays_listed_while_a_replica_replaces_its_placeholder(rig: KueueRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    rig.use(name)
    await rig.go_on()
    shown = await only(provider)
    assert (shown.name, shown.phase, shown.node, shown.marks.instead) == (name, "here", "w1", "")
    assert shown.marks.gates == (kueue_objects.GATE,)
    assert not rig.server.objects[f"{PODS}/replica"]["spec"]["schedulingGates"], "its quota is the one that was kept"
    await rig.server.delete(f"{PODS}/replica")
    await rig.go_on()
    assert await provider.list() == ()
    assert not [at for at in rig.server.objects if at.startswith(WORKLOADS)]


@run_in(KueueRig)
async def test_placeholder_pod_is_not_released_while_a_replica_replaces_it(rig: KueueRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    kept = rig.server.objects[f"{PODS}/{name}"]
    rig.use(name)
    rig.server.put(f"{PODS}/{name}", kept)
    assert (await only(provider)).marks.instead == ""
    await provider.release(release(order((await provider.offers())[0])))
    assert f"{PODS}/{name}" in rig.server.objects, "the driver has it go"


@run_in(partial(KueueRig, gpus=1))
async def test_preempted_order_is_leaving_until_its_placeholder_pod_is_gone(rig: KueueRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    rig.server.change(f"{PODS}/{name}", {"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}})
    rig.kueue.preempted.add(name)
    await rig.go_on(1.0)
    assert (await only(provider)).phase == "leaving"
    rig.server.change(f"{PODS}/{name}", {"metadata": {"finalizers": None}})
    await rig.go_on()
    assert await provider.list() == ()


@run_in(partial(KueueRig, gpus=1))
async def test_evicted_workload_fails_the_order_with_the_eviction_reason(rig: KueueRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for a better one"}
    rig.server.change(f"{WORKLOADS}/{name}", {"status": {"conditions": [evicted]}})
    shown = await only(provider)
    assert (shown.phase, shown.says) == ("failed", "Kueue evicted its Workload (Preempted: for a better one)")


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (None, "its LocalQueue does not exist"),
        ({"spec": {"stopPolicy": "HoldAndDrain"}}, "its LocalQueue is stopped (HoldAndDrain)"),
        (
            {"status": {"conditions": [{"type": "Active", "status": "False", "reason": "ClusterQueueDoesNotExist"}]}},
            "its LocalQueue is not active (ClusterQueueDoesNotExist)",
        ),
    ],
)
@run_in(KueueRig)
async def test_unusable_local_queue_rejects_offers_and_orders(
    rig: KueueRig, queue: Object | None, message: str
) -> None:
    provider = rig.provider()
    made = order((await provider.offers())[0])
    del rig.server.objects[f"{QUEUES}/serving"]
    if queue is not None:
        rig.server.put(f"{QUEUES}/serving", queue)
    for call in (provider.offers(), provider.acquire(made)):
        with pytest.raises(RefusedError) as caught:
            await call
        assert str(caught.value) == message


@run_in(KueueRig)
async def test_kueue_order_for_a_deleted_model_is_rejected(rig: KueueRig) -> None:
    provider = rig.provider()
    made = replace(order((await provider.offers())[0]), owner=ModelName("gone"))
    with pytest.raises(RefusedError, match="Model gone does not exist any more"):
        await provider.acquire(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"annotations": {order_annotations.OFFER: "<html>"}}}, "the annotations of its pod are invalid"),
        ({"metadata": {"annotations": {order_annotations.EPOCH: None}}}, "the annotations of its pod are invalid"),
        ({"status": {"phase": "Failed"}}, "its placeholder pod has terminated"),
    ],
)
@run_in(KueueRig)
async def test_modified_or_finished_placeholder_pod_fails_the_order(
    rig: KueueRig, change: Object, message: str
) -> None:
    provider, name = await ordered(rig)
    made = order((await provider.offers())[0])
    rig.server.change(f"{PODS}/{name}", change)
    shown = await only(provider)
    assert (shown.name, shown.phase, shown.says) == (name, "failed", message)
    await provider.release(release(made))
    assert not [at for at in rig.server.objects if at.startswith(PODS)]
