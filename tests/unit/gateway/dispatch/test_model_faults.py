"""An exception for one model closes only this model. The tests patch methods, so they need the gateway's sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoscaler.contract import ModelName, ReplicaId, Route, RoutesDelta
from tests.support.harness.faults.fault_injection import concerns, inject
from tests.support.harness.gateway.dispatch_script import Script


def _about_llama(*args: object) -> bool:
    return any(getattr(one, "name", "") == "llama" or concerns("llama")(one) for one in args)


def _routes(*, full: bool = False) -> RoutesDelta:
    """One ready replica of each of the two models."""
    replicas = tuple(
        Route(
            replica=ReplicaId(f"{name}-1"), model=ModelName(name), state="ready", address=f"{name}:80", slots=8,
            hold=8, granted=9,
        )
        for name in ("llama", "tiny")
    )  # fmt: skip
    return RoutesDelta(epoch=0, version=0, full=full, replicas=replicas)


@pytest.mark.parametrize(
    "point",
    [
        "model_dispatcher:ModelDispatcher.look",
        "model_dispatcher:ModelDispatcher.settle",
        "model_dispatcher:ModelDispatcher._grant",
        "routing_table:Routes._update",
        "routing_table:Routes._allow",
    ],
)
def test_exception_while_routes_are_applied_closes_only_its_model(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.model("tiny")
    script.arrive("waiting")
    fault = inject(monkeypatch, f"gateway.dispatch.{point}", _about_llama, expected=False)
    effects = script.routes(_routes())
    assert effects[-2:] == ["fault llama", "report"]
    assert script.dispatch.has_faults()
    assert script.arrive("c1", model="tiny") == ["grant c1 tiny-1", "report"]
    assert script.arrive("c2") == ["refuse c2 model_faulty"]
    assert (script.refused["c2"].error.status, script.refused["c2"].error.should_retry) == (503, False)
    fault.stop()
    script.model()
    script.routes(_routes(full=True))
    assert not script.dispatch.has_faults()
    assert script.arrive("c3") == ["grant c3 llama-1", "report"]


def test_exception_for_one_model_rejects_its_queued_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.model("tiny")
    script.arrive_many(3, "c")
    script.arrive("t1", model="tiny")
    inject(monkeypatch, "gateway.dispatch.routing_table:Routes._update", _about_llama, expected=False)
    refused = [f"refuse c{number} model_faulty" for number in range(3)]
    assert script.routes(_routes()) == [*refused, "fault llama", "grant t1 tiny-1", "report"]
    assert (script.dispatch.next_s(), script.level("acme").model) == (None, "tiny")
    assert [total.finished for total in script.totals() if total.model == "llama"] == [3]


def test_exception_in_an_operation_on_one_request_closes_only_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[tuple[str, Callable[[Script], list[str]]]] = [
        ("arrive", lambda script: script.arrive("c9")),
        ("finish", lambda script: script.finish("c1")),
        ("heard", lambda script: script.heard("c1")),
        ("bounce", lambda script: script.bounce("c1", "reset")),
    ]
    for name, act in acts:
        script = Script()
        script.model("tiny")
        script.routes(_routes())
        script.arrive("c1")
        with monkeypatch.context() as patch:
            point = f"gateway.dispatch.model_dispatcher:ModelDispatcher.{name}"
            inject(patch, point, _about_llama, expected=False)
            assert "fault llama" in act(script), name
        assert script.arrive("t1", model="tiny") == ["grant t1 tiny-1", "report"]
        assert script.arrive("c2") == ["refuse c2 model_faulty"]


def test_exception_at_a_deadline_rejects_the_requests_of_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.model("tiny")
    script.arrive("c1", wait_s=5)
    script.arrive("t1", wait_s=5, model="tiny")
    inject(monkeypatch, "gateway.dispatch.model_dispatcher:ModelDispatcher.expire", _about_llama, expected=False)
    effects = script.at(5.0)
    assert {"refuse c1 model_faulty", "fault llama", "refuse t1 model_starting"} <= set(effects)
