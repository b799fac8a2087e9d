"""Who makes room on a node beside its Devices, where a Want finds a Device and too little CPU or memory.

Owns what becomes of Options of one node then: who waits for those who leave, and the fewest and cheapest victims that
make room on the Devices and beside them. Promises: nobody goes who need not. It asks nobody to leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoscaler.placement.eviction import COMING, COSTS, EVICT, Option, cheapest, cost_of, sum_of
from autoscaler.placement.model.predicates import evictable
from autoscaler.placement.model.types import Incumbent, Outlook, Want
from autoscaler.state.lanes import Room
from autoscaler.state.resources import NOTHING, Beside, Host


def hosted(
    want: Want, team: Sequence[Option], host: Host, around: Iterable[Incumbent], *, outlook: Outlook, now_s: float
) -> tuple[Option, ...] | None:
    """These Options, of Slices of one node, as they are with what the Want needs beside them; None: there is no way
    now. `around`: who is on the node.
    """
    chosen = {one.replica: one for option in team for one in option.victims}
    if host.left.holds(want.beside):
        return tuple(team)
    if host.soon.plus(amounts(chosen.values())).holds(want.beside):
        return tuple(_as(option, COMING, option.victims, outlook) for option in team)
    must = {one.replica: one for option in team for one in option.strangers if one.replica in chosen}
    more = {one.replica: one for one in around if one.replica not in must and evictable(want, one, now_s)}
    useful = [one for one in more.values() if any(one.beside) or one.replica in chosen]
    lacks = [(_here(option), _lack(option, must.values())) for option in team]
    short = host.soon.plus(amounts(must.values())).lack(want.beside)

    def enough(some: Sequence[Incumbent]) -> bool:
        going = {one.replica for one in some}
        rooms = (sum_of(room for id, room in here.items() if id in going).holds(lack) for here, lack in lacks)
        return amounts(some).holds(short) and all(rooms)

    found = cheapest(useful, enough, outlook)
    victims = (*must.values(), *found)
    return tuple(_as(option, EVICT, victims, outlook) for option in team) if found else None


def amounts(incumbents: Iterable[Incumbent]) -> Beside:
    """What they have of their node together."""
    total = NOTHING
    for one in incumbents:
        total = total.plus(one.beside)
    return total


def _here(option: Option) -> dict[str, Incumbent]:
    return {one.replica: one for one in option.shelf.incumbents}


def _lack(option: Option, going: Iterable[Incumbent]) -> Room:
    """What its Slice lacks when these are gone, too."""
    here = _here(option)
    shelf = option.shelf
    gone = sum_of(here[one.replica] for one in going if one.replica in here)
    return option.need.less(shelf.free.plus(shelf.coming).plus(gone))


def _as(option: Option, rung: int, victims: tuple[Incumbent, ...], outlook: Outlook) -> Option:
    rung = max(rung, EVICT if victims else rung)
    key = (rung, *cost_of(victims, outlook), *option.key[COSTS:])
    return option._replace(rung=rung, key=key, victims=victims, wide=True)
