"""Runs the steps one after the other, each with its own time limit; a failed step does not stop the next."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pynvml

import pilotlight
from tests.gpu.bed import ENGINES, Bed, GpuRunError, listens
from tests.gpu.llama import SOURCE, Building
from tests.gpu.report import Report
from tests.gpu.steps import coldstart, fit, inventory, kill, misbehave, serial, sharing, swap

LIMITS_S = {
    "prepare": 150.0, "start": 60.0, "inventory": 20.0, "cold": 120.0, "swap": 110.0, "kill": 60.0, "serial": 160.0,
    "fit": 150.0, "misbehave": 90.0, "sharing": 110.0,
}  # fmt: skip
"""Time limit of each step in seconds; a step that exceeds it has failed."""
SIMULATED_LONGER = 4
"""Factor of the time limits with simulated devices: the machine may be slow or busy."""
LEAST_BYTES, IDLE_BYTES_MAX = 20 << 30, 1 << 30
"""Memory that the device must have, and the maximum that others may hold of it."""
LEAST_DISK_BYTES, LLAMA_DISK_BYTES = 11_000_000_000, 12_000_000_000
"""Disk space for the models and logs, and after that for the models and the build of llama.cpp."""
LAST_S = 20.0
"""Seconds before the end of the whole run, reserved for cleaning up."""
LAST_RESORT = 0.98
"""Fraction of the whole limit after which a run that is still active is ended."""
START_S_MAX = 5.5
"""Maximum duration of one engine start; if it takes longer, the run takes the amounts of --quick."""
REPORTED_ONLY = ("sharing",)
"""The last step: it is skipped if the run has no time left for it."""

Step = Callable[[], Awaitable[None]]


def run(arguments: argparse.Namespace, nvcc: str) -> int:
    """Run all steps; return the exit status."""
    if not arguments.simulate and (wrong := unfit()):
        print(wrong, flush=True)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    work = new_folder(arguments.work)
    if not arguments.simulate and (wrong := lacks_space(work, LEAST_DISK_BYTES)):
        work.rmdir()
        print(wrong, flush=True)
        return 2
    report = Report(arguments.out / "result.json", facts(simulated=arguments.simulate))
    for name, value in report.facts.items():
        report.say(f"{name:<10} {value}")
    engine = arguments.engine or ("simulated" if arguments.simulate else "torch")
    bed = Bed(
        work, report, simulated=arguments.simulate, quick=arguments.quick, uuid=str(report.facts["uuid"]), engine=engine
    )
    stop = threading.Timer(arguments.limit * LAST_RESORT, lambda: _give_up(bed, work, arguments))
    stop.daemon = True
    stop.start()
    try:
        asyncio.run(_steps(arguments, bed, nvcc))
    except (KeyboardInterrupt, asyncio.CancelledError):
        report.failed("run", "ended by a signal")
    finally:
        stop.cancel()
        sharing.end_daemon(work)  # a step that was ended may have been about to start it
        if not bed.watch.is_running:
            report.failed("watch", f"the device is no longer sampled: {bed.watch.error}")
        bed.watch.stop()
        report.keep("watch", "samples", len(bed.watch.samples))
        report.keep("watch", "failed looks", f"{bed.watch.failures} {bed.watch.error}")
        _keep_results(report, work, arguments)
    report.say(f"{report.verdict()}; result in {arguments.out}")
    return 0 if report.good else 1


def new_folder(parent: Path | None) -> Path:
    """A new folder in the named one, or else in the one for temporary files. Engines need its absolute path."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="gpu-run-", dir=parent and parent.resolve()))


def lacks_space(folder: Path, needed_bytes: int) -> str:
    """Why the folder is too small, with the fix; empty: it is not."""
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes:
        return ""
    return (
        f"{free / 1e9:.0f} GB are free in {folder}, and {needed_bytes / 1e9:.0f} GB are needed: name a disk with --work"
    )


