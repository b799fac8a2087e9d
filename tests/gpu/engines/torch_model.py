"""The backend on a GPU: a transformers model in bfloat16 whose safetensors file is read straight to the device.

With --device cpu it computes on the CPU, and the GPU memory that it would use is counted on the simulated device.

Reading starts as soon as the CUDA context exists and overlaps the import of transformers. Threads read pieces of the
file into pinned buffers and copy them into one tensor; the parameters are views of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

PIECE_BYTES = 32 << 20
THREADS = 6
PROMPT_TOKENS = 64
"""Maximum number of prompt tokens."""
MIB = 1 << 20
SIMULATED_CONTEXT_BYTES = 64 << 20
SPARE = 0.003
"""Fraction of the permitted memory that is left for later allocations of the libraries."""

Tensor = Any


class Reading:
    """Loads one safetensors file to the device."""

    def __init__(self, path: Path, device: str, *, empty: bool) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(length))
        self._header.pop("__metadata__", None)
        self._begin = 8 + length
        self.bytes = 0 if empty else path.stat().st_size - self._begin
        size = path.stat().st_size - self._begin
        if device == "cpu":
            count_simulated(size)
        self._data = torch.empty(size, dtype=torch.uint8, device=device)
        self._path, self._device = path, device
        self._next, self._lock = 0, threading.Lock()
        self._errors: list[BaseException] = []
        self.began_s = self.ended_s = time.time()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[str, Tensor]:
        """Return the tensors by name when all are on the device. Raises the error of a thread."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return {
            name: self._data[slice(*one["data_offsets"])].view(torch.bfloat16).view(one["shape"])
            for name, one in self._header.items()
        }

    def _run(self) -> None:
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001 - raised again by `wait`, in the thread that loads
            self._errors.append(error)

    def _copy(self) -> None:
        on_gpu = self._device != "cpu"
        buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        view = memoryview(buffer.numpy())
        file = os.open(self._path, os.O_RDONLY)
        try:
            while True:
                with self._lock:
                    at, self._next = self._next, self._next + PIECE_BYTES
                size = min(PIECE_BYTES, self.bytes - at)
                if size <= 0:
                    return
                if os.preadv(file, [view[:size]], self._begin + at) != size:
                    raise OSError(f"{self._path} ended early")
                self._data[at : at + size].copy_(buffer[:size])
                with self._lock:
                    self.ended_s = time.time()
        finally:
            os.close(file)


