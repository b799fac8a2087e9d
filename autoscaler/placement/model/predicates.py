"""Placement predicates of one slice: whether it could ever hold a request, whom the request may evict, and what
prevents a placement.

Produces the reasons as text as well. `autoscaler.placement.packer` decides by these predicates and
`autoscaler.explain.model` shows their reasons, so users read what was decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoscaler.placement.model.tenant_isolation import Domain, domain_of, has_tenant_conflict
from autoscaler.placement.model.topology import UNKNOWN, WORDS, Team, count_team_devices, link_shortage_reason
from autoscaler.placement.model.types import Bin, EvictionLevel, NodeConstraints, Occupant, PlacementRequest
from autoscaler.state.lifecycle import LEAVING, ReplicaState
from autoscaler.state.node_labels import Taint, can_label_appear, find_untolerated_taint
from autoscaler.state.resources import CORE, NOTHING, HostAmount, HostResources, Link, ResourceAmount
from autoscaler.state.world import Slice
from autoscaler.text import format_duration, format_size

_PLACE = {Link.NODE: "node", Link.PCIE_ROOT: "root", Link.NVLINK: "node"}
TOLD_MAX = 3
"""Slices of one node whose occupants a reason lists."""


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
    """Explain which taint or avoided node keeps a request off the slice's node for now; empty: none."""
    taint = find_untolerated_taint(slice_.taints, choice.tolerations) if slice_.taints else None
    if taint is not None:
        return f"its node is tainted {taint}, which spec.pod.tolerations do not tolerate"
    if slice_.node in choice.avoids:
        return "its cluster's scheduler kept the last pod of the Model off its node; it is tried again later"
    return ""


def tenant_conflict_reason(want: PlacementRequest, slice_: Slice, there: Iterable[Occupant]) -> str:
    """Name the models in the slice's domain whose tenants conflict with the request's; empty: none."""
    names = sorted({one.model for one in there if has_tenant_conflict(want.trust, one.trust)})
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {_there(slice_)}" if names else ""


def reservation_reason(slice_: Slice) -> str:
    """Say that a request of conflicting tenants has room promised there."""
    return f"a Model that waits longer is to be {_there(slice_)}"


def _there(slice_: Slice) -> str:
    domain = domain_of(slice_)
    where = "on its device" if domain is None or domain[1] is not None else "on a shared device of its node"
    return f"{where} for other tenants"


def find_required_amount(want: PlacementRequest, shelf: Bin) -> ResourceAmount | None:
    """Return what the request takes of this slice. None: it can never be there, even if the slice is empty."""
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
    """Explain why no slice could hold the request, which needs one, even empty. None: one could. `kinds`: one `Bin` of
    each kind that exists; `most`: the largest number of devices on one node that could hold it.
    """
    if not kinds:
        return f"needs {describe_request(want)}; there is no device"
    matching = [shelf for shelf in kinds if want.kind.rank(shelf.slice.product) is not None]
    if not matching:
        products = sorted({shelf.slice.product or "unnamed" for shelf in kinds})
        return f"needs a device named like {' or '.join(want.kind.products)}; there are: {', '.join(products)}"
    matching = [shelf for shelf in matching if has_matching_labels(want.choice.selector, shelf.slice)]
    if not matching:
        return f"needs a node labelled {describe_selector(want)}; none that has such a device is"
    if all(find_required_amount(want, shelf) is None for shelf in matching):
        return f"needs {describe_request(want)}; {_too_small(want, [shelf.lane.room for shelf in matching])}"
    if most < want.kind.devices and want.kind.link:
        return f"needs {describe_request(want)}; " + (
            f"at most {most} are joined so" if most else f"of each {UNKNOWN[want.kind.link]}"
        )
    if most < want.kind.devices:
        return f"needs {describe_request(want)} of one node; the largest node has {most}"
    return None


def _too_small(want: PlacementRequest, rooms: Sequence[ResourceAmount]) -> str:
    """Describe what exists instead of what it needs."""
    if any(room.holds(ResourceAmount(want.kind.memory_bytes, want.kind.compute_percent)) for room in rooms):
        apart = ", and not kept apart so" if want.kind.isolation else ""
        return f"what is large enough is only a part of a device{apart}"
    largest = max(rooms)
    return f"the largest has {format_size(largest.memory_bytes)}{_compute(want, largest)}"


