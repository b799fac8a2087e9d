"""Merges user settings into our pods, and adds affinity between the pods of a model. Pure.

Overrides are applied in order: `pod` of the Settings, then `resources` and `pod` of the model. The merge is strategic:
maps are merged and the later value wins; lists are merged by the key of their items (`name`, for mounts `mountPath`),
and items without one are appended. A document cannot contain fields that the plan owns (`autoscaler.spec.pod`), so no
override can remove them.

`spread` and `near` become preferred pod affinity where the scheduler chooses the node, so a pod never waits for them.
For a replica on devices the planner chooses the node and applies both (`autoscaler.placement.model.topology`). Affinity
set by users is kept.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from autoscaler.kubernetes.api import Object
from autoscaler.slicing.slicer_protocol import PodFields
from autoscaler.spec.model import ModelSpec
from autoscaler.spec.pod import Pod, Resources

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
NEAR, APART = 100, 10
"""Weights of the two affinities; each counts once per matching other pod. `near` has the higher weight, so with both,
pods are placed on different hosts of one rack."""


def add_pod_affinity(spec: Object, of: ModelSpec, labels: Mapping[str, str]) -> None:
    """Add the affinity to a pod's spec. `labels`: those that select its model's pods."""
    for kind, topology, weight in (("podAffinity", of.near, NEAR), ("podAntiAffinity", of.spread, APART)):
        if topology:
            term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": topology}
            affinity = spec.get("affinity", {})
            said = affinity.get(kind, {})
            terms = [*said.get(PREFERRED, []), {"weight": weight, "podAffinityTerm": term}]
            spec["affinity"] = {**affinity, kind: {**said, PREFERRED: terms}}


def apply_overrides(pod: Object, over: Pod) -> Object:
    """Return a new pod: `pod` with `over` applied. Its first container is the engine's."""
    new = copy.deepcopy(pod)
    metadata, spec = new["metadata"], new["spec"]
    engine = spec["containers"][0]
    _merge(metadata, "labels", over.labels)
    _merge(metadata, "annotations", over.annotations)
    _merge(spec, "nodeSelector", over.node_selector)
    _merge(spec, "affinity", over.affinity)
    if over.security_context:
        # Replaced, not merged: a mixture of both could have an effect that neither has.
        spec["securityContext"] = dict(over.security_context)
    _extend(spec, "tolerations", (_plain(one) for one in over.tolerations))
    _extend(spec, "imagePullSecrets", (_plain(one) for one in over.image_pull_secrets), by="name")
    _extend(spec, "volumes", over.volumes, by="name")
    _extend(engine, "volumeMounts", over.volume_mounts, by="mountPath")
    names = {
        "serviceAccountName": over.service_account_name, "runtimeClassName": over.runtime_class_name,
        "schedulerName": over.scheduler_name, "priorityClassName": over.priority_class_name,
    }  # fmt: skip
    spec |= {key: name for key, name in names.items() if name is not None}
    has: Object = engine.get("resources", {})
    engine["resources"] = merge_resources(has, over.resources) | {
        kind: has[kind] for kind in ("claims",) if kind in has
    }
    return new


class CollisionError(Exception):
    """A document uses a name that Pilotlight uses in this pod. `str()` is the name and the fix."""


def refuse_collisions(over: Pod, env: Iterable[str], asks: PodFields, weights: Pod) -> None:
    """Raise `CollisionError` if `over` or a variable of `env` would replace device requests, the scheduler of the
    devices, or weights' mounts.
    """
    amounts = {**over.resources.requests, **over.resources.limits}
    pairs = (
        ("label", over.labels, asks.labels), ("annotation", over.annotations, asks.annotations),
        ("resource", amounts, asks.limits), ("environment variable", env, asks.env),
        ("volume", _words(over.volumes, "name"), _words(weights.volumes, "name")),
        ("mount path", _words(over.volume_mounts, "mountPath"), _words(weights.volume_mounts, "mountPath")),
    )  # fmt: skip
    for what, theirs, ours in pairs:
        if same := sorted(set(theirs) & set(ours)):
            raise CollisionError(
                f"Pilotlight uses {what} {same[0]} in this pod: remove it from the Model or the Settings"
            )
    if asks.scheduler and over.scheduler_name not in {None, asks.scheduler}:
        raise CollisionError(
            f"the devices of this pod require schedulerName {asks.scheduler}: remove schedulerName "
            f"{over.scheduler_name} from the Model or the Settings"
        )


def _words(items: Iterable[Mapping[str, object]], key: str) -> set[str]:
    """Return the values of a key, as normalized paths."""
    return {posixpath.normpath(str(item[key])) for item in items if key in item}


def merge_resources(before: Mapping[str, Mapping[str, object]], over: Resources) -> Object:
    """Merge requests and limits.
    A limit without a request implies an equal request, as in Kubernetes. So it replaces a default request.
    """
    requests = {n: amount for n, amount in before.get("requests", {}).items() if n not in over.limits}
    both = {
        "requests": {**requests, **over.requests}, "limits": {**before.get("limits", {}), **over.limits}
    }  # fmt: skip
    return {kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in both.items() if amounts}


def _merge(of: Object, key: str, over: Mapping[str, object]) -> None:
    if over:
        of[key] = {**of.get(key, {}), **over}


def _extend(of: Object, key: str, over: Iterable[Mapping[str, object]], by: str | None = None) -> None:
    """Extend a list; an item of the same name is replaced in place."""
    items: list[Mapping[str, object]] = list(of.get(key, []))
    for item in over:
        place = _place(items, item, by)
        if place is None:
            items.append(item)
        else:
            items[place] = item
    if items:
        of[key] = items


def _place(items: Sequence[Mapping[str, object]], item: Mapping[str, object], by: str | None) -> int | None:
    same = (n for n, one in enumerate(items) if (one == item if by is None else one.get(by) == item.get(by)))
    return next(same, None)


def _plain(part: msgspec.Struct) -> dict[str, object]:
    """Return the API form: unset fields are left out."""
    fields: dict[str, object] = msgspec.to_builtins(part)
    return {key: value for key, value in fields.items() if value is not None}
