"""An API server that loses responses or returns 500 or garbage, and nodes that differ from the order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoscaler.providers.kube import AnswerError, Object
from autoscaler.providers.provider import RefusedError
from autoscaler.providers.provisioning_request.objects import ATOMIC, GKE, OFFER
from autoscaler.providers.provisioning_request.provider import COUNTED, WAIT_MAX
from autoscaler.spec.pod import GPU
from tests.contracts.provider import order, release
from tests.support.harness.async_tests import run_in
from tests.support.harness.providers.provisioning_request_rig import (
    NAMESPACE,
    PODS,
    REQUESTS,
    TEMPLATES,
    ProvisioningRig,
    Quotas,
    only,
    ordered,
    scenario,
)


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
        said = f"{method} {path}"
        hit = next((one for one in left if said.startswith(one)), None)
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
async def test_node_with_other_labels_is_not_assigned(rig: ProvisioningRig) -> None:
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
            rig.server.objects[f"{REQUESTS}/{name}"]["metadata"]["annotations"][OFFER] = "<html>"
        else:
            rig.server.change(f"/api/v1/nodes/node-{name}", {"status": {"allocatable": {GPU: "1"}}})
        shown = await only(provider)
        assert (shown.phase, shown.node) == ("failed", f"node-{name}")
        assert spoilt or shown.ends_s == ends_s, "who is on it still has to leave in time"
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
