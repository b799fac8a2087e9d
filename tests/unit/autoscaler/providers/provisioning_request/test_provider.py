"""Nodes by ProvisioningRequests: the provider contract for each class, and failures of nodes or API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.providers import order_annotations
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request import objects
from autoscaler.providers.provisioning_request.objects import ATOMIC, CHECK, GKE
from autoscaler.providers.provisioning_request.provider import COUNTED, HALF_S, WAIT_MAX
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.pod import CONSUMES, GPU
from autoscaler.state.capacity import NO_MARKS, LeaseId, ReleaseOrder
from tests.contracts.provider import ProviderContract, order, release
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.provisioner import Fault
from tests.support.harness.async_tests import run_in
from tests.support.harness.providers.provisioning_request_rig import (
    DRY,
    EXPIRED,
    NAMESPACE,
    POD,
    PODS,
    REQUESTS,
    TEMPLATES,
    UNIX_S,
    ProvisioningRig,
    Quotas,
    only,
    ordered,
    scenario,
)


class TestAtomicScaleUp(ProviderContract):
    """Cluster Autoscaler adds a node."""

    @pytest.fixture
    def rig(self) -> ProvisioningRig:
        return ProvisioningRig()


class TestQueuedProvisioning(ProviderContract):
    """A cloud's queue delivers a node at some later time, for a week."""

    @pytest.fixture
    def rig(self) -> ProvisioningRig:
        return ProvisioningRig(GKE, max_run_s=604_800.0)


class TestCheckCapacity(ProviderContract):
    """Capacity on an existing node is reserved."""

    @pytest.fixture
    def rig(self) -> ProvisioningRig:
        return ProvisioningRig(CHECK)


