"""The simulated GPUs of a node: a tree with sysfs, procfs and devfs below a root, and a consistent fake `nvidia-smi`.

It behaves as real hardware was observed or is documented to: a linked GPU is on the bus after a scan; the driver binds
it unless it is hidden; programs that start later do not see a hidden GPU; a GPU that is open, or whose driver is kept
alive, cannot be removed. Writes into the tree take effect at the next command, whereas the kernel would apply them at
once. The kubelet's daemon pods are objects of a fake API server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.agent.gpu.pci_bus import Answer
from tests.support.fakes.kubernetes.kube_objects import PlayedServer

NODE, GPU_OPERATOR = "w1", "gpu-operator"
PLUGIN = "app=nvidia-device-plugin-daemonset"
POD_UID = "0f3a1c52-7b1e-4d2a-9a55-{:012d}"


@dataclass
class PlayedGpu:
    """One GPU, linked to this node."""

    uuid: str
    bus: str
    minor: int
    used_mib: int = 4
    kept: bool = False
    cut: bool = False
    """Whether MIG mode is on."""
    computing: tuple[int, ...] = ()
    on_bus: bool = False
    driven: bool = False
    """Whether the driver has bound it."""


@dataclass
class PlayedNode:
    """See the module. `virtual`: the driver cannot remove a GPU from the bus there."""

    root: Path
    server: PlayedServer
    gpus: dict[str, PlayedGpu] = field(default_factory=dict)
    """All linked GPUs by bus address."""
    hidden: set[str] = field(default_factory=set)
    """Bus addresses of hidden GPUs; they stay hidden."""
    virtual: bool = False
    answers: bool = True
    """Whether the driver responds."""
    deaf: bool = False
    """The driver binds no new GPU."""
    commands: list[str] = field(default_factory=list)
    """Commands that change something and files that were written, in order."""
    pods: int = 0

    def __post_init__(self) -> None:
        self._pci = self.root / "sys/bus/pci"
        for folder in (self._pci / "devices", self.root / "sys/module", self.root / "proc", self.root / "dev"):
            folder.mkdir(parents=True)
        for name in ("rescan", "drivers_probe"):
            (self._pci / name).write_text("")
        for module in ("nvidia_drm", "nvidia_uvm"):
            (self.root / "sys/module" / module).mkdir()
        self.start_plugin()

    # --- controls for tests -------------------------------------------------------------------------------------------

    def link(self, uuid: str, bus: str, *, here: bool = False) -> PlayedGpu:
        """The fabric links a GPU. `here`: the scan and everything after it are done, too."""
        minor = min(set(range(len(self.gpus) + 1)) - {one.minor for one in self.gpus.values()})
        gpu = self.gpus[bus] = PlayedGpu(uuid, bus, minor)
        if here:
            self._scan()
        return gpu

    def detach(self, bus: str) -> None:
        """The fabric detaches a GPU."""
        assert not self.gpus[bus].driven, "its driver would fail"
        del self.gpus[bus]

    def hold(self, pid: int, gpu: PlayedGpu, name: str, pod: str = "") -> None:
        """A process opens the GPU."""
        folder = self.root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/7").symlink_to(f"/dev/nvidia{gpu.minor}")
        (folder / "fd/8").symlink_to("/dev/null")
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(f"0::/kubepods/besteffort/pod{pod}/4711\n" if pod else "0::/system.slice\n")

    def let_go(self, pid: int) -> None:
        """The process exits."""
        folder = self.root / "proc" / str(pid)
        for one in (*(folder / "fd").iterdir(), folder / "comm", folder / "cgroup"):
            one.unlink()
        (folder / "fd").rmdir()
        folder.rmdir()

    def start_plugin(self, *, ready: bool = True) -> str:
        """Starts the pod of a device plugin; returns its uid."""
        self.pods += 1
        uid = POD_UID.format(self.pods)
        key, _, value = PLUGIN.partition("=")
        self.server.put(f"/api/v1/namespaces/{GPU_OPERATOR}/pods/plugin-{self.pods}", {
            "metadata": {"namespace": GPU_OPERATOR, "uid": uid, "labels": {key: value}},
            "spec": {"nodeName": NODE},
            "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
        })  # fmt: skip
        return uid

    def plugins(self) -> list[str]:
        """The uids of the device plugin pods."""
        return [one["metadata"]["uid"] for path, one in sorted(self.server.objects.items()) if "/pods/" in path]

    # --- the kernel and the driver ------------------------------------------------------------------------------------

    def _scan(self) -> None:
        for gpu in self.gpus.values():
            if not gpu.on_bus:
                gpu.on_bus = True
                folder = self._pci / "devices" / gpu.bus
                folder.mkdir()
                for name, text in (("vendor", "0x10de\n"), ("class", "0x030200\n"), ("remove", "")):
                    (folder / name).write_text(text)
                self._probe(gpu)

    def _probe(self, gpu: PlayedGpu) -> None:
        if gpu.driven or gpu.bus in self.hidden or self.deaf:
            return
        gpu.driven = True
        folder = self.root / "proc/driver/nvidia/gpus" / gpu.bus
        folder.mkdir(parents=True, exist_ok=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n"
        (folder / "information").write_text(text)
        (self.root / f"dev/nvidia{gpu.minor}").touch()

    def _off(self, gpu: PlayedGpu) -> None:
        gpu.on_bus = gpu.driven = False
        folder, proc = self._pci / "devices" / gpu.bus, self.root / "proc/driver/nvidia/gpus" / gpu.bus
        for inner in (folder, proc):
            for one in inner.iterdir() if inner.exists() else ():
                one.unlink()
            if inner.exists():  # the driver never bound it
                inner.rmdir()

    def settle(self) -> None:
        """Applies what was written into the tree."""
        for name in ("drivers_probe", "rescan"):
            path = self._pci / name
            if text := path.read_text():
                path.write_text("")
                self.commands.append(f"{name} {text}")
                if name == "rescan":
                    self._scan()
                else:
                    self._probe(self.gpus[text])
        for gpu in self.gpus.values():
            if gpu.on_bus and (self._pci / "devices" / gpu.bus / "remove").read_text():
                self.commands.append(f"remove {gpu.bus}")
                assert not self._is_open(gpu), "the kernel would wait for ever"
                self._off(gpu)

    def _is_open(self, gpu: PlayedGpu) -> bool:
        opened = (link.readlink() for link in (self.root / "proc").glob("*/fd/*"))
        return any(str(one) == f"/dev/nvidia{gpu.minor}" for one in opened)

    # --- nvidia-smi ---------------------------------------------------------------------------------------------------

    async def run(self, words: Sequence[str]) -> Answer:
        """See gpubus.Command."""
        self.settle()
        if words[0] == "nsenter":
            self.commands.append(" ".join(words[words.index("modprobe") :]))
            for module in words[words.index("-r") + 1 :]:
                (self.root / "sys/module" / module).rmdir()
            return Answer(0, "")
        assert words[0] == "nvidia-smi"
        if not self.answers:
            return Answer(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        shown = [one for one in self.gpus.values() if one.driven and one.bus not in self.hidden]
        if words[1].startswith("--query"):
            if not shown:
                return Answer(6, "No devices were found")
            return Answer(0, "\n".join(self._row(one, words[1]) for one in shown if self._row(one, words[1])))
        if words[1] == "drain":
            return self._drain(self.gpus.get(words[3]), words[3], words[4:])
        assert (words[1], *words[3:]) == ("-i", "-pm", "0"), words
        gpu = next(one for one in shown if one.uuid == words[2])
        gpu.kept = False
        self.commands.append(f"-pm 0 {gpu.uuid}")
        return Answer(0, "")

    @staticmethod
    def _row(gpu: PlayedGpu, query: str) -> str:
        if query.startswith("--query-compute-apps"):
            return "\n".join(f"{gpu.uuid}, {pid}" for pid in gpu.computing)
        kept, cut = ("Enabled" if one else "Disabled" for one in (gpu.kept, gpu.cut))
        return f"{gpu.uuid}, 0000{gpu.bus.upper()}, {gpu.used_mib}, {kept}, {cut}"

    def _drain(self, gpu: PlayedGpu | None, bus: str, words: Sequence[str]) -> Answer:
        if words == ("-q",):
            state = "draining" if bus in self.hidden else "not draining"
            return Answer(0, f"The current drain state of GPU 0000{bus.upper()} is: {state}.")
        self.commands.append(f"drain {' '.join(words)} {bus}")
        if words == ("-m", "0"):
            self.hidden.discard(bus)
        elif words == ("-m", "1"):
            if gpu is not None and gpu.kept:
                return Answer(3, "Persistence mode is on: cannot drain")
            self.hidden.add(bus)
        elif gpu is not None:
            if self.virtual or self._is_open(gpu):
                return Answer(15, "Failed to remove GPU: In use by another client")
            self._off(gpu)
        return Answer(0, "")
