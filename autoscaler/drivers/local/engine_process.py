"""One engine process as the local driver knows it: its record, and the two things that can happen to it.

Owns the order of its end: an order to stop can only become more urgent, and its end is noticed once. No I/O of its own.
"""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass, field

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import WeightsHandle
from autoscaler.drivers.local.ports import HOST
from autoscaler.drivers.local.processes import ProcessSelector
from autoscaler.drivers.local.state_directory import ReplicaRecord
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import Placing, Replica


@dataclass(slots=True, kw_only=True, eq=False)
class EngineProcess:
    """The engine of one Replica. `child` None: adopted, so that its exit status goes to somebody else."""

    mark: str
    record: ReplicaRecord
    child: subprocess.Popen[bytes] | None
    born_s: float
    """When its process started, on the World's clock."""
    weights: WeightsHandle | None = None
    """What was brought for it, in use until nothing of it is left."""
    placing: Placing = field(default_factory=Placing)
    waits: str = ""
    """Why it has no process yet."""
    seen: Seen = Seen.STARTING
    reason: str = ""
    owns_port: bool | None = None
    """Whether the process that listens on its port is its own; None: nobody has looked since somebody listens."""
    failed_probes: int = 0
    """In a row."""
    memory_bytes: int = 0
    """At the last look, of the host and of its devices."""
    used_bytes: int = 0
    """At the last look, of each Device that it is on; 0: that cannot be told."""
    reported_bytes: int = 0
    """`used_bytes` when it was last reported to exceed the claim; 0: never."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has ended or is to be stopped."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Its main process has ended."""
    _kill_s: float | None = None
    _grace: asyncio.Timeout | None = None

    @property
    def claim(self) -> ProcessSelector:
        """Which processes are its."""
        return ProcessSelector(self.mark, self.record.pid, self.child is not None, self.record.start_ticks)

    def as_seen(self, *, proof: str = "", grew: bool = False) -> ReplicaSeen:
        """What the World is told of it."""
        record = self.record
        return ReplicaSeen(
            id=record.id,
            model=record.model,
            spec_hash=record.spec_hash,
            intent=record.intent,
            slices=record.slices,
            memory_bytes=record.memory_bytes,
            slots=record.slots,
            seen=self.seen,
            compute_percent=record.compute_percent,
            address=format_record_address(record),
            started_s=self.born_s if record.pid else None,
            placing=self.placing,
            waits=self.waits,
            grew=grew,
            used_bytes=self.used_bytes,
            reason=self.reason,
            proof=proof,
        )

    def end(self) -> None:
        """Its main process has ended."""
        self.ended.set()
        self.over.set()

    def end_within(self, grace_s: float) -> None:
        """It is to be stopped, and killed after `grace_s`; of several orders the most urgent holds."""
        kill_s = asyncio.get_running_loop().time() + grace_s
        self._kill_s = kill_s if self._kill_s is None else min(self._kill_s, kill_s)
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(self._kill_s)
        self.over.set()

    async def wait_for_end(self) -> bool:
        """Waits out its grace; True when it ended in time."""
        try:
            async with asyncio.timeout_at(self._kill_s) as self._grace:
                await self.ended.wait()
        except TimeoutError:
            return False
        finally:
            self._grace = None
        return True


def format_record_address(record: ReplicaRecord) -> str:
    """Where gateways reach it, as Routes say it (`autoscaler.contract`); empty before it has a process."""
    if not record.pid:
        return ""
    if record.tls is None:
        return f"{HOST}:{record.port}"
    name = record.tls.server_name
    return f"https://{name}@{HOST}:{record.port}" if name else f"https://{HOST}:{record.port}"


def build_record(replica: Replica) -> ReplicaRecord:
    """The record of a Replica whose process does not exist yet."""
    return ReplicaRecord(
        id=replica.id,
        model=replica.model,
        spec_hash=replica.spec_hash,
        intent=replica.intent,
        slices=replica.slices,
        memory_bytes=replica.memory_bytes,
        compute_percent=replica.compute_percent,
        slots=replica.slots,
    )


def build_unknown_record(replica: ReplicaId) -> ReplicaRecord:
    """Stands for the record of a Replica of which only a mark is known."""
    return ReplicaRecord(id=replica, model=ModelName(""), spec_hash="", intent="", slices=(), memory_bytes=0)
