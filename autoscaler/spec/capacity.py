"""Providers of capacity as the Settings name them (`capacity:`), and what must hold of each beyond its types.

Owns these types and rules. Who carries them out is `autoscaler.providers`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, field

from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.model import Auto, Seconds
from autoscaler.spec.names import check_name
from autoscaler.spec.pod import check_label_value, check_labels, check_object_name

Text = Annotated[str, Meta(min_length=1, max_length=253)]
KINDS = ("cro", "redfish", "karpenter", "clusterAutoscaler", "provisioningRequest", "kueue")
QUEUES = ("provisioningRequest", "kueue")
"""Of those, where what is asked for is a Model's pod."""
PUBLISH = "publish"
"""Beside those, where rights are told: one of `redfish` says that key."""
PROVIDERS_MAX = 64
_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
ORIGIN = rf"https://([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:{_PORT})?/?"
"""A service's `url`; the chart has the same."""
NOTES_KEY = "[A-Za-z0-9._-]+"
"""What a key of a ConfigMap may be; so, too."""


class Cro(Part, frozen=True):
    """A fabric behind the composable resource operator. `model`: its name for the Devices, which it asks for."""

    model: Text


class Redfish(Part, frozen=True):
    """A fabric that is composed by Redfish. `systems`: by the name of a node the path of its system there."""

    url: Text
    systems: dict[str, str]
    secret_ref: Text | None = None
    """User and password, in a Secret; in it, too, a private authority (`ca.crt`)."""
    ca_file: str | None = None
    agents: bool = False
    """Agents of the nodes have what was attached seen there, and let go of it before it is detached."""
    publish: bool = False
    """Claims of anybody may be given what it could attach: that is published as ResourceSlices."""

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """By node the service, and the system's path there: the same text for the same, however it is written."""
        service = self.url.rstrip("/").lower()
        return {node: (service, path.rstrip("/")) for node, path in self.systems.items()}


class Karpenter(Part, frozen=True):
    """Nodes that Karpenter adds."""

    node_pool: Text


class ClusterAutoscaler(Part, frozen=True):
    """Nodes of one group that are added for pods that are Pending."""

    node_labels: dict[str, str]
    """Of the group's nodes, by which pods choose it; it must say them itself, to grow from zero."""
    nodes_max: Annotated[int, Meta(ge=1, le=1000)] = 8
    """At once, for us."""
    priority_class: Text = "pilotlight-placeholder"
    """Of the pods that wait for a node: lower than that of engines."""
    image: Text = "registry.k8s.io/pause:3.10"


class Provisioning(Part, frozen=True):
    """Nodes that a ProvisioningRequest asks for."""

    class_name: Text = field(name="class")
    max_run_seconds: Seconds | None = None
    selector: dict[str, str] = {}
    """Labels of its nodes; those of Settings `nodes` that agree with them are what it may bring."""


class Kueue(Part, frozen=True):
    """Nodes that a queue of Kueue admits to."""

    local_queue: Text


