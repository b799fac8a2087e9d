"""What a Slice rules on a Want: whether it could ever be there, whom it may evict, and what stands in its way.

Owns these three questions and the sentences that answer the last one. `autoscaler.packer` decides by them and
`autoscaler.explain` shows them, so that what people read is what was decided. Decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from autoscaler.packing import Choice, Force, Incumbent, Room, Shelf, Want
from autoscaler.states import ReplicaState
from autoscaler.taints import repels
from autoscaler.words import seconds, size
from autoscaler.world import Slice


def product_rank(want: Want, product: str) -> int | None:
    """Position of the first glob that matches the product, 0 where none is named; None: no match."""
    if not want.products:
        return 0
    low = product.lower()
    return next((i for i, glob in enumerate(want.products) if low and fnmatchcase(low, glob.lower())), None)


def admits(selector: Sequence[tuple[str, str]], slice_: Slice) -> bool:
    """Whether a Slice's node has these labels, as far as its labels are known."""
    labels, whole = slice_.labels, slice_.labels_known
    return all(labels.get(key, None if whole else value) == value for key, value in selector)


def barred(choice: Choice, slice_: Slice) -> str:
    """What keeps who chooses so off a Slice's node for now, in words; empty: nothing does."""
    taint = repels(slice_.taints, choice.tolerations) if slice_.taints else None
    if taint is not None:
        return f"its node is tainted {taint}, which spec.pod.tolerations do not tolerate"
    if slice_.node in choice.avoids:
        return "its cluster's scheduler kept the last pod of the Model off its node; it is tried again later"
    return ""


def need(want: Want, shelf: Shelf) -> Room | None:
    """What the Want takes of this Slice; None: it can never be there, however empty the Slice is."""
    slice_ = shelf.slice
    if want.selector and not admits(want.selector, slice_):
        return None
    all_of_it = Room(slice_.memory_bytes, slice_.compute_percent)
    room = Room(want.memory_bytes, want.compute_percent)
    if want.memory_bytes == 0 or want.devices > 1 or want.isolation > slice_.isolation:
        return all_of_it if shelf.whole and all_of_it.holds(room) else None
    if not all_of_it.holds(room):
        return None
    return room if slice_.shared else all_of_it


def evictable(want: Want, incumbent: Incumbent, now_s: float) -> bool:
    """Whether the Want may take the incumbent's room now."""
    if incumbent.leaving or incumbent.model == want.model or now_s < incumbent.evictable_s:
        return False
    if incumbent.priority != want.priority:
        return incumbent.priority < want.priority and want.force >= Force.LOWER
    return not incumbent.kept and want.force >= (Force.BUSY if incumbent.busy else Force.IDLE)


def never_reason(want: Want, shelves: Sequence[Shelf]) -> str | None:
    """Why no Slice could hold the Want, which needs one, however empty; None: one could."""
    if not shelves:
        return f"needs {ask(want)}; there is no device"
    matching = [shelf for shelf in shelves if product_rank(want, shelf.slice.product) is not None]
    if not matching:
        products = sorted({shelf.slice.product or "unnamed" for shelf in shelves})
        return f"needs a device named like {' or '.join(want.products)}; there are: {', '.join(products)}"
    matching = [shelf for shelf in matching if admits(want.selector, shelf.slice)]
    if not matching:
        return f"needs a node labelled {labelled(want)}; none that has such a device is"
    fitting = [shelf for shelf in matching if need(want, shelf) is not None]
    if not fitting:
        largest = max(shelf.slice.memory_bytes for shelf in matching)
        return f"needs {ask(want)}; the largest has {size(largest)}"
    if want.devices > 1:
        nodes = [shelf.slice.node for shelf in fitting]
        most = max(nodes.count(node) for node in set(nodes))
        if most < want.devices:
            return f"needs {ask(want)} of one node; the largest node has {most}"
    return None


