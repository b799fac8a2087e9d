"""GPUs of a fabric that come to a node and leave it while it runs: what is to be done next, from what is seen. Pure.

Owns the order of both. Coming: the bus is scanned, the driver shows it, and what tells a kubelet of devices (device
plug-in, DRA driver) starts anew, once. Leaving, of a GPU that nobody may be put on any more: nobody computes on it, no
pod has it and its memory is free; then it is tainted, kept alive by nobody, hidden from whoever comes, let go of by the
node's own daemons, and taken off the bus. Each step is one that may be done twice: the next look tells what it did.

Promises: what is used stays, whoever asks; nobody but persistenced is ended, and no pod but those that are named; what
is asked for no more is undone. A GPU of which it is not known where it is, is not said to be gone; one that has left is
not brought back until it is detached, and what is in its place by then is another's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple

VISIBLE_S: Final = 300.0
"""What was attached, and is not seen by then, has failed: the fabric's own way takes less than ten minutes."""
SCAN_S: Final = 5.0
"""Between two scans of the bus for one GPU: a link takes its time."""
IDLE_BYTES_MAX = 1 << 30
"""What a driver and its daemons keep of a GPU that nobody uses, and more."""
KEEPER = "nvidia-persisten"
"""persistenced, as the kernel shortens names (15 characters and a NUL)."""
PART = "MIG-"
"""So the names of a GPU's parts begin."""
MODULES = ("nvidia_drm", "nvidia_uvm")
"""They hold a driver's last GPU."""
_BUS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")

Does = Literal[
    "scan", "restart", "taint", "untaint", "unkeep", "hide", "show", "end", "unlink", "unload", "take", "remove"
]
"""`take`: off the bus by the driver; `remove`: by the kernel."""


class Step(NamedTuple):
    """Something to do, and to whom: a bus, a UUID, a process id, a minor, or pods' uids."""

    does: Does
    of: tuple[str, ...] = ()


class Stand(NamedTuple):
    """There is nothing to do now: it is done, has failed, or waits for somebody."""

    says: str = ""
    done: bool = False
    failed: bool = False


class Gpu(NamedTuple):
    """A GPU as the driver shows it to a program that starts now."""

    bus: str
    used_bytes: int = 0
    kept: bool = False
    """Persistence mode."""
    cut: bool = False
    """MIG mode, or nobody knows: what pods have of it are parts, whose names do not tell of which GPU they are."""


class Holder(NamedTuple):
    """A process that has a GPU open."""

    pid: int
    name: str
    pod: str = ""
    """The uid of the pod that it is of; empty: of none."""


class DaemonPod(NamedTuple):
    """A pod of the node that looks at GPUs only when it starts."""

    name: str
    ready: bool
    going: bool = False


class Seen(NamedTuple):
    """All that was seen at one time."""

    shown: Mapping[str, Gpu] | None
    """By UUID; None: the driver does not answer."""
    buses: frozenset[str]
    """Where NVIDIA's GPUs are on PCI."""
    minors: Mapping[str, int] = {}
    """By bus: the device files of those that the driver has, shown or not."""
    hidden: frozenset[str] = frozenset()
    """Buses whose GPU the driver shows to nobody who comes."""
    computing: Mapping[str, tuple[int, ...]] = {}
    """Processes, by UUID."""
    holders: Mapping[int, tuple[Holder, ...]] = {}
    """By minor: those that have its file open."""
    files: frozenset[int] = frozenset()
    """Minors whose file is there."""
    modules: frozenset[str] = frozenset()
    """Those of MODULES that are loaded."""
    pods: Mapping[str, str] = {}
    """By UUID, or a part's name, the pod that its kubelet gave it to, NAMESPACE/NAME."""
    daemons: Mapping[str, DaemonPod] = {}
    """By uid."""
    tainted: Mapping[str, bool] = {}
    """By UUID, of those that could be: where a driver publishes them."""
    trouble: str = ""
    """What could not be seen, in words: nothing is done while it is so."""


class Job(NamedTuple):
    """One GPU that comes or leaves."""

    device: str
    leave: bool
    since_s: float
    bus: str = ""
    """Where it was last seen; empty: it was not yet."""
    stale: frozenset[str] | None = None
    """Daemons that had started before it was shown, or gone; None: it is not."""
    scanned_s: float | None = None
    taken: bool = False
    """The driver, or the kernel, was told to take it off."""

    @property
    def off(self) -> bool:
        """It is off the bus, or about to be, and may be linked still: a scan would find it."""
        return self.leave and (self.taken or self.stale is not None)


