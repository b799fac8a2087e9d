"""The GPU run with a simulated device: every step runs, every figure holds, and each missing item is one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from math import inf
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu import main, prerequisites, runner
from tests.gpu.bed import Bed, GpuRunError, cached_fraction, disk_bytes_per_s, drop_from_page_cache
from tests.gpu.report import Report
from tests.gpu.steps import coldstart, fit, inventory, swap
from tests.gpu.test_engines import TORCH, torch_python
from tests.gpu.watch import Sample, Watch
from tests.support.harness.serve.serve import Serving

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
REPORTED_ONLY = ("over the larger of the two", "together over the faster alone")
"""Ends of the names of figures that a simulated device reports without a verdict."""
OLD_TRANSFORMERS = (
    "transformers 4.55 is too old, so all steps are skipped: pip install --upgrade transformers (4.56 or newer)"
)
ROWS = {
    "cold": {"by hand, page cache", "by hand, no weights", "Pilotlight, page cache"},
    "swap": {"swap by hand: engine killed -> first token of the other"},
    "kill": {"SIGKILL -> memory free, by hand"},
    "sharing": {"by hand: share-a alone", "by hand: share-b alone", "by hand: both together, sum"},
}
"""Rows of steps that compare with the same steps by hand."""


def test_each_run_gets_a_new_folder_with_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = runner.new_folder(Path("a/work")), runner.new_folder(Path("a/work"))
    assert first != second
    assert {first.parent, second.parent} == {tmp_path / "a" / "work"}
    temporary = runner.new_folder(None)
    assert temporary.is_absolute()
    temporary.rmdir()


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
    unmet = [one["figure"] for one in result["figures"] if one["holds"] is not True]
    assert [name for name in unmet if not name.endswith(REPORTED_ONLY)] == []
    missing = {step: ROWS[step] - result["steps"][step].keys() for step in steps.split(",") if step in ROWS}
    assert not any(missing.values()), missing
    if "cold" in steps:
        phases = result["steps"]["cold"]["phases"]
        assert {"by hand, page cache", "Pilotlight, page cache", "by hand, no weights"} <= phases.keys()
        assert all({"torch", "weights", "first token"} <= one.keys() for one in phases.values())
    found = [one["step"] for one in result["figures"]]
    asked = {"inventory", *steps.split(",")}
    assert {step: found.count(step) for step in asked} == {step: FIGURES[step] for step in asked}
    plots = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert plots == ({"coldstart.svg", "swap.svg"} if "cold" in steps else set())


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_simulated_gpu_run_with_torch_engines_on_the_cpu_passes(tmp_path: Path) -> None:
    words = ["--simulate", "--engine", "torch", "--quick", "--steps", "cold,kill", "--out", str(tmp_path)]
    kept = {name: value for name, value in os.environ.items() if name != TORCH}  # `serve` refuses unknown settings
    env = kept | {"PYTHONPATH": sysconfig.get_path("purelib")}  # the same for all Pythons of a version
    ran = subprocess.run(
        [torch_python(), str(RUN), *words], env=env, capture_output=True, text=True, timeout=1000, check=False
    )
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0


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


@pytest.mark.parametrize(
    ("by_pid", "used_bytes", "found"),
    [
        ({8: 1}, 3 << 30, 0),
        ({7: 1, 8: 1}, 3 << 30, 1),  # 7 was killed and is still in exit, which makes it neither ended nor a zombie
        ({}, 1 << 20, 0),  # as in a container whose process ids are not the driver's
        ({}, 3 << 30, 1),
    ],
)
def test_engine_start_is_reported_as_early_reuse_only_if_memory_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_pid: dict[int, int], used_bytes: int, found: int
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={7: 0.0, 8: 1.005})
    bed.watch.samples = [Sample(0.99, 0, {}, frozenset()), Sample(1.03, used_bytes, by_pid, frozenset())]
    assert bed.reused_too_soon("kill", 1.0) == found
    assert [one["holds"] for one in bed.report.figures] == [found == 0]


def test_memory_reuse_check_skips_starts_without_samples_close_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={7: 1.005, 8: 2.005})
    bed.watch.samples = [
        Sample(0.99, 0, {}, frozenset()),
        Sample(1.03, 0, {7: 1}, frozenset()),
        Sample(2.03, 0, {7: 1, 8: 1}, frozenset()),  # 1 s after the one before: what it shows may be older
    ]
    assert bed.reused_too_soon("kill", 0.0) == 0
    assert bed.report.steps["kill"]["starts with samples around them"] == "1 of 2"


def test_memory_reuse_is_not_measured_without_samples_or_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start there is no sample, as with a thread that has ended."""
    bed = _bed(tmp_path, monkeypatch, spawns={7: 1.005})
    bed.watch.samples = [Sample(0.99, 0, {7: 1}, frozenset())]
    assert bed.reused_too_soon("kill", 0.0) is None
    bed.watch.samples.append(Sample(1.03, 0, {7: 1}, frozenset()))
    assert bed.reused_too_soon("kill", 0.0) == 0
    assert bed.reused_too_soon("kill", 2.0) is None
    assert [one["holds"] for one in bed.report.figures] == [None, True, None]


