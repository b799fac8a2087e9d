"""Placement predicates of one slice: whether it can ever hold a request, which replicas the request may evict, and why
it cannot be placed there.

`autoscaler.placement.packer` decides by these predicates, and `autoscaler.explain` shows their reasons, so explanations
match decisions. A reason is a clause without a full stop; an empty reason means that nothing prevents the placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoscaler.placement.model.tenant_isolation import Domain, domain_of, has_tenant_conflict
from autoscaler.placement.model.topology import UNKNOWN, WORDS, Team, count_team_devices, link_shortage_reason
from autoscaler.placement.model.types import Bin, EvictionLevel, NodeConstraints, Occupant, PlacementRequest
from autoscaler.state.lifecycle import LEAVING, ReplicaState
from autoscaler.state.node_labels_and_taints import Taint, can_label_appear, find_untolerated_taint
from autoscaler.state.resources import CORE, NOTHING, HostAmount, HostResources, Link, ResourceAmount
from autoscaler.state.world import Slice
from autoscaler.text import format_duration, format_size

_PLACE = {Link.NODE: "node", Link.PCIE_ROOT: "PCIe root", Link.NVLINK: "node"}
LISTED_MAX = 3
"""Maximum number of slices of one node whose occupants a reason lists."""


def has_matching_labels(selector: Sequence[tuple[str, str]], slice_: Slice) -> bool:
    """Whether the slice's node has these labels, as far as its labels are known."""
    labels, whole = slice_.labels, slice_.labels_known
    return all(
        labels[key] == value if key in labels else not whole or can_label_appear(key, slice_.labels_coming)
        for key, value in selector
    )


def can_tolerate_taints(choice: NodeConstraints, taints: Sequence[Taint]) -> bool:
    """Whether these constraints tolerate all of a node's taints."""
    return not taints or find_untolerated_taint(taints, choice.tolerations) is None


def node_exclusion_reason(choice: NodeConstraints, slice_: Slice) -> str:
    """Explain why a request is kept off the slice's node for now: by a taint or a failed binding; empty: neither."""
    taint = find_untolerated_taint(slice_.taints, choice.tolerations) if slice_.taints else None
    if taint is not None:
        return f"its node is tainted {taint}, which spec.pod.tolerations do not tolerate"
    if slice_.node in choice.avoids:
        return "the scheduler did not bind the last pod of the Model to its node; the node is retried later"
    return ""


def tenant_conflict_reason(want: PlacementRequest, slice_: Slice, occupants: Iterable[Occupant]) -> str:
    """Name the models in the slice's domain whose tenants conflict with the request's; empty: none."""
    names = sorted({one.model for one in occupants if has_tenant_conflict(want.trust, one.trust)})
    return f"{_domain(slice_)} is in use for other tenants ({', '.join(names)})" if names else ""


def reservation_reason(slice_: Slice) -> str:
    """Explain that room there is reserved for a request of conflicting tenants."""
    return f"{_domain(slice_)} is reserved for other tenants, whose Model waits longer"


def _domain(slice_: Slice) -> str:
    domain = domain_of(slice_)
    return "its device" if domain is None or domain[1] is not None else "a shared device of its node"


def find_required_amount(want: PlacementRequest, shelf: Bin) -> ResourceAmount | None:
    """Return the amount that the request takes of this slice. None: it does not fit even if the slice is empty."""
    selector = want.choice.selector
    if selector and not has_matching_labels(selector, shelf.slice):
        return None
    room = want.kind.takes(shelf.lane)
    return room._replace(places=1) if room is not None and shelf.slice.holders_max else room


def can_evict(want: PlacementRequest, incumbent: Occupant, now_s: float) -> bool:
    """Whether the request may evict this replica now."""
    if incumbent.leaving or incumbent.model == want.model or now_s < incumbent.evictable_s:
        return False
    priority, force = want.urgency.priority, want.urgency.force
    if incumbent.priority != priority:
        return incumbent.priority < priority and force >= EvictionLevel.LOWER
    return not incumbent.kept and force >= (EvictionLevel.BUSY if incumbent.busy else EvictionLevel.IDLE)


