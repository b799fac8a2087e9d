"""Runs policies on workloads, several processes at a time, and collects the outcomes.

Has the names of the policies and their needs. All policies of a workload get the same rounds (paired by seed).
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
"""The folder of the trace, unless the environment variable `OPENB` names another. It is not shipped."""


class Task(NamedTuple):
    """One replay."""

    workload: str
    policy: str
    seed: int


class Given(NamedTuple):
    """The input that a policy may use."""

    cluster: Cluster
    round: Round
    pods: Sequence[Kind]
    """The pods of the workload, not in the order of arrival."""
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
"""The policies that learn before they are judged, and how each converts a request of the trace."""


def learnt(given: Given) -> Taught:
    """Return the learned tables. Raises ValueError if there are none."""
    if given.tables is None:
        raise ValueError("the policies of Pilotlight require learned tables")
    return given.tables


def folder() -> Path:
    """Return the folder of the workloads: `OPENB`, or the default next to the project."""
    return Path(os.environ.get("OPENB") or FOLDER)


def nodes(place: Path) -> Path:
    """Return the file of the nodes: in the folder, or next to the project. Raises FileNotFoundError."""
    for one in (place / openb.NODES, FOLDER / openb.NODES):
        if one.exists():
            return one
    raise FileNotFoundError(f"no {openb.NODES} in {place.name}/: set OPENB to the folder that has the trace")


class Field:
    """The processes that run replays, one per core. Use it as a context manager."""

    def __init__(self, place: Path) -> None:
        self._pool = ProcessPoolExecutor(initializer=_load, initargs=(place,))
        self.tables: dict[tuple[str, str], Taught] = {}
        """Learned tables by workload and policy."""

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def learn(self, workloads: Iterable[str]) -> Iterator[str]:
        """Learn the tables that Pilotlight's policies need for these workloads; yield the name of each finished one."""
        waiting = {self._pool.submit(_learn, one, policy): (one, policy) for one in workloads for policy in LEARN}
        for done in as_completed(waiting):
            self.tables[waiting[done]] = done.result()
            yield " for ".join(waiting[done])

    def play(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Run the tasks; yield them as they end. Raises the errors of replays."""
        waiting = {
            self._pool.submit(_play, task, self.tables.get((task.workload, task.policy))): task for task in tasks
        }
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def mean(outcomes: Iterable[Outcome], key: int) -> float:
    """Return the mean percent of GPU in use at a percent arrived, over seeds."""
    return statistics.fmean(outcome.used[key] for outcome in outcomes)


_nodes: list[NodeRow] = []
_workloads: dict[str, list[Kind]] = {}


def _load(place: Path) -> None:
    """Read the trace once per process, because reading takes longer than a replay."""
    _nodes[:] = openb.read_nodes(nodes(place))
    _workloads.update(openb.workloads(place))


def _learn(workload: str, policy: str) -> Taught:
    return learn(_nodes, _workloads[workload], LEARN[policy])


def _play(task: Task, tables: Taught | None) -> Outcome:
    pods = _workloads[task.workload]
    round = arrange(_nodes, pods, task.seed)
    return replay(round, lambda cluster: POLICIES[task.policy](Given(cluster, round, pods, tables)))
