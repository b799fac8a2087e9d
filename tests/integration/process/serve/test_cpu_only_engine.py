"""On a machine with a GPU (a fake NVML), a llama.cpp wheel without CUDA is reported or skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoscaler.engines import LLAMA_CPP
from loadtest import tiny_gguf
from loadtest.result import Ending
from pilotlight.models.cpu_warning import NO_GPU
from tests.support.harness.serve.serve import Document, model, serving, settings
from tests.support.waiting import until

NVML = '''
"""One GPU without memory in use."""
from types import SimpleNamespace


nvmlMemory_v2 = 2


class NVMLError(Exception):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


def nvmlInit():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetUUID(handle):
    return "GPU-false"


def nvmlDeviceGetName(handle):
    return "False GPU"


def nvmlDeviceGetMemoryInfo(handle, version=None):
    return SimpleNamespace(total=1 << 30, reserved=0, used=0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []


nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses
nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetComputeRunningProcesses
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the fake NVML; PATH otherwise holds only what every machine has."""
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tiny_gguf.make_model(tmp_path / "ada.gguf", "Held for nothing.")
    return tmp_path


def documents(folder: Path) -> tuple[Document, Document]:
    ada = model("ada", engine="llama.cpp", artifact=f"file://{folder}/ada.gguf", gpu={}, contextTokens=64)
    return ada, {**settings(), "devices": []}


@pytest.mark.standard
async def test_model_on_a_gpu_with_a_cpu_only_wheel_logs_a_warning_and_serves(folder: Path) -> None:
    async with serving(folder, *documents(folder)) as one:
        line = f"Model ada holds a GPU and computes on the CPU: {NO_GPU}; {LLAMA_CPP.programs[0].for_gpus}"
        await until("it is logged at the start", lambda: f"pilotlight: {line}" in one.output().splitlines())
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert [record.slices for record in one.records()] == [("GPU-false",)]
        assert one.output().count(NO_GPU) == 1


async def test_gpu_model_starts_llama_server_instead_of_a_cpu_only_wheel(folder: Path) -> None:
    """The server is a fake that records its command line and fails."""
    (folder / "llama-server").write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $@" >> {folder}/called\nexit 1\n')
    (folder / "llama-server").chmod(0o755)
    async with serving(folder, *documents(folder)) as one:
        assert (await one.call("ada")).code == "model_start_failed"
        first = (folder / "called").read_text().splitlines()[0]
        assert first.startswith(f"GPU-false --model {folder}/ada.gguf --host 127.0.0.1 --port ")
        assert NO_GPU not in one.output()
