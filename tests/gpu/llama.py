"""llama.cpp with CUDA, built from the source in the kit while other steps run, and GGUF models with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from loadtest import tiny_gguf

SOURCE = "llama.cpp.tar.xz"
BUILD_S = 240.0
"""Maximum build time; after it the steps with llama.cpp are skipped."""
SPARED = 3
"""Number of processors that the build leaves to the measurements."""
F16, F32 = 1, 0
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_CUDA=ON", "-DGGML_CUDA_FA=OFF", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_CUDA_NCCL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_APP=OFF", "-DGGML_CCACHE=OFF",
)  # fmt: skip

Dimensions = tuple[int, ...]


class Building:
    """A background build on processors of its own, so that it disturbs no measurement."""

    def __init__(self, kit: Path, folder: Path, nvcc: str, capability: list[int], *, ready: str = "") -> None:
        self._folder, self._nvcc = folder, nvcc
        self._server = Path(ready) if ready else folder / "build" / "bin" / "llama-server"
        self._architecture = f"{''.join(map(str, capability))}-real"
        self._began_s, self._process = time.monotonic(), None if ready else self._start(kit)
        self.result = "ready-made" if ready else ""
        self.without_flash_attention = True
        self._is_late = threading.Event()
        self._timer = threading.Timer(BUILD_S, self._end_late)
        self._timer.daemon = True
        if self._process is not None:
            self._timer.start()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the build began."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds that the build may still take; 0 if it has ended."""
        runs = self._process is not None and self._process.poll() is None
        return max(0.0, BUILD_S - self.elapsed_s) if runs else 0.0

    @property
    def is_late(self) -> bool:
        """Whether the build was ended at its time limit."""
        return self._is_late.is_set()

    async def wait(self) -> Path | None:
        """Return the server once it is built; None: timed out (`is_late`) or failed, and `result` has the reason."""
        while self._process is not None and self._process.poll() is None:
            await asyncio.sleep(0.1)
        if self.is_late:
            self.result = f"not built within {BUILD_S:g} s"
        elif self._process is not None and self._process.returncode != 0:
            lines = (self._folder / "build.log").read_text(errors="replace").splitlines()
            errors = [line for line in lines if "rror" in line] or lines
            self.result = f"the build failed: {errors[0][:200] if errors else 'no output'}"
        elif not self._server.exists():
            self.result = f"{self._server} does not exist"
        else:
            self.result = self.result or f"built in {self.elapsed_s:.0f} s at most"
            return self._server
        return None

    def stop(self) -> None:
        """End the build if it is running."""
        self._timer.cancel()
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _end_late(self) -> None:
        """End the build at its time limit, whichever step runs at that time."""
        if self._process is not None and self._process.poll() is None:
            self._is_late.set()
            self.stop()

    def gguf(self, name: str, shape: dict[str, Any]) -> Path:
        """The file of a model, which is written at the first call."""
        path = self._folder / f"{name}.gguf"
        if not path.exists():
            write(path, shape)
        return path

    def _start(self, kit: Path) -> subprocess.Popen[bytes]:
        source = self._folder / "llama.cpp"
        source.mkdir(parents=True)
        unpack = [sys.executable, "-I", "-m", "tarfile", "-e", str(kit / SOURCE), str(source)]  # this project packed it
        processors = sorted(os.sched_getaffinity(0))
        jobs = max(1, len(processors) - SPARED)
        cmake = ["cmake", "-S", str(source), "-B", str(self._folder / "build"), *OPTIONS]
        cmake += [f"-DCMAKE_CUDA_ARCHITECTURES={self._architecture}", f"-DCMAKE_CUDA_COMPILER={self._nvcc}"]
        cmake += ["-G", "Ninja"] if shutil.which("ninja") else []
        make = ["cmake", "--build", str(self._folder / "build"), "--target", "llama-server", "--parallel", str(jobs)]
        own = ",".join(map(str, processors[-jobs:]))
        pinned = ["taskset", "--cpu-list", own] if len(processors) > 1 and shutil.which("taskset") else []
        script = 'set -e; while (($# > 0)); do n=$1; shift; "${@:1:$n}"; shift "$n"; done'
        counted = [word for words in (unpack, cmake, make) for word in (str(len(words)), *words)]
        argv = ["nice", "-n", "19", *pinned, "bash", "-c", script, "build", *counted]
        with (self._folder / "build.log").open("wb") as log:
            return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def write(path: Path, shape: dict[str, Any]) -> None:
    """Write a model of the llama architecture with random float16 weights."""
    tensors = _tensors(shape)
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(_metadata(path, shape))))
    for key, value in _metadata(path, shape).items():
        head += tiny_gguf._string(key) + tiny_gguf._typed(value)
    at = 0
    for name, dimensions in tensors.items():
        kind = F32 if len(dimensions) == 1 else F16
        head += tiny_gguf._string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, at)
        at += _size(dimensions) + -_size(dimensions) % tiny_gguf.ALIGNMENT
    with path.open("wb") as file:
        file.write(bytes(head) + bytes(-len(head) % tiny_gguf.ALIGNMENT))
        _data(file, tensors)


