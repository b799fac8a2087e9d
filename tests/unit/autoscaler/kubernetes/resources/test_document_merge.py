"""All documents together: nothing is reported before all are known, and learned values are reported once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autoscaler.contract import ModelName
from autoscaler.documents.document_quarantine import DocumentFault
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, FILES, Installation, Status
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.settings import Settings
from autoscaler.state.events import DocumentsSeen
from tests.support.harness.faults.fault_injection import inject

X, Y = Origin(CUSTOMS, "a", "x"), Origin(CUSTOMS, "b", "x")


def model(at_s: int = 0, namespace: str = "a", slots: int = 1) -> Model:
    spec = ModelSpec(engine="vllm")
    return Model(name=ModelName("x"), spec=spec, namespace=namespace, created_unix_s=at_s, slots=slots)


class Received:
    """Records the reported observations; properties return the latest."""

    def __init__(self) -> None:
        self.documents: list[DocumentsSeen] = []
        self.statuses: list[Mapping[ModelName, Status]] = []

    def __call__(self, documents: DocumentsSeen, statuses: Mapping[ModelName, Status]) -> None:
        self.documents.append(documents)
        self.statuses.append(statuses)

    @property
    def names(self) -> list[str]:
        """The Models in the latest report."""
        return [one.name for one in self.documents[-1].models]


def test_no_models_are_delivered_until_all_sources_have_reported() -> None:
    received = Received()
    one = Installation(received, (FILES, CUSTOMS))
    one.put(CUSTOMS, {X: model()}, statuses={X: {"learned": 1}})
    assert not received.documents, "a Model in the files would look like a removed one"
    one.put_files(DocumentsSeen(settings=Settings(auth="keys")))
    assert received.names == ["x"]
    assert received.documents[-1].settings.auth == "keys"
    assert received.statuses == [{"x": {"learned": 1}}]


def test_status_of_a_model_with_a_taken_name_has_its_namespaced_name() -> None:
    received = Received()
    one = Installation(received, (CUSTOMS,))
    one.put(CUSTOMS, {X: model(1), Y: model(2, "b")}, statuses={X: {"n": 1}, Y: {"n": 2}})
    one.put(CUSTOMS, {Y: model(2, "b")})
    assert received.statuses == [{"x": {"n": 1}, "b/x": {"n": 2}}, {}]
    assert received.names == ["x"], "the next one has the name"
    assert one.settled.names == {Y: "x"}


def test_model_of_another_source_gets_the_name_of_a_removed_model() -> None:
    received = Received()
    one = Installation(received, (FILES,))
    one.put_files(DocumentsSeen(models=(model(),)))
    one.put("adopted", {Origin("adopted", "c", "x"): model(5, "c")})
    one.put(CUSTOMS, {X: model(1)})
    assert received.names == ["x", "a/x", "c/x"]
    one.put_files(DocumentsSeen())
    assert received.names == ["x", "c/x"]
    one.put(CUSTOMS, {})
    assert received.names == ["x"]


def test_model_whose_name_resolution_raises_keeps_its_name_and_is_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    received = Received()
    one = Installation(received, (CUSTOMS,))
    one.put(CUSTOMS, {X: model(1), Y: model(2, "b")})
    inject(monkeypatch, "autoscaler.spec.document_names:_settled", lambda origin, *_: origin == X)
    one.put(CUSTOMS, {X: model(1, slots=7), Y: model(2, "b", slots=8)})
    assert received.names == ["x", "b/x"], "the younger Model does not get its name"
    assert [of.slots for of in received.documents[-1].models] == [1, 8]
    assert [*one.faults] == ["x"]
    assert "InjectedError" in one.faults[ModelName("x")].reason


def test_fault_of_a_document_is_listed_under_the_name_of_its_model() -> None:
    received = Received()
    one = Installation(received, (CUSTOMS,))
    one.put(CUSTOMS, {X: model(1), Y: model(2, "b")}, faults={Y: "KeyError: 7"}, versions={X: 1, Y: 2})
    assert one.faults == {"b/x": DocumentFault("KeyError: 7", 2)}
    one.put(CUSTOMS, {X: model(1), Y: model(2, "b")})
    assert one.faults == {}


def test_file_document_fault_is_listed_only_after_all_sources_reported() -> None:
    received = Received()
    one = Installation(received, (FILES, CUSTOMS))
    one.put_files(DocumentsSeen(models=(model(),)), {ModelName("x"): DocumentFault("KeyError: 7")})
    assert one.faults == {}
    one.put(CUSTOMS, {})
    assert (one.faults, received.names) == ({"x": DocumentFault("KeyError: 7")}, ["x"])
    one.put_files(DocumentsSeen(models=(model(),)))
    assert one.faults == {}


def test_model_is_served_elsewhere_if_another_installation_has_its_name() -> None:
    one = Installation(Received(), (CUSTOMS,), title="a/one", request_claims=lambda _: None)
    one.put_holders({"a": "b/two", "b": "a/one"})
    one.put(CUSTOMS, {X: model()})
    names = [ModelName(name) for name in ("x", "a/x", "y")]
    assert [*map(one.is_served_elsewhere, names)] == [True, True, False]
    one.put(CUSTOMS, {X: model(), Y: model(2, "b")})
    assert [*map(one.is_served_elsewhere, names)] == [False, True, False], "its own Model has the name"
