"""The kit of the GPU run: its contents, hashes and size limit, and the run with packages that are installed from it."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.gpu import kit, llama, main, prerequisites, runner
from tests.gpu.watch import lives

MIB = 1 << 20


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Build the kit in a temporary folder; return the arguments that pip gets, and fake the files that it downloads."""
    calls: list[tuple[str, ...]] = []

    def download(*words: str) -> None:
        calls.append(words)
        folder = Path(words[words.index("--dest") + 1])
        if "--no-binary" in words:
            source_package(folder / "xllamacpp.tar.gz", ["CMakeLists.txt"])
        else:
            for name in ("cmake-4-py3-none-any.whl", "numpy-2-py3-none-any.whl", "uvloop-1-py3-none-any.whl"):
                (folder / name).write_bytes(name.encode())

    monkeypatch.setattr(kit, "KIT", tmp_path / "gpu-kit")
    monkeypatch.setattr(kit, "_pip", download)
    return calls


def source_package(path: Path, names: list[str]) -> None:
    """A source package with llama.cpp's files of these names."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"package-2026.10.11549/thirdparty/llama.cpp/{name}")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))


def test_gpu_kit_contains_verified_wheels_and_the_llama_cpp_source(
    no_downloads: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verified: list[str] = []
    monkeypatch.setattr(kit, "verify", lambda path: verified.append(path.name))
    assert kit.main(["3.13"]) == 0
    assert {path.name for path in (tmp_path / "gpu-kit").iterdir()} == {
        "cmake-4-py3-none-any.whl",
        "uvloop-1-py3-none-any.whl",
        llama.SOURCE,
    }
    assert {*verified} == {"cmake-4-py3-none-any.whl", "uvloop-1-py3-none-any.whl", "xllamacpp.tar.gz"}
    wheels, source = no_downloads
    assert {"cmake", "ninja", "aiohttp>=3.14"} <= {*wheels}
    assert wheels[wheels.index("--python-version") + 1] == "3.13"
    assert source[-1].startswith("xllamacpp==")
    assert capsys.readouterr().out.endswith("gpu-kit: 3 files, 0.0 MiB, for Python 3.13 on x86-64\n")


def test_gpu_kit_without_build_tools_downloads_no_cmake_or_ninja(
    no_downloads: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "verify", lambda _: None)
    assert kit.main(["3.13", "--without-build-tools"]) == 0
    wheels, _ = no_downloads
    assert not {"cmake", "ninja"} & {*wheels}
    assert wheels[wheels.index("--python-version") + 1] == "3.13"


def test_packages_that_the_gpu_run_imports_are_dependencies_of_the_kit() -> None:
    """Both the list that the run checks before it installs the kit, and what its modules load."""
    project = tomllib.loads((main.ROOT / "pyproject.toml").read_text())["project"]
    direct = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert {canonicalize_name(name) for name in prerequisites.PACKAGES.values()} == direct
    program = "import json, sys, tests.gpu.runner; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(main.ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    owners = importlib.metadata.packages_distributions()
    loaded = {canonicalize_name(owner) for name in json.loads(ran.stdout) for owner in owners.get(name, ())}
    assert loaded - {"pilotlight", "setuptools"} <= _closure(direct)  # venv loads setuptools at its start
    assert {"msgspec", "psutil"} <= loaded


def _closure(names: set[NormalizedName]) -> set[NormalizedName]:
    """The packages with those that they require."""
    found, todo = set[NormalizedName](), {*names}
    while todo:
        found |= todo
        needed = [Requirement(line) for name in todo for line in importlib.metadata.requires(name) or ()]
        todo = {
            canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})
        } - found
    return found


def test_lock_of_the_gpu_kit_pins_the_build_tools_with_hashes() -> None:
    lock = (main.ROOT / "requirements" / "gpu-kit.lock").read_text()
    for name in kit.BUILD_TOOLS:
        assert f"\n{name}==" in f"\n{lock}"
    assert lock.count("--hash=sha256:") > len(kit.BUILD_TOOLS)


@pytest.mark.parametrize(("size_bytes", "status"), [(60 * MIB, 0), (60 * MIB + 1, 1)])
def test_building_a_gpu_kit_larger_than_60_mib_exits_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size_bytes: int, status: int
) -> None:
    def wheels(version: str, folder: Path, tools: tuple[str, ...]) -> None:
        with (folder / "large.whl").open("wb") as file:
            file.truncate(size_bytes - 4)

    monkeypatch.setattr(kit, "KIT", tmp_path)
    monkeypatch.setattr(kit, "wheels", wheels)
    monkeypatch.setattr(kit, "source", lambda target: target.write_bytes(b"text"))
    assert kit.main([]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 files, 60.0 MiB, for Python 3.12 on x86-64")
    assert lines[1:] == ["that is more than 60 MiB"] * status


def test_file_with_a_hash_in_no_lock_is_named_and_no_kit_is_built(
    no_downloads: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kit.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    name, _, reason = line.partition(": ")
    assert name in {"cmake-4-py3-none-any.whl", "uvloop-1-py3-none-any.whl"}
    digest = hashlib.sha256(name.encode()).hexdigest()
    assert reason == (
        f"its SHA-256 {digest} is not in requirements/dev.lock and requirements/gpu-kit.lock, so no kit was built"
    )
    assert not (tmp_path / "gpu-kit").exists()


def test_packed_llama_cpp_sources_contain_only_what_the_server_needs(tmp_path: Path) -> None:
    """Including names longer than 100 bytes, which a tar file keeps in an extended header."""
    long = "ggml/src/ggml-cuda/template-instances/fattn-mma-f16-instance-ncols1_16-ncols2_2.cu"
    wanted = [long, "CMakeLists.txt", "tools/server/server.cpp"]
    others = ["models/vocabulary.gguf", "ggml/src/ggml-vulkan/vulkan.cpp", "tools/ui/src/app.ts"]
    package = tmp_path / "package.tar.gz"
    source_package(package, wanted + others)
    kit.pack(package, tmp_path / llama.SOURCE)
    with tarfile.open(tmp_path / llama.SOURCE) as packed:
        assert sorted(packed.getnames()) == sorted(wanted)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that replaces tests/gpu/run: prints what it finds and exits with status 7."""
    path = tmp_path / "run"
    path.write_text(
        "import json, os, shutil, sys\n"
        "import packed\n"
        "print(json.dumps([packed.__file__, shutil.which('packed-tool'), os.environ, sys.argv[1:]], default=dict))\n"
        "sys.exit(7)\n"
    )
    monkeypatch.setattr(main, "RUN", path)
    return path


