"""The GPU run with a simulated device: every step runs, every figure holds, and each missing item is one line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import time
from math import inf
from pathlib import Path

import pytest

from tests.gpu import main, prerequisites, runner
from tests.gpu.bed import Bed, GpuRunError
from tests.gpu.report import Report
from tests.gpu.test_engines import torch_python
from tests.gpu.watch import Sample, Watch

RUN = Path(__file__).parent / "run"
FIGURES = {
    "inventory": 2,
    "cold": 2,
    "swap": 3,
    "kill": 3,
    "serial": 4,
    "sharing": 3,
    "misbehave": 4,
    "fit": 3,
}  # fmt: skip
"""Number of figures of each step without a GPU."""


@pytest.mark.parametrize("steps", ["inventory,cold,swap,kill", "serial,sharing,misbehave,fit"])
def test_every_benchmark_step_passes_on_a_simulated_device(tmp_path: Path, steps: str) -> None:
    argv = [sys.executable, str(RUN), "--simulate", "--quick", "--steps", steps, "--out", str(tmp_path / "out")]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    print(ran.stdout, ran.stderr)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    failed = {name: step for name, step in result["steps"].items() if {"failed", "skipped"} & step.keys()}
    assert ran.returncode == 0
    assert not failed
    assert result["facts"]["simulated"] is True
    found = [one["step"] for one in result["figures"]]
    asked = {"inventory", *steps.split(",")}
    assert {step: found.count(step) for step in asked} == {step: FIGURES[step] for step in asked}
    plots = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert plots == ({"coldstart.svg", "swap.svg"} if "cold" in steps else set())


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_simulated_gpu_run_with_torch_engines_on_the_cpu_passes(tmp_path: Path) -> None:
    words = ["--simulate", "--engine", "torch", "--quick", "--steps", "cold,kill", "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}  # the same for all Pythons of a version
    ran = subprocess.run(
        [torch_python(), str(RUN), *words], env=env, capture_output=True, text=True, timeout=1000, check=False
    )
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0


def test_torch_engine_reports_zero_memory_if_pynvml_is_missing() -> None:
    """The machine's own Python, which has torch, may lack them."""
    code = "import sys; sys.modules.update(pynvml=None, torch=type(sys)('torch')); sys.path.insert(0, {!r}); "
    code += "import torch_model; assert torch_model._listed_bytes() == 0"
    argv = [sys.executable, "-c", code.format(str(RUN.parent / "engines"))]
    assert subprocess.run(argv, check=False).returncode == 0


def test_verdict_of_an_incomplete_run_fails_and_lists_the_reasons(tmp_path: Path) -> None:
    report = Report(tmp_path / "result.json", {})
    report.figure("kill", "requests lost", 0.0, "0", holds=True)
    assert (report.good, report.verdict()) == (True, "all figures that were measured hold")
    report.figure("swap", "device reused before its memory was free", None, "0", holds=None)
    report.skipped("llama.cpp", "there is no nvcc")
    report.failed("fit", "no time was left")
    assert not report.good
    assert report.verdict() == (
        "not all figures hold; failed: fit; skipped: llama.cpp; "
        "not measured: swap: device reused before its memory was free"
    )


def test_memory_reuse_by_a_process_not_listed_in_nvml_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose process ids are not the driver's."""
    monkeypatch.setattr("tests.gpu.bed.Watch", lambda _: Watch.__new__(Watch))
    bed = Bed(tmp_path, Report(tmp_path / "result.json", {}), simulated=True, quick=True, uuid="GPU-0")
    for pid, found in ((7, 0), (8, None)):
        row = {"model": "a", "pid": pid, "phase": "process", "at_s": 1.005}
        bed.phases_file.write_text(json.dumps(row) + "\n")
        bed.watch.samples = [Sample(1 + number / 100, 3, {7: 1}, frozenset()) for number in range(6)]
        assert bed.reused_too_soon("kill", 0.0) == found
    assert [one["holds"] for one in bed.report.figures] == [True, None]


def test_gap_around_a_start_lies_between_the_samples_before_and_after_it() -> None:
    watch = Watch.__new__(Watch)
    watch.samples = [Sample(at_s, 0, {}, frozenset()) for at_s in (10.0, 10.02, 10.05, 20.0)]
    assert watch.gap_s(10.01) == pytest.approx(0.05)
    assert watch.gap_s(10.04) == pytest.approx(9.98)
    assert watch.gap_s(20.0) == watch.gap_s(5.0) == inf


