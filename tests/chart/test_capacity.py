"""Capacity entries in the chart's values: the chart rejects exactly what the autoscaler would reject."""

from __future__ import annotations

from typing import Any

import click
import msgspec
import pytest
from helm_python import HelmError

from autoscaler.spec.capacity import KINDS, QUEUES, ProviderSettings, check_providers
from autoscaler.spec.decode import WrongKeyError
from pilotlight.cli.main import cli
from tests.support.chart import pod_specs, texts
from tests.unit.autoscaler.spec.test_capacity import NO_URLS, URLS

FIELDS: dict[str, Any] = {
    "cro": {"model": "A100"},
    "redfish": {"url": "https://fabric.example", "systems": {"w1": "/redfish/v1/Systems/1"}},
    "karpenter": {"nodePool": "g4"},
    "clusterAutoscaler": {"nodeLabels": {"pool": "g4"}},
    "provisioningRequest": {"class": "check-capacity.autoscaling.x-k8s.io"},
    "kueue": {"localQueue": "serving"},
}
CRO = {"name": "a", "cro": FIELDS["cro"]}
FABRIC = {"name": "f", "redfish": FIELDS["redfish"]}


def read(*entries: dict[str, Any]) -> None:
    """Read the entries as the autoscaler does."""
    check_providers(msgspec.convert(entries, tuple[ProviderSettings, ...]))


@pytest.mark.parametrize("kind", KINDS)
def test_doctor_command_names_only_the_provider_kind_of_a_capacity_entry(kind: str) -> None:
    entry = {"name": "a", kind: FIELDS[kind], "expectedSeconds": 60, "hedge": True, "keepSeconds": 10, "closing": True}
    entry |= {} if kind in QUEUES else {"headroom": 1}
    content = {one.encode_name for one in msgspec.structs.fields(ProviderSettings)} - {*KINDS}
    assert content - entry.keys() <= {"headroom"}, "a key that is not tried here"
    read(entry)
    (spec,) = (spec for part, spec in pod_specs({"settings": {"capacity": [entry]}}) if part == "doctor")
    name, *words = spec["containers"][0]["args"]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    words = [word for word in words if not word.startswith("--settings=")]  # a file of the pod
    assert command.make_context(name, words).params["capacity"] == (kind,)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "a"}], "a: expected exactly one of cro, redfish, karpenter, .*; found none"),
        ([{**CRO, "kueue": FIELDS["kueue"]}], "a: expected exactly one of .*; found cro and kueue"),
        ([{**CRO, "name": ""}], '"": each entry needs a unique name'),
        ([CRO, {**CRO, "cro": {"model": "B"}}], '"a": each entry needs a unique name'),
        ([{"name": "q", "kueue": FIELDS["kueue"], "headroom": 2}], "q: headroom: queues do not support it"),
        ([{**FABRIC, "name": "rack/a"}], "rack/a: name: expected only letters, digits, "),
        *(
            ([{**FABRIC, "redfish": {**FIELDS["redfish"], "url": url}}], "f: redfish.url: expected https://HOST ")
            for url in NO_URLS
        ),
    ],
)
def test_chart_rejects_capacity_entries_that_the_autoscaler_rejects(
    entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(WrongKeyError):
        read(*entries)
    with pytest.raises(HelmError, match=rf"settings\.capacity: {message}"):
        texts({"settings": {"capacity": entries}})


@pytest.mark.parametrize("url", URLS)
def test_chart_accepts_fabric_urls_that_the_autoscaler_accepts(url: str) -> None:
    entry = {**FABRIC, "redfish": {**FIELDS["redfish"], "url": url}}
    read(entry)
    assert texts({"settings": {"capacity": [entry]}})


def test_capacity_providers_are_rejected_with_namespace_scope() -> None:
    with pytest.raises(HelmError, match=r"scope namespace: settings\.capacity: remove it"):
        texts({"scope": "namespace", "settings": {"capacity": [CRO]}})
