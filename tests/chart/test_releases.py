"""Several releases of the chart in one cluster: no two of their objects have the same name."""

from __future__ import annotations

import functools
import json
from itertools import combinations

import pytest
import yaml

from tests.support.chart import EVERY_SET, SETS, Object, Values, of_kind, texts

RELEASES = [
    ("a-pilotlight", "team"), ("pilotlight", "team-a"),  # the same name when joined by a hyphen
    ("blue", "n" * 63), ("green", "n" * 63),
    ("r" * 50 + "-x", "long"), ("r" * 50 + "-y", "long"), ("r" * 53, "n" * 63), ("r" * 52 + "s", "n" * 63),
]  # fmt: skip
"""Pairs of (name, namespace); 53 and 63 characters are the maximum."""
each_set = pytest.mark.parametrize(
    "name", ["everything", "nodes", "agents", "agents of a fabric", "namespaced", "namespaced and minimal"]
)


def rendered(values: Values, release: tuple[str, str]) -> list[Object]:
    name, namespace = release
    found = (text for path, text in texts(values, name, namespace).items() if not path.endswith(".txt"))
    return [one for text in found for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def keys(values: Values, release: tuple[str, str]) -> set[tuple[str, str, str]]:
    """Return kind, namespace and name of each object except namespaces, which releases may share."""
    objects = rendered(values, release)
    found = {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in objects}
    return {key for key in found if key[0] != "Namespace"}


@functools.cache
def keys_of(name: str, release: tuple[str, str]) -> set[tuple[str, str, str]]:
    """Return the keys of a value set; `home` in it stands for the release's namespace."""
    return keys(json.loads(json.dumps(EVERY_SET[name]).replace("home", release[1])), release)


@each_set
def test_two_releases_of_the_chart_share_no_object_name(name: str) -> None:
    found = {release: keys_of(name, release) for release in RELEASES}
    assert all(len(one) > 10 for one in found.values())
    assert not [found[one] & found[other] for one, other in combinations(RELEASES, 2) if found[one] & found[other]]


def test_same_named_releases_can_share_engine_and_agent_namespaces() -> None:
    """Except for namespaces, no two objects have the same name."""
    values = {**SETS["agents"], "agent": {"enabled": True, "pullSecrets": ["login"]}}
    one, other = (keys(values, ("pilotlight", namespace)) for namespace in ("team-a", "team-b"))
    assert not one & other


@each_set
@pytest.mark.parametrize("release", RELEASES)
def test_object_names_of_long_release_names_are_valid_in_kubernetes(release: tuple[str, str], name: str) -> None:
    for kind, _, made in keys_of(name, release):
        assert len(made) <= (63 if kind == "Service" else 253)
        assert made == made.strip("-")


def test_placeholder_pods_use_the_priority_class_of_their_release() -> None:
    (made,) = of_kind(SETS["nodes"], "PriorityClass")
    (settings,) = [one for one in of_kind(SETS["nodes"], "ConfigMap") if "settings.yaml" in one["data"]]
    (group,) = [
        one["clusterAutoscaler"] for one in yaml.safe_load(settings["data"]["settings.yaml"])["capacity"]
        if "clusterAutoscaler" in one
    ]  # fmt: skip
    assert group["priorityClass"] == made["metadata"]["name"]
