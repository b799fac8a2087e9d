"""Plays policies on workloads, several processes at a time, and gathers what came of each.

Owns the names of the policies and what each needs. All policies of a workload see the same rounds (paired by seed).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from autoscaler.placement.index.residual_waste_tables import Taught
from bench.packing import openb
from bench.packing.arrivals import Round, arrange
from bench.packing.cluster import Cluster
from bench.packing.fgd import Fgd
from bench.packing.openb import Kind, NodeRow
from bench.packing.ours import Granter, Packer, elastic, kind, learn
from bench.packing.peers import Anywhere, BestFit, DotProd, GpuPacking
from bench.packing.policy import Chooser, Rows
from bench.packing.replay import Outcome, replay

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "openb"
"""Where the trace is, unless the environment names another (`OPENB`); it is not shipped."""


class Task(NamedTuple):
    """One replay."""

    workload: str
    policy: str
    seed: int


class Given(NamedTuple):
    """What a policy may know."""

    cluster: Cluster
    round: Round
    pods: Sequence[Kind]
    """Of the workload, in no order of arrival."""
    tables: Taught | None


POLICIES: dict[str, Callable[[Given], Chooser]] = {
    "LRV": lambda given: Packer(given.round.nodes, learnt(given)),
    "Elastic": lambda given: Granter(given.round.nodes, learnt(given)),
    "FGD": lambda given: Rows(given.cluster, Fgd(given.cluster, given.pods)),
    "BestFit": lambda given: Rows(given.cluster, BestFit()),
    "GpuPacking": lambda given: Rows(given.cluster, GpuPacking()),
    "DotProd": lambda given: Rows(given.cluster, DotProd()),
    "Random": lambda given: Anywhere(given.cluster, given.round.seed),
}


LEARN = {"LRV": kind, "Elastic": elastic}
"""Who learns before it is judged, and what a request is to it."""


def learnt(given: Given) -> Taught:
    """Raises ValueError where nothing was."""
    if given.tables is None:
        raise ValueError("ours is judged with what it has learnt")
    return given.tables


def folder() -> Path:
    """Where the workloads are: `OPENB`, or beside the project."""
    return Path(os.environ.get("OPENB") or FOLDER)


def nodes(place: Path) -> Path:
    """The file of the nodes: there, or else beside the project. Raises FileNotFoundError."""
    for one in (place / openb.NODES, FOLDER / openb.NODES):
        if one.exists():
            return one
    raise FileNotFoundError(f"no {openb.NODES} in {place.name}/: name the folder that has the trace in OPENB")


class Field:
    """The processes that play, as many as there are cores. To be used as a context."""

    def __init__(self, place: Path) -> None:
        self._pool = ProcessPoolExecutor(initializer=_load, initargs=(place,))
        self.tables: dict[tuple[str, str], Taught] = {}
        """By workload and policy."""

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def learn(self, workloads: Iterable[str]) -> Iterator[str]:
        """Learns what ours need to know of these; says each when that is done."""
        waiting = {self._pool.submit(_learn, one, policy): (one, policy) for one in workloads for policy in LEARN}
        for done in as_completed(waiting):
            self.tables[waiting[done]] = done.result()
            yield " for ".join(waiting[done])

    def play(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """As they end. Raises what a replay raises."""
        waiting = {
            self._pool.submit(_play, task, self.tables.get((task.workload, task.policy))): task for task in tasks
        }
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def mean(outcomes: Iterable[Outcome], key: int) -> float:
    """Percent of GPU in use at a percent arrived, over seeds."""
    return statistics.fmean(outcome.used[key] for outcome in outcomes)


_nodes: list[NodeRow] = []
_workloads: dict[str, list[Kind]] = {}


def _load(place: Path) -> None:
    """Once for each process: reading takes longer than a replay."""
    _nodes[:] = openb.read_nodes(nodes(place))
    _workloads.update(openb.workloads(place))


def _learn(workload: str, policy: str) -> Taught:
    return learn(_nodes, _workloads[workload], LEARN[policy])


def _play(task: Task, tables: Taught | None) -> Outcome:
    pods = _workloads[task.workload]
    round = arrange(_nodes, pods, task.seed)
    return replay(round, lambda cluster: POLICIES[task.policy](Given(cluster, round, pods, tables)))