def test_failed_or_overdue_gpu_step_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.bed.Watch", lambda _: Watch.__new__(Watch))
    monkeypatch.setattr(runner, "LIMITS_S", {"cold": 60.0, "swap": 0.01, "kill": 60.0, "serial": 60.0})
    report = Report(tmp_path / "result.json", {})
    bed = Bed(tmp_path, report, simulated=False, quick=True, uuid="GPU-0")
    ran = []

    async def fails() -> None:
        raise GpuRunError("the engine ended")

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def passes() -> None:
        ran.append("kill")

    async def run() -> None:
        for name, step in (("cold", fails), ("swap", hangs), ("kill", passes)):
            await runner.run_step(bed, name, step, time.monotonic() + 60)
        await runner.run_step(bed, "serial", passes, time.monotonic())

    asyncio.run(run())
    steps = json.loads((tmp_path / "result.json").read_text())["steps"]
    failed = {name: step["failed"] for name, step in steps.items() if "failed" in step}
    assert failed == {"cold": "GpuRunError: the engine ended", "swap": "took longer than 0 s"}
    assert report.steps["serial"]["failed"] == "no time was left"
    assert ran == ["kill"]


def test_machine_without_a_gpu_gets_one_line_for_each_missing_item() -> None:
    if prerequisites.driver_cuda() is not None:
        pytest.skip("this machine has an NVIDIA driver")
    ran = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, timeout=60, check=False)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 2
    assert [line for line in lines if "NVIDIA driver" in line] == [lines[0]]
    assert len(lines) == len({line.partition(" in ")[0] for line in lines})
    assert not ran.stderr


def test_unknown_gpu_run_step_is_rejected_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.options(["--steps", "inventory,hot"])
    assert "no step is called hot" in capsys.readouterr().err


def test_missing_driver_is_reported_in_one_line() -> None:
    found = prerequisites.check(simulated=False, driver="libno-such-driver.so")
    (line,) = (line for line in found.fatal if "driver" in line)
    assert line == (
        "no NVIDIA driver: libno-such-driver.so cannot be loaded, so all steps are skipped; "
        "--simulate runs without a GPU"
    )


def test_driver_older_than_torch_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "driver_cuda", lambda _: (12, 4))
    monkeypatch.setattr(prerequisites, "torch_cuda", lambda: (13, 0))
    (line,) = (line for line in prerequisites.check(simulated=False).fatal if "driver" in line)
    assert line == (
        "the NVIDIA driver is too old: it supports CUDA 12.4, and this PyTorch needs CUDA 13.0, "
        "so all steps are skipped; install a newer driver or an older PyTorch"
    )


def test_missing_torch_transformers_and_nvcc_are_reported_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "driver_cuda", lambda _: (13, 0))
    monkeypatch.setattr(prerequisites, "torch_cuda", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    found = prerequisites.check(simulated=False)
    assert found.fatal == (
        "no PyTorch with CUDA in this Python, so all steps are skipped: pip install torch",
        "no transformers in this Python, so all steps are skipped: pip install transformers",
    )
    assert found.skipped == ("no nvcc on the PATH or in /usr/local/cuda/bin: the steps with llama.cpp are skipped",)
    assert not found.nvcc


@pytest.mark.parametrize(
    ("programs", "skipped"),
    [
        ({"nvcc", "g++"}, ("no cmake on the PATH: the steps with llama.cpp are skipped",)),
        (
            {"nvcc", "cmake"},
            ("no C++ compiler on the PATH, which nvcc needs: the steps with llama.cpp are skipped",),
        ),
        ({"nvcc", "cmake", "clang++"}, ()),
    ],
)
def test_missing_build_program_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, programs: set[str], skipped: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/bin/{name}" if name in programs else None)
    found = prerequisites.check(simulated=False, driver="libno-such-driver.so")
    assert found.skipped == skipped
    assert found.nvcc == ("" if skipped else "/bin/nvcc")


def test_cuda_version_of_torch_is_read_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text("__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert prerequisites.torch_cuda() == (13, 0)
    (package / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n")
    assert prerequisites.torch_cuda() is None


def test_ended_process_that_holds_memory_after_the_next_start_is_detected() -> None:
    """Process 7 ended before the start at 1.0 and held memory after it; 8 ended later, and no later sample has it."""
    watch = Watch.__new__(Watch)
    watch.samples = [
        Sample(0.95, 3, {7: 1, 8: 2}, frozenset({7})),
        Sample(1.03, 3, {7: 1, 8: 2}, frozenset({7, 8})),
        Sample(1.10, 0, {}, frozenset()),
    ]
    assert watch.held_by_ended(1.0) == {7}
    assert watch.freed_s(7) == 1.10
    assert watch.held_by_ended(1.05) == frozenset()
