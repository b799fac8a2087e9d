"""The engines of the GPU run: the OpenAI-format server with both backends, and the torch engine if there is PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pynvml
import pytest

from tests.gpu.bed import ENGINES, Bed
from tests.gpu.report import Report
from tests.gpu.watch import Watch
from tests.support.net.ports import free_port

SHAPE = {"width": 256, "inner": 512, "layers": 2, "rows": 1, "vocabulary": 300}
KINDS = ("llama", "qwen2")
TORCH = "PILOTLIGHT_TORCH_PYTHON"
"""Environment variable: a Python that has PyTorch and transformers, if this one has not."""
WITH_TORCH = pytest.param("torch_model", marks=pytest.mark.deep)
START_S = 400.0
ROUNDING = 0.05
"""Difference between logits due to bfloat16; the logits of random models have a standard deviation of about 0.4."""


def torch_python() -> str:
    """The Python that has PyTorch and transformers; the test is skipped if there is none."""
    if all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers")):
        return sys.executable
    if not (named := os.environ.get(TORCH)):
        pytest.skip(f"no PyTorch and transformers (pip install torch transformers; {TORCH} can name another Python)")
    return named


def make_models(folder: Path, python: str, device: str) -> dict[str, object]:
    """Make a model of each kind; return what was printed."""
    models = json.dumps({kind: {"kind": kind, **SHAPE} for kind in KINDS})
    argv = [python, "-E", str(ENGINES / "make_models.py"), str(folder), "--device", device, "--models", models]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    found = json.loads(made.stdout)
    assert isinstance(found, dict)
    return found


class Engine(NamedTuple):
    """A server that listens."""

    url: str
    phases: Path

    def ask(self, path: str, body: object) -> tuple[int, str]:
        """Send a request; return status and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data=data), timeout=START_S) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(params=["simulated_model", WITH_TORCH])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The server with a backend, on the simulated device."""
    uses_torch = request.param == "torch_model"
    python = torch_python() if uses_torch else sys.executable
    make_models(tmp_path / "models", python, "cpu" if uses_torch else "none")
    port, phases = free_port(), tmp_path / "phases.jsonl"
    argv = [python, "-E", str(ENGINES / "server.py"), "--port", str(port), "--name", "tiny", "--device", "cpu"]
    argv += ["--weights", str(tmp_path / "models" / "llama"), "--backend", request.param, "--phases", str(phases)]
    env = os.environ | {"SIMULATED_GPU": str(tmp_path / "device"), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "engine.log").open("wb") as log, subprocess.Popen(argv, env=env, stderr=log) as process:
        try:
            end_s = time.monotonic() + START_S
            while '"listening"' not in (phases.read_text() if phases.exists() else ""):
                assert process.poll() is None, (tmp_path / "engine.log").read_text()
                assert time.monotonic() < end_s
                time.sleep(0.05)
            yield Engine(f"http://127.0.0.1:{port}", phases)
        finally:
            process.kill()
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


@pytest.mark.timeout(1200)
def test_engine_serves_chat_and_completions_with_and_without_streaming(engine: Engine) -> None:
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        status, text = engine.ask(path, {"model": "tiny", "max_tokens": 6, **prompt})
        (choice,) = json.loads(text)["choices"]
        whole = choice["message"]["content"] if "message" in choice else choice["text"]
        assert (status, len(whole.split()), choice["finish_reason"]) == (200, 6, "length")
        status, text = engine.ask(path, {"model": "tiny", "max_tokens": 6, "stream": True, **prompt})
        *events, done, rest = text.split("\n\n")
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        pieces = [one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices]
        assert (status, done, rest) == (200, "data: [DONE]", "")
        assert ("".join(pieces), len(pieces)) == (whole, 7)
        assert [one["finish_reason"] for one in choices] == [None] * 6 + ["length"]
    rows = [json.loads(line) for line in engine.phases.read_text().splitlines()]
    names = [row["phase"] for row in rows if row["phase"] != "transformers"]
    assert names == ["process", "torch", "context", "weights", "warm", "listening", "first token"]
    assert [row["at_s"] for row in rows] == sorted(row["at_s"] for row in rows)
    size = (engine.phases.parent / "models" / "llama" / "model.safetensors").stat().st_size
    assert next(row for row in rows if row["phase"] == "listening")["used_bytes"] >= size // 2
    wrong = {
        path: engine.ask(path, body)[0]
        for path, body in (("/v1/completions", b"{"), ("/v1/chat/completions", b"[1]"), ("/v1/embeddings", {}))
    }
    assert wrong == {"/v1/completions": 400, "/v1/chat/completions": 400, "/v1/embeddings": 404}


def test_generated_safetensors_files_have_contiguous_aligned_tensors(tmp_path: Path) -> None:
    found = make_models(tmp_path, sys.executable, "none")
    sizes = found["weights_bytes"]
    assert isinstance(sizes, dict)
    for kind in KINDS:
        data = (tmp_path / kind / "model.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        begins, ends = zip(*(one["data_offsets"] for one in header.values()), strict=True)
        assert [*begins, sizes[kind]] == [0, *ends]
        assert not any(begin % 256 for begin in begins)
        assert len(data) == 8 + length + sizes[kind]
        assert (8 + length) % 256 == 0
        assert ("model.layers.1.self_attn.q_proj.bias" in header) == (kind == "qwen2")
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_torch_engine_tokens_match_those_of_transformers_within_rounding(tmp_path: Path) -> None:
    python = torch_python()
    make_models(tmp_path, python, "cpu")
    for kind in KINDS:
        argv = [python, "-E", str(ENGINES / "compare.py"), str(tmp_path / kind), "Hello, how are you?", "12"]
        ran = subprocess.run(
            argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout.splitlines()[-1])
        assert found["tokens"] == found["again"]
        assert len(found["tokens"]) == 12
        assert max(found["behind"]) <= ROUNDING < found["deviation"] / 4
        assert "deprecated" not in ran.stderr


@pytest.fixture
def torch_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of the torch backend with a fake torch that has reserved 5 bytes, on a simulated device."""
    torch = mock.MagicMock()
    torch.cuda.memory_reserved.return_value = 5
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("SIMULATED_GPU", str(tmp_path / "device"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = importlib.util.spec_from_file_location("torch_model", ENGINES / "torch_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_engine_reads_its_gpu_memory_through_the_given_pynvml_path(
    torch_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python, which ignores PYTHONPATH, need not have them."""
    monkeypatch.setattr("tests.gpu.bed.Watch", lambda _: Watch.__new__(Watch))
    bed = Bed(tmp_path, Report(tmp_path / "result.json", {}), simulated=False, quick=True, uuid="GPU-0")
    command = bed.command("tiny", "small")
    assert Path(command[command.index("--nvml") + 1]).name == "pynvml.py"
    nvml = torch_model.Nvml(ENGINES.parent / "simulated" / "pynvml.py")
    nvml._pynvml.allocate(3 << 30)
    assert nvml.used_bytes() == 3 << 30


def test_torch_engine_loads_the_real_pynvml_from_its_file_path(
    torch_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pynvml` looks itself up in `sys.modules` while it is loaded."""

    def raise_os_error(*_: object) -> None:
        raise OSError

    bindings = Path(pynvml.__file__)
    assert bindings.parent != ENGINES.parent / "simulated"
    monkeypatch.setattr(ctypes, "CDLL", raise_os_error)  # also a machine with a driver has no library then
    with pytest.raises(Exception, match="NVML Shared Library Not Found") as caught:
        torch_model.Nvml(bindings)
    loaded = sys.modules["pynvml_of_the_run"]
    assert (loaded.__file__, type(caught.value)) == (str(bindings), loaded.NVMLError_LibraryNotFound)


def test_torch_engine_not_listed_by_nvml_reports_memory_growth_of_its_gpu(
    torch_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose process ids are not the driver's."""
    nvml = torch_model.Nvml(ENGINES.parent / "simulated" / "pynvml.py")
    monkeypatch.setattr(nvml._pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [])
    assert nvml.used_bytes() == 5
    nvml._pynvml.allocate(3 << 30)
    assert nvml.used_bytes() == 3 << 30


def test_torch_engine_without_the_nvml_option_is_rejected_on_a_gpu(tmp_path: Path) -> None:
    argv = [sys.executable, str(ENGINES / "server.py"), "--port", "1", "--name", "tiny", "--weights", str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.endswith("error: --backend torch_model needs --nvml on a GPU\n")


def test_forward_passes_of_all_requests_run_in_the_thread_that_warmed_up(torch_model: Any) -> None:
    """PyTorch takes memory of the device for each thread that multiplies matrices."""
    threads = list[int]()

    class Module:
        def forward(self, cache: object) -> None:
            """Only its signature is read."""

        def __call__(self, **given: object) -> mock.MagicMock:
            threads.append(threading.get_ident())
            return mock.MagicMock()

    arguments = SimpleNamespace(slots=2, context_tokens=128, prompt_tokens=0, device="cuda")
    model = torch_model.Model(Module(), arguments, mock.Mock)
    model.warm_up()
    assert len(threads) == 4
    for _ in range(2):
        request = threading.Thread(target=lambda: [*model.generate(b"Hello", 3)])
        request.start()
        request.join()
    assert len(threads) == 10
    assert len({*threads}) == 1
