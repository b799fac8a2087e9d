"""The capacity providers of the Settings (`capacity:`), and the rules of each provider beyond its types.

`autoscaler.providers` implements the providers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, field

from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.document_names import check_name
from autoscaler.spec.model import Auto, Seconds
from autoscaler.spec.pod import check_label_value, check_labels, check_object_name

Text = Annotated[str, Meta(min_length=1, max_length=253)]
KINDS = ("cro", "redfish", "karpenter", "clusterAutoscaler", "provisioningRequest", "kueue")
QUEUES = ("provisioningRequest", "kueue")
"""The kinds whose order is for the pod of one Model."""
PUBLISH = "publish"
"""An additional kind in the list of required permissions: a `redfish` provider has `publish: true`."""
PROVIDERS_MAX = 64
_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
ORIGIN = rf"https://([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:{_PORT})?/?"
"""The form of a service's `url`. The chart's values schema has the same pattern."""
NOTES_KEY = "[A-Za-z0-9._-]+"
"""The form of a ConfigMap key. The chart's values schema has the same pattern."""


class Cro(Part, frozen=True):
    """A fabric of GPUs that the Composable Resource Operator (CRO) manages."""

    model: Text
    """The CRO's name of the GPU product, for example `NVIDIA-A100-PCIE-40GB`."""


class Redfish(Part, frozen=True):
    """A fabric of GPUs that is composed through a Redfish service."""

    url: Text
    """The address of the service: `https://HOST:PORT`, without a path."""
    systems: dict[str, str]
    """Node name -> path of the node's computer system in the service, for example `/redfish/v1/Systems/1`."""
    secret_ref: Text | None = None
    """The Secret with the keys `username` and `password`, and optionally `ca.crt`: the private CA
    of the service (PEM).
    """
    ca_file: str | None = None
    """An absolute path to the private CA of the service (PEM)."""
    agents: bool = False
    """Whether node agents make attached GPUs visible on their node and release them before they are detached."""
    publish: bool = False
    """Whether GPUs that could be attached are published as ResourceSlices, so that any ResourceClaim can be allocated
    one.
    """

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """Node name -> the service and the path of the node's system, both normalized for comparison."""
        service = self.url.rstrip("/").lower()
        return {node: (service, path.rstrip("/")) for node, path in self.systems.items()}


class Karpenter(Part, frozen=True):
    """Nodes that Karpenter adds."""

    node_pool: Text
    """The NodePool to which Karpenter adds the nodes."""


class ClusterAutoscaler(Part, frozen=True):
    """Nodes that Cluster Autoscaler adds to one node group for Pending pods."""

    node_labels: dict[str, str]
    """Labels of the group's nodes, by which placeholder pods select the group. To scale the group up from zero,
    configure the same labels on the group itself.
    """
    nodes_max: Annotated[int, Meta(ge=1, le=1000)] = 8
    """The maximum number of the group's nodes that Pilotlight uses at the same time."""
    priority_class: Text = "pilotlight-placeholder"
    """The PriorityClass of the placeholder pods that wait for a node. It must be lower than that of engine pods."""
    image: Text = "registry.k8s.io/pause:3.10"
    """The container image of the placeholder pods."""


class Provisioning(Part, frozen=True):
    """Nodes that are requested with a ProvisioningRequest."""

    class_name: Text = field(name="class")
    """The provisioning class (`spec.provisioningClassName`)."""
    max_run_seconds: Seconds | None = None
    """The maximum time that the nodes may be held, in seconds, at least 1."""
    selector: dict[str, str] = {}
    """Labels of the nodes. A request can provide the entries of Settings `nodes` whose selectors agree with these
    labels.
    """


class Kueue(Part, frozen=True):
    """Nodes whose quota a Kueue queue manages."""

    local_queue: Text
    """The LocalQueue in the engines' namespace."""


class ProviderSettings(Part, frozen=True):
    """A provider of additional capacity: its name and settings, and exactly one provider kind."""

    name: str
    """The name of the provider in reasons and metrics."""
    expected_seconds: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    """The time from an order until the capacity is usable, in seconds, until lead times have been measured. None: the
    default of the provider kind.
    """
    hedge: bool = False
    """Whether a second order may be placed with this provider when requests wait and neither provider is certain to
    deliver in time. The order that arrives later is cancelled.
    """
    keep_seconds: Seconds | Auto = "auto"
    """How long added capacity stays allocated while it is idle, in seconds. `auto`: as long as keeping it costs less
    than ordering it again is expected to cost.
    """
    headroom: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The number of devices of this kind to keep free in advance, so that a start finds one. Not for queues
    (`provisioningRequest`, `kueue`).
    """
    closing: bool = False
    """Whether the provider is being removed: nothing new is ordered, and existing capacity is released as soon as it is
    unused.
    """
    cro: Cro | None = None
    """Use a fabric that the Composable Resource Operator manages."""
    redfish: Redfish | None = None
    """Use a fabric that a Redfish service composes."""
    karpenter: Karpenter | None = None
    """Use nodes that Karpenter adds."""
    cluster_autoscaler: ClusterAutoscaler | None = None
    """Use nodes that Cluster Autoscaler adds."""
    provisioning_request: Provisioning | None = None
    """Use nodes that a ProvisioningRequest requests."""
    kueue: Kueue | None = None
    """Use nodes whose quota a Kueue queue manages."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The provider kinds that are set, by their document keys."""
        values = (
            self.cro, self.redfish, self.karpenter, self.cluster_autoscaler, self.provisioning_request, self.kueue
        )  # fmt: skip
        return tuple(kind for kind, one in zip(KINDS, values, strict=True) if one is not None)


