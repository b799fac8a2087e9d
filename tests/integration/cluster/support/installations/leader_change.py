"""Two autoscalers of one namespace in this process that lead in turn: a test selects the write at which they change.

Each runs everything that `pilotlight autoscaler --driver kubernetes` runs for a cluster, except leader election.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

from autoscaler.contract import GatewayId, ReplicaUse, Report
from autoscaler.kubernetes.api import Api, ApiError, UnreachableError
from autoscaler.kubernetes.kubeconfig import ApiAccess, load_api_access
from autoscaler.kubernetes.leader_election import Elector
from autoscaler.state.events import DocumentsSeen, Reported
from autoscaler.state.world import World
from pilotlight.processes.cluster import Cluster, ClusterOptions
from tests.support.builders.worlds import level


class Moment(Enum):
    """When the leader changes: what happens to the awaited write."""

    BEFORE = "it is not sent"
    AFTER = "the request is executed, but its response is lost"
    LATE = "it is on its way, and carried out when the next leader has done its work"


class Write(NamedTuple):
    """One kind of write: its method, the end of its path, and words in its body."""

    method: str
    path: str
    words: str = ""


class Fenced(Api):
    """Writes while its process leads. Leadership ends at the awaited write, once."""

    def __init__(self, way: ApiAccess) -> None:
        super().__init__(way, self.may_s)
        self._way = way
        self.leads = False
        self.ended = asyncio.Event()
        self._awaited: tuple[Write, Moment] | None = None
        self._held: tuple[Any, ...] | None = None
        """The arguments of a write that is held until `release`."""

    def may_s(self) -> float:
        """The remaining seconds in which it may write."""
        return math.inf if self.leads else 0.0

    def end_at(self, write: Write, moment: Moment) -> None:
        """Ends its leadership at the first write that matches."""
        self.ended.clear()
        self._awaited = write, moment

    async def release(self) -> str:
        """Sends the held write and returns the API server's reason if it rejects it."""
        assert self._held is not None
        held, self._held = self._held, None
        async with Api(self._way) as late:
            try:
                await late._ask(*held)
            except ApiError as error:
                return error.reason
        return ""

    async def _ask(self, *asked: Any, **more: Any) -> bytes:
        """Handles every request; those that do not match are forwarded unchanged."""
        if self._awaited is None or not self.leads or not _is(self._awaited[0], *asked[:3]):
            return await super()._ask(*asked, **more)
        moment = self._awaited[1]
        if moment is Moment.AFTER:  # a rejected write has no effect: wait for the next one
            await super()._ask(*asked, **more)
        self._awaited, self.leads = None, False
        self.ended.set()
        if moment is Moment.BEFORE:
            return await super()._ask(*asked, **more)
        if moment is Moment.LATE:
            self._held = asked
        raise UnreachableError(f"{asked[0]}: no answer")


def _is(write: Write, method: str, path: str, body: object = None) -> bool:
    return method == write.method and re.search(write.path + "$", path) is not None and write.words in str(body)


class Chosen:
    """Replaces an Elector: the test decides which process leads."""

    def __init__(self, api: Fenced) -> None:
        self._api = api
        self.stands = asyncio.Event()

    def writes_s(self) -> float:
        return self._api.may_s()

    def in_touch(self) -> bool:
        return True

    async def run(self, _: Cluster) -> None:
        self.stands.set()


class Process:
    """One autoscaler."""

    def __init__(self, name: str, options: ClusterOptions, acting: Fenced, asking: Api) -> None:
        self.api = acting
        self.chosen = Chosen(acting)
        self.cluster = Cluster(options, (acting, asking), cast("Elector", self.chosen), name, time.monotonic)
        self.cluster._own._clearing._assume_after_s = 0.05  # no agent reports measurements here
        self.loop = self.cluster.loop()

    @property
    def world(self) -> World:
        return self.loop.world


class Relay:
    """Both autoscalers, and one gateway that reports to both. `calls`: the models with waiting requests."""

    def __init__(self, one: Process, other: Process) -> None:
        self.leader, self.other = one, other
        self.calls: tuple[str, ...] = ()
        self._epoch = 0
        self._sequence = 0

    def lead(self) -> None:
        """Starts the leadership of the leader."""
        self._epoch += 1
        self.leader.api.leads = True
        self.leader.cluster.lead(self._epoch)

    async def hand_over(self) -> None:
        """Waits until the leader's writes have ended and makes the other lead before the first one notices."""
        await self.leader.api.ended.wait()
        self.leader, self.other = self.other, self.leader
        self.lead()
        await self.other.cluster.follow()

    async def gateway(self) -> None:
        """Follows the Routes with the higher epoch."""
        while True:
            acted_on = max((self.leader.world, self.other.world), key=lambda world: world.epoch)
            self._sequence += 1
            report = Report(
                gateway=GatewayId("g1"), boot="b", sequence=self._sequence, epoch=acted_on.epoch,
                version=acted_on.version, levels=tuple(level(name, 1) for name in self.calls),
                replicas=tuple(ReplicaUse(replica=id) for id in acted_on.replicas),
            )  # fmt: skip
            for one in (self.leader, self.other):
                one.loop.observe((Reported(report=report),))
            await asyncio.sleep(0.03)


@asynccontextmanager
async def relay(kubeconfig: Path, namespace: str) -> AsyncIterator[Relay]:
    """Yields when both have all state and the first one leads. They adopt workloads in that namespace."""
    way = await load_api_access(kubeconfig)
    options = ClusterOptions(namespace=namespace, gateway_pods="", adopt_in=(namespace,))
    async with Fenced(way) as a1, Fenced(way) as a2, Api(way) as asking, asyncio.TaskGroup() as tasks:
        one, other = (Process(name, options, acting, asking) for name, acting in (("a1", a1), ("a2", a2)))
        both, running = Relay(one, other), []
        for process in (one, other):
            process.cluster.put_files(DocumentsSeen())
            running += [tasks.create_task(process.loop.run()), tasks.create_task(process.cluster.run())]
            await process.chosen.stands.wait()
        running.append(tasks.create_task(both.gateway()))
        both.lead()
        try:
            yield both
        finally:
            for task in running:
                task.cancel()
            for process in (one, other):
                await process.cluster.close()
