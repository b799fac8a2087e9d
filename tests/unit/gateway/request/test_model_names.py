"""Names of models: as clients of Ollama's API see them, and after changes of the catalogue."""

from __future__ import annotations

import random

import pytest

from autoscaler.contract import AdapterEntry, ModelEntry, ModelName, TenantEntry, TenantName
from gateway.request.model_names import ModelNames


@pytest.mark.parametrize(
    ("aliases", "name", "listed"),
    [
        ((), "ada", "ada:latest"),
        ((), "lab/ada", "lab/ada:latest"),
        ((), "ada:lora", "ada:lora"),
        (("ada:latest",), "ada", "ada"),
    ],
)
def test_untagged_name_is_listed_as_latest_unless_that_name_is_taken(
    aliases: tuple[str, ...], name: str, listed: str
) -> None:
    names = ModelNames()
    names.update([ModelEntry(name=ModelName("other"), served_name="other", aliases=aliases)], ())
    assert names.with_tag(name) == listed


def test_incremental_updates_give_the_same_names_as_a_full_catalogue() -> None:
    rng, names, models = random.Random(7), ModelNames(), dict[ModelName, ModelEntry]()
    for _ in range(500):
        name = ModelName(rng.choice("abcd"))
        if rng.random() < 0.3:
            models.pop(name, None)
            assert names.update((), [name]) == {}
        else:
            models[name] = ModelEntry(
                name=name,
                served_name=name,
                aliases=tuple(rng.sample("abcxyz", rng.randrange(4))),
                adapters=tuple(AdapterEntry(name=one, served_name=one) for one in rng.sample("pq", rng.randrange(3))),
                created_unix_s=rng.randrange(3),
                serves_aliases=rng.random() < 0.5,
            )
            assert names.update([models[name]], ()) == {}
        complete = ModelNames()
        complete.update(models.values(), ())
        assert names._names == complete._names
        holders = {called: (entry.created_unix_s, entry.name) for called, entry in names._names.items()}
        for model in models.values():
            assert all(holders[called] <= (model.created_unix_s, model.name) for called in (model.name, *model.aliases))
        assert names.visible(TENANT) == complete.visible(TENANT)
    for name in models:
        names.update((), [name])
    assert (names._names, names._younger, names._entries) == ({}, {}, {})


@pytest.mark.parametrize("serves_aliases", [False, True])
def test_aliases_of_a_model_are_those_that_no_older_model_has(serves_aliases: bool) -> None:
    names = ModelNames()
    younger, older = (
        ModelEntry(
            name=ModelName(name), served_name=f"served-{name}", aliases=(f"{name}-alias", "shared"), created_unix_s=age,
            serves_aliases=serves_aliases,
        )
        for name, age in (("ada", 2), ("bob", 1))
    )  # fmt: skip
    names.update([younger, older], ())
    assert names.own_aliases(younger) == ["ada-alias"]
    assert names.own_aliases(older) == ["bob-alias", "shared"]


TENANT = TenantEntry(name=TenantName("t"))
