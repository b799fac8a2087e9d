"""Decides, from an observation of a running node, the next step of attaching or detaching a fabric GPU. Pure.

Attaching: scan the bus until the driver shows the GPU, then restart once the pods that report devices to the kubelet
(device plug-in, DRA driver).

Detaching, for a GPU that receives no new pods: wait until no process computes on it, no pod has it and its memory is
free. Then taint it, turn off persistence mode, hide it from new processes, have the node's daemons release it, and
remove it from the bus. Steps are idempotent: the next look shows their effect.

A GPU in use is never removed. Only persistenced and the configured daemon pods are terminated. Withdrawn requests are
undone. A GPU whose location is unknown is not reported as gone. A GPU that was removed from the bus is not added to
it again before its detachment is complete; another GPU found at its address is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple

VISIBLE_S: Final = 300.0
"""An attached GPU that is not visible after this time has failed: the fabric needs less than ten minutes."""
SCAN_S: Final = 5.0
"""Minimum interval between two bus scans for one GPU, since link training takes time."""
IDLE_BYTES_MAX = 1 << 30
"""Upper bound of the memory that a driver and its daemons use on an idle GPU."""
KEEPER = "nvidia-persisten"
"""persistenced, truncated as in the kernel (15 characters and a NUL)."""
PART = "MIG-"
"""Prefix of the names of MIG slices."""
MODULES = ("nvidia_drm", "nvidia_uvm")
"""Modules that keep a driver's last GPU in use."""

Does = Literal[
    "scan", "restart", "taint", "untaint", "unkeep", "hide", "show", "end", "unlink", "unload", "take", "remove"
]
"""`take`: remove from the bus by the driver; `remove`: by the kernel."""


class Step(NamedTuple):
    """A step and its targets: buses, UUIDs, process ids, minors, modules or pod UIDs."""

    does: Does
    of: tuple[str, ...] = ()


class Stand(NamedTuple):
    """No step is possible now: the job is done, has failed, or waits."""

    says: str = ""
    done: bool = False
    failed: bool = False


class Gpu(NamedTuple):
    """A GPU as the driver shows it to a newly started program."""

    bus: str
    used_bytes: int = 0
    kept: bool = False
    """Whether persistence mode is on."""
    cut: bool = False
    """Whether MIG mode is on or unknown: pods then have slices, whose names do not identify the GPU."""


class Holder(NamedTuple):
    """A process that has a GPU open."""

    pid: int
    name: str
    pod: str = ""
    """UID of its pod; empty for a process outside of pods."""


class DaemonPod(NamedTuple):
    """A pod of the node that detects GPUs only at startup."""

    name: str
    ready: bool
    going: bool = False


class Seen(NamedTuple):
    """Everything seen in one look."""

    shown: Mapping[str, Gpu] | None
    """By UUID; None if the driver does not answer."""
    buses: frozenset[str]
    """PCI addresses of NVIDIA GPUs."""
    minors: Mapping[str, int] = {}
    """Device file minors by bus, for the GPUs that the driver has, shown or not."""
    hidden: frozenset[str] = frozenset()
    """Buses whose GPU the driver hides from new processes."""
    computing: Mapping[str, tuple[int, ...]] = {}
    """Process ids, by UUID."""
    holders: Mapping[int, tuple[Holder, ...]] = {}
    """Processes that have the device file open, by minor."""
    files: frozenset[int] = frozenset()
    """Minors whose device file exists."""
    modules: frozenset[str] = frozenset()
    """Loaded modules out of MODULES."""
    pods: Mapping[str, str] = {}
    """The pod (NAMESPACE/NAME) that has each GPU or MIG slice, by UUID or slice name, as the kubelet reports it."""
    daemons: Mapping[str, DaemonPod] = {}
    """By UID."""
    tainted: Mapping[str, bool] = {}
    """Whether a GPU is tainted, by UUID, for GPUs that a driver publishes."""
    trouble: str = ""
    """The reason why this look is incomplete; no steps are executed meanwhile."""


class Job(NamedTuple):
    """One GPU to be attached or detached."""

    device: str
    leave: bool
    since_s: float
    bus: str = ""
    """Where it was last seen; empty if never."""
    stale: frozenset[str] | None = None
    """UIDs of daemon pods that started before the GPU appeared or disappeared; None until then."""
    scanned_s: float | None = None
    taken: bool = False
    """Whether the driver or the kernel was requested to remove it."""

    @property
    def off(self) -> bool:
        """Whether it is off the bus or about to be. Its link may still be up: a scan would find it."""
        return self.leave and (self.taken or self.stale is not None)


def observe_job(job: Job, seen: Seen) -> Job:
    """Return the job updated from this look; unchanged if the look was incomplete."""
    if seen.shown is None or seen.trouble:
        return job
    gpu = seen.shown.get(job.device)
    if gpu is not None:
        job = job._replace(bus=gpu.bus)
    there = gpu is not None if not job.leave else not _gone(job, seen)
    if there == job.leave:  # a GPU that is back after it left is detached from the beginning
        return job._replace(stale=None, taken=job.taken and job.stale is None)
    return job._replace(stale=frozenset(seen.daemons) if job.stale is None else job.stale)


def record_step(job: Job, step: Step, now_s: float) -> Job:
    """Return the job after a step was executed."""
    if step.does == "scan":
        return job._replace(scanned_s=now_s)
    return job._replace(taken=True) if step.does in {"take", "remove"} else job