def _bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawns: dict[int, float]) -> Bed:
    """A bed without a sampling thread; `spawns`: times at which engines started, by process."""
    monkeypatch.setattr("tests.gpu.bed.Watch", lambda _: Watch.__new__(Watch))
    bed = Bed(tmp_path, Report(tmp_path / "result.json", {}), simulated=False, quick=True, uuid="GPU-0")
    rows = [{"model": "a", "pid": pid, "phase": "process", "at_s": at_s} for pid, at_s in spawns.items()]
    bed.phases_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bed


def test_run_fails_if_the_thread_that_samples_the_device_ended(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tests.gpu import main\n"
        "main.simulate()\n"
        "from tests.gpu import runner, watch\n"
        "def fails(): raise ValueError('no device')\n"
        "watch.pynvml.nvmlDeviceGetComputeRunningProcesses = lambda _: fails()\n"
        "async def steps(arguments, bed, nvcc): bed.watch._thread.join()\n"
        "runner._steps = steps\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "--simulate", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(main.ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    steps = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert steps["watch"]["failed"] == "the device is no longer sampled: ValueError: no device"


def test_gap_around_a_start_is_the_time_between_its_adjacent_samples() -> None:
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


@pytest.mark.parametrize(
    ("left_s", "limit_s", "result"),
    [(-1.0, 60.0, "skipped"), (0.01, 60.0, "skipped"), (60.0, 0.01, "failed")],
)
def test_report_only_step_is_skipped_at_the_run_limit_and_fails_at_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, limit_s: float, result: str
) -> None:
    """Its own time limit still fails it."""
    bed = _bed(tmp_path, monkeypatch, spawns={})
    monkeypatch.setattr(runner, "LIMITS_S", {"sharing": limit_s})

    async def hangs() -> None:
        await asyncio.Event().wait()

    asyncio.run(runner.run_step(bed, "sharing", hangs, time.monotonic() + left_s))
    assert result in bed.report.steps["sharing"]


@pytest.mark.parametrize(
    ("quick", "start_s", "lasts_s"), [(True, 3.0, 12.0), (True, 9.0, 24.0), (False, 5.0, 24.0), (False, 12.0, 30.0)]
)
def test_swap_step_load_lasts_longer_for_models_that_start_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, start_s: float, lasts_s: float
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={})
    bed.quick, bed.start_s = quick, start_s
    assert swap.load_s(bed, residency_s=3.0) == lasts_s


@pytest.mark.parametrize(
    ("visible", "index"), [(None, 0), ("1", 1), ("1,0", 1), ("GPU-b", 1), ("GPU-a,GPU-b", 0), ("", None), ("2", None)]
)
def test_gpu_that_cuda_visible_devices_names_first_is_measured(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int | None
) -> None:
    monkeypatch.setattr("tests.gpu.runner.pynvml.nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr("tests.gpu.runner.pynvml.nvmlDeviceGetHandleByIndex", lambda at: at)
    monkeypatch.setattr("tests.gpu.runner.pynvml.nvmlDeviceGetUUID", lambda at: f"GPU-{'ab'[at]}1234")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(GpuRunError, match="which is none of the 2 GPUs of NVML"):
            runner.chosen_device()
    else:
        assert runner.chosen_device() == index


def test_driver_older_than_510_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        value = 13

    nvml = mock.Mock(NVMLError=NVMLError, NVML_ERROR_FUNCTION_NOT_FOUND=13)
    nvml.nvmlDeviceGetMemoryInfo.side_effect = NVMLError("Function Not Found")
    nvml.nvmlSystemGetDriverVersion.return_value = "470.256.02"
    monkeypatch.setattr(runner, "pynvml", nvml)
    monkeypatch.setattr(runner, "chosen_device", lambda: 0)
    expected = "the NVIDIA driver 470.256.02 is too old: this run needs 510 or newer; install a newer driver"
    assert runner.unfit() == expected


def test_disk_with_too_little_space_is_reported_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "unfit", str)
    monkeypatch.setattr("tests.gpu.runner.shutil.disk_usage", lambda _: mock.Mock(free=10_900_000_000))
    assert runner.run(main.options(["--out", str(tmp_path), "--work", str(tmp_path / "work")]), "") == 2
    line = capsys.readouterr().out
    assert line.endswith(", and 11 GB are needed: name a disk with --work\n")
    assert [*(tmp_path / "work").iterdir()] == []


