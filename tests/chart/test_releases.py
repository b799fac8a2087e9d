"""Several releases of the chart in one cluster: no two of their objects have the same name."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import pytest
import yaml

from autoscaler.spec.installation_ownership import INSTALLATION, Ownership, installation_id
from autoscaler.spec.pod import MANAGED_BY, OURS
from tests.support.chart import AGENTS_OF_A_FABRIC, CHART, EVERY_SET, EVERYTHING, SETS, Object, Values, of_kind, texts

RELEASES = [
    ("a-pilotlight", "team"), ("pilotlight", "team-a"),  # the same name when joined by a hyphen
    ("blue", "n" * 63), ("green", "n" * 63),
    ("r" * 50 + "-x", "long"), ("r" * 50 + "-y", "long"), ("r" * 53, "n" * 63), ("r" * 52 + "s", "n" * 63),
]  # fmt: skip
"""Pairs of (name, namespace); 53 and 63 characters are the maximum."""
ALIASES = ("blue", "green")
each_set = pytest.mark.parametrize(
    "name", ["everything", "nodes", "agents", "agents of a fabric", "namespaced", "namespaced and minimal"]
)


@functools.cache
def umbrella() -> bytes:
    """The archive of a chart that has this one as a dependency once for each of ALIASES."""
    with tempfile.TemporaryDirectory() as folder:
        dependencies = [
            {"name": CHART.name, "version": "*", "alias": alias, "condition": f"{alias}.enabled"} for alias in ALIASES
        ]
        chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": dependencies}
        (Path(folder) / "Chart.yaml").write_text(yaml.safe_dump(chart))
        shutil.copytree(CHART, Path(folder) / "charts" / CHART.name)
        return Path(helm_python.Chart.load(folder).save(folder)).read_bytes()


def rendered(values: Values, release: tuple[str, str], alias: str = "") -> list[Object]:
    name, namespace = release
    if alias:
        chosen = {one: {"enabled": False} for one in ALIASES} | {alias: {**values, "enabled": True}}
        made = helm_python.Chart.load_archive(umbrella()).render(chosen, name=name, namespace=namespace)
    else:
        made = texts(values, name, namespace)
    found = (text for path, text in made.items() if not path.endswith(".txt"))
    return [one for text in found for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def keys(values: Values, release: tuple[str, str], alias: str = "") -> set[tuple[str, str, str]]:
    """Return kind, namespace and name of each object except namespaces, which releases may share."""
    objects = rendered(values, release, alias)
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
"""Values of two installations that share the namespaces of engines and agents."""


class Installed(NamedTuple):
    """One installation of the chart."""

    release: tuple[str, str]
    override: str = ""
    """Of its name."""
    alias: str = ""
    """In the umbrella chart."""

    def values(self, values: Values) -> Values:
        """Return the values with its name."""
        return {**values, "fullnameOverride": self.override}

    def rendered(self, values: Values) -> list[Object]:
        return rendered(self.values(values), self.release, self.alias)


PAIRS = {
    "one name": [Installed(("pilotlight", "team-a")), Installed(("pilotlight", "team-b"))],
    "one release": [Installed(("umbrella", "team-a"), alias, alias) for alias in ALIASES],
    "an override equal to a release": [Installed(("blue", "team-a")), Installed(("z", "team-a"), "blue")],
    "an override for the same default": [
        Installed(("blue-pilotlight", "team-a")), Installed(("blue", "team-a"), "other"),
    ],
}  # fmt: skip
"""Two installations that share the namespaces of engines and agents."""
each_shared = pytest.mark.parametrize("values", SHARED.values(), ids=SHARED)
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


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
    (name, namespace), override, _ = installed
    name = name if "pilotlight" in name else f"{name}-pilotlight"
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
def test_two_installations_with_similar_names_share_no_object_name(values: Values, pair: list[Installed]) -> None:
    """Except for namespaces, no two objects have the same name."""
    one, other = (keys(installed.values(values), installed.release, installed.alias) for installed in pair)
    assert len(one) > 10
    assert not one & other


@each_pair
@each_shared
def test_rendered_selectors_match_no_pod_of_another_installation(values: Values, pair: list[Installed]) -> None:
    made = {one: one.rendered(values) for one in pair}
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
def test_service_monitor_selector_matches_exactly_one_service(values: Values, pair: list[Installed]) -> None:
    made = [one for installed in pair for one in installed.rendered(values)]
    for monitor in (one for one in made if one["kind"] == "ServiceMonitor"):
        query = Selector("", monitor["metadata"]["namespace"], monitor["spec"]["selector"])
        services = [one["metadata"] for one in made if one["kind"] == "Service"]
        assert len([one for one in services if query.matches(one["namespace"], one["labels"])]) == 1


@each_set
def test_every_object_has_the_label_of_its_installation(name: str) -> None:
    release, namespace = "pl", "home"
    for one in rendered(EVERY_SET[name], (release, namespace)):
        assert one["metadata"]["labels"][INSTALLATION] == installation_id(namespace, f"{release}-pilotlight")


def test_agent_daemon_set_name_differs_from_that_with_the_old_selector() -> None:
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


def test_fullname_override_does_not_change_deployment_selectors() -> None:
    """They are immutable, so a change would make an upgrade fail."""
    for name, release in (("", "pl"), ("other", "pl")):
        selectors_ = [one["spec"]["selector"] for one in of_kind({"fullnameOverride": name}, "Deployment")]
        assert {one["matchLabels"]["app.kubernetes.io/instance"] for one in selectors_} == {release}


@pytest.mark.parametrize("release", [("123", "456"), ("1e3", "0123"), ("true", "null")])
def test_names_such_as_true_or_0123_are_rendered_as_yaml_strings(release: tuple[str, str]) -> None:
    values: Values = {**EVERYTHING, "engines": {"namespace": "789"}}
    for one in rendered(values, release):
        metadata = one["metadata"]
        assert all(isinstance(text, str) for text in metadata["labels"].values())
        assert isinstance(metadata.get("namespace", ""), str)
        assert isinstance(metadata["name"], str)


def test_roles_of_agents_in_one_namespace_have_different_names() -> None:
    agent = {**AGENTS_OF_A_FABRIC["agent"], "pullSecrets": ["login"], "namespace": "agents"}
    agent["fabric"] = {"enabled": True, "restart": [{"namespace": "engines", "labels": "app=plugin"}]}
    values: Values = {**AGENTS_OF_A_FABRIC, "agent": agent, "engines": {"namespace": "engines"}}
    roles = [(one["metadata"]["namespace"], one["metadata"]["name"]) for one in of_kind(values, "Role")]
    assert len(roles) == len(set(roles))
    assert len([1 for namespace, _ in roles if namespace == "engines"]) >= 2
