"""A gateway with an injected exception: only the model or the request at fault is affected."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from autoscaler.contract import (
    AdapterEntry,
    CatalogueDelta,
    GatewayId,
    ModelEntry,
    ModelName,
    PolicyEntry,
    ReplicaId,
    RoutesDelta,
    TenantEntry,
    TenantName,
)
from gateway.control import fault_containment
from gateway.dispatch.call import Call, CallState
from gateway.dispatch.effects import Grant, ModelFaulted
from gateway.errors import CallError
from gateway.gateway import Gateway
from tests.support.harness.faults.fault_injection import InjectedError
from tests.support.harness.gateway.dispatch_script import call_of

TENANT = TenantEntry(name=TenantName("acme"))


class FakeProxiedCall:
    """A request that records what happens to it. `fails`: every operation raises."""

    waits = True

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.addresses: list[str] = []
        self.errors: list[str] = []
        self.sweeps = 0

    def granted(self, address: str) -> None:
        if self.fails:
            raise InjectedError("granted")
        self.addresses.append(address)

    def sweep(self, now_s: float) -> None:
        del now_s
        if self.fails:
            raise InjectedError("sweep")
        self.sweeps += 1

    def fail(self, error: CallError) -> None:
        self.errors.append(error.code)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str]]:
    """The contained exceptions."""
    faults: list[tuple[str | None, str]] = []
    monkeypatch.setattr(fault_containment, "report_fault", lambda model, what, _: faults.append((model, what)))
    return faults


def gateway(calls: dict[Call, FakeProxiedCall] | None = None) -> Gateway:
    one = Gateway(GatewayId("g1"), "boot", lambda: 100.0)
    one._calls.update(calls or {})  # type: ignore[arg-type]  # fakes
    return one


def test_exception_in_one_catalogue_entry_does_not_affect_other_models(reported: list[tuple[str | None, str]]) -> None:
    adapters = (AdapterEntry(name="a", served_name="a"),)
    healthy, repaired = (
        ModelEntry(name=ModelName(name), served_name=name, adapters=adapters) for name in ("healthy", "faulty")
    )
    faulty = replace(repaired, adapters=(*adapters, cast("AdapterEntry", None)))
    one = gateway()
    one.catalogue(CatalogueDelta(epoch=1, version=1, full=True, models=(faulty, healthy)))
    one.routes(RoutesDelta(epoch=1, version=1, full=True))
    assert one.informed.is_set()
    assert one.directory.names.resolve(TENANT, "healthy:a").name == "healthy"
    assert one.directory.names.resolve(TENANT, "faulty").name == "faulty", "it is rejected as model_faulty, not as 404"
    assert (reported, one.has_faults()) == ([("faulty", "dispatch")], True)
    one.catalogue(CatalogueDelta(epoch=1, version=1, full=True, models=(repaired, healthy)))
    assert not one.has_faults()
    assert one.directory.names.resolve(TENANT, "faulty:a").name == "faulty"


@pytest.mark.parametrize("of", ["model", "tenant"])
def test_exception_in_a_policy_rejects_only_requests_that_use_the_policy(
    of: str, reported: list[tuple[str | None, str]]
) -> None:
    faulty = PolicyEntry(removed=cast("tuple[str, ...]", (None,)))
    names = ("faulty", "healthy") if of == "model" else ("faulty",)
    models = tuple(ModelEntry(name=ModelName(name), served_name=name) for name in names)
    tenants = (TENANT, TenantEntry(name=TenantName("other")))
    if of == "model":
        models = (replace(models[0], policy=faulty), replace(models[1], policy=PolicyEntry(removed=("tools",))))
    else:
        tenants = (tenants[1], replace(TENANT, policy=faulty))
    one = gateway()
    one.catalogue(CatalogueDelta(epoch=1, version=1, full=True, models=models, tenants=tenants))
    one.routes(RoutesDelta(epoch=1, version=1, full=True))
    assert one.informed.is_set()
    assert (reported, one.has_faults()) == ([], False)
    policies = one.directory.policies
    assert policies is not None
    for _ in range(2):
        with pytest.raises(CallError) as caught:
            policies.find(TENANT, models[0], "faulty")
        assert (caught.value.status, caught.value.code) == (503, "model_faulty")
    assert reported == [("faulty", "policy")]
    if of == "model":
        assert policies.find(TENANT, models[1], "healthy") is not None
    else:
        assert policies.find(tenants[0], models[0], "faulty") is None
    repaired = CatalogueDelta(
        epoch=1,
        version=2,
        models=tuple(replace(one, policy=None) for one in models),
        tenants=(TENANT, TenantEntry(name=TenantName("other"))),
    )
    one.catalogue(repaired)
    assert one.directory.policies is None


def test_exception_while_a_grant_is_performed_ends_only_its_request(reported: list[tuple[str | None, str]]) -> None:
    calls = {call_of("c1"): FakeProxiedCall(fails=True), call_of("c2"): FakeProxiedCall()}
    one = gateway(calls)
    one.perform([Grant(call, ReplicaId("r1"), "r1:80") for call in calls])
    broken, healthy = calls.values()
    assert (broken.errors, healthy.addresses, healthy.errors) == (["model_faulty"], ["r1:80"], [])
    assert reported == [("llama", "request")]


def test_exception_in_the_timeouts_of_one_request_ends_only_that_request(
    reported: list[tuple[str | None, str]],
) -> None:
    calls = {call_of("c1"): FakeProxiedCall(fails=True), call_of("c2"): FakeProxiedCall()}
    one = gateway(calls)
    one.sweep(100.0)
    broken, healthy = calls.values()
    assert (broken.errors, healthy.sweeps, healthy.errors) == (["model_faulty"], 1, [])
    assert reported == [("llama", "request")]


def test_request_left_waiting_after_a_dispatch_exception_is_rejected(reported: list[tuple[str | None, str]]) -> None:
    lost, other = call_of("c1"), call_of("c2", model="tiny")
    lost.state = other.state = CallState.PARKED
    calls = {lost: FakeProxiedCall(), other: FakeProxiedCall()}
    gateway(calls).perform([ModelFaulted(lost.model, InjectedError("dispatch"))])
    assert (calls[lost].errors, calls[other].errors) == (["model_faulty"], [])
    assert (lost.state, other.state) == (CallState.ENDED, CallState.PARKED)
    assert reported == [("llama", "dispatch")]


def test_memory_error_while_a_grant_is_performed_is_raised() -> None:
    one = gateway({call_of("c1"): FakeProxiedCall()})
    (proxied,) = one._calls.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxied, "granted", _exhaust)
        with pytest.raises(MemoryError):
            one.perform([Grant(next(iter(one._calls)), ReplicaId("r1"), "r1:80")])


def _exhaust(address: str) -> None:
    raise MemoryError(address)