def unfit() -> str:
    """Why the chosen device cannot be measured, with the fix; empty: it can be."""
    try:
        pynvml.nvmlInit()
        handle = chosen_device()
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            version = _text(pynvml.nvmlSystemGetDriverVersion())
            return f"the NVIDIA driver {version} is too old: this run needs 510 or newer; install a newer driver"
        return f"NVML does not work ({error}); in a container add `utility` to NVIDIA_DRIVER_CAPABILITIES"
    except GpuRunError as error:
        return str(error)
    if inventory.mig_mode(_text(pynvml.nvmlDeviceGetUUID(handle))) == "Enabled":
        return "the GPU is in MIG mode, which this run does not measure; turn it off with `nvidia-smi -mig 0`"
    if memory.total < LEAST_BYTES:
        return f"the GPU has {memory.total >> 30} GiB of memory; the models of this run need {LEAST_BYTES >> 30} GiB"
    if memory.used > IDLE_BYTES_MAX:
        return f"{memory.used >> 20} MiB of the GPU are in use; end the processes that use it"
    return ""


def chosen_device() -> object:
    """NVML's handle of the first GPU in CUDA_VISIBLE_DEVICES (UUID or index); without it, of the first GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "0" if visible is None else visible.split(",")[0].strip()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    for index, handle in enumerate(handles):
        if named == str(index) or (
            named.startswith("GPU-") and _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(named)
        ):
            return handle
    raise GpuRunError(f'CUDA_VISIBLE_DEVICES begins with "{named}", which is none of the {len(handles)} GPUs of NVML')


def facts(*, simulated: bool) -> dict[str, object]:
    """Facts about the device, the host and the versions."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0) if simulated else chosen_device()
    return {
        "device": _text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "simulated": simulated,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "pilotlight": pilotlight.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
    }


async def _steps(arguments: argparse.Namespace, bed: Bed, nvcc: str) -> None:
    own = asyncio.current_task()
    assert own is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # asyncio.run does this for SIGINT
        asyncio.get_running_loop().add_signal_handler(number, own.cancel)
    building: Building | None = None

    async def prepare() -> None:
        nonlocal building
        building = await _prepare(bed, arguments, nvcc)

    os.environ["CUDA_VISIBLE_DEVICES"] = bed.uuid  # of several GPUs the run uses one
    steps: dict[str, Step] = {
        "start": lambda: _measure_start(bed),
        "inventory": lambda: inventory.run(bed),
        "cold": lambda: coldstart.run(bed),
        "swap": lambda: swap.run(bed),
        "kill": lambda: kill.run(bed),
        "serial": lambda: serial.run(bed),
        "sharing": lambda: sharing.run(bed),
        "misbehave": lambda: misbehave.run(bed),
        "fit": lambda: fit.run(bed, building),
    }
    end_s = time.monotonic() + arguments.limit - LAST_S
    try:
        asked = ("start", *arguments.steps.split(","))
        for name, step in {"prepare": prepare, **{name: steps[name] for name in asked}}.items():
            if name != "prepare" and not bed.weights_bytes:
                bed.report.skipped(name, "there are no models")
                continue
            if name not in {"start", "inventory"} and bed.weights_bytes and not bed.device_bytes:
                await run_step(bed, "inventory", steps["inventory"], end_s)
            await run_step(bed, name, step, end_s, building.left_s if name == "fit" and building is not None else 0.0)
    finally:
        if building is not None:
            building.stop()