def node_too_small_reason(want: PlacementRequest, cpu_milli: int, host_bytes: int) -> str:
    """Explain why no node could hold it, even empty. The amounts are the most on any node with suitable devices."""
    most = HostAmount(cpu_milli if want.kind.cpu_milli else 0, host_bytes if want.kind.host_bytes else 0)
    has = f"none that has such devices has more than {describe_host_request(most)}"
    return f"needs {describe_host_request(want.kind.host_request)} of one node beside {describe_request(want)}; {has}"


def host_shortage_reason(want: PlacementRequest, host: HostResources | None, node: str) -> str:
    """Explain which host resource a node is short of; empty: none, or (`host` is None) its resources are unknown."""
    lack = NOTHING if host is None else host.left.lack(want.kind.host_request)
    if host is None or lack == NOTHING:
        return ""
    pairs = zip(lack, _told(host.left.most(NOTHING)), _told(host.all), ("CPU", "memory"), strict=True)
    short = [(name, f"{left} left of {all_}") for lacks, left, all_, name in pairs if lacks]
    names, amounts = " and ".join(name for name, _ in short), ", ".join(amount for _, amount in short)
    return f"{node} has not {names} enough beside its devices: {amounts}"


def unmet_reason(want: PlacementRequest, best: Bin | None, closed: str, now_s: float, scarce: str = "") -> str:
    """Explain why the request, which could be placed some day, is not placed now.

    `best`: the `Bin` with the most room that could hold it; None: none is open. `closed`: what keeps it from others;
    `scarce`: the `host_shortage_reason` of a node whose devices have room.
    """
    if best is None:
        return f"needs {describe_request(want)}; {closed or 'no device that has it is healthy'}"
    elsewhere = f"; elsewhere {closed}" if closed else ""
    if scarce:
        host = describe_host_request(want.kind.host_request)
        return f"needs {describe_request(want)} and {host} of its node; {scarce}{elsewhere}"
    return (
        f"needs {describe_request(want)}; the largest has {describe_free_amount(want, best)}, "
        f"{describe_holders(want, best, now_s)}{elsewhere}"
    )


def team_reason(want: PlacementRequest, node: Sequence[Bin], closed: str, now_s: float, scarce: str = "") -> str:
    """Explain why a request for several devices, which could be placed some day, is not placed now. `node`: the bins
    that could hold it on the node (or link) that has the most of them free; empty: none has enough open ones. The other
    parameters are those of `unmet_reason`.
    """
    asks = f"needs {describe_request(want)}" + ("" if want.kind.link else " of one node")
    if not node:
        return f"{asks}; {closed or 'no node has as many that are healthy'}"
    elsewhere = f"; elsewhere {closed}" if closed else ""
    full = [one for one in node if (room := find_required_amount(want, one)) is None or not one.free.holds(room)]
    free = len(node) - len(full)
    if scarce:
        return f"{asks} and {describe_host_request(want.kind.host_request)} beside them; {scarce}{elsewhere}"
    if free >= want.kind.devices:
        return f"{asks}; {closed or 'another Replica is starting there, and one starts at a time'}"
    told = [f"{one.slice.id} is {describe_holders(want, one, now_s)}" for one in full[:TOLD_MAX]]
    more = f" and {len(full) - TOLD_MAX} more are not free" if len(full) > TOLD_MAX else ""
    return f"{asks}; the {_PLACE[want.kind.link]} with the most has {free} free, {', '.join(told)}{more}{elsewhere}"


def group_occupants_by_domain(shelves: Iterable[Bin]) -> Mapping[Domain | None, Sequence[Occupant]]:
    """Return the occupants of each domain."""
    found: dict[Domain | None, list[Occupant]] = {}
    for shelf in shelves:
        domain = domain_of(shelf.slice)
        if domain is not None:
            found.setdefault(domain, []).extend(shelf.incumbents)
    return found


