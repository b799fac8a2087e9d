"""Model names by age: the oldest keeps the name, later ones get a namespace prefix, none stays unnamed for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName, TenantName
from autoscaler.engines import build_launch_command
from autoscaler.routing.catalogue import model_entry
from autoscaler.spec.document_names import Origin, Settled, resolve_model_conflicts, resolve_tenant_conflicts
from autoscaler.spec.model import Adapter, Model, ModelSpec
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from tests.support.example_budget import examples
from tests.support.harness.faults.fault_injection import inject


def model(name: str, *aliases: str, namespace: str = "a", at_s: int = 0, adapters: tuple[str, ...] = ()) -> Model:
    laid = tuple(Adapter(name=one, artifact=f"file:///{one}") for one in adapters)
    spec = ModelSpec(engine="vllm", artifact="file:///m", aliases=aliases, adapters=laid)
    return Model(name=ModelName(name), spec=spec, namespace=namespace, created_unix_s=at_s)


def origin(model: Model) -> Origin:
    return Origin("customs", model.namespace, model.name)


def settled(*models: Model, files: tuple[Model, ...] = ()) -> Settled:
    return resolve_model_conflicts(files, {origin(one): one for one in models})


def test_older_of_two_models_keeps_the_name_and_the_other_gets_a_prefix() -> None:
    old, young = model("x", namespace="b", at_s=1), model("x", namespace="a", at_s=2)
    found = settled(young, old)
    assert [one.name for one in found.models] == ["x", "a/x"]
    assert found.models[0] is old
    assert dict(found.names) == {origin(old): "x", origin(young): "a/x"}
    assert dict(found.taken) == {origin(young): "name `x` belongs to Model b/x; this Model is renamed to `a/x`"}


@pytest.mark.parametrize(
    ("models", "names"),
    [
        ([model("x", namespace="b"), model("x", namespace="a")], ["x", "b/x"]),
        ([model("x", "y", at_s=1), model("y", at_s=2)], ["x", "a/y"]),
    ],
    ids=["equal age: by namespace", "alias of an older model"],
)
def test_name_goes_to_the_older_model_or_to_the_first_namespace(models: list[Model], names: list[str]) -> None:
    assert [one.name for one in settled(*models).models] == names


def test_next_model_gets_the_name_when_its_holder_is_removed() -> None:
    young, younger = model("x", namespace="b", at_s=2), model("x", namespace="c", at_s=3)
    found = settled(young, younger)
    assert [one.name for one in found.models] == ["x", "c/x"]
    assert origin(young) not in found.taken


def test_taken_alias_is_dropped_and_its_model_keeps_its_name() -> None:
    old, young = model("x", "gpt", at_s=1), model("y", "gpt", "free", "x", at_s=2)
    found = settled(old, young)
    assert [one.spec.aliases for one in found.models] == [("gpt",), ("free",)]
    assert found.names[origin(young)] == "y"
    assert found.taken[origin(young)] == "alias `gpt` belongs to Model a/x; alias `x` belongs to Model a/x"


def test_model_from_a_file_keeps_its_name_over_an_older_model() -> None:
    found = settled(model("x", at_s=1), files=(model("x", at_s=9),))
    assert [one.name for one in found.models] == ["x", "a/x"]
    assert found.taken[Origin("customs", "a", "x")].startswith("name `x` belongs to Model x in the configuration files")


def test_model_without_a_free_name_is_dropped_with_a_reason() -> None:
    found = settled(model("x", at_s=2), files=(model("x", "a/x"),))
    assert [one.name for one in found.models] == ["x"]
    assert found.taken[Origin("customs", "a", "x")] == (
        "other Models have the names `x` and `a/x`; Model x in the configuration files is named `a/x`"
    )
    assert not found.names


def test_adapters_of_a_renamed_model_get_its_new_name_as_prefix() -> None:
    young = model("x", "y", namespace="b", at_s=2, adapters=("z",))
    found = settled(model("w", "x:z", at_s=1), young)
    (_, second) = found.models
    assert (second.name, second.spec.aliases) == ("b/x", ("y",)), "`x` would be taken, and `x:z` could not"
    assert list(second.adapter_names()) == ["b/x:z", "y:z"]


def test_renamed_model_keeps_its_served_name_and_launch_command() -> None:
    """A Model that gets its name back therefore needs no new replica."""
    young = model("x", namespace="b", at_s=2, adapters=("z",))
    called = settled(model("x", at_s=1), young).models[1]
    assert called.name == "b/x"
    assert called.spec_hash() == young.spec_hash()
    argv = build_launch_command(called, None, "h", 1, {"vllm": "vllm"}).argv
    assert argv == build_launch_command(young, None, "h", 1, {"vllm": "vllm"}).argv
    entry = model_entry(called)
    assert (entry.name, entry.served_name, entry.adapters[0].served_name) == ("b/x", "x", "x:z")


names = st.sampled_from(["p", "q", "r", "p:q", "a/p"])
specs = st.tuples(names, st.lists(names, max_size=2, unique=True), st.sampled_from("ab"), st.integers(0, 3))


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(st.lists(specs, max_size=6), st.booleans())
def test_younger_model_never_takes_a_name_from_an_older_model(
    made: list[tuple[str, list[str], str, int]], adapted: bool
) -> None:
    models = {}
    for name, aliases, namespace, at_s in made:
        others = [alias for alias in aliases if alias != name]
        one = model(name, *others, namespace=namespace, at_s=at_s, adapters=("q",) if adapted else ())
        models[origin(one)] = one
    found = resolve_model_conflicts((), models)
    called = [name for one in found.models for name in one.names()]
    assert len(called) == len(set(called))
    oldest_first = sorted(models, key=lambda one: (models[one].created_unix_s, one.namespace, one.name))
    if oldest_first:
        *rest, youngest = oldest_first
        without = resolve_model_conflicts((), {one: models[one] for one in rest})
        assert list(without.models) == [one for one in found.models if one.name != found.names.get(youngest)]


def test_faulty_model_keeps_its_previous_document_only_if_its_uid_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    old, other = replace(model("x", "y"), uid="1"), model("z")
    before = settled(old, other)
    inject(monkeypatch, "autoscaler.spec.document_names:_settled", lambda *_: True)
    for uid, names in (("1", ["x", "y"]), ("2", ["x"])):
        new = replace(old, uid=uid, spec=replace(old.spec, slots=7))
        found = resolve_model_conflicts((), {origin(new): new}, before)
        assert [*found.models[0].names()] == names
        assert (found.models[0].uid, found.models[0].spec.slots) == (uid, None if uid == "1" else 7)
        assert [*found.faults] == [origin(new)]


def key(letter: str, name: str = "") -> Key:
    return Key(sha256=letter * 64, name=name)


def tenant(name: str, *keys: Key) -> Tenant:
    return Tenant(name=TenantName(name), spec=TenantSpec(keys=keys))


def test_shared_key_is_kept_only_by_the_oldest_tenant() -> None:
    files, old, young = tenant("f", key("a")), tenant("o", key("a"), key("b")), tenant("y", key("b", "ci"), key("c"))
    tenants, taken = resolve_tenant_conflicts([files], [old, young])
    assert tenants == (files, tenant("o", key("b")), tenant("y", key("c")))
    assert taken == {
        "o": "API key aaaaaaaa... already belongs to Tenant f", "y": "API key `ci` already belongs to Tenant o",
    }  # fmt: skip


def test_tenant_from_files_takes_precedence_over_an_equally_named_tenant() -> None:
    of_files = tenant("x", key("a"))
    tenants, taken = resolve_tenant_conflicts([of_files], [replace(of_files, spec=TenantSpec())])
    assert tenants == (of_files,)
    assert taken == {"x": "Tenant x in the configuration files has precedence"}