async def run_step(bed: Bed, name: str, step: Step, end_s: float, more_s: float = 0.0) -> None:
    """Run one step within its time limit, and `more_s` to wait. An exception is its failure, and is printed."""
    began_s = time.monotonic()
    own_s = LIMITS_S[name] * (SIMULATED_LONGER if bed.simulated else 1) + more_s
    limit_s = min(own_s, end_s - began_s)
    out_of_time = bed.report.skipped if name in REPORTED_ONLY and limit_s < own_s else bed.report.failed
    if limit_s <= 0:
        out_of_time(name, "no time was left")
        return
    try:
        async with asyncio.timeout(limit_s):
            await step()
    except TimeoutError:
        out_of_time(name, f"took longer than {limit_s:.0f} s")
    except Exception as error:  # noqa: BLE001 - whatever ends a step is its result, and must not end the next
        bed.report.failed(name, f"{type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
    bed.report.took(name, time.monotonic() - began_s)
    bed.report.say(f"{name:<10} took {time.monotonic() - began_s:.1f} s")
    bed.report.write()


async def _prepare(bed: Bed, arguments: argparse.Namespace, nvcc: str) -> Building | None:
    """Make models on disk, measure the copy rate to the device, and build llama.cpp in the background."""
    device = "cuda" if not bed.simulated else "cpu" if arguments.engine == "torch" else "none"
    argv = [sys.executable, "-E", str(ENGINES / "make_models.py"), str(bed.folder / "models")]
    argv += ["--device", device, "--models", json.dumps(bed.shapes)]
    made = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        printed, errors = await made.communicate()
    finally:
        if made.returncode is None:
            made.kill()
    if made.returncode != 0:
        raise GpuRunError(f"models cannot be made: {errors.decode()[-300:]}")
    found = json.loads(printed.splitlines()[-1])
    bed.report.facts |= {key: value for key, value in found.items() if key != "weights_bytes"}
    bed.weights_bytes, bed.copy_bytes_per_s = found["weights_bytes"], found["copy_bytes_per_s"]
    for name, size in bed.weights_bytes.items():
        bed.report.row("prepare", f"model {name}", size / 1e9, "GB")
    rate = bed.copy_bytes_per_s / 1e9 or "not measured"
    bed.report.row("prepare", "host to device, pinned memory", rate, "GB/s" if bed.copy_bytes_per_s else "")
    if bed.simulated or "fit" not in arguments.steps.split(","):
        return None
    if not arguments.llama_server and not nvcc:
        bed.report.keep(
            "llama.cpp", "skipped", "there is no nvcc, no cmake or no C++ compiler"
        )  # printed when the run began
        return None
    if not arguments.llama_server and not (arguments.kit / SOURCE).exists():
        bed.report.skipped("llama.cpp", f"the kit has no {SOURCE}; build it with `make gpu-kit`")
        return None
    if wrong := lacks_space(bed.folder, LLAMA_DISK_BYTES):
        bed.report.skipped("llama.cpp", wrong)
        return None
    (bed.folder / "llama").mkdir()
    return Building(arguments.kit, bed.folder / "llama", nvcc, found["capability"], ready=arguments.llama_server)


async def _measure_start(bed: Bed) -> None:
    """Measure one start without Pilotlight; if it is slow, shorten the run."""
    began_s = time.monotonic()
    with bed.by_hand("start", "large") as (process, port):
        await listens(process, port)
        bed.start_s = time.monotonic() - began_s
    await bed.until_free([process.pid])
    note = ""
    if bed.start_s > START_S_MAX and not bed.quick:
        bed.quick = True
        note = f"more than {START_S_MAX:g} s: the run takes the amounts of --quick"
    bed.report.row("start", "one engine, by hand", bed.start_s, "s", note)


def _give_up(bed: Bed, work: Path, arguments: argparse.Namespace) -> None:
    """Last resort if a blocked call prevents the step limits from working: end all started processes."""
    try:
        bed.report.failed("run", f"took longer than {arguments.limit * LAST_RESORT:.0f} s and was ended")
        sharing.end_daemon(work)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        bed.watch.stop()
        _keep_results(bed.report, work, arguments)
    except Exception:  # noqa: BLE001 - printed; the process must end in any case
        traceback.print_exc()
    finally:
        os._exit(1)


def _keep_results(report: Report, work: Path, arguments: argparse.Namespace) -> None:
    """Write the result, copy plots and phases out of the working folder, and remove that, or only the models if it was
    named; remove the files of the simulated device.
    """
    for name in (*work.glob("*.svg"), *work.glob("phases.jsonl")):
        shutil.copy(name, arguments.out)
    report.write()
    for folder in (work,) if arguments.work is None else (work / "models", work / "llama"):
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.simulate:
        shutil.rmtree(os.environ["SIMULATED_GPU"], ignore_errors=True)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