def _data(file: BinaryIO, tensors: dict[str, Dimensions]) -> None:
    import numpy as np

    block = (np.random.default_rng(28).standard_normal(1 << 24) * 0.02).astype(np.float16).tobytes()
    for dimensions in tensors.values():
        size = _size(dimensions)
        if len(dimensions) == 1:
            file.write(struct.pack("<f", 1.0) * dimensions[0])
        else:
            file.writelines(_pieces(block, size))
        file.write(bytes(-size % tiny_gguf.ALIGNMENT))


def _pieces(block: bytes, size: int) -> Iterator[memoryview]:
    while size > 0:
        yield memoryview(block)[: min(size, len(block))]
        size -= len(block)


def _size(dimensions: Dimensions) -> int:
    return math.prod(dimensions) * (4 if len(dimensions) == 1 else 2)


def _tensors(shape: dict[str, Any]) -> dict[str, Dimensions]:
    """Name -> dimensions, the fastest first."""
    width, inner, rows, vocabulary = shape["width"], shape["inner"], 128 * shape["rows"], shape["vocabulary"]
    found: dict[str, Dimensions] = {"token_embd.weight": (width, vocabulary)}
    for layer in range(shape["layers"]):
        at = f"blk.{layer}."
        found |= {
            at + "attn_norm.weight": (width,),
            at + "attn_q.weight": (width, width),
            at + "attn_k.weight": (width, rows),
            at + "attn_v.weight": (width, rows),
            at + "attn_output.weight": (width, width),
            at + "ffn_norm.weight": (width,),
            at + "ffn_gate.weight": (width, inner),
            at + "ffn_up.weight": (width, inner),
            at + "ffn_down.weight": (inner, width),
        }
    return found | {"output_norm.weight": (width,), "output.weight": (width, vocabulary)}


def _metadata(path: Path, shape: dict[str, Any]) -> dict[str, tiny_gguf.Value]:
    letters = tiny_gguf.byte_letters()
    tokens = [*letters, "<|end|>", *(f"filler{number}" for number in range(shape["vocabulary"] - 257))]
    return {
        "general.architecture": "llama",
        "general.name": path.stem,
        "llama.context_length": 32768,
        "llama.embedding_length": shape["width"],
        "llama.block_count": shape["layers"],
        "llama.feed_forward_length": shape["inner"],
        "llama.attention.head_count": shape["width"] // 128,
        "llama.attention.head_count_kv": shape["rows"],
        "llama.attention.key_length": 128,
        "llama.attention.value_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 128,
        "llama.vocab_size": shape["vocabulary"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * (shape["vocabulary"] - 257),
        "tokenizer.ggml.merges": [f"{letters[97]} {letters[98]}"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
