"""`make test` has a process or cluster test of each fault case, driver, provider, command, adoption and slicing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import click
import pytest

from autoscaler.spec.capacity import KINDS
from autoscaler.spec.model import Adopted
from autoscaler.spec.settings import NodeSlicing
from pilotlight.cli.main import cli
from scripts.gates import ROOT

INTEGRATION = ROOT / "tests" / "integration"
REAL = sorted(INTEGRATION.rglob("test_*.py"))
SUBJECTS = {
    "driver local": "process/local_driver/test_engine_processes.py",
    "driver kubernetes": "cluster/driver/test_contract.py",
    "adoption Deployment": "cluster/adoption/test_workloads.py",
    "adoption StatefulSet": "cluster/adoption/test_workloads.py",
    "adoption of a KubeAI model": "cluster/kubernetes/resources/test_kubeai_watcher.py",
    "slicing whole": "cluster/placement/test_schedulability.py",
    "slicing timeslice": "cluster/slicing/test_time_slicing.py",
    "slicing mps": "cluster/slicing/test_device_allocation.py",
    "slicing mig": "cluster/slicing/test_device_allocation.py",
    "slicing hami": "cluster/slicing/test_device_allocation.py",
    "slicing dra": "cluster/slicing/test_device_allocation.py",
    "slicing volcano": "cluster/slicing/test_device_allocation.py",
    "slicing kai": "cluster/slicing/test_device_allocation.py",
    "provider cro": "cluster/fabric/test_cro.py",
    "provider redfish": "cluster/fabric/test_redfish_dra_publisher.py",
    "provider karpenter": "cluster/capacity/test_karpenter.py",
    "provider clusterAutoscaler": "cluster/capacity/test_cluster_autoscaler.py",
    "provider provisioningRequest": "cluster/capacity/test_provisioning_request.py",
    "provider kueue": "cluster/capacity/test_kueue.py",
    "command agent": "process/commands/test_operator.py",
    "command autoscaler": "process/security/test_tls.py",
    "command cordon": "process/commands/test_operator.py",
    "command doctor": "cluster/install/test_doctor.py",
    "command drain": "process/commands/test_operator.py",
    "command explain": "process/commands/test_read_only_commands.py",
    "command gateway": "process/security/test_tls.py",
    "command import": "process/commands/test_read_only_commands.py",
    "command key": "process/serve/test_metrics_and_reload.py",
    "command load": "process/commands/test_read_only_commands.py",
    "command plan": "process/commands/test_operator.py",
    "command service": "process/packaging/test_wheel.py",
    "command serve": "process/serve/test_metrics_and_reload.py",
    "command status": "process/commands/test_read_only_commands.py",
    "command stop": "process/commands/test_operator.py",
    "command uncordon": "process/commands/test_operator.py",
    "command wake": "process/commands/test_operator.py",
    "command weights": "process/artifacts/test_peers.py",
}
"""Subject -> a file of process or cluster tests with at least one standard test of it."""


class Function(NamedTuple):
    """A test function of a file."""

    path: Path
    name: str
    is_standard: bool
    cases: tuple[str, ...] = ()
    """Its markers `case` and `point`."""


def functions_of(path: Path) -> Iterator[Function]:
    """The tests of a file, with whether the marker `standard` is on them, on their class or on the module."""
    tree = ast.parse(path.read_text())
    assigned = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    module = any(text.startswith("pytestmark = ") and "pytest.mark.standard" in text for text in assigned)

    def walk(body: list[ast.stmt], *, marked: bool) -> Iterator[Function]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            marks = {ast.unparse(one) for one in node.decorator_list}
            own = (marked or "pytest.mark.standard" in marks) and "pytest.mark.deep" not in marks
            if isinstance(node, ast.ClassDef):
                if own:  # its tests may all be inherited from a contract
                    yield Function(path, node.name, is_standard=True)
                yield from walk(node.body, marked=own)
            elif node.name.startswith("test_"):
                cases = (one for one in marks if one.startswith(("pytest.mark.case", "pytest.mark.point")))
                yield Function(path, node.name, own, tuple(cases))

    yield from walk(tree.body, marked=module)


def test_each_fault_case_has_a_standard_tier_test() -> None:
    cases: dict[str, bool] = {}
    for test in (test for path in REAL for test in functions_of(path)):
        for case in test.cases:
            cases[case] = cases.get(case, False) or test.is_standard
    assert len(cases) > 35
    assert [case for case, covered in sorted(cases.items()) if not covered] == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_listed_product_feature_has_a_standard_tier_test(subject: str) -> None:
    assert any(test.is_standard for test in functions_of(INTEGRATION / SUBJECTS[subject]))


def test_each_provider_slicing_adoption_and_command_is_a_test_subject() -> None:
    slicing, adopted = (get_args(get_type_hints(one)["kind"]) for one in (NodeSlicing, Adopted))
    expected = {f"provider {kind}" for kind in KINDS} | {f"slicing {kind}" for kind in slicing}
    expected |= {f"adoption {kind}" for kind in adopted} | {
        f"command {name}" for name in cli.list_commands(click.Context(cli))
    }
    assert expected <= SUBJECTS.keys()
    assert [one for one in SUBJECTS if one.startswith("command ") and one not in expected] == []