class Model:
    """A loaded model. One forward pass at a time; each request has a cache of its own.

    One thread makes all forward passes: PyTorch gives each thread a cuBLAS handle with a workspace of its own, so the
    threads of requests would take memory after `fill`.
    """

    def __init__(self, model: Any, arguments: argparse.Namespace, make_cache: Any) -> None:
        self._model, self._arguments, self._make_cache = model, arguments, make_cache
        self._lock, self._worker = threading.Lock(), ThreadPoolExecutor(max_workers=1)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5
        self._caches = [make_cache() for _ in range(arguments.slots)]
        self._kept: list[Tensor] = []

    def warm_up(self) -> None:
        """Answer the longest prompt in each slot, so that its cache exists and memory does not grow later."""
        for cache in self._caches:
            for _ in self._run(cache, self._prompt(b"H" * PROMPT_TOKENS), 2):
                pass

    def generate(self, prompt: bytes, tokens: int) -> Iterator[int]:
        """Greedy decoding."""
        with self._lock:
            cache = self._caches.pop()
        try:
            yield from self._run(cache, self._prompt(prompt), tokens)
        finally:
            with self._lock:
                self._caches.append(cache)

    def grow(self, size_bytes: int) -> None:
        """Allocate this many more bytes."""
        self._kept.append(take(size_bytes, self._arguments.device))

    def used_bytes(self) -> int:
        """Device memory of this process."""
        return _nvml.used_bytes() if _nvml else _simulated_bytes

    def _prompt(self, text: bytes) -> list[int]:
        """Its last bytes as tokens, limited by the command line."""
        tokens = self._arguments.prompt_tokens
        text = text or b" "
        return list((text * (tokens // len(text) + 1))[:tokens] if tokens else text[-PROMPT_TOKENS:])

    def _run(self, cache: Any, prompt: list[int], tokens: int) -> Iterator[int]:
        at, given = 0, prompt
        for _ in range(min(tokens, self._arguments.context_tokens - len(prompt))):
            token = self._worker.submit(self._pass, cache, at, given).result()
            at, given = at + len(given), [token]
            yield token

    def _pass(self, cache: Any, at: int, given: list[int]) -> int:
        """One forward pass over these tokens at this position; the next token."""
        device = self._arguments.device
        with torch.inference_mode():
            if at == 0:
                cache.reset()
            position = torch.arange(at, at + len(given), device=device)
            answer = self._model(
                input_ids=torch.tensor([given], device=device), position_ids=position[None],
                use_cache=True, logits_to_keep=1, **{self._cache_argument: cache},
            )  # fmt: skip
            return int(answer.logits[0, -1].argmax().item())


def load(arguments: argparse.Namespace, phases: Any) -> Model:
    """Load a model and let it answer once."""
    phases.note("torch")
    global _nvml  # noqa: PLW0603 - one number for the process
    if arguments.device == "cpu":
        count_simulated(SIMULATED_CONTEXT_BYTES)
    else:
        _nvml = Nvml(arguments.nvml)
    torch.zeros(1, device=arguments.device)
    phases.note("context")
    reading = Reading(arguments.weights / "model.safetensors", arguments.device, empty=arguments.empty)
    import transformers
    from transformers.cache_utils import StaticCache

    config = transformers.AutoConfig.from_pretrained(arguments.weights)
    kind = getattr(transformers, config.architectures[0])
    phases.note("transformers")
    with torch.device("meta"):
        made = kind._from_config(config, dtype=torch.bfloat16)
    with torch.device(arguments.device):
        made.model.rotary_emb = type(made.model.rotary_emb)(config=config)  # its table is no parameter
    made.load_state_dict(reading.wait(), strict=True, assign=True)
    made.eval()
    phases.note("weights", began_s=reading.began_s, ended_s=reading.ended_s, bytes=reading.bytes)
    model = Model(made, arguments, lambda: StaticCache(config=config, max_cache_len=arguments.context_tokens))
    model.warm_up()
    fill(model, arguments)
    phases.note("warm")
    return model


def fill(model: Model, arguments: argparse.Namespace) -> None:
    """Take the rest of the permitted memory, as engines with a paged cache do."""
    wanted = arguments.memory_bytes
    if arguments.gpu_memory_utilization:
        wanted = int(arguments.gpu_memory_utilization * total_bytes(arguments.device))
    rest = int(wanted * (1 - SPARE)) - model.used_bytes()
    if rest > 0:
        model.grow(rest // MIB * MIB)


class Nvml:
    """NVML by its bindings in a file, since this Python need not have them; made before the process uses the device."""

    def __init__(self, file: Path) -> None:
        spec = importlib.util.spec_from_file_location("pynvml_of_the_run", file)
        assert spec is not None
        assert spec.loader is not None
        self._pynvml: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self._pynvml  # it looks itself up there
        spec.loader.exec_module(self._pynvml)
        self._pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        by_uuid = visible.startswith("GPU-")
        handle_of = self._pynvml.nvmlDeviceGetHandleByUUID if by_uuid else self._pynvml.nvmlDeviceGetHandleByIndex
        self._handle = handle_of(visible if by_uuid else 0)
        self._before = self._in_use()

    def used_bytes(self) -> int:
        """Memory of this process. If NVML does not list it, the increase of the device's memory in use: engines start
        one at a time.
        """
        listed = list(self._pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        try:
            listed += self._pynvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle)
        except self._pynvml.NVMLError:
            pass  # a driver or a device without MPS
        own = max((int(one.usedGpuMemory or 0) for one in listed if one.pid == os.getpid()), default=0)
        return own or max(self._in_use() - self._before, int(torch.cuda.memory_reserved()))

    def _in_use(self) -> int:
        return int(self._pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)


def hold(size_bytes: int, device: str) -> None:
    """Hold memory until the process ends."""
    _held.append(take(size_bytes, device))


def take(size_bytes: int, device: str) -> Tensor:
    """Allocate device memory; without a GPU it is only counted."""
    if device != "cpu":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    count_simulated(size_bytes)
    return None


def total_bytes(device: str) -> int:
    """Memory of the device, as CUDA reports it."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[1])
    pynvml = _simulated()
    return int(pynvml.TOTAL_BYTES - pynvml.RESERVED_BYTES)


def count_simulated(size_bytes: int) -> None:
    """Count this many more bytes for this process on the simulated device. Raises its OutOfMemoryError."""
    global _simulated_bytes  # noqa: PLW0603 - one number for the process, as the device has it
    _simulated().allocate(_simulated_bytes + size_bytes)
    _simulated_bytes += size_bytes


def _simulated() -> Any:
    folder = str(Path(__file__).parents[1] / "simulated")
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    import pynvml

    return pynvml


_held: list[Tensor] = []
_nvml: Nvml | None = None
"""None on the CPU."""
_simulated_bytes = 0
