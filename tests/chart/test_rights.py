"""What the chart lets autoscalers do: exactly this list, so that a wider right is somebody's decision."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from autoscaler.drivers.kubernetes.rights import Scope, rights
from tests.kit.chart import SETS, Object, Values, objects, of_kind

READ = ("get", "list", "watch")
LEASE = "pl-pilotlight"


class Grant(NamedTuple):
    """One verb on one resource, in the whole cluster or one namespace; `name`: on that object only."""

    where: str
    group: str
    resource: str
    verb: str
    name: str = ""


def grants(where: str, group: str, resource: str, verbs: tuple[str, ...], name: str = "") -> set[Grant]:
    return {Grant(where, group, resource, verb, name) for verb in verbs}


def documents(where: str) -> set[Grant]:
    return {
        *grants(where, "pilotlight.dev", "models", READ),
        *grants(where, "pilotlight.dev", "models/status", ("get", "patch")),
        *grants(where, "", "events", ("create", "patch")),
    }


def adoption(where: str) -> set[Grant]:
    return {
        *grants(where, "apps", "deployments", READ),
        *grants(where, "apps", "statefulsets", READ),
        *grants(where, "apps", "deployments/scale", ("get", "patch")),
        *grants(where, "apps", "statefulsets/scale", ("get", "patch")),
        *grants(where, "autoscaling", "horizontalpodautoscalers", ("list", "watch")),
        *grants(where, "keda.sh", "scaledobjects", ("list", "watch")),
    }


def home(engines: str) -> set[Grant]:
    return {
        *grants(engines, "", "pods", (*READ, "create", "patch", "delete")),
        *grants("home", "coordination.k8s.io", "leases", ("create",)),
        *grants("home", "coordination.k8s.io", "leases", (*READ, "update"), LEASE),
        *grants("home", "", "pods", READ),
    }


CLUSTER = {
    *grants("*", "", "nodes", READ),
    *grants("*", "", "pods", READ),
    *grants("*", "authentication.k8s.io", "tokenreviews", ("create",)),
    *grants("*", "pilotlight.dev", "tenants", READ),
    *documents("*"),
    *home("pilotlight-engines"),
}
CORDON, DELETION_COST = grants("*", "", "nodes", ("patch",)), grants("*", "", "pods", ("patch",))
WANTED: dict[str, set[Grant]] = {
    "defaults": CLUSTER | CORDON | adoption("*") | DELETION_COST,
    "minimal": CLUSTER,
    "kubeai": CLUSTER | CORDON | adoption("*") | DELETION_COST | grants("*", "kubeai.org", "models", READ),
    "namespaced": documents("home") | adoption("home") | home("home"),
    "namespaced and minimal": documents("home") | home("home"),
}


def given(values: Values) -> Iterator[Grant]:
    """What the rendered roles say, where they are bound."""
    for role in of_kind(values, "ClusterRole", "Role"):
        where = role["metadata"].get("namespace", "*")
        for rule in role["rules"]:
            assert rule.keys() <= {"apiGroups", "resources", "verbs", "resourceNames"}
            names = rule.get("resourceNames", [""])
            for group, resource, verb, name in product(rule["apiGroups"], rule["resources"], rule["verbs"], names):
                yield Grant(where, group, resource, verb, name)


@pytest.mark.parametrize("name", WANTED)
def test_the_rights_are_these_and_no_more(name: str) -> None:
    found = list(given(SETS[name]))
    assert set(found) == WANTED[name]
    assert len(found) == len(set(found)), "said once"


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_every_role_is_bound_to_the_autoscalers(values: Values) -> None:
    def key(one: Object) -> tuple[str, str, str]:
        return one["kind"].removesuffix("Binding"), one["metadata"].get("namespace", ""), one["metadata"]["name"]

    bindings = of_kind(values, "RoleBinding", "ClusterRoleBinding")
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (key(binding)[0], key(binding)[2])
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "home")
        assert subject["name"].endswith("-autoscaler")
    assert {key(one) for one in of_kind(values, "Role", "ClusterRole")} == {key(one) for one in bindings}


@pytest.mark.parametrize(("name", "scope"), [("defaults", "cluster"), ("namespaced", "namespace")])
def test_the_doctor_asks_for_what_the_chart_gives(name: str, scope: Scope) -> None:
    place = {"cluster": "*", "home": "home", "engines": "pilotlight-engines" if scope == "cluster" else "home"}
    asked = {
        Grant(place[one.where], one.group, one.resource, verb, LEASE if one.named else "")
        for one in rights(scope)
        for verb in one.verbs
    }
    assert asked == WANTED[name]


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_nobody_may_do_everything_or_read_secrets(values: Values) -> None:
    for grant in given(values):
        assert "*" not in (grant.group, grant.resource, grant.verb)
        assert grant.resource not in {"secrets", "pods/exec", "serviceaccounts", "clusterroles", "roles"}


@pytest.mark.parametrize("name", ["namespaced", "namespaced and minimal"])
def test_with_scope_namespace_nothing_is_outside_of_it(name: str) -> None:
    for one in objects(SETS[name]):
        assert one["metadata"].get("namespace") == "home", one["kind"]
