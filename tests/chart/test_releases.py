"""Several releases of the chart in one cluster: no two of their objects have the same name."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations
from typing import Any, NamedTuple

import pytest
import yaml

from autoscaler.spec.installation_ownership import INSTALLATION, Ownership, installation_id
from autoscaler.spec.pod import MANAGED_BY, OURS
from tests.support.chart import AGENTS_OF_A_FABRIC, EVERY_SET, EVERYTHING, SETS, Object, Values, of_kind, texts

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


MONITORED: Values = {"metrics": EVERYTHING["metrics"], "engines": {"namespace": "engines"}}
SHARED: dict[str, Values] = {
    "agents": {**MONITORED, "agent": {"enabled": True, "namespace": "agents", "pullSecrets": ["login"]}},
    "agents in the namespace of a release": {**MONITORED, "agent": {"enabled": True, "namespace": "team-b"}},
    "agents of a fabric": {
        **MONITORED, **AGENTS_OF_A_FABRIC, "agent": {**AGENTS_OF_A_FABRIC["agent"], "namespace": "agents"},
    },
    "agents with engines": {
        **MONITORED, "agent": {"enabled": True, "namespace": "engines", "createNamespace": False},
        "engines": {"namespace": "engines", "createNamespace": False},
    },
    "everything": {**EVERYTHING, "engines": {"namespace": "engines"}},
    "namespaced": {**SETS["namespaced and minimal"], "networkPolicy": {}, "metrics": EVERYTHING["metrics"]},
}  # fmt: skip
"""Values of two releases with the same name, which share the namespaces of engines and agents."""
Installed = tuple[str, tuple[str, str]]
"""The override of the name, and the release."""
TWINS: list[Installed] = [("", ("pilotlight", "team-a")), ("", ("pilotlight", "team-b"))]
UMBRELLA: list[Installed] = [("blue", ("umbrella", "team-a")), ("green", ("umbrella", "team-a"))]
"""A release of a chart that has this one twice as a dependency."""
each_shared = pytest.mark.parametrize("values", SHARED.values(), ids=SHARED)
each_pair = pytest.mark.parametrize("pair", [TWINS, UMBRELLA], ids=["two releases", "one release"])


class Selector(NamedTuple):
    """A selector in a rendered object."""

    where: str
    """The object and the path to the selector."""
    namespace: str
    """The namespace of the pods that it can match."""
    query: Object

    def matches(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether it selects a pod."""
        if namespace != self.namespace or not self.query.get("matchLabels", {}).items() <= labels.items():
            return False
        for one in self.query.get("matchExpressions", ()):
            assert one["operator"] == "DoesNotExist", "the only one that the chart uses"
            if one["key"] in labels:
                return False
        return True


def selectors(one: Object) -> Iterator[Selector]:
    """Yield every selector of pods in an object."""
    where, namespace = f"{one['kind']} {one['metadata']['name']}", one["metadata"].get("namespace", "")
    spec = one.get("spec") or {}
    if one["kind"] in {"Service", "Deployment", "DaemonSet", "PodDisruptionBudget", "PodMonitor"}:
        query = spec["selector"] if one["kind"] != "Service" else {"matchLabels": spec["selector"]}
        assert "namespaceSelector" not in spec
        yield Selector(where, namespace, query)
    for path, part in parts(spec, "spec"):
        if "podSelector" in part:
            place = part.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": namespace}})
            assert place.keys() == {"matchLabels"}, "a selector of pods in all namespaces"
            (there,) = place["matchLabels"].values()
            yield Selector(f"{where} {path}", there, part["podSelector"])
        if "labelSelector" in part:
            yield Selector(f"{where} {path}", namespace, part["labelSelector"])
        for word in part.get("args", ()):
            if word.startswith("--gateway-pods="):
                terms = dict(term.split("=") for term in word.partition("=")[2].split(","))
                yield Selector(f"{where} {path} {word}", namespace, {"matchLabels": terms})