def test_llama_cpp_is_skipped_if_its_files_do_not_fit_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={})
    found = {"copy_bytes_per_s": 1e9, "weights_bytes": {"small": 1}, "capability": [9, 0]}
    made = mock.Mock(communicate=mock.AsyncMock(return_value=(json.dumps(found).encode(), b"")), returncode=0)
    monkeypatch.setattr("tests.gpu.runner.asyncio.create_subprocess_exec", mock.AsyncMock(return_value=made))
    monkeypatch.setattr("tests.gpu.runner.shutil.disk_usage", lambda _: mock.Mock(free=11_000_000_000))
    arguments = main.options(["--llama-server", "/bin/llama-server"])
    assert asyncio.run(runner._prepare(bed, arguments, "")) is None
    assert "12 GB are needed" in str(bed.report.steps["llama.cpp"]["skipped"])


@pytest.mark.parametrize(
    ("cached", "rate", "why"),
    [
        (0.0, 100.0, ""),
        (0.5, 100.0, "50% of the file stay in memory, as on tmpfs: name a disk with --work"),
        (0.0, 30e6, "the disk reads only 30 MB/s: name a faster one with --work"),
    ],
)
def test_disk_cold_start_is_not_measured_if_file_stays_cached_or_disk_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: float, rate: float, why: str
) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(3000 if rate == 100.0 else 1_000_000_000)
    monkeypatch.setattr(coldstart, "cached_fraction", lambda _: cached)
    monkeypatch.setattr(coldstart, "disk_bytes_per_s", lambda _: rate)
    assert coldstart.no_disk(weights) == why


