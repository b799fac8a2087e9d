"""Checks the ClusterPolicy of NVIDIA's GPU operator for MIG repartitioning. Pure.

Checks whether mig-manager is enabled, which ConfigMap it uses, and the strategy that exposes MIG slices. Source: the
operator's definition `clusterpolicies.nvidia.com`, v1, with its defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pilotlight.doctor.finding import Finding

POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
CHECK = "cutting"
NO_OPERATOR = Finding(
    CHECK, "warning", "there is no ClusterPolicy: the GPU operator with its mig-manager is not installed",
    "install the GPU operator, or remove `cut: true` from Settings `nodes`",
)  # fmt: skip
OWN = "default-mig-parted-config"
"""The operator's own ConfigMap, used if the ClusterPolicy names none; Pilotlight does not write to it."""
MIXED = "mixed"

Object = dict[str, Any]


def check_cluster_policies(policies: Sequence[Object], config_map: str) -> list[Finding]:
    """Return what keeps mig-manager from using our ConfigMap `config_map`, one finding each."""
    if not policies:
        return [NO_OPERATOR]
    wrong = [finding for policy in policies for finding in _wrong(policy, config_map)]
    return wrong or [Finding(CHECK, "ok", f"the ClusterPolicy uses ConfigMap {config_map} with strategy {MIXED}")]


def _wrong(policy: Object, config_map: str) -> Iterator[Finding]:
    name, spec = policy["metadata"]["name"], _part(policy, "spec")
    cutter = _part(spec, "migManager")
    if cutter.get("enabled") is False:
        says = f"ClusterPolicy {name} disables mig-manager, so nodes cannot be repartitioned"
        yield Finding(CHECK, "warning", says, _fix(name, '{"spec":{"migManager":{"enabled":true}}}'))
    named = _part(cutter, "config").get("name") or OWN
    if named != config_map:
        says = f"ClusterPolicy {name} uses ConfigMap {named} for MIG, and Pilotlight writes to {config_map}"
        change = f'{{"spec":{{"migManager":{{"config":{{"name":"{config_map}"}}}}}}}}'
        yield Finding(CHECK, "warning", says, _fix(name, change))
    strategy = _part(spec, "mig").get("strategy") or "single"
    if strategy != MIXED:
        says = f"ClusterPolicy {name} has MIG strategy {strategy}, which does not support partitions of different sizes"
        yield Finding(CHECK, "warning", says, _fix(name, '{"spec":{"mig":{"strategy":"mixed"}}}'))


def _part(of: Object, key: str) -> Object:
    found = of.get(key)
    return found if isinstance(found, dict) else {}


def _fix(name: str, change: str) -> str:
    return f"kubectl patch clusterpolicies.nvidia.com {name} --type merge -p '{change}'"