def next_step(job: Job, seen: Seen, now_s: float, jobs: Collection[Job] = ()) -> Step | Stand:
    """Return the next step of a job. `observe_job` must have been applied to it and to all `jobs` of the node."""
    if seen.trouble:
        return _late(job, seen.trouble, now_s)
    if seen.shown is None:
        return _late(job, "the driver does not answer (nvidia-smi)", now_s)
    return _leaving(job, seen, seen.shown) if job.leave else _coming(job, seen, seen.shown, now_s, jobs)


def next_undo_step(job: Job, seen: Seen) -> Step | None:
    """Return the next step after a detachment was withdrawn or completed: show the GPU if it is still hidden, then
    delete its taint. None if nothing is left.
    """
    if job.leave and job.bus in seen.hidden and job.bus in seen.buses:
        return Step("show", (job.bus,))
    return Step("untaint", (job.device,)) if job.leave and seen.tainted.get(job.device) else None


def list_cleanup_steps(jobs: Collection[Job], seen: Seen) -> tuple[Step, ...]:
    """Return steps that undo leftovers of a previous agent process; none while a job may still need them."""
    if seen.trouble or any(one.leave for one in jobs):
        return ()
    shows = (Step("show", (bus,)) for bus in sorted(seen.hidden & seen.buses))
    return (*shows, *(Step("untaint", (device,)) for device, tainted in sorted(seen.tainted.items()) if tainted))


def _late(job: Job, says: str, now_s: float) -> Stand:
    """Return the state of a waiting job: attachment fails after VISIBLE_S, detachment waits while it is requested."""
    return Stand(says, failed=not job.leave and now_s >= job.since_s + VISIBLE_S)


# --- attaching --------------------------------------------------------------------------------------------------------


def _coming(job: Job, seen: Seen, shown: Mapping[str, Gpu], now_s: float, jobs: Collection[Job]) -> Step | Stand:
    if job.device in shown:
        registered = _register(job, seen)
        return (
            _late(job, registered.says, now_s) if isinstance(registered, Stand) and not registered.done else registered
        )
    off = min((one.device for one in jobs if one.off), default="")
    if off:
        waits = f"the scan of the bus for this device waits until the removed device {off} is detached"
        return _late(job, waits, now_s)
    late = _late(job, "it is attached, but the node's driver does not show it", now_s)
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


def _register(job: Job, seen: Seen) -> Step | Stand:
    """Restart the daemon pods that report devices to the kubelet, or report whether all have started since."""
    stale = tuple(sorted(uid for uid in job.stale or () if uid in seen.daemons))
    todo = tuple(uid for uid in stale if not seen.daemons[uid].going)
    if todo:
        return Step("restart", todo)
    waits = sorted(one.name for uid, one in seen.daemons.items() if uid in stale or not one.ready)
    return Stand(f"{waits[0]} is starting") if waits else Stand(done=True)


def _nameless(shown: Mapping[str, Gpu], seen: Seen) -> tuple[str, ...]:
    """Return buses with a GPU that the driver does not show."""
    return tuple(sorted(seen.buses - {one.bus for one in shown.values()}))


# --- detaching --------------------------------------------------------------------------------------------------------


def _gone(job: Job, seen: Seen) -> bool:
    """Return whether the GPU is known to be off the bus. Once it was off the bus, only the driver can show that it is
    back, since another GPU may have taken its place.
    """
    if seen.shown is None or seen.trouble or job.device in seen.shown:
        return False
    nameless = _nameless(seen.shown, seen)
    return job.stale is not None or (job.bus not in nameless if job.bus else not nameless)


def _leaving(job: Job, seen: Seen, shown: Mapping[str, Gpu]) -> Step | Stand:
    gpu = shown.get(job.device)
    if _gone(job, seen):
        return _register(job, seen)
    if not job.bus:
        nameless = _nameless(shown, seen)
        hidden = [bus for bus in nameless if bus in seen.hidden]  # hidden by us, before a restart of the agent
        doubt = f"the GPU at {nameless[0]} has no driver and may be this device"
        return Step("show", (hidden[0],)) if hidden else Stand(doubt)
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
    """Return what uses the GPU; empty if nothing does."""
    computing = seen.computing.get(job.device, ())
    if computing:
        return f"process {computing[0]} computes on it"
    if job.device in seen.pods:
        return f"pod {seen.pods[job.device]} uses it"
    parts = sorted(pod for name, pod in seen.pods.items() if gpu.cut and name.startswith(PART))
    if parts:
        return f"pod {parts[0]} uses a MIG slice, possibly of this GPU"
    if gpu.used_bytes > IDLE_BYTES_MAX:
        return f"{gpu.used_bytes >> 20} MiB of its memory are in use"
    return ""


def _let_go(job: Job, seen: Seen, shown: Mapping[str, Gpu]) -> Step | Stand:
    """Return the next step for a GPU hidden from new processes: end what has it open, then remove it."""
    minor = seen.minors.get(job.bus)
    if minor is not None:
        for one in seen.holders.get(minor, ()):
            if one.name.startswith(KEEPER[:15]):
                return Step("end", (str(one.pid),))
            if one.pod in seen.daemons:
                going = seen.daemons[one.pod].going
                return Stand(f"{seen.daemons[one.pod].name} is terminating") if going else Step("restart", (one.pod,))
            return Stand(f"process {one.pid} ({one.name}) has it open")
        if minor in seen.files:
            return Step("unlink", (str(minor),))
        if len(seen.minors) == 1 and seen.modules and not shown.keys() - {job.device}:
            return Step("unload", tuple(one for one in MODULES if one in seen.modules))
        if not job.taken:
            return Step("take", (job.bus,))
    return Step("remove", (job.bus,))