@run_in(partial(ProvisioningRig, GKE, max_run_s=3600.0, count=4))
async def test_order_creates_a_pod_template_and_a_provisioning_request(rig: ProvisioningRig) -> None:
    _, name = await ordered(rig)
    made, request = rig.server.objects[f"{TEMPLATES}/{name}"], rig.server.objects[f"{REQUESTS}/{name}"]
    spec = made["template"]["spec"]
    assert spec["nodeSelector"] == {"pool": "l4"}
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "4"}, "limits": {GPU: "4"}}
    assert request["spec"] == {
        "provisioningClassName": GKE, "parameters": {"maxRunDurationSeconds": "3600"},
        "podSets": [{"count": 1, "podTemplateRef": {"name": name}}],
    }  # fmt: skip
    assert POD["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "4"}}


def test_offer_has_the_device_count_price_and_duration_of_its_class() -> None:
    async def offered(class_name: str, **options: Any) -> list[Any]:
        rig = ProvisioningRig(class_name, **options)
        rig.server = Quotas(lambda: UNIX_S)
        (one,) = await rig.provider().offers()
        return [
            one.product,
            one.devices_min,
            one.devices_max,
            one.bought,
            one.price_per_hour,
            one.expected_s,
            one.lasts_s,
        ]

    assert run(offered(GKE, max_run_s=60.0, count=4)) == ["NVIDIA-L4", 4, 4, "flex", 0.5, None, 60.0]
    assert run(offered(ATOMIC)) == ["NVIDIA-L4", 1, 1, "on-demand", 0.5, 300.0, None]
    assert run(offered(CHECK, max_run_s=60.0, count=4)) == ["NVIDIA-L4", 1, 4, "owned", 0.0, 30.0, None]


@run_in(partial(ProvisioningRig, GKE, max_run_s=3600.0))
async def test_order_ends_after_its_maximum_run_duration(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    first = await only(provider)
    assert first.ends_s is not None
    left_s = first.ends_s - asyncio.get_running_loop().time()
    assert 3600 - 130 < left_s <= 3600
    await rig.go_on(600.0)
    assert await only(provider) == first  # it does not jitter with the clock


@pytest.mark.parametrize(
    ("fault", "class_name", "phase", "message"),
    [
        ("unseen", ATOMIC, "coming", "its request is not accepted yet"),
        ("never", ATOMIC, "coming", "it is not provisioned yet (CapacityIsNotFound: CA will try to find it later.)"),
        ("rejects", ATOMIC, "failed", "its request failed (FailedToCreatePods: its template is wrong)"),
        ("fails", ATOMIC, "failed", "its request failed (Expired: ProvisioningRequest is expired)"),
        ("expires", ATOMIC, "failed", f"its booking expired unused ({EXPIRED})"),
        ("quota", GKE, "coming", f"the quota of the cloud is used up ({DRY})"),
        ("half", ATOMIC, "failed", "its node {node} has 1 of 2 devices"),
    ],
)  # fmt: skip
def test_undelivered_order_reports_its_reason_and_can_be_released(
    fault: Fault, class_name: str, phase: str, message: str
) -> None:
    rig = ProvisioningRig(class_name, count=2)
    rig.fault = fault

    async def what() -> None:
        provider, name = await ordered(rig)
        await rig.go_on(600.0)
        shown = await only(provider)
        assert (shown.phase, shown.says) == (phase, message.format(node=f"node-{name}"))
        await provider.release(ReleaseOrder(id=order((await rig.provider().offers() or [shown.offer])[0]).id, epoch=1))
        assert await provider.list() == ()
        assert f"{TEMPLATES}/{name}" not in rig.server.objects

    scenario(rig, what)


@run_in(partial(ProvisioningRig, GKE))
async def test_exhausted_quota_suspends_offers_until_the_order_is_released(rig: ProvisioningRig) -> None:
    rig.fault = "quota"

    provider, name = await ordered(rig)
    assert await provider.offers()
    await rig.go_on(120.0)
    assert not await provider.offers()
    await provider.release(ReleaseOrder(id=order((await only(provider)).offer).id, epoch=1))
    assert name not in str(rig.server.objects)
    assert await provider.offers()


@run_in(partial(ProvisioningRig, GKE))
async def test_repeated_orders_for_three_days_create_one_provisioning_request(rig: ProvisioningRig) -> None:
    rig.fault = "never"

    provider, name = await ordered(rig)
    for hour in range(72):
        await provider.acquire(order((await only(provider)).offer))
        await asyncio.sleep(3600.0)
        await rig.go_on()
        shown = await only(provider)
        assert (shown.name, shown.phase, shown.committed) == (name, "coming", False), hour
    made = [at for method, at, _ in rig.server.writes if method == "POST" and at == REQUESTS]
    assert len(made) == 1


@run_in(ProvisioningRig)
async def test_each_provisioning_request_is_assigned_its_own_node(rig: ProvisioningRig) -> None:
    provider, first = await ordered(rig)
    rig.server.put("/api/v1/nodes/other", {"metadata": {"labels": {"pool": "h100"}}})
    await rig.go_on(60.0)
    _, second = await ordered(rig, 1)
    await rig.until_here(second)
    nodes = {one.name: one.node for one in await rig.provider().list()}
    assert nodes == {first: f"node-{first}", second: f"node-{second}"}
    await provider.release(ReleaseOrder(id=order((await provider.offers())[0]).id, epoch=1))
    assert (await only(provider)).node == f"node-{second}"  # even while the node of the first one still exists


@run_in(ProvisioningRig)
async def test_node_older_than_the_provisioning_request_is_not_assigned_to_it(rig: ProvisioningRig) -> None:
    rig.server.put("/api/v1/nodes/old", {"metadata": {"labels": {"pool": "l4"}}})
    await asyncio.sleep(5.0)
    provider, name = await ordered(rig)
    await rig.go_on(70.0)
    assert (await only(provider)).phase == "coming"
    await rig.until_here(name)
    assert (await only(provider)).node == f"node-{name}"


@run_in(partial(ProvisioningRig, GKE))
async def test_node_not_reported_by_the_cloud_is_not_assigned_to_the_order(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    await rig.go_on(65.0)
    rig.server.put("/api/v1/nodes/a-stranger", {"metadata": {"labels": {"pool": "l4"}}})
    assert (await only(provider)).phase == "coming"
    await rig.until_here(name)
    assert (await only(provider)).node == f"node-{name}"


@run_in(ProvisioningRig)
async def test_delivered_order_has_the_annotations_for_pods_that_consume_it(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    assert (await only(provider)).marks == NO_MARKS
    await rig.until_here(name)
    assert (await only(provider)).marks.annotations == dict(zip(CONSUMES, (name, ATOMIC), strict=True))


@run_in(partial(ProvisioningRig, CHECK))
async def test_booking_that_expires_after_its_use_stays_delivered(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    await rig.until_here(name)
    await rig.go_on(60.0)
    conditions = rig.server.objects[f"{REQUESTS}/{name}"]["status"]["conditions"]
    assert any(one["type"] == "BookingExpired" and one["reason"] == objects.CONSUMED for one in conditions)
    shown = await only(provider)
    assert (shown.phase, shown.node) == ("here", "there")


@run_in(partial(ProvisioningRig, CHECK))
async def test_booking_is_not_bound_to_the_node_of_another_installations_pod(rig: ProvisioningRig) -> None:
    rig.server.owner = Ownership("home-1")
    provider, name = await ordered(rig)
    while not objects.read_booking(rig.server.objects[f"{REQUESTS}/{name}"]).holds("Provisioned"):
        await rig.go_on()
    rig.bind(name)
    labels = rig.server.objects[f"{PODS}/pod-{name}"]["metadata"]["labels"]
    labels[INSTALLATION] = "other-1"
    assert (await only(provider)).node == ""
    labels[INSTALLATION] = "home-1"
    assert (await only(provider)).node == "there"


@run_in(partial(ProvisioningRig, GKE))
async def test_revoked_capacity_ends_now_and_fails_when_its_node_is_gone(rig: ProvisioningRig) -> None:
    rig.fault = "revokes"

    provider, name = await ordered(rig)
    await rig.until_here(name)
    shown = await only(provider)
    assert shown.says == "its capacity is being revoked (Preempted: the machine was taken back)"
    assert shown.ends_s is not None
    assert shown.ends_s <= asyncio.get_running_loop().time()
    await rig.server.delete(f"/api/v1/nodes/node-{name}")
    shown = await only(provider)
    assert (shown.phase, shown.says) == ("failed", f"its node node-{name} was deleted")


@run_in(ProvisioningRig)
async def test_capacity_arriving_after_release_is_not_listed(rig: ProvisioningRig) -> None:
    rig.fault = "late"

    provider, name = await ordered(rig)
    await rig.go_on(60.0)
    await provider.release(ReleaseOrder(id=order((await provider.offers())[0]).id, epoch=1))
    await rig.go_on(300.0)
    assert await provider.list() == ()
    again, _ = await ordered(rig)
    await rig.go_on(30.0)
    assert (await only(again)).phase == "coming", name


@run_in(ProvisioningRig)
async def test_concurrent_identical_orders_create_one_request(rig: ProvisioningRig) -> None:
    one, other = rig.provider(), rig.provider()
    made = order((await one.offers())[0])
    await asyncio.gather(one.acquire(made), other.acquire(made))
    assert len([at for at in rig.server.objects if at.startswith((REQUESTS, TEMPLATES))]) == 2
    assert (await only(one)).phase == "coming"


@run_in(ProvisioningRig)
async def test_order_named_like_another_providers_request_is_rejected(rig: ProvisioningRig) -> None:
    _, name = await ordered(rig)
    other = rig.provider("other")
    made = replace(order((await other.offers())[0]), id=LeaseId("other", name))
    with pytest.raises(RefusedError, match="belongs to another owner"):
        await other.acquire(made)
    await other.release(release(made))
    assert await other.list() == ()
    assert {f"{REQUESTS}/{name}", f"{TEMPLATES}/{name}"} <= rig.server.objects.keys()


@run_in(ProvisioningRig)
async def test_pod_template_without_a_request_is_listed_as_failed_and_released(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    made = order((await provider.offers())[0])
    del rig.server.objects[f"{REQUESTS}/{name}"]
    assert await provider.list() == ()  # its request may be created next
    await asyncio.sleep(HALF_S + 1)
    shown = await only(provider)
    assert (shown.name, shown.phase) == (name, "failed")
    await provider.release(release(made))
    assert await provider.list() == ()
    assert f"{TEMPLATES}/{name}" not in rig.server.objects


@run_in(ProvisioningRig)
async def test_rejected_provisioning_request_leaves_no_pod_template(rig: ProvisioningRig) -> None:
    provider = rig.provider()
    made = order((await provider.offers())[0])
    rig.leave_little()
    with pytest.raises(RefusedError, match="exceeded quota: few"):
        await provider.acquire(made)
    assert not [at for at in rig.server.objects if at.startswith(TEMPLATES)]


@run_in(ProvisioningRig)
async def test_leftover_pod_template_is_replaced_by_a_new_order(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    del rig.server.objects[f"{REQUESTS}/{name}"]
    rig.server.objects[f"{TEMPLATES}/{name}"]["template"]["spec"]["containers"] = []
    await ordered(rig)
    assert rig.server.objects[f"{TEMPLATES}/{name}"]["template"]["spec"]["containers"]
    assert (await only(provider)).phase == "coming"


@run_in(ProvisioningRig)
async def test_provisioning_order_for_a_deleted_model_is_rejected(rig: ProvisioningRig) -> None:
    provider = rig.provider()
    made = order((await provider.offers())[0])
    with pytest.raises(RefusedError, match="Model gone does not exist any more"):
        await provider.acquire(replace(made, owner=ModelName("gone")))


@run_in(ProvisioningRig)
async def test_order_with_malformed_annotations_has_failed(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    rig.server.objects[f"{REQUESTS}/{name}"]["metadata"]["annotations"][order_annotations.OFFER] = "<html>"
    shown = await only(provider)
    assert (shown.phase, shown.says) == ("failed", "the annotations of its ProvisioningRequest are invalid")


@run_in(ProvisioningRig)
async def test_one_hour_api_outage_loses_and_duplicates_no_order(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    rig.server.away = True
    await asyncio.sleep(3600.0)
    with pytest.raises(ConnectionError):
        await provider.list()
    rig.server.away = False
    await rig.until_here(name)
    assert (await only(provider)).name == name


class Lossy(Quotas):
    """Loses responses. `after`: (method, path) -> the error to raise after the operation, or None."""

    after: Callable[[str, str], Exception | None] = staticmethod(lambda method, path: None)

    async def create(self, path: str, body: Object) -> Object:
        made = await super().create(path, body)
        self._tell("POST", path)
        return made

    async def delete(self, path: str, *, version: str | None = None) -> None:
        await super().delete(path, version=version)
        self._tell("DELETE", path)

    def _tell(self, method: str, path: str) -> None:
        error = self.after(method, path)
        if error is not None:
            raise error


class Garbage(Quotas):
    """A proxy that answers with garbage instead of the API server."""

    spoilt: list[Object]

    async def items(self, path: str, **query: str) -> list[Object]:
        del path, query
        return self.spoilt


def lossy(rig: ProvisioningRig, *lost: str, error: Exception) -> None:
    """Raise `error` after the first operation that matches each of these."""
    left = list(lost)

    def after(method: str, path: str) -> Exception | None:
        message = f"{method} {path}"
        hit = next((one for one in left if message.startswith(one)), None)
        if hit is None:
            return None
        left.remove(hit)
        return error

    server = Lossy(rig.server.unix_s)
    server.objects, server.after = rig.server.objects, after
    rig.server = rig.controller.server = server


@pytest.mark.parametrize("where", [f"POST {TEMPLATES}", f"POST {REQUESTS}"])
@pytest.mark.parametrize("error", [TimeoutError(), AnswerError(500, "InternalError", "etcd")])
@run_in(ProvisioningRig)
async def test_lost_reply_to_create_is_retried_without_duplicates(
    rig: ProvisioningRig, where: str, error: Exception
) -> None:
    provider = rig.provider()
    made = order((await provider.offers())[0])
    lossy(rig, where, error=error)
    provider = rig.provider()
    with pytest.raises(type(error)):
        await provider.acquire(made)
    await provider.acquire(made)
    assert (await only(provider)).phase == "coming"
    assert len([at for at in rig.server.objects if at.startswith((TEMPLATES, REQUESTS))]) == 2
    await provider.release(release(made))
    assert not [at for at in rig.server.objects if at.startswith((TEMPLATES, REQUESTS))]


@run_in(ProvisioningRig)
async def test_repeated_release_completes_a_release_whose_reply_was_lost(rig: ProvisioningRig) -> None:
    provider, name = await ordered(rig)
    made = order((await provider.offers())[0])
    lossy(rig, f"DELETE {REQUESTS}", error=TimeoutError())
    provider = rig.provider()
    with pytest.raises(TimeoutError):
        await provider.release(release(made))
    assert f"{TEMPLATES}/{name}" in rig.server.objects
    await provider.release(release(made))
    assert not [at for at in rig.server.objects if at.startswith((TEMPLATES, REQUESTS))]


@pytest.mark.parametrize("spoilt", [{}, {"metadata": {"name": "x", "creationTimestamp": "yesterday"}}])
@run_in(ProvisioningRig)
async def test_listing_fails_if_the_server_returns_a_malformed_object(rig: ProvisioningRig, spoilt: Object) -> None:
    await ordered(rig)
    garbage = Garbage(rig.server.unix_s)
    rig.server, garbage.spoilt = garbage, [spoilt]
    provider = rig.provider()
    with pytest.raises((KeyError, ValueError)) as caught:
        await provider.list()
    assert not isinstance(caught.value, RefusedError)


@run_in(ProvisioningRig)
async def test_offers_stop_at_the_maximum_of_pending_requests(rig: ProvisioningRig) -> None:
    for number in range(WAIT_MAX):
        (offer,) = await rig.provider().offers()
        assert offer.many == WAIT_MAX - number
        await ordered(rig, number)
    assert await rig.provider().offers() == ()
    await rig.go_on(300.0)
    assert len(await rig.provider().list()) == WAIT_MAX
    (offer,) = await rig.provider().offers()
    assert offer.many == WAIT_MAX, "they have their nodes"


@run_in(ProvisioningRig)
async def test_provisioning_request_is_not_assigned_a_node_with_other_labels(rig: ProvisioningRig) -> None:
    rig.fault = "never"

    provider, _ = await ordered(rig)
    await rig.go_on(120.0)
    rig.server.put("/api/v1/nodes/elsewhere", {"metadata": {"labels": {"pool": "t4"}}})
    rig.server.change(
        next(at for at in rig.server.objects if at.startswith(REQUESTS)),
        {"status": {"conditions": [{"type": "Provisioned", "status": "True", "reason": "CapacityIsProvisioned"}]}},
    )
    shown = await only(provider)
    assert (shown.phase, shown.node, shown.committed) == ("coming", "", True)


@pytest.mark.parametrize("class_name", [ATOMIC, GKE])
@pytest.mark.parametrize("spoilt", [False, True])
def test_failed_capacity_in_use_is_kept_until_its_pod_is_gone(class_name: str, spoilt: bool) -> None:
    """One of its two devices is no longer healthy, or our label on it was changed."""
    rig = ProvisioningRig(class_name, max_run_s=7200.0, count=2)

    async def what() -> None:
        provider, name = await ordered(rig)
        made = order((await only(provider)).offer)
        await rig.until_here(name)
        ends_s = (await only(provider)).ends_s
        rig.use(name)
        if spoilt:
            rig.server.objects[f"{REQUESTS}/{name}"]["metadata"]["annotations"][order_annotations.OFFER] = "<html>"
        else:
            rig.server.change(f"/api/v1/nodes/node-{name}", {"status": {"allocatable": {GPU: "1"}}})
        shown = await only(provider)
        assert (shown.phase, shown.node) == ("failed", f"node-{name}")
        assert spoilt or shown.ends_s == ends_s, "its replica must still leave before the end"
        await provider.release(release(made))
        assert {f"{REQUESTS}/{name}", f"{TEMPLATES}/{name}"} <= rig.server.objects.keys()
        await rig.server.delete(f"{PODS}/pod-{name}")
        await provider.release(release(made))
        assert await provider.list() == ()

    scenario(rig, what)


@run_in(ProvisioningRig)
async def test_offers_stop_when_the_resource_quota_for_requests_is_used_up(rig: ProvisioningRig) -> None:
    for hard, used, left in (("1k", "998", 2), ("1k", "1k", 0)):
        quota = {"spec": {"hard": {COUNTED: hard}}, "status": {"used": {COUNTED: used}}}
        rig.server.put(f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/few", quota)
        assert [one.many for one in await rig.provider().offers()] == [left] * bool(left)