def count_fitting_devices(want: PlacementRequest, shelves: Iterable[Bin]) -> Mapping[Team, int]:
    """Count, per team, the devices that could hold the request if they were empty."""
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
    there: Mapping[Domain | None, Sequence[Occupant]],
    host: HostResources | None = None,
    *,
    teams: Mapping[Team, int] | None = None,
) -> str:
    """Explain what keeps the request off this slice; empty: nothing. `there`: see `group_occupants_by_domain`; `host`:
    its node's resources, if known; `teams`: see `count_fitting_devices`, None: links are not checked.
    """
    if shelf.closed:
        return shelf.closed
    if not shelf.slice.healthy:
        return "it is not healthy"
    if want.kind.rank(shelf.slice.product) is None:
        return f"it is {shelf.slice.product or 'of no named product'}, not {' or '.join(want.kind.products)}"
    if not has_matching_labels(want.choice.selector, shelf.slice):
        return f"its node is not labelled {describe_selector(want)}"
    bar = node_exclusion_reason(want.choice, shelf.slice)
    bar = bar or tenant_conflict_reason(want, shelf.slice, there.get(domain_of(shelf.slice), ()))
    if bar:
        return bar
    room = find_required_amount(want, shelf)
    if room is None:
        return f"it has {format_size(shelf.slice.memory_bytes)} in all, which cannot be {describe_request(want)}"
    apart = link_shortage_reason(shelf.slice, want.kind.link, teams, want.kind.devices) if teams is not None else ""
    if apart:
        return apart
    if not shelf.free.holds(room):
        return f"{describe_free_amount(want, shelf)}, {describe_holders(want, shelf, now_s)}"
    short = host_shortage_reason(want, host, "its node")
    return short or ("another Replica is starting on this device, and one starts at a time" if shelf.locked else "")


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
    least = f" or {format_size(kind.least.memory_bytes)} at least" if kind.spare_bytes else ""
    return f"{format_size(kind.memory_bytes)}{least}{compute} on one device{apart}"


def describe_free_amount(want: PlacementRequest, shelf: Bin) -> str:
    """`4Gi free of 24Gi`, or `4Gi and 30 % of compute free of 24Gi and 100 %` if the request asks for compute."""
    free, all_ = shelf.free, shelf.lane.room
    percent = f" and {all_.compute_percent} %" if want.kind.compute_percent else ""
    return f"{format_size(free.memory_bytes)}{_compute(want, free)} free of {format_size(all_.memory_bytes)}{percent}"


def _compute(want: PlacementRequest, room: ResourceAmount) -> str:
    return f" and {room.compute_percent} % of compute" if want.kind.compute_percent else ""


def describe_host_request(amounts: HostAmount) -> str:
    """`4 cores and 16Gi`."""
    return " and ".join(told for amount, told in zip(amounts, _told(amounts), strict=True) if amount)


def _told(amounts: HostAmount) -> tuple[str, str]:
    return f"{amounts.cpu_milli / CORE:g} cores", format_size(amounts.host_bytes)


def describe_selector(want: PlacementRequest) -> str:
    """`zone=a, disk=ssd`."""
    return ", ".join(f"{key}={value}" for key, value in want.choice.selector)


def describe_holders(want: PlacementRequest, shelf: Bin, now_s: float) -> str:
    """`held by llama-8b (busy, residency ends in 12 s)`."""
    full = shelf.slice.holders_max > 0 and not shelf.free.places
    there = [f"{i.model} ({describe_occupant(want, i, now_s)})" for i in shelf.incumbents]
    there += [f"pods of others ({shelf.slice.theirs})"] if full and shelf.slice.theirs else []
    told = f"held by {', '.join(there)}" if there else "promised to Models that wait longer"
    return f"{told}, and takes no more than {shelf.slice.holders_max} at once" if full else told


def describe_occupant(want: PlacementRequest, incumbent: Occupant, now_s: float) -> str:
    """Describe why the replica stays, or that it leaves."""
    if incumbent.stuck:
        return f"{incumbent.state}, and should long be gone"
    if incumbent.leaving:
        return str(incumbent.state) if incumbent.state in LEAVING else "leaves soon"
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