def kinds_of(providers: Sequence[ProviderSettings]) -> tuple[str, ...]:
    """Return the provider kinds, and PUBLISH if one publishes devices: they decide which permissions are required."""
    publish = (PUBLISH for one in providers if one.redfish is not None and one.redfish.publish)
    return tuple(dict.fromkeys((*(kind for one in providers for kind in one.kinds), *publish)))


def provider_keep_seconds(providers: Sequence[ProviderSettings], name: str) -> float | Auto:
    """Return how long idle capacity of the named provider is kept, in seconds."""
    return next((0.0 if one.closing else one.keep_seconds for one in providers if one.name == name), "auto")


def check_providers(providers: Sequence[ProviderSettings]) -> None:
    """Check all providers. Raises WrongKeyError."""
    if len(providers) > PROVIDERS_MAX:
        raise WrongKeyError(("capacity",), f"expected at most {PROVIDERS_MAX} providers")
    seen: set[str] = set()
    for position, one in enumerate(providers):
        at: Path = ("capacity", position)
        check_name(one.name, (*at, "name"))
        if one.name in seen:
            raise WrongKeyError((*at, "name"), f"`{one.name}` occurs twice")
        seen.add(one.name)
        if len(one.kinds) != 1:
            found = " and ".join(one.kinds) or "none"
            raise WrongKeyError(at, f"expected exactly one of {', '.join(KINDS)}; found {found}")
        _check_kind(one, at)
    _check_writers(providers)


def _check_writers(providers: Sequence[ProviderSettings]) -> None:
    """Check that one provider writes each fabric system.

    Two providers would each treat the other's GPUs as unused. A closing provider does not count.
    """
    writers: dict[tuple[str, str], str] = {}
    for position, one in enumerate(providers):
        for node, system in ({} if one.redfish is None or one.closing else one.redfish.places).items():
            if system in writers:
                fix = (
                    f"provider `{writers[system]}` also lists this Redfish system: list it for one provider only, or "
                    "retire one of them with `closing: true`"
                )
                raise WrongKeyError(("capacity", position, "redfish", "systems", node), fix)
            writers[system] = one.name


def _check_kind(one: ProviderSettings, at: Path) -> None:
    if one.redfish is not None:
        if not re.fullmatch(NOTES_KEY, one.name):
            raise WrongKeyError(
                (*at, "name"), "expected only letters, digits, `.`, `_` and `-`: the name is also a ConfigMap key"
            )
        _check_redfish(one.redfish, (*at, "redfish"))
        if one.redfish.publish:
            check_object_name(one.name, (*at, "name"))  # the name is part of pool names
    if one.karpenter is not None or one.cluster_autoscaler is not None:
        check_label_value(one.name, (*at, "name"))  # a label value of the objects that are created for it
    if one.karpenter is not None:
        check_object_name(one.karpenter.node_pool, (*at, "karpenter", "nodePool"))
    if one.cluster_autoscaler is not None:
        check_labels(one.cluster_autoscaler.node_labels, (*at, "clusterAutoscaler", "nodeLabels"))
        check_object_name(one.cluster_autoscaler.priority_class, (*at, "clusterAutoscaler", "priorityClass"))
    if one.headroom and (queue := next((kind for kind in one.kinds if kind in QUEUES), None)) is not None:
        raise WrongKeyError(
            (*at, "headroom"),
            f"expected 0: a `{queue}` provider orders capacity only for a Model that waits, so it keeps no device free",
        )
    if one.provisioning_request is not None:
        _check_provisioning(one.provisioning_request, (*at, "provisioningRequest"))
    if one.kueue is not None:
        check_object_name(one.kueue.local_queue, (*at, "kueue", "localQueue"))


def _check_provisioning(provisioning: Provisioning, at: Path) -> None:
    check_object_name(provisioning.class_name, (*at, "class"))
    check_labels(provisioning.selector, (*at, "selector"))
    if provisioning.max_run_seconds is not None and provisioning.max_run_seconds < 1:
        raise WrongKeyError((*at, "maxRunSeconds"), "expected at least 1")


def _check_redfish(redfish: Redfish, at: Path) -> None:
    if not re.fullmatch(ORIGIN, redfish.url):
        fix = "expected https://HOST or https://HOST:PORT, without a user, a path or a query"
        raise WrongKeyError((*at, "url"), fix)
    if redfish.secret_ref is not None:
        check_object_name(redfish.secret_ref, (*at, "secretRef"))
    if redfish.ca_file is not None and not redfish.ca_file.startswith("/"):
        raise WrongKeyError((*at, "caFile"), "expected an absolute path")
    if not redfish.systems:
        raise WrongKeyError((*at, "systems"), "expected at least one node and the path of its Redfish system")
    owners: dict[str, str] = {}
    for node, path in redfish.systems.items():
        check_object_name(node, (*at, "systems", node))
        if not path.startswith("/redfish/v1/Systems/"):
            raise WrongKeyError((*at, "systems", node), "expected a path such as /redfish/v1/Systems/1")
        if owners.setdefault(path, node) != node:
            raise WrongKeyError(
                (*at, "systems", node), f"is already the system of {owners[path]}: each node needs its own system"
            )