def parts(found: Any, path: str) -> Iterator[tuple[str, Object]]:
    """Yield every mapping in a value, with its path."""
    if isinstance(found, dict):
        yield path, found
        for key, one in found.items():
            yield from parts(one, f"{path}.{key}")
    elif isinstance(found, list):
        for number, one in enumerate(found):
            yield from parts(one, f"{path}[{number}]")


def pods(made: list[Object], values: Values, installed: Installed) -> list[tuple[str, Mapping[str, str]]]:
    """Return namespace and labels of each pod of a release: those of the chart, and an engine."""
    override, (name, namespace) = installed
    found = list[tuple[str, Mapping[str, str]]]()
    for one in made:
        if one["kind"] == "Pod":
            found.append((one["metadata"]["namespace"], one["metadata"]["labels"]))
        elif "template" in (one.get("spec") or {}):
            found.append((one["metadata"]["namespace"], one["spec"]["template"]["metadata"]["labels"]))
    owner = Ownership(installation_id(namespace, override or name))
    engines = namespace if values.get("scope") == "namespace" else values["engines"]["namespace"]
    return [*found, (engines, {MANAGED_BY: "pilotlight", OURS + "intent": "i", **owner.labels})]


@each_pair
@each_shared
def test_installations_of_a_pair_share_no_object_name(values: Values, pair: list[Installed]) -> None:
    """Except for namespaces, no two objects have the same name."""
    one, other = (keys({**values, "fullnameOverride": override}, release) for override, release in pair)
    assert len(one) > 10
    assert not one & other


@each_pair
@each_shared
def test_selectors_match_no_pod_of_the_other_installation(values: Values, pair: list[Installed]) -> None:
    made = {one: rendered({**values, "fullnameOverride": one[0]}, one[1]) for one in pair}
    there = {one: pods(made[one], values, one) for one in pair}
    for mine, theirs in permutations(pair):
        found = [selector for one in made[mine] for selector in selectors(one)]
        assert len(found) >= 15
        for selector in found:
            assert not [pod for pod in there[theirs] if selector.matches(*pod)], selector.where
            if "matchExpressions" not in selector.query:  # pods of an earlier version
                assert [pod for pod in there[mine] if selector.matches(*pod)], f"{selector.where} matches no pod"


@each_pair
@each_shared
def test_selector_of_a_service_monitor_matches_one_service(values: Values, pair: list[Installed]) -> None:
    made = [one for override, release in pair for one in rendered({**values, "fullnameOverride": override}, release)]
    for monitor in (one for one in made if one["kind"] == "ServiceMonitor"):
        query = Selector("", monitor["metadata"]["namespace"], monitor["spec"]["selector"])
        services = [one["metadata"] for one in made if one["kind"] == "Service"]
        assert len([one for one in services if query.matches(one["namespace"], one["labels"])]) == 1


@each_set
def test_every_object_has_the_label_of_its_installation(name: str) -> None:
    release, namespace = "pl", "home"
    for one in rendered(EVERY_SET[name], (release, namespace)):
        assert one["metadata"]["labels"][INSTALLATION] == installation_id(namespace, f"{release}-pilotlight")


def test_daemon_set_has_another_name_than_one_whose_selector_lacked_the_installation() -> None:
    """A selector is immutable, so an upgrade must create another DaemonSet; Helm deletes the previous one."""
    for values, before in (
        (SETS["agents"], "home-pl-pilotlight-be36f1d0-agent"),
        (SETS["agents in the release's namespace"], "pl-pilotlight-agent"),
    ):
        (made,) = of_kind(values, "DaemonSet")
        assert made["metadata"]["name"] == before.removesuffix("agent") + "node-agent"
        assert INSTALLATION in made["spec"]["selector"]["matchLabels"]
    for one in of_kind(SETS["everything"], "Deployment"):
        assert INSTALLATION not in one["spec"]["selector"]["matchLabels"], "it could not be upgraded"


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
