"""What a Model's pods may take of the namespace that they are made in, where the Model is of another one. Pure.

Owns that rule: pods of all Models are made in one namespace, so a name of a Secret, ConfigMap, claim or service account
means the one there. Whoever may write Models in another namespace has no right to those, so such keys are refused by
path, with what to do. Of volumes only those are let through that take nothing of a namespace.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoscaler.spec.decode import Path, WrongKeyError
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.pod import EnvSource

OF_NO_NAMESPACE = frozenset({"emptyDir", "downwardAPI", "image"})
"""Kinds of volumes that nobody else's are. A claim from a template is not among them: it may be another one's copy."""


def check(model: Model, namespace: str) -> None:
    """`namespace` is the pods'. Raises WrongKeyError at the first key by which the Model reaches into it."""
    if model.namespace == namespace:
        return
    for path in _reaching(model.spec):
        fix = f"put the Model into namespace {namespace}, or leave this out"
        raise WrongKeyError(("spec", *path), f"is of the pods' namespace, which is not this Model's: {fix}")


def _reaching(spec: ModelSpec) -> Iterator[Path]:
    """Paths below spec."""
    for name, source in spec.env.items():
        if isinstance(source, EnvSource):
            of = source.value_from
            if of.secret_key_ref is not None:
                yield "env", name, "valueFrom", "secretKeyRef"
            if of.config_map_key_ref is not None:
                yield "env", name, "valueFrom", "configMapKeyRef"
    if spec.pull_secret is not None:
        yield ("pullSecret",)
    if (spec.artifact or "").startswith("pvc://"):
        yield ("artifact",)
    for position, volume in enumerate(spec.pod.volumes):
        for kind in sorted(volume.keys() - {"name"} - OF_NO_NAMESPACE):
            yield "pod", "volumes", position, kind
    if spec.pod.image_pull_secrets:
        yield "pod", "imagePullSecrets"
    if spec.pod.service_account_name is not None:
        yield "pod", "serviceAccountName"