def test_cached_fraction_of_a_file_is_1_after_it_is_written_or_read(tmp_path: Path) -> None:
    """Reading brings pages into memory. They stay there on tmpfs; from a disk's cache they can be dropped."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    assert cached_fraction(path) == 1.0
    drop_from_page_cache(path)
    assert cached_fraction(path) in {0.0, 1.0}
    assert disk_bytes_per_s(path) > 0
    assert cached_fraction(path) == 1.0


@pytest.mark.parametrize(("listed", "holds"), [("GPU-1", True), ("GPU-2", False)])
def test_inventory_step_passes_only_if_serve_lists_every_nvidia_smi_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, holds: bool
) -> None:
    """Not only the one that the run uses, which CUDA_VISIBLE_DEVICES names to the other steps."""
    bed = _bed(tmp_path, monkeypatch, spawns={})
    bed.weights_bytes = {"small": 1}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", bed.uuid)
    visible = list[str | None]()

    async def start(serve: Serving) -> None:
        visible.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

    devices = [{"device": name, "product": "H200", "memory_bytes": 8 << 20} for name in ("GPU-0", "GPU-1")]
    row = {"name": "H200", "memory.total": "8", "memory.reserved": "0", "mig.mode.current": "Disabled"}
    monkeypatch.setattr(Serving, "start", start)
    monkeypatch.setattr(Serving, "get", lambda *_: devices)
    monkeypatch.setattr(inventory, "smi", lambda: [{"uuid": name, **row} for name in ("GPU-0", listed)])
    monkeypatch.setattr(inventory, "mig_mode", lambda _: "Disabled")
    asyncio.run(inventory.run(bed))
    assert [one["holds"] for one in bed.report.figures] == [holds, True]
    assert (visible, os.environ["CUDA_VISIBLE_DEVICES"]) == ([None], bed.uuid)


@pytest.mark.parametrize(("start_s", "quick"), [(5.0, False), (6.0, True)])
def test_engine_start_longer_than_5_s_switches_the_run_to_quick_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_s: float, quick: bool
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={})
    bed.quick = False
    process = mock.Mock(pid=7)
    monkeypatch.setattr(bed, "by_hand", lambda *_: contextlib.nullcontext((process, 1)))
    monkeypatch.setattr(bed, "until_free", mock.AsyncMock())
    monkeypatch.setattr(runner, "listens", mock.AsyncMock())
    times = iter([10.0, 10.0 + start_s])
    monkeypatch.setattr(runner, "time", mock.Mock(monotonic=lambda: next(times)))
    asyncio.run(runner._measure_start(bed))
    assert bed.quick is quick
    assert bed.report.steps["start"]["one engine, by hand"] == bed.start_s == start_s


def test_llama_server_in_a_file_of_any_name_runs_as_llama_server(tmp_path: Path) -> None:
    server = tmp_path / "server of mine"
    server.write_text('#!/bin/sh\necho "$0 $@"\n')
    server.chmod(0o755)
    fit.llama_server(server, tmp_path / "llama-server")
    ran = subprocess.run([tmp_path / "llama-server", "--port", "1 2"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{server} --port 1 2\n"


@pytest.mark.parametrize("listed", [True, False])
def test_time_to_end_of_a_killed_engine_is_known_only_if_nvml_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={})
    clock, process = [100.0], mock.Mock(pid=7)
    monkeypatch.setattr("tests.gpu.bed.time", mock.Mock(time=lambda: clock[0]))
    process.wait.side_effect = lambda: clock.append(clock.pop() + 2.0)  # while the kernel frees the memory
    look = mock.Mock(return_value=Sample(0.0, 5, {7: 1} if listed else {}, frozenset()))
    monkeypatch.setattr(bed.watch, "look", look, raising=False)
    monkeypatch.setattr(bed, "until_free", mock.AsyncMock())
    assert asyncio.run(bed.kill_by_hand(process)) == (100.0, 2.0 if listed else None)


@pytest.mark.parametrize(("is_late", "result"), [(True, "skipped"), (False, "failed")])
def test_late_llama_cpp_build_is_skipped_and_a_failed_one_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool, result: str
) -> None:
    """A build that is late skips the cases, and one that is broken fails; the files of the models are deleted."""
    bed = _bed(tmp_path, monkeypatch, spawns={})
    monkeypatch.setattr(fit, "_cases", mock.AsyncMock())
    building = mock.Mock(wait=mock.AsyncMock(return_value=None), is_late=is_late, result="not built")
    building.gguf.side_effect = lambda name, _: (tmp_path / name, (tmp_path / name).touch())[0]
    asyncio.run(fit.run(bed, building))
    assert bed.report.steps["llama.cpp"] == {result: "not built"}
    assert f"{result}: llama.cpp" in bed.report.verdict()
    assert bed.report.good is is_late
    assert [(one["value"], one["holds"]) for one in bed.report.figures] == [(None, None)] * 3
    assert not any((tmp_path / name).exists() for name in bed.shapes)


def test_memory_figure_fails_if_the_engine_used_no_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = _bed(tmp_path, monkeypatch, spawns={})
    bed.watch.samples = []
    monkeypatch.setattr(bed.watch, "look", lambda: Sample(0.0, 5, {}, frozenset()), raising=False)
    monkeypatch.setattr(fit, "call", mock.AsyncMock())
    serve = mock.Mock(zero=mock.AsyncMock(), engines=lambda _: [7])
    serve.get.return_value = {"memory_bytes": 1, "needs": {"parts": []}}
    case = fit.Case({"metadata": {"name": "llama-small"}}, "small as GGUF")
    asyncio.run(fit._case(bed, serve, case))
    (figure,) = bed.report.figures
    assert (figure["holds"], figure["value"]) == (False, None)
    assert str(figure["figure"]).startswith("small as GGUF: the engine used no memory of the device")


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


def test_engine_option_without_the_simulate_option_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.options(["--engine", "torch"])
    assert "--engine needs --simulate" in capsys.readouterr().err


def test_missing_driver_is_reported_in_one_line() -> None:
    found = prerequisites.check(simulated=False, driver="libno-such-driver.so")
    (line,) = (line for line in found.fatal if "driver" in line)
    assert line == (
        "no NVIDIA driver: libno-such-driver.so cannot be loaded, so all steps are skipped; "
        "--simulate runs without a GPU"
    )


def test_driver_with_an_older_cuda_than_torch_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("4.55.4", [OLD_TRANSFORMERS]),
        ("4.56.0", []),
        ("5.2.0.dev0", []),
    ],
)
def test_transformers_older_than_4_56_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, lines: list[str]
) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(f'import no_such_module\n__version__ = "{version}"\n')
    monkeypatch.syspath_prepend(tmp_path)
    fatal = prerequisites.check(simulated=False).fatal
    assert [line for line in fatal if "transformers" in line] == lines


def test_cuda_version_of_torch_is_read_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text("__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert prerequisites.torch_cuda() == (13, 0)
    (package / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n")
    assert prerequisites.torch_cuda() is None


def test_process_end_and_memory_release_are_timed_from_samples() -> None:
    watch = Watch.__new__(Watch)
    watch.samples = [
        Sample(0.95, 3, {7: 1, 8: 2}, frozenset()),
        Sample(1.03, 3, {7: 1, 8: 2}, frozenset({7})),
        Sample(1.10, 2, {8: 2}, frozenset()),
    ]
    assert (watch.ended_s(7), watch.freed_s(7)) == (1.03, 1.10)
    assert (watch.ended_s(8), watch.freed_s(8)) == (None, None)
    assert watch.first_after(1.0) == watch.samples[1]
    assert watch.first_after(1.10) is None
    assert watch.idle_bytes() == 2