def observe_job(job: Job, seen: Seen) -> Job:
    """With what this look adds to what is known of it: nothing, where it was not a whole one."""
    if seen.shown is None or seen.trouble:
        return job
    gpu = seen.shown.get(job.device)
    if gpu is not None:
        job = job._replace(bus=gpu.bus)
    there = gpu is not None if not job.leave else not _gone(job, seen)
    if there == job.leave:  # what had left, and is back, is let go of as if it never had
        return job._replace(stale=None, taken=job.taken and job.stale is None)
    return job._replace(stale=frozenset(seen.daemons) if job.stale is None else job.stale)


def record_step(job: Job, step: Step, now_s: float) -> Job:
    """After a step."""
    if step.does == "scan":
        return job._replace(scanned_s=now_s)
    return job._replace(taken=True) if step.does in {"take", "remove"} else job


def next_step(job: Job, seen: Seen, now_s: float, jobs: Collection[Job] = ()) -> Step | Stand:
    """Of a job that is `observe_job`, as all `jobs` of the node are."""
    if seen.trouble:
        return _late(job, seen.trouble, now_s)
    if seen.shown is None:
        return _late(job, "the driver does not answer (nvidia-smi)", now_s)
    return _leaving(job, seen, seen.shown) if job.leave else _coming(job, seen, seen.shown, now_s, jobs)


def next_undo_step(job: Job, seen: Seen) -> Step | None:
    """Of one that is to leave no more, or has left: what of it is to be taken back. None: nothing (more)."""
    if job.leave and job.bus in seen.hidden and job.bus in seen.buses:
        return Step("show", (job.bus,))
    return Step("untaint", (job.device,)) if job.leave and seen.tainted.get(job.device) else None


def list_cleanup_steps(jobs: Collection[Job], seen: Seen) -> tuple[Step, ...]:
    """What an agent before this one did, and nobody asks for any more: it is taken back, where no job may need it."""
    if seen.trouble or any(one.leave for one in jobs):
        return ()
    shows = (Step("show", (bus,)) for bus in sorted(seen.hidden & seen.buses))
    return (*shows, *(Step("untaint", (device,)) for device, tainted in sorted(seen.tainted.items()) if tainted))


def _late(job: Job, says: str, now_s: float) -> Stand:
    """What comes is waited for so long; what leaves, for as long as it is asked for."""
    return Stand(says, failed=not job.leave and now_s >= job.since_s + VISIBLE_S)


# --- it comes ---------------------------------------------------------------------------------------------------------


def _coming(job: Job, seen: Seen, shown: Mapping[str, Gpu], now_s: float, jobs: Collection[Job]) -> Step | Stand:
    if job.device in shown:
        told = _told(job, seen)
        return _late(job, told.says, now_s) if isinstance(told, Stand) and not told.done else told
    off = min((one.device for one in jobs if one.off), default="")
    if off:
        return _late(job, f"it is scanned for once {off}, which has left, is detached", now_s)
    late = _late(job, "it is attached, and the node's driver does not show it", now_s)
    if late.failed:
        return late
    theirs = {one.bus for one in jobs if one.leave}
    nameless = tuple(bus for bus in _nameless(shown, seen) if bus not in theirs)
    for bus in nameless:
        if bus in seen.hidden:
            return Step("show", (bus,))
    if job.scanned_s is not None and now_s < job.scanned_s + SCAN_S:
        return late
    return Step("scan", nameless)


def _told(job: Job, seen: Seen) -> Step | Stand:
    """Whether those that tell a kubelet of devices have started since."""
    stale = tuple(sorted(uid for uid in job.stale or () if uid in seen.daemons))
    todo = tuple(uid for uid in stale if not seen.daemons[uid].going)
    if todo:
        return Step("restart", todo)
    waits = sorted(one.name for uid, one in seen.daemons.items() if uid in stale or not one.ready)
    return Stand(f"{waits[0]} is starting") if waits else Stand(done=True)


def _nameless(shown: Mapping[str, Gpu], seen: Seen) -> tuple[str, ...]:
    """Buses with a GPU that the driver does not show."""
    return tuple(sorted(seen.buses - {one.bus for one in shown.values()}))


# --- it leaves --------------------------------------------------------------------------------------------------------


def _gone(job: Job, seen: Seen) -> bool:
    """Whether it is known to be on the bus no more. Once it was, only the driver can tell that it is back: what else is
    in its place may be another, that came after it.
    """
    if seen.shown is None or seen.trouble or job.device in seen.shown:
        return False
    nameless = _nameless(seen.shown, seen)
    return job.stale is not None or (job.bus not in nameless if job.bus else not nameless)