def wheel(folder: Path, tag: str = "py3-none-any") -> None:
    """Write a wheel with a module and a program."""
    folder.mkdir()
    info = "packed-1.dist-info"
    with zipfile.ZipFile(folder / f"packed-1-{tag}.whl", "w") as archive:
        archive.writestr("packed.py", "")
        program = zipfile.ZipInfo("packed-1.data/scripts/packed-tool")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


def test_gpu_run_restarts_with_missing_packages_installed_from_the_kit(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both modules and programs of the wheels are found; after the run they are removed."""
    wheel(tmp_path / "kit")
    monkeypatch.setattr(prerequisites, "missing_packages", lambda: ["packed"])
    words = ["--simulate", "--kit", str(tmp_path / "kit"), "--steps", "cold"]
    assert main.main(words) == 7
    module, tool, environment, argv = json.loads(capfd.readouterr().out)
    site = Path(module).parent
    assert tool == str(site / "bin" / "packed-tool")
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(main.ROOT), str(site)]
    assert environment["PATH"].split(os.pathsep)[0] == str(site / "bin")
    assert float(environment[main.INSTALLED]) > 0
    assert argv == words
    assert not site.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SLOW_TO_END = """
import pathlib, signal, sys, time
import packed
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("started", flush=True)
signal.sigwait(signals)
time.sleep(1)  # four times as long as subprocess.run lets a child live after Ctrl-C
print("cleaned up", pathlib.Path(packed.__file__).exists())
sys.exit(5)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gpu_run_restarted_from_the_kit_cleans_up_on_ctrl_c_or_sigterm(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C signals all processes of the terminal, SIGTERM only the first."""
    wheel(tmp_path / "kit")
    (tmp_path / "run").write_text(SLOW_TO_END)
    program = (
        "import pathlib, sys\nfrom tests.gpu import main\nmain.RUN = pathlib.Path(sys.argv[1])\n"
        "sys.exit(main._again_with_packages(pathlib.Path(sys.argv[2]), []))\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "run"), str(tmp_path / "kit")]
    env = os.environ | {"PYTHONPATH": str(main.ROOT)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "started\n"
        if number == signal.SIGINT:
            os.killpg(ran.pid, number)
        else:
            ran.send_signal(number)
        assert ran.stdout.read() == "cleaned up True\n"
    assert ran.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_package_installation_removes_the_temporary_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "pip.py").write_text("import threading\nprint('installing', flush=True)\nthreading.Event().wait()\n")
    (tmp_path / "tmp").mkdir()
    program = "import pathlib\nfrom tests.gpu import main\nmain._again_with_packages(pathlib.Path('kit'), [])\n"
    env = os.environ | {"PYTHONPATH": f"{main.ROOT}:{tmp_path}", "TMPDIR": str(tmp_path / "tmp")}
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "installing\n"
        assert len(list((tmp_path / "tmp").iterdir())) == 1
        ran.send_signal(number)
        assert ran.stdout.read() == ""
    assert ran.returncode == 128 + number
    assert list((tmp_path / "tmp").iterdir()) == []


def test_gpu_kit_built_for_another_python_is_reported_in_one_line(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "kit", "cp27-none-any")
    monkeypatch.setattr(prerequisites, "missing_packages", lambda: ["packed"])
    assert main.main(["--simulate", "--kit", str(tmp_path / "kit")]) == 2
    assert capfd.readouterr().out == (
        f"the wheels in {tmp_path / 'kit'} cannot be installed into this Python; build them for it: make gpu-kit\n"
    )


def test_kit_installation_without_pip_is_reported_in_one_line(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "kit")
    monkeypatch.setattr(prerequisites, "missing_packages", lambda: ["packed"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main.main(["--simulate", "--kit", str(tmp_path / "kit")]) == 2
    assert capfd.readouterr().out == (
        "this Python has no pip, which installs the wheels of the kit: python3 -m ensurepip\n"
    )


def test_missing_packages_without_a_kit_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prerequisites, "missing_packages", lambda: ["msgspec", "uvloop"])
    assert main.main(["--simulate", "--kit", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out == (
        "packages are missing: msgspec, uvloop; run `make venv` and use .venv/bin/python\n"
    )
    monkeypatch.setattr(prerequisites, "check", lambda **_: prerequisites.Found((), (), ""))
    assert main.main(["--kit", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out == (
        "packages are missing: msgspec, uvloop; run `make gpu-kit` and copy build/gpu-kit here\n"
    )


def test_package_installation_time_is_subtracted_from_the_run_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run(arguments: argparse.Namespace, nvcc: str) -> int:
        limits.append(arguments.limit)
        return 0

    monkeypatch.setattr("tests.gpu.main.time.time", lambda: 1_000_030.0)
    monkeypatch.setattr(prerequisites, "check", lambda **_: prerequisites.Found((), (), ""))
    monkeypatch.setattr(prerequisites, "missing_packages", list)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(main.INSTALLED, "1000000.0")
    assert main.main(["--limit", "100", "--kit", "/nonexistent"]) == 0
    assert main.main(["--limit", "100", "--kit", "/nonexistent"]) == 0
    assert limits == [70.0, 100.0]
    assert main.INSTALLED not in os.environ


def test_run_limit_of_20_seconds_leaves_no_time_for_any_step(tmp_path: Path) -> None:
    """The last 20 s of the limit are reserved for cleaning up, so none is left for the first step."""
    words = ["--simulate", "--limit", "20", "--steps", "inventory,cold", "--out", str(tmp_path)]
    ran = subprocess.run([sys.executable, str(main.RUN), *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    steps = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert steps["prepare"] == {"failed": "no time was left"}
    assert steps["inventory"] == steps["cold"] == {"skipped": "there are no models"}
    assert "not all figures hold; failed: prepare; skipped: start, inventory, cold; result in" in ran.stdout


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for the Unix socket of `serve` in it."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gpu_run_ended_by_a_signal_keeps_results_and_leaves_no_process(
    tmp_path: Path, short_folder: Path, number: signal.Signals
) -> None:
    """It is in the middle of a step, with an engine."""
    words = ["--simulate", "--steps", "misbehave", "--out", str(tmp_path / "out")]
    env = os.environ | {"TMPDIR": str(short_folder)}
    with subprocess.Popen([sys.executable, str(main.RUN), *words], env=env, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert any("start      took" in line for line in ran.stdout)
        (phases,) = short_folder.glob("gpu-run-*/phases.jsonl")
        end_s = time.monotonic() + 60
        while '"model": "leaky"' not in phases.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        ran.send_signal(number)
        assert "not all figures hold; failed: run; result in" in ran.stdout.read()
    assert ran.returncode == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "phases.jsonl").read_text().splitlines()]
    assert not any(lives(row["pid"]) for row in rows)
    assert [*short_folder.iterdir()] == []


BLOCKED = """
import asyncio, subprocess, sys, time
from tests.gpu import main
main.simulate()
from tests.gpu import runner

async def blocked(arguments, bed, nvcc):
    child = subprocess.Popen(["sleep", "600"])
    (bed.folder / "phases.jsonl").write_text(f"{child.pid}\\n")
    time.sleep(600)

runner._steps = blocked
main.simulate = lambda: None
main.main(sys.argv[1:])
"""


def test_blocked_gpu_run_is_ended_at_its_limit_and_keeps_its_results(tmp_path: Path) -> None:
    """A call that never returns also blocks the time limits of the steps."""
    folders = {"TMPDIR": str(tmp_path / "temporary")}
    Path(folders["TMPDIR"]).mkdir()
    words = ["--simulate", "--limit", "1", "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], env=os.environ | folders | {"PYTHONPATH": str(main.ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (1, "")
    steps = json.loads((tmp_path / "out" / "result.json").read_text())["steps"]
    assert steps["run"] == {"failed": "took longer than 1 s and was ended"}
    assert not lives(int((tmp_path / "out" / "phases.jsonl").read_text()))
    assert [*Path(folders["TMPDIR"]).iterdir()] == []
