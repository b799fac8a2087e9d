"""Reads a node's GPUs from sysfs, procfs, devfs and `nvidia-smi`, and executes the steps of `hotplug` on them. I/O.

All paths are relative to a root folder. The process needs root's rights and the node's PID namespace. Each command ends
within COMMAND_S. The next scan shows all effects, also those of a failed command. A step removes only
the named bus, and ends a process only if it still has the expected name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autoscaler.spec.quantity import whole_number
from pilotlight.agent.gpu import hotplug
from pilotlight.agent.gpu.hotplug import MODULES, Gpu, Holder, Seen, Step
from pilotlight.agent.kubelet.grpc_clients import pod_uid

_BUS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")

_ASKED = "uuid,pci.bus_id,memory.used,persistence_mode,mig.mode.current"

QUERY = (f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits")

APPS = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits")


COMMAND_S = 60.0
"""Time limit of a command. The memory of a newly found GPU is scrubbed first, which takes seconds."""
OUTPUT_BYTES_MAX = 1 << 20
NONE_FOUND = "no devices were found"
"""Output of nvidia-smi (exit status 6) if the driver has no GPU to show."""
NVIDIA, DISPLAY = "0x10de", "0x03"
SMI = "nvidia-smi"
UNLOAD = ("nsenter", "--target=1", "--mount", "--", "modprobe", "-r")
"""Runs the node's own modprobe, which unloads the node's modules."""


class StepError(Exception):
    """A step failed; `str()` contains the command and its output."""


class Answer(NamedTuple):
    """Exit status and output of a command."""

    status: int
    said: str


Command = Callable[[Sequence[str]], Awaitable[Answer]]


async def run_command(words: Sequence[str]) -> Answer:
    """Run a command. Status 127: no such program; 124: killed after COMMAND_S."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError:
        return Answer(127, f"{words[0]} is not installed")
    try:
        async with asyncio.timeout(COMMAND_S):
            said, _ = await process.communicate()
    except TimeoutError:
        return Answer(124, f"{words[0]} did not end within {COMMAND_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Answer(process.returncode or 0, said[:OUTPUT_BYTES_MAX].decode(errors="replace").strip())


class Bus:
    """The PCI bus, device files and driver of one node."""

    def __init__(self, root: Path = Path("/"), run: Command = run_command) -> None:
        self._pci = root / "sys/bus/pci"
        self._modules = root / "sys/module"
        self._proc, self._dev = root / "proc", root / "dev"
        self._run = run

    async def look(self, buses: Collection[str] = ()) -> Seen:
        """Return everything but pods, daemons and taints. `buses`: the GPUs that leave or have left. The drain state is
        read for them, and for each GPU that the driver does not show.
        """
        query, apps = await self._run((SMI, *QUERY)), await self._run((SMI, *APPS))
        shown = parse_gpu_query(query.said) if query.status == 0 or NONE_FOUND in query.said.lower() else None
        seen = await asyncio.to_thread(self._files, buses)
        named = {one.bus for one in (shown or {}).values()}
        asked = sorted((seen.buses - named) | (seen.buses & set(buses)))
        hidden = frozenset([bus for bus in asked if await self._hides(bus)])
        return seen._replace(shown=shown, hidden=hidden, computing=parse_compute_apps(apps.said))

    async def _hides(self, bus: str) -> bool:
        answer = await self._run((SMI, "drain", "-p", bus, "-q"))
        return answer.status == 0 and is_draining(answer.said)

    def _files(self, buses: Collection[str]) -> Seen:
        minors = dict(self._minors())
        sought = {f"/dev/nvidia{minor}": minor for bus, minor in minors.items() if bus in buses}
        return Seen(
            shown=None, buses=frozenset(self._buses()), minors=minors,
            holders=self._holders(sought) if sought else {},
            files=frozenset(minor for minor in minors.values() if (self._dev / f"nvidia{minor}").exists()),
            modules=frozenset(one for one in MODULES if (self._modules / one).exists()),
        )  # fmt: skip

    def _buses(self) -> Iterator[str]:
        for folder in _entries(self._pci / "devices"):
            bus = parse_bus_address(folder.name)
            if bus and _text(folder / "vendor") == NVIDIA and _text(folder / "class").startswith(DISPLAY):
                yield bus

    def _minors(self) -> Iterator[tuple[str, int]]:
        for folder in _entries(self._proc / "driver/nvidia/gpus"):
            minor = parse_device_minor(_text(folder / "information"))
            if (bus := parse_bus_address(folder.name)) and minor is not None:
                yield bus, minor

    def _holders(self, sought: Mapping[str, int]) -> dict[int, tuple[Holder, ...]]:
        found: dict[int, tuple[Holder, ...]] = {}
        for folder in _entries(self._proc):
            if not folder.name.isdecimal():
                continue
            opened = {sought[path] for path in _links(folder / "fd") if path in sought}
            if opened:
                holder = Holder(int(folder.name), _text(folder / "comm"), pod_uid(_text(folder / "cgroup")))
                for minor in opened:
                    found[minor] = (*found.get(minor, ()), holder)
        return found

    # --- steps --------------------------------------------------------------------------------------------------------

    async def act(self, step: Step) -> None:
        """Execute a step on the bus, the driver or a process. Raises StepError."""
        match step.does, step.of:
            case "scan", buses:
                for bus in buses:  # the driver gave up on the GPU, or it was hidden from the driver
                    await asyncio.to_thread(_write, self._pci / "drivers_probe", bus)
                await asyncio.to_thread(_write, self._pci / "rescan", "1")
            case "show", (bus,):
                await self._smi("drain", "-p", bus, "-m", "0")
            case "hide", (bus,):
                await self._smi("drain", "-p", bus, "-m", "1")
            case "unkeep", (device,):
                await self._smi("-i", device, "-pm", "0")
            case "take", (bus,):
                with contextlib.suppress(StepError):  # fails in a virtual machine, where the kernel's removal works
                    await self._smi("drain", "-p", bus, "-r")
            case "remove", (bus,):
                await asyncio.to_thread(_write, self._pci / "devices" / bus / "remove", "1")
            case "unlink", (minor,):
                await asyncio.to_thread((self._dev / f"nvidia{minor}").unlink, missing_ok=True)
            case "unload", modules:
                await self._ran((*UNLOAD, *modules))
            case "end", (pid,):
                await asyncio.to_thread(self._end, int(pid))
            case _:
                raise ValueError(step.does)

    async def _smi(self, *words: str) -> None:
        await self._ran((SMI, *words))

    async def _ran(self, words: Sequence[str]) -> None:
        answer = await self._run(words)
        if answer.status:
            said = answer.said.splitlines()[0] if answer.said else "nothing"
            raise StepError(f"{' '.join(words)} failed with status {answer.status}: {said}")

    def _end(self, pid: int) -> None:
        """Send SIGTERM if the process is still persistenced."""
        if _text(self._proc / str(pid) / "comm").startswith(hotplug.KEEPER[:15]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder; empty if it does not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Return a file's text without surrounding whitespace; empty if it cannot be read or is gone."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _links(folder: Path) -> Iterator[str]:
    """Yield the targets of the links in a folder."""
    for one in _entries(folder):
        with contextlib.suppress(OSError):
            yield str(one.readlink())


def _write(path: Path, text: str) -> None:
    """Write to an existing file. Raises StepError."""
    try:
        with path.open("w") as file:  # fails where sysfs lacks the file
            file.write(text)
    except OSError as error:
        raise StepError(f"{path.name} of the PCI bus cannot be written: {error.strerror}") from None


def parse_bus_address(text: str) -> str:
    """Return an address as sysfs writes it, `0000:18:00.0`; empty if `text` is none."""
    found = _BUS.fullmatch(text.strip())
    if found is None:
        return ""
    domain, bus, slot, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{slot}.{function}".lower()


def parse_gpu_query(text: str) -> dict[str, Gpu]:
    """Parse the output of `nvidia-smi` QUERY: `GPU-..., 00000000:18:00.0, 4, Disabled, [N/A]`. Skip other lines."""
    found: dict[str, Gpu] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].startswith("GPU-") and (bus := parse_bus_address(cells[1])):
            mib = whole_number(cells[2]) or 0
            whole = cells[4].strip("[]").lower() in {"disabled", "n/a", "not supported"}
            found[cells[0]] = Gpu(bus, mib << 20, kept=cells[3].lower() == "enabled", cut=not whole)
    return found


def parse_compute_apps(text: str) -> dict[str, tuple[int, ...]]:
    """Parse the output of `nvidia-smi` APPS: `GPU-..., 4711`."""
    found: dict[str, tuple[int, ...]] = {}
    for line in text.splitlines():
        uuid, _, pid = (cell.strip() for cell in line.partition(","))
        if uuid.startswith("GPU-") and (number := whole_number(pid)) is not None:
            found[uuid] = (*found.get(uuid, ()), number)
    return found


def is_draining(text: str) -> bool:
    """Parse the output of `nvidia-smi drain -p BUS -q`: `... is: draining.`, or `... is: not draining.`"""
    said = text.lower()
    return "draining" in said and "not draining" not in said


def parse_device_minor(text: str) -> int | None:
    """Parse the minor in /proc/driver/nvidia/gpus/BUS/information, or return None if it is missing."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Device Minor" and (minor := whole_number(value.strip())) is not None:
            return minor
    return None