class ProviderSettings(Part, frozen=True):
    """One way to more capacity: what it is called in reasons and metrics, and exactly one of its kinds."""

    name: str
    expected_seconds: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    """From an order until it can be used, while nothing is learnt."""
    hedge: bool = False
    """It may be started beside another, where neither is sure to come in time: the later one is taken back."""
    keep_seconds: Seconds | Auto = "auto"
    """How long what stands idle is kept; `auto`: as long as that is worth more than it costs."""
    headroom: Annotated[int, Meta(ge=0, le=1000)] = 0
    """So many Devices like those that it brings are kept free ahead of need."""
    closing: bool = False
    """Nothing is ordered of it any more, and what came of it goes as soon as nobody needs it."""
    cro: Cro | None = None
    redfish: Redfish | None = None
    karpenter: Karpenter | None = None
    cluster_autoscaler: ClusterAutoscaler | None = None
    provisioning_request: Provisioning | None = None
    kueue: Kueue | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that are given, as they are written."""
        told = (
            self.cro, self.redfish, self.karpenter, self.cluster_autoscaler, self.provisioning_request, self.kueue
        )  # fmt: skip
        return tuple(kind for kind, one in zip(KINDS, told, strict=True) if one is not None)


def kinds_of(providers: Sequence[ProviderSettings]) -> tuple[str, ...]:
    """All that they are, once each, and PUBLISH where one of them publishes: rights are needed by that."""
    publish = (PUBLISH for one in providers if one.redfish is not None and one.redfish.publish)
    return tuple(dict.fromkeys((*(kind for one in providers for kind in one.kinds), *publish)))


def provider_keep_seconds(providers: Sequence[ProviderSettings], name: str) -> float | Auto:
    """How long what one of them gave is kept idle."""
    return next((0.0 if one.closing else one.keep_seconds for one in providers if one.name == name), "auto")


def check_providers(providers: Sequence[ProviderSettings]) -> None:
    """All of them. Raises WrongKeyError."""
    if len(providers) > PROVIDERS_MAX:
        raise WrongKeyError(("capacity",), f"expected at most {PROVIDERS_MAX}")
    seen: set[str] = set()
    for position, one in enumerate(providers):
        at: Path = ("capacity", position)
        check_name(one.name, (*at, "name"))
        if one.name in seen:
            raise WrongKeyError((*at, "name"), f"`{one.name}` occurs twice")
        seen.add(one.name)
        if len(one.kinds) != 1:
            told = " and ".join(one.kinds) or "none"
            raise WrongKeyError(at, f"expected exactly one of {', '.join(KINDS)}; there is {told}")
        _check_kind(one, at)
    _check_writers(providers)


def _check_writers(providers: Sequence[ProviderSettings]) -> None:
    """A system of a fabric has one: two would take each other's GPUs for nobody's. One that closes gives it up."""
    writers: dict[tuple[str, str], str] = {}
    for position, one in enumerate(providers):
        for node, system in ({} if one.redfish is None or one.closing else one.redfish.places).items():
            if system in writers:
                fix = f"`{writers[system]}` has that system: name it in one entry, or say in the other `closing: true`"
                raise WrongKeyError(("capacity", position, "redfish", "systems", node), fix)
            writers[system] = one.name


def _check_kind(one: ProviderSettings, at: Path) -> None:
    if one.redfish is not None:
        if not re.fullmatch(NOTES_KEY, one.name):
            raise WrongKeyError(
                (*at, "name"), "expected letters, digits, `.`, `_` and `-`: it is a ConfigMap's key, too"
            )
        _check_redfish(one.redfish, (*at, "redfish"))
        if one.redfish.publish:
            check_object_name(one.name, (*at, "name"))  # it is in the names of pools
    if one.karpenter is not None or one.cluster_autoscaler is not None:
        check_label_value(one.name, (*at, "name"))  # of what is made in its name
    if one.karpenter is not None:
        check_object_name(one.karpenter.node_pool, (*at, "karpenter", "nodePool"))
    if one.cluster_autoscaler is not None:
        check_labels(one.cluster_autoscaler.node_labels, (*at, "clusterAutoscaler", "nodeLabels"))
        check_object_name(one.cluster_autoscaler.priority_class, (*at, "clusterAutoscaler", "priorityClass"))
    if one.headroom and (queue := next((kind for kind in one.kinds if kind in QUEUES), None)) is not None:
        raise WrongKeyError((*at, "headroom"), f"expected 0: `{queue}` asks for one Model's room, and keeps none free")
    if one.provisioning_request is not None:
        _check_provisioning(one.provisioning_request, (*at, "provisioningRequest"))
    if one.kueue is not None:
        check_object_name(one.kueue.local_queue, (*at, "kueue", "localQueue"))


def _check_provisioning(told: Provisioning, at: Path) -> None:
    check_object_name(told.class_name, (*at, "class"))
    check_labels(told.selector, (*at, "selector"))
    if told.max_run_seconds is not None and told.max_run_seconds < 1:
        raise WrongKeyError((*at, "maxRunSeconds"), "expected at least 1")


def _check_redfish(told: Redfish, at: Path) -> None:
    if not re.fullmatch(ORIGIN, told.url):
        fix = "expected https://HOST or https://HOST:PORT, without a user, a path or a query"
        raise WrongKeyError((*at, "url"), fix)
    if told.secret_ref is not None:
        check_object_name(told.secret_ref, (*at, "secretRef"))
    if told.ca_file is not None and not told.ca_file.startswith("/"):
        raise WrongKeyError((*at, "caFile"), "expected an absolute path")
    if not told.systems:
        raise WrongKeyError((*at, "systems"), "expected at least one node, with the path of its system")
    owners: dict[str, str] = {}
    for node, path in told.systems.items():
        check_object_name(node, (*at, "systems", node))
        if not path.startswith("/redfish/v1/Systems/"):
            raise WrongKeyError((*at, "systems", node), "expected a path such as /redfish/v1/Systems/1")
        if owners.setdefault(path, node) != node:
            raise WrongKeyError((*at, "systems", node), f"is the system of {owners[path]}, too: one node each")