def never_reason(want: PlacementRequest, kinds: Sequence[Bin], most: int) -> str | None:
    """Explain why the request fits on no slice, even an empty one. None: it fits on one.

    `kinds`: one `Bin` of each kind that exists; `most`: the largest number of suitable devices that one node (or link)
    has.
    """
    if not kinds:
        return f"needs {describe_request(want)}; there is no device"
    matching = [shelf for shelf in kinds if want.kind.rank(shelf.slice.product) is not None]
    if not matching:
        products = sorted({shelf.slice.product or "unnamed" for shelf in kinds})
        return f"needs a device of product {' or '.join(want.kind.products)}; existing products: {', '.join(products)}"
    matching = [shelf for shelf in matching if has_matching_labels(want.choice.selector, shelf.slice)]
    if not matching:
        return f"needs a node with labels {describe_selector(want)}; no node with a suitable device has them"
    if all(find_required_amount(want, shelf) is None for shelf in matching):
        return f"needs {describe_request(want)}; {_too_small(want, [shelf.lane.room for shelf in matching])}"
    if most < want.kind.devices and want.kind.link:
        return f"needs {describe_request(want)}; " + (
            f"at most {most} have this link" if most else f"for every device, {UNKNOWN[want.kind.link]}"
        )
    if most < want.kind.devices:
        return f"needs {describe_request(want)} on one node; the largest node has {most}"
    return None


def _too_small(want: PlacementRequest, rooms: Sequence[ResourceAmount]) -> str:
    """Describe the largest slices that exist."""
    if any(room.holds(ResourceAmount(want.kind.memory_bytes, want.kind.compute_percent)) for room in rooms):
        isolation = " without this isolation" if want.kind.isolation else ""
        return f"every slice of that size is a part of a device{isolation}"
    largest = max(rooms)
    return f"the largest has {format_size(largest.memory_bytes)}{_compute(want, largest)}"


def node_too_small_reason(want: PlacementRequest, cpu_milli: int, host_bytes: int) -> str:
    """Explain why every node is too small, even if empty. The amounts are the most on a node with suitable devices."""
    most = HostAmount(cpu_milli if want.kind.cpu_milli else 0, host_bytes if want.kind.host_bytes else 0)
    largest = f"no node with such devices has more than {describe_host_request(most)}"
    return f"needs {describe_request(want)} and {describe_host_request(want.kind.host_request)} on its node; {largest}"


def host_shortage_reason(want: PlacementRequest, host: HostResources | None, node: str) -> str:
    """Explain which host resource a node lacks; empty: none, or its resources are unknown (`host` is None)."""
    lack = NOTHING if host is None else host.left.lack(want.kind.host_request)
    if host is None or lack == NOTHING:
        return ""
    pairs = zip(lack, _formatted(host.left.most(NOTHING)), _formatted(host.all), ("CPU", "memory"), strict=True)
    short = [(name, f"{left} left of {all_}") for lacks, left, all_, name in pairs if lacks]
    names, amounts = " and ".join(name for name, _ in short), ", ".join(amount for _, amount in short)
    return f"{node} has too little {names}: {amounts}"


def unmet_reason(want: PlacementRequest, best: Bin | None, closed: str, now_s: float, scarce: str = "") -> str:
    """Explain why a request that fits on some slice is not placed now.

    `best`: the suitable `Bin` with the most room; None: none is open. `closed`: why another suitable slice is closed
    to it; `scarce`: the `host_shortage_reason` of a node whose devices have room.
    """
    if best is None:
        return f"needs {describe_request(want)}; {closed or 'no suitable device is healthy'}"
    elsewhere = f"; on another device: {closed}" if closed else ""
    if scarce:
        host = describe_host_request(want.kind.host_request)
        return f"needs {describe_request(want)} and {host} on its node; {scarce}{elsewhere}"
    return (
        f"needs {describe_request(want)}; the largest has {describe_free_amount(want, best)}, "
        f"{describe_holders(want, best, now_s)}{elsewhere}"
    )


