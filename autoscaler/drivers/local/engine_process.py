"""One engine process that the local driver started: its model, its state and its end. No I/O.

An order to stop can only become more urgent.
"""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass, field

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import WeightsHandle
from autoscaler.drivers.local.ports import HOST
from autoscaler.drivers.local.replica_processes import ProcessSelector
from autoscaler.drivers.local.state_directory import ReplicaRecord
from autoscaler.state.events import ReplicaSeen, Seen
from autoscaler.state.world import Placing, Replica


@dataclass(slots=True, kw_only=True, eq=False)
class EngineProcess:
    """The engine of one replica. `child` None: it was adopted, and its exit status is not available."""

    mark: str
    record: ReplicaRecord
    child: subprocess.Popen[bytes] | None
    born_s: float
    """When its process started, on the `World`'s clock."""
    weights: WeightsHandle | None = None
    """The weights fetched for it, in use until it is clean."""
    placing: Placing = field(default_factory=Placing)
    waits: str = ""
    """Why it has no process yet."""
    seen: Seen = Seen.STARTING
    reason: str = ""
    owns_port: bool | None = None
    """Whether the listener on its port is its own process; None: not checked yet."""
    failed_probes: int = 0
    """Consecutive failed probes."""
    memory_bytes: int = 0
    """Memory of the host and of its devices at the last check."""
    used_bytes: int = 0
    """Memory used on each of its devices at the last check; 0: unknown."""
    reported_bytes: int = 0
    """`used_bytes` when it was last reported to exceed the claim; 0: never."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has ended or a stop was ordered."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its main process has ended."""
    _kill_s: float | None = None
    _grace: asyncio.Timeout | None = None

    @property
    def claim(self) -> ProcessSelector:
        """The selector of its processes."""
        return ProcessSelector(self.mark, self.record.pid, self.child is not None, self.record.start_ticks)

    def as_seen(self, *, proof: str = "", grew: bool = False) -> ReplicaSeen:
        """Return the observation for the `World`."""
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
        """Record that its main process has ended."""
        self.ended.set()
        self.stopping.set()

    def end_within(self, grace_s: float) -> None:
        """Order a stop, with a kill after `grace_s`. Of several orders the earliest kill applies."""
        kill_s = asyncio.get_running_loop().time() + grace_s
        self._kill_s = kill_s if self._kill_s is None else min(self._kill_s, kill_s)
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(self._kill_s)
        self.stopping.set()

    async def wait_for_end(self) -> bool:
        """Wait for the grace period; True if the process ended in time."""
        try:
            async with asyncio.timeout_at(self._kill_s) as self._grace:
                await self.ended.wait()
        except TimeoutError:
            return False
        finally:
            self._grace = None
        return True


def format_record_address(record: ReplicaRecord) -> str:
    """Return its address as routes contain it (`autoscaler.contract`); empty before it has a process."""
    if not record.pid:
        return ""
    if record.tls is None:
        return f"{HOST}:{record.port}"
    name = record.tls.server_name
    return f"https://{name}@{HOST}:{record.port}" if name else f"https://{HOST}:{record.port}"


def build_record(replica: Replica) -> ReplicaRecord:
    """Return the record of a replica whose process does not exist yet."""
    return ReplicaRecord(
        id=replica.id,
        model=replica.model,
        spec_hash=replica.spec_hash,
        intent=replica.intent,
        slices=replica.resources.slices,
        memory_bytes=replica.resources.memory_bytes,
        compute_percent=replica.resources.compute_percent,
        slots=replica.slots,
    )


def build_unknown_record(replica: ReplicaId) -> ReplicaRecord:
    """Return a placeholder record for a replica that is known only by the mark of its processes."""
    return ReplicaRecord(id=replica, model=ModelName(""), spec_hash="", intent="", slices=(), memory_bytes=0)
