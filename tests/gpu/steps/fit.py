"""Step `fit`: compares Pilotlight's memory estimate of a Model with the peak use of its engine.

llama.cpp: the estimate comes from the GGUF header, and the engine allocates what it needs. Engine with a paged cache
(vLLM's command line, `gpu.memory: auto`): the estimate comes from config.json, and the engine gets it as an argument.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.gpu import llama
from tests.gpu.bed import ENGINES, Bed, GpuRunError, call, document
from tests.gpu.llama import Building
from tests.support.harness.serve.serve import Document, Serving

OVER_MAX, UNDER_MAX = 0.10, 0.03
OVER, WITHIN = "predicted / measured - 1", "-0.03 to 0.10"
LLAMA_CASES = (("small", 32768, 1), ("medium", 8192, 4), ("large", 4096, 2))
"""Model, tokens of the context, slots."""
MIB = 1 << 20
BESIDE_TOKENS = 256
"""Tokens of the context that are left for the answer."""


class Case(NamedTuple):
    """One Model, and a description of its weights."""

    document: Document
    words: str
    prompt: str = "word " * 600


async def run(bed: Bed, building: Building | None) -> None:
    """Run both kinds, one engine at a time."""
    scripts = bed.folder / "bin"
    scripts.mkdir(exist_ok=True)
    paged(bed, scripts / "vllm")
    cases = [
        Case(_document(f"paged-{name}", "vllm", bed.weights(name), tokens, slots), f"{name}, {slots} x {tokens} tokens")
        for name, tokens, slots in (("small", 4096, 4), ("medium", 16384, 2), ("large", 8192, 4))
    ]
    await _cases(bed, "fit-paged", cases, scripts)
    if bed.simulated and importlib.util.find_spec("xllamacpp") is not None:
        await _on_cpu(bed)
    if building is None:
        return
    files = dict[str, Path]()
    try:
        for name, shape in bed.shapes.items():
            files[name] = await asyncio.to_thread(building.gguf, name, shape)
        await _llama(bed, building, files, scripts)
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)  # as large as the models of all other steps


async def _llama(bed: Bed, building: Building, files: Mapping[str, Path], scripts: Path) -> None:
    """The cases of llama.cpp, once it is built."""
    server = await building.wait()
    if server is None:
        end = bed.report.skipped if building.is_late else bed.report.failed
        end("llama.cpp", building.result)
        for name, tokens, _ in LLAMA_CASES:
            bed.report.figure("fit", f"{_llama_name(name, tokens)}: {OVER}", None, WITHIN, holds=None)
        return
    bed.report.row("fit", "llama.cpp", building.result)
    words = ["--flash-attn", "off"] if building.without_flash_attention else []
    cases = [
        Case(
            _document(_llama_name(name, tokens), "llama.cpp", files[name], tokens, slots, args=words),
            f"{name} as GGUF, {slots} x {tokens} tokens",
            ("word " * tokens)[: tokens - BESIDE_TOKENS],  # its tokens are bytes: fills the context of a slot
        )
        for name, tokens, slots in LLAMA_CASES
    ]
    llama_server(server, scripts / "llama-server")
    await _cases(bed, "fit-llama", cases, scripts)


def _llama_name(name: str, tokens: int) -> str:
    return f"llama-{name}-{tokens}"


async def _cases(bed: Bed, name: str, cases: Sequence[Case], programs: Path) -> None:
    async with bed.serving(name, *(one.document for one in cases), path=str(programs)) as serve:
        for one in cases:
            await _case(bed, serve, one)


async def _on_cpu(bed: Bed) -> None:
    """A real llama.cpp server on the CPU: its resident memory is reported without a comparison."""
    file = bed.folder / "small.gguf"
    llama.write(file, bed.shapes["small"])
    async with bed.serving("fit-cpu", _document("llama-cpu", "llama.cpp", file, 1024, 2)) as serve:
        fit = serve.get("/api/v1/explain/fit/llama-cpu")
        assert isinstance(fit, Mapping)
        await call(serve.url, "llama-cpu")
        (pid,) = serve.engines("llama-cpu")
        resident = psutil.Process(pid).memory_info().rss
    bed.report.row(
        "fit", "llama-cpu predicted", int(fit["memory_bytes"]) // MIB, "MiB", f"resident {resident // MIB} MiB"
    )


def llama_server(server: Path, script: Path) -> None:
    """The server under the name that Pilotlight starts, whatever its file is called."""
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(server.absolute()))} "$@"\n')
    script.chmod(0o755)


def paged(bed: Bed, script: Path) -> None:
    """Our engine with vLLM's command line."""
    argv = [sys.executable, "-E", str(ENGINES / "server.py")]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@" {shlex.join(bed.backend)}\n')
    script.chmod(0o755)


def _document(name: str, engine: str, weights: Path, tokens: int, slots: int, **more: object) -> Document:
    gpu = {} if engine == "llama.cpp" else {"gpu": {"memory": "auto"}}
    return document(
        name, engine=engine, artifact=f"file://{weights}", contextTokens=tokens, slots=slots, idleSeconds=1,
        residencySeconds=0, **gpu, **more,
    )  # fmt: skip


async def _case(bed: Bed, serve: Serving, case: Case) -> None:
    metadata = case.document["metadata"]
    assert isinstance(metadata, Mapping)
    name = str(metadata["name"])
    fit = serve.get(f"/api/v1/explain/fit/{name}")
    assert isinstance(fit, Mapping)
    predicted = int(fit["memory_bytes"])
    before = bed.watch.look().used_bytes
    try:
        await call(serve.url, name, prompt=case.prompt)
    except GpuRunError as error:
        bed.tail(serve)
        bed.report.figure("fit", f"{case.words}: {error}", None, "within 10 %", holds=False)
        return
    (pid,) = serve.engines(name)
    now = bed.watch.look()  # the thread may have taken no sample since the response
    measured = max(bed.watch.peak(pid), now.by_pid.get(pid, 0))
    listed = measured > 0
    if not listed:
        measured = now.used_bytes - before
    await serve.zero(name, 60.0)
    if measured <= 0:
        why = "the engine used no memory of the device; it runs on the CPU or ended early"
        bed.report.figure("fit", f"{case.words}: {why}", None, "within 10 %", holds=False)
        return
    parts = {part["name"]: part["bytes"] // MIB for part in fit["needs"]["parts"]}
    note = f"measured {measured // MIB} MiB{'' if listed else ' (device)'}; parts {parts}"
    bed.report.row("fit", f"{name} predicted", predicted // MIB, "MiB", note)
    over = predicted / measured - 1
    holds = -UNDER_MAX <= over <= OVER_MAX
    bed.report.figure("fit", f"{name}: {OVER}", over, WITHIN, holds=holds)