def team_reason(want: PlacementRequest, node: Sequence[Bin], closed: str, now_s: float, scarce: str = "") -> str:
    """Explain why a request for several devices that fits on some node is not placed now.

    `node`: the suitable bins of the node (or link) with the most free ones; empty: none has enough open ones. For the
    other parameters see `unmet_reason`.
    """
    needs = f"needs {describe_request(want)}" + ("" if want.kind.link else " on one node")
    if not node:
        return f"{needs}; {closed or 'no node has that many healthy devices'}"
    elsewhere = f"; on another device: {closed}" if closed else ""
    full = [one for one in node if (room := find_required_amount(want, one)) is None or not one.free.holds(room)]
    free = len(node) - len(full)
    if scarce:
        return f"{needs}, with {describe_host_request(want.kind.host_request)}; {scarce}{elsewhere}"
    if free >= want.kind.devices:
        return f"{needs}; {closed or 'another replica is starting there, and replicas start one at a time'}"
    listed = [f"{one.slice.id} is {describe_holders(want, one, now_s)}" for one in full[:LISTED_MAX]]
    more = f", {len(full) - LISTED_MAX} more are not free" if len(full) > LISTED_MAX else ""
    best = f"the {_PLACE[want.kind.link]} with the most free devices has {free}"
    return f"{needs}; {best}: {', '.join(listed)}{more}{elsewhere}"


def group_occupants_by_domain(shelves: Iterable[Bin]) -> Mapping[Domain | None, Sequence[Occupant]]:
    """Return the occupants of each domain."""
    found: dict[Domain | None, list[Occupant]] = {}
    for shelf in shelves:
        domain = domain_of(shelf.slice)
        if domain is not None:
            found.setdefault(domain, []).extend(shelf.incumbents)
    return found


def count_fitting_devices(want: PlacementRequest, shelves: Iterable[Bin]) -> Mapping[Team, int]:
    """Count, per team, the devices on which the request fits if they are empty."""
    able = (
        one.slice
        for one in shelves
        if want.kind.rank(one.slice.product) is not None and find_required_amount(want, one)
    )
    return count_team_devices(able, want.kind.link) if want.kind.devices > 1 else {}


def rejection_reason(
    want: PlacementRequest,
    shelf: Bin,
    now_s: float,
    occupants: Mapping[Domain | None, Sequence[Occupant]],
    host: HostResources | None = None,
    *,
    teams: Mapping[Team, int] | None = None,
) -> str:
    """Explain why the request cannot be placed on this slice now; empty: it can.

    `occupants`: see `group_occupants_by_domain`; `host`: resources of its node, if known; `teams`: see
    `count_fitting_devices`; None: links are not checked.
    """
    if shelf.closed:
        return shelf.closed
    if not shelf.slice.healthy:
        return "it is not healthy"
    if want.kind.rank(shelf.slice.product) is None:
        return f"its product is {shelf.slice.product or 'unknown'}, not {' or '.join(want.kind.products)}"
    if not has_matching_labels(want.choice.selector, shelf.slice):
        return f"its node does not have the labels {describe_selector(want)}"
    excluded = node_exclusion_reason(want.choice, shelf.slice)
    excluded = excluded or tenant_conflict_reason(want, shelf.slice, occupants.get(domain_of(shelf.slice), ()))
    if excluded:
        return excluded
    room = find_required_amount(want, shelf)
    if room is None:
        return (
            f"it has {format_size(shelf.slice.memory_bytes)} in total, which does not satisfy {describe_request(want)}"
        )
    apart = link_shortage_reason(shelf.slice, want.kind.link, teams, want.kind.devices) if teams is not None else ""
    if apart:
        return apart
    if not shelf.free.holds(room):
        return f"{describe_free_amount(want, shelf)}, {describe_holders(want, shelf, now_s)}"
    short = host_shortage_reason(want, host, "its node")
    return short or (
        "another replica is starting on this device, and replicas start one at a time" if shelf.locked else ""
    )