def unmet_reason(want: Want, shelves: Sequence[Shelf], now: Sequence[Shelf], now_s: float) -> tuple[str, bool]:
    """(why the Want is not placed, whether it can never be). `shelves` are all, `now` what is left of the usable."""
    never = never_reason(want, shelves)
    if never is not None:
        return never, True
    choice = want.choice
    fitting = [s for s in now if _fits(want, s) and not barred(choice, s.slice)]
    why = (s.closed or barred(choice, s.slice) for s in shelves if _fits(want, s))
    closed = next(filter(None, why), "")
    if not fitting:
        return f"needs {ask(want)}; {closed or 'no device that has it is healthy'}", False
    best = max(fitting, key=lambda shelf: (shelf.free.memory_bytes, shelf.free.compute_percent, shelf.slice.id))
    what = f"{size(best.free.memory_bytes)} free of {size(best.slice.memory_bytes)}"
    elsewhere = f"; elsewhere {closed}" if closed else ""
    return f"needs {ask(want)}; the largest has {what}, {held(want, best, now_s)}{elsewhere}", False


def _fits(want: Want, shelf: Shelf) -> bool:
    """Whether the Want could be there, were the Slice empty."""
    return need(want, shelf) is not None and product_rank(want, shelf.slice.product) is not None


def why_not(want: Want, shelf: Shelf, now_s: float) -> str:
    """What keeps the Want from this Slice, for people; empty: nothing does."""
    if shelf.closed:
        return shelf.closed
    if not shelf.slice.healthy:
        return "it is not healthy"
    if product_rank(want, shelf.slice.product) is None:
        return f"it is {shelf.slice.product or 'of no named product'}, not {' or '.join(want.products)}"
    if not admits(want.selector, shelf.slice):
        return f"its node is not labelled {labelled(want)}"
    bar = barred(want.choice, shelf.slice)
    if bar:
        return bar
    room = need(want, shelf)
    if room is None:
        return f"it has {size(shelf.slice.memory_bytes)} in all, which cannot be {ask(want)}"
    if not shelf.free.holds(room):
        return f"{size(shelf.free.memory_bytes)} free of {size(shelf.slice.memory_bytes)}, {held(want, shelf, now_s)}"
    return "another Replica is starting on this device, and one starts at a time" if shelf.locked else ""


def ask(want: Want) -> str:
    """`20Gi on one device`."""
    if want.devices > 1:
        return f"{want.devices} whole devices" + (f" of {size(want.memory_bytes)}" if want.memory_bytes else "")
    if want.memory_bytes == 0:
        return "a whole device"
    compute = f" and {want.compute_percent} % of compute" if want.compute_percent else ""
    apart = f" with {want.isolation.name.lower()} isolation" if want.isolation else ""
    return f"{size(want.memory_bytes)}{compute} on one device{apart}"


def labelled(want: Want) -> str:
    """`zone=a, disk=ssd`."""
    return ", ".join(f"{key}={value}" for key, value in want.selector)


def held(want: Want, shelf: Shelf, now_s: float) -> str:
    """`held by llama-8b (busy, residency ends in 12 s)`."""
    if not shelf.incumbents:
        return "promised to Models that wait longer"
    return "held by " + ", ".join(f"{i.model} ({standing(want, i, now_s)})" for i in shelf.incumbents)


def standing(want: Want, incumbent: Incumbent, now_s: float) -> str:
    """Why the incumbent stays, or that it goes."""
    if incumbent.stuck:
        return f"{incumbent.state}, and should long be gone"
    if incumbent.leaving:
        return str(incumbent.state) if incumbent.state in _LEAVING else "leaves soon"
    words = ["busy" if incumbent.busy else "idle"]
    if incumbent.state in (ReplicaState.STARTING, ReplicaState.WAKING):
        words = [str(incumbent.state)]
    if incumbent.priority > want.priority:
        words.append("higher priority")
    elif incumbent.kept and incumbent.priority == want.priority:
        words.append("kept by replicas.min")
    elif now_s < incumbent.evictable_s < float("inf"):
        words.append(f"residency ends in {seconds(incumbent.evictable_s - now_s)}")
    return ", ".join(words)


_LEAVING = frozenset({ReplicaState.DRAINING, ReplicaState.STOPPING, ReplicaState.SCRUBBING, ReplicaState.FAILED})
