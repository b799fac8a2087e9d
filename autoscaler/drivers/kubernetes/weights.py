"""A node's Copy in a pod: where the engine finds it, and how it gets there. Pure.

Owns the path in the container. Promises: a pod sees the files of its own weights and nothing else of the store, and
cannot write to them.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.drivers.kubernetes.api import Object
from autoscaler.model import Model
from autoscaler.nodewants import Laid
from autoscaler.podspec import OURS

STORE = "/var/lib/pilotlight/weights"
"""The agent's store on its node, and where a pod has the files of its Copy."""
VOLUME = "weights"


def located(model: Model, laid: Laid) -> Model:
    """The Model with its weights where a pod has them."""
    artifact = f"file://{STORE}/{laid.path}".removesuffix("/")
    return replace(model, spec=replace(model.spec, artifact=artifact))


def mounted(pod: Object, laid: Laid, store: str = STORE) -> Object:
    """The pod with the Copy in its engine, and the note that says which it uses."""
    metadata, spec = pod["metadata"], pod["spec"]
    source = {"name": VOLUME, "hostPath": {"path": f"{store}/{laid.folder}", "type": "Directory"}}
    mount = {"name": VOLUME, "mountPath": STORE, "readOnly": True}
    engine, *others = spec["containers"]
    return {
        **pod,
        "metadata": {**metadata, "annotations": {**metadata["annotations"], OURS + "weights": laid.folder}},
        "spec": {
            **spec, "volumes": [*spec.get("volumes", ()), source],
            "containers": [{**engine, "volumeMounts": [*engine.get("volumeMounts", ()), mount]}, *others],
        },
    }  # fmt: skip