def _leaving(job: Job, seen: Seen, shown: Mapping[str, Gpu]) -> Step | Stand:
    gpu = shown.get(job.device)
    if _gone(job, seen):
        return _told(job, seen)
    if not job.bus:
        nameless = _nameless(shown, seen)
        hidden = [bus for bus in nameless if bus in seen.hidden]  # we hid it, before we started anew
        return Step("show", (hidden[0],)) if hidden else Stand(f"the GPU at {nameless[0]} may be it: its driver is off")
    if gpu is not None:
        used = _used(job, seen, gpu)
        if used:
            return Stand(used)
        if seen.tainted.get(job.device) is False:
            return Step("taint", (job.device,))
        if gpu.kept:
            return Step("unkeep", (job.device,))
    if job.bus in seen.minors and job.bus not in seen.hidden:
        return Step("hide", (job.bus,))
    return _let_go(job, seen, shown)


def _used(job: Job, seen: Seen, gpu: Gpu) -> str:
    """By whom, in words; empty: by nobody."""
    computing = seen.computing.get(job.device, ())
    if computing:
        return f"process {computing[0]} computes on it"
    if job.device in seen.pods:
        return f"pod {seen.pods[job.device]} has it"
    parts = sorted(pod for name, pod in seen.pods.items() if gpu.cut and name.startswith(PART))
    if parts:
        return f"pod {parts[0]} has a MIG part, which may be of it"
    if gpu.used_bytes > IDLE_BYTES_MAX:
        return f"{gpu.used_bytes >> 20} MiB of its memory are held"
    return ""


def _let_go(job: Job, seen: Seen, shown: Mapping[str, Gpu]) -> Step | Stand:
    """Nobody who comes sees it: who has it open lets go, and it goes."""
    minor = seen.minors.get(job.bus)
    if minor is not None:
        for one in seen.holders.get(minor, ()):
            if one.name.startswith(KEEPER[:15]):
                return Step("end", (str(one.pid),))
            if one.pod in seen.daemons:
                going = seen.daemons[one.pod].going
                return Stand(f"{seen.daemons[one.pod].name} is ending") if going else Step("restart", (one.pod,))
            return Stand(f"process {one.pid} ({one.name}) has it open")
        if minor in seen.files:
            return Step("unlink", (str(minor),))
        if len(seen.minors) == 1 and seen.modules and not shown.keys() - {job.device}:
            return Step("unload", tuple(one for one in MODULES if one in seen.modules))
        if not job.taken:
            return Step("take", (job.bus,))
    return Step("remove", (job.bus,))


# --- what programs and files say --------------------------------------------------------------------------------------


def parse_bus_address(text: str) -> str:
    """As sysfs names it: `0000:18:00.0`; empty: it is none."""
    found = _BUS.fullmatch(text.strip())
    if found is None:
        return ""
    domain, bus, slot, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{slot}.{function}".lower()


_ASKED = "uuid,pci.bus_id,memory.used,persistence_mode,mig.mode.current"
QUERY = (f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits")
APPS = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits")


def parse_gpu_query(text: str) -> dict[str, Gpu]:
    """What `nvidia-smi` QUERY prints: `GPU-..., 00000000:18:00.0, 4, Disabled, [N/A]`. Other lines are left out."""
    found: dict[str, Gpu] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].startswith("GPU-") and (bus := parse_bus_address(cells[1])):
            mib = int(cells[2]) if cells[2].isdecimal() else 0
            whole = cells[4].strip("[]").lower() in {"disabled", "n/a", "not supported"}
            found[cells[0]] = Gpu(bus, mib << 20, kept=cells[3].lower() == "enabled", cut=not whole)
    return found


def parse_compute_apps(text: str) -> dict[str, tuple[int, ...]]:
    """What `nvidia-smi` APPS prints: `GPU-..., 4711`."""
    found: dict[str, tuple[int, ...]] = {}
    for line in text.splitlines():
        uuid, _, pid = (cell.strip() for cell in line.partition(","))
        if uuid.startswith("GPU-") and pid.isdecimal():
            found[uuid] = (*found.get(uuid, ()), int(pid))
    return found


def is_draining(text: str) -> bool:
    """What `nvidia-smi drain -p BUS -q` prints: `... is: draining.`, or `... is: not draining.`"""
    said = text.lower()
    return "draining" in said and "not draining" not in said


def parse_device_minor(text: str) -> int | None:
    """Of /proc/driver/nvidia/gpus/BUS/information; None: it does not say."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Device Minor" and value.strip().isdecimal():
            return int(value)
    return None
