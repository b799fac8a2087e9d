"""The GPU run from its command line to its exit status; standard library only until packages are installed.

Exit status: 0 no step failed and no measured figure was missed, 1 otherwise, 2 the run could not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from tests.gpu import prerequisites

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "build" / "gpu-kit"
RUN = Path(__file__).parent / "run"
STEPS = ("inventory", "cold", "swap", "kill", "serial", "fit", "misbehave", "sharing")
"""Run order: steps with a figure that must hold come before those that are only reported."""
INSTALLED = "PILOTLIGHT_GPU_RUN_INSTALLED"
"""Set in the process that has the packages: Unix seconds when the run began."""


def options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run",
        description="Measure Pilotlight on one GPU of this machine: the first, or the first of CUDA_VISIBLE_DEVICES.",
        epilog="Example: python3 tests/gpu/run --steps inventory,cold --work /var/tmp/gpu-run. "
        "Exit status: 0 every measured figure holds, 1 a step failed or a figure was missed, 2 nothing was run.",
        allow_abbrev=False,
    )
    parser.add_argument("--simulate", action="store_true", help="use a simulated device and engines that need no GPU")
    parser.add_argument(
        "--engine", choices=("torch", "simulated"), metavar="ENGINE",
        help="with --simulate: `simulated` (default), or `torch`, which computes on the CPU",
    )  # fmt: skip
    parser.add_argument("--steps", default=",".join(STEPS), help=f"run only some of {','.join(STEPS)}")
    parser.add_argument("--quick", action="store_true", help="one cold start of each kind, and shorter loads")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-run"), metavar="FOLDER",
        help="folder of result.json and the plots; files of an earlier run are replaced (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kit", type=Path, default=KIT, metavar="FOLDER",
        help="folder that `make gpu-kit` built (default: build/gpu-kit of this clone)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER",
        help="folder on a local disk for a new folder with models and logs, of which the logs are kept "
        "(default: a temporary folder, which is removed)",
    )  # fmt: skip
    parser.add_argument(
        "--llama-server", default="", metavar="PATH", help="use this llama-server, built with CUDA, and build none"
    )
    parser.add_argument(
        "--limit", type=float, default=480.0, metavar="SECONDS", help="time limit of the run (default: %(default)g)"
    )
    arguments = parser.parse_args(argv)
    unknown = [step for step in arguments.steps.split(",") if step not in STEPS]
    if unknown:
        parser.error(f"--steps: no step is called {unknown[0]}; the steps are {', '.join(STEPS)}")
    if arguments.engine and not arguments.simulate:
        parser.error("--engine needs --simulate; on a GPU the engine is always torch")
    return arguments


def main(argv: list[str]) -> int:
    """Run the steps; return the exit status."""
    began_s = float(os.environ.pop(INSTALLED, "0"))
    arguments = options(argv)
    found = prerequisites.check(simulated=arguments.simulate)
    missing = prerequisites.missing_packages()
    install = arguments.kit.is_dir() and not began_s and (missing or not arguments.simulate)
    if found.fatal or not install:
        for line in (*found.fatal, *(() if arguments.llama_server else found.skipped)):
            print(line, flush=True)
    if found.fatal:
        return 2
    if install:
        return _again_with_packages(arguments.kit, argv)
    if missing:
        fix = (
            "run `make venv` and use .venv/bin/python"
            if arguments.simulate
            else "run `make gpu-kit` and copy build/gpu-kit here"
        )
        print(f"packages are missing: {', '.join(missing)}; {fix}", flush=True)
        return 2
    if began_s:
        arguments.limit -= time.time() - began_s
    os.environ["PYTHONPATH"] = _python_path(str(ROOT))
    if arguments.simulate:
        simulate()
    from tests.gpu.runner import run

    return run(arguments, found.nvcc)


def simulate() -> None:
    """Make this process and its children use the simulated device."""
    folder = Path(__file__).parent / "simulated"
    os.environ["SIMULATED_GPU"] = tempfile.mkdtemp(prefix="simulated-gpu-")
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = _python_path(str(folder))
    sys.path.insert(0, str(folder))


def _python_path(*first: str) -> str:
    return os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _again_with_packages(kit: Path, argv: list[str]) -> int:
    """Install the kit's wheels into a folder of their own and run this again with them; return the exit status."""
    if importlib.util.find_spec("pip") is None:
        print("this Python has no pip, which installs the wheels of the kit: python3 -m ensurepip", flush=True)
        return 2
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handlers(dict.fromkeys(numbers, _exit)), tempfile.TemporaryDirectory(prefix="gpu-run-packages-") as site:
        began_s = time.time()
        wheels = sorted(map(str, kit.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        installed = subprocess.run([*pip, "--no-cache-dir", "--target", site, *wheels], check=False)
        if installed.returncode != 0:
            print(
                f"the wheels in {kit} cannot be installed into this Python; build them for it: make gpu-kit", flush=True
            )
            return 2
        env = os.environ | {
            "PATH": f"{site}/bin:{os.environ['PATH']}",  # cmake and ninja
            "PYTHONPATH": _python_path(str(ROOT), site),
            INSTALLED: f"{began_s:.3f}",
        }
        return _run_child([sys.executable, str(RUN), *argv], env)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _run_child(argv: list[str], env: dict[str, str]) -> int:
    """Run a program and return its status. Signals end the program, which cleans up, and not this process."""
    children: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        for child in children:
            child.terminate()

    def ignore(_number: int, _frame: object) -> None:
        """Ctrl-C reaches the child as well. SIG_IGN would be inherited."""

    with (
        _handlers({signal.SIGINT: ignore, signal.SIGTERM: end, signal.SIGHUP: end}),
        subprocess.Popen(argv, env=env) as child,
    ):
        children.append(child)
        if ended:  # before there was a child
            child.terminate()
        return child.wait()


@contextlib.contextmanager
def _handlers(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
