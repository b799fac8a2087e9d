"""Golden files of the objects that we emit, `tests/golden/NAME.yaml`, and validation with the schemas of Kubernetes.

GOLDEN=write in the environment regenerates the files; review the difference afterwards.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from autoscaler.slicing.slicer_protocol import PodFields

validate = importlib.import_module("kubernetes_validate").validate  # the package has no types
ROOT = Path(__file__).parent.parent / "golden"
VERSIONS = ("1.34", "1.36")
"""The first version with resource.k8s.io/v1, and that of the test cluster."""


def agrees(name: str, objects: Sequence[Any]) -> None:
    """Checks that the objects are valid and equal the file."""
    for one in objects:
        if "apiVersion" in one and one["apiVersion"] in {"v1", "resource.k8s.io/v1"}:
            for version in VERSIONS:
                validate(one, version, strict=True)
    path = ROOT / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=120))
    assert list(yaml.safe_load_all(path.read_text())) == list(objects), path.name


def pod(name: str, fields: PodFields, *, node: str = "", image: str = "engine") -> dict[str, Any]:
    """A minimal pod with these fields, on that node."""
    claims = [one["metadata"]["name"] for one in fields.claims]
    resources: dict[str, Any] = {"limits": dict(fields.limits)}
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if claims:
        resources["claims"] = [{"name": f"claim-{at}"} for at in range(len(claims))]
        spec["resourceClaims"] = [
            {"name": f"claim-{at}", "resourceClaimName": claim} for at, claim in enumerate(claims)
        ]
    if fields.scheduler:
        spec["schedulerName"] = fields.scheduler
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    env = [{"name": name, "value": value} for name, value in fields.env.items()]
    spec["containers"] = [{"name": "engine", "image": image, "env": env, "resources": resources}]
    metadata = {"name": name, "labels": dict(fields.labels), "annotations": dict(fields.annotations)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
