"""Agents that attach and detach GPUs of a fabric: their permissions exist only if the values enable them."""

from __future__ import annotations

import click
import pytest
from helm_python import HelmError

from autoscaler.spec.installation_ownership import installation_id
from pilotlight.cli.main import cli
from tests.support.chart import AGENTS_NAME, AGENTS_OF_A_FABRIC, SETS, Object, Values, of_kind, pod_specs, texts


def agent(values: Values) -> Object:
    """Return the pod of the agent."""
    ((_, spec),) = [one for one in pod_specs(values) if one[0] == "agent"]
    return spec


def test_fabric_agents_are_privileged_with_minimal_host_access() -> None:
    spec = agent(AGENTS_OF_A_FABRIC)
    assert spec["hostPID"] is True
    assert not {"hostNetwork", "hostIPC", "initContainers"} & spec.keys()
    assert spec["automountServiceAccountToken"] is True
    (container,) = spec["containers"]
    assert container["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    hosts = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    assert hosts == {
        "store": "/var/lib/pilotlight", "dev": "/dev", "pod-resources": "/var/lib/kubelet/pod-resources",
    }  # fmt: skip
    assert {"name": "dev", "mountPath": "/dev"} in container["volumeMounts"]


def test_fabric_agent_command_lists_the_pods_to_restart() -> None:
    name, *words = agent(AGENTS_OF_A_FABRIC)["containers"][0]["args"]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    context = command.make_context(name, [word.replace("$(POD_IP)", "127.0.0.1") for word in words])
    assert context.params["fabric"] is True
    assert context.params["installation"] == installation_id("home", "pl-pilotlight")
    assert context.params["restart"] == (
        "gpu-operator/app=nvidia-device-plugin-daemonset", "gpu-operator/app=nvidia-dcgm",
        "nvidia/nvidia.com/component=dra,tier=node",
    )  # fmt: skip


def test_fabric_agents_may_delete_configured_pods_and_taint_devices() -> None:
    roles = [one for one in of_kind(AGENTS_OF_A_FABRIC, "Role") if one["metadata"]["name"].endswith("-restart")]
    assert {one["metadata"]["namespace"]: one["rules"] for one in roles} == {
        namespace: [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]}]
        for namespace in ("gpu-operator", "nvidia")
    }
    (role,) = [one for one in of_kind(AGENTS_OF_A_FABRIC, "ClusterRole") if one["metadata"]["name"].endswith("-agent")]
    assert role["rules"] == [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list"]},
        {
            "apiGroups": ["resource.k8s.io"], "resources": ["devicetaintrules"],
            "verbs": ["get", "list", "create", "delete"],
        },
    ]  # fmt: skip
    bound = [
        one for one in of_kind(AGENTS_OF_A_FABRIC, "RoleBinding", "ClusterRoleBinding")
        if one["roleRef"]["name"].endswith(("-agent", "-agent-restart"))
    ]  # fmt: skip
    assert len(bound) == 3
    assert {(each["name"], each["namespace"]) for one in bound for each in one["subjects"]} == {
        (f"{AGENTS_NAME}-agent", "pilotlight-agents")
    }


@pytest.mark.parametrize("name", [name for name in SETS if "agents" in name or name == "everything"])
def test_agents_without_fabric_option_have_no_fabric_privileges(name: str) -> None:
    spec = agent(SETS[name])
    assert not spec.keys() & {"hostPID"}
    assert "privileged" not in spec["containers"][0]["securityContext"]
    assert "dev" not in {one["name"] for one in spec["volumes"]}
    assert "--fabric" not in spec["containers"][0]["args"]
    assert not [one for one in of_kind(SETS[name], "ClusterRole") if one["metadata"]["name"].endswith("-agent")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"scope": "namespace", "agent": {"fabric": {"enabled": True}}},
            "scope namespace: agent.fabric.enabled is not possible",
        ),
        ({"agent": {"fabric": {"enabled": True}}}, "agent.fabric.enabled: requires agent.enabled: true"),
        (
            {"settings": AGENTS_OF_A_FABRIC["settings"], "agent": {"enabled": True}},
            "settings.capacity: pod2: redfish.agents requires agent.fabric.enabled",
        ),
        ({"settings": AGENTS_OF_A_FABRIC["settings"]}, "redfish.agents requires agent.fabric.enabled"),
        (
            {"agent": {"fabric": {"restart": [{"namespace": "a", "labels": "b"}]}}},
            "at '/agent/fabric/restart/0/labels'",
        ),
    ],
)
def test_invalid_fabric_values_are_rejected_with_a_message(values: Values, message: str) -> None:
    with pytest.raises(HelmError) as refused:
        texts(values)
    assert message in str(refused.value)