def describe_request(want: PlacementRequest) -> str:
    """`20Gi on one device`."""
    kind = want.kind
    if kind.devices > 1:
        joined = f" {WORDS[kind.link]}" if kind.link else ""
        each = f" of {format_size(kind.memory_bytes)}" if kind.memory_bytes else ""
        return f"{kind.devices} whole devices{each}{joined}"
    if kind.memory_bytes == 0:
        return "a whole device"
    compute = f" and {kind.compute_percent} % of compute" if kind.compute_percent else ""
    apart = f" with {kind.isolation.name.lower()} isolation" if kind.isolation else ""
    least = f" (at least {format_size(kind.least.memory_bytes)})" if kind.spare_bytes else ""
    return f"{format_size(kind.memory_bytes)}{least}{compute} on one device{apart}"


def describe_free_amount(want: PlacementRequest, shelf: Bin) -> str:
    """`4Gi free of 24Gi`, or `4Gi and 30 % of compute free of 24Gi and 100 %` if it requests compute."""
    free, all_ = shelf.free, shelf.lane.room
    percent = f" and {all_.compute_percent} %" if want.kind.compute_percent else ""
    return f"{format_size(free.memory_bytes)}{_compute(want, free)} free of {format_size(all_.memory_bytes)}{percent}"


def _compute(want: PlacementRequest, room: ResourceAmount) -> str:
    return f" and {room.compute_percent} % of compute" if want.kind.compute_percent else ""


def describe_host_request(amounts: HostAmount) -> str:
    """`4 cores and 16Gi`."""
    return " and ".join(text for amount, text in zip(amounts, _formatted(amounts), strict=True) if amount)


def _formatted(amounts: HostAmount) -> tuple[str, str]:
    return f"{amounts.cpu_milli / CORE:g} cores", format_size(amounts.host_bytes)


def describe_selector(want: PlacementRequest) -> str:
    """`zone=a, disk=ssd`."""
    return ", ".join(f"{key}={value}" for key, value in want.choice.selector)


def describe_holders(want: PlacementRequest, shelf: Bin, now_s: float) -> str:
    """`held by llama-8b (busy, residency ends in 12 s)`."""
    full = shelf.slice.holders_max > 0 and not shelf.free.places
    holders = [f"{i.model} ({describe_occupant(want, i, now_s)})" for i in shelf.incumbents]
    holders += (
        [f"pods that this installation does not manage ({shelf.slice.theirs})"] if full and shelf.slice.theirs else []
    )
    held = f"held by {', '.join(holders)}" if holders else "reserved for Models that wait longer"
    return f"{held}; at most {shelf.slice.holders_max} pods share it" if full else held


def describe_occupant(want: PlacementRequest, incumbent: Occupant, now_s: float) -> str:
    """Describe its state, and what protects it from eviction."""
    if incumbent.stuck:
        return f"{incumbent.state}, overdue"
    if incumbent.leaving:
        return str(incumbent.state) if incumbent.state in LEAVING else "to be drained"
    words = ["busy" if incumbent.busy else "idle"]
    if incumbent.state in (ReplicaState.STARTING, ReplicaState.WAKING):
        words = [str(incumbent.state)]
    if incumbent.priority > want.urgency.priority:
        words.append("higher priority")
    elif incumbent.kept and incumbent.priority == want.urgency.priority:
        words.append("kept by replicas.min")
    elif now_s < incumbent.evictable_s < float("inf"):
        words.append(f"residency ends in {format_duration(incumbent.evictable_s - now_s)}")
    return ", ".join(words)
