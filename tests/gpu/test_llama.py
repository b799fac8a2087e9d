"""The background build of llama.cpp with stand-ins for cmake: its commands, its time limit and its failures."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.gpu import llama
from tests.gpu.llama import Building
from tests.gpu.watch import lives

NVCC = "/usr/local/cuda/bin/nvcc"
CMAKE = (
    f"#!{sys.executable} -IS"
    """
import json, os, pathlib, sys
argv, here = sys.argv[1:], pathlib.Path(__file__).parent
with (here / "calls.jsonl").open("a") as file:
    file.write(json.dumps(argv) + "\\n")
(here / "affinity.json").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
"""
)
BUILDS = """
if argv[0] == "--build":
    server = pathlib.Path(argv[1], "bin", "llama-server")
    server.parent.mkdir(parents=True)
    server.write_text("")
"""
HANGS = """
if argv[0] == "--build":
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    (here / "child.txt").write_text(str(child.pid))
    child.wait()
"""
FAILS = """
if argv[0] == "-S":
    print("-- Looking for a CUDA compiler")
    print("CMake Error: no CUDA toolkit was found")
    sys.exit(1)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of the PATH. Its `nice` records the priority and keeps that of the tests."""
    folder = tmp_path / "programs"
    folder.mkdir()
    executable(folder / "nice", '#!/bin/sh\necho "$1 $2" > "$(dirname "$0")/nice.txt"\nshift 2\nexec "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit that contains only a source archive with one file."""
    folder = tmp_path / "kit"
    folder.mkdir()
    with tarfile.open(folder / llama.SOURCE, "w:xz") as archive:
        member = tarfile.TarInfo("CMakeLists.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    return folder


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def build(kit: Path, tmp_path: Path, *, ready: str = "") -> tuple[Path | None, str]:
    """Build in tmp_path / "llama"; return the server and the outcome in words."""
    building = Building(kit, tmp_path / "llama", NVCC, [9, 0], ready=ready)
    try:
        return asyncio.run(building.wait()), building.result
    finally:
        building.stop()


def until_started(programs: Path) -> int:
    """Wait for the child process of cmake; return its id."""
    path, end_s = programs / "child.txt", time.monotonic() + 300
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return int(path.read_text())


def until_ended(pid: int) -> None:
    end_s = time.monotonic() + 300
    while lives(pid):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def calls(programs: Path) -> list[list[str]]:
    """Argument lists of the calls of cmake."""
    return [json.loads(line) for line in (programs / "calls.jsonl").read_text().splitlines()]


def test_llama_cpp_build_uses_one_cuda_architecture_and_one_target(kit: Path, programs: Path, tmp_path: Path) -> None:
    executable(programs / "cmake", CMAKE + BUILDS)
    executable(programs / "ninja", "#!/bin/sh\n")
    server, said = build(kit, tmp_path)
    assert server == tmp_path / "llama" / "build" / "bin" / "llama-server"
    assert re.fullmatch(r"built in \d+ s at most", said)
    configure, make = calls(programs)
    folders = [str(tmp_path / "llama" / name) for name in ("llama.cpp", "build")]
    assert configure[:4] == ["-S", folders[0], "-B", folders[1]]
    assert {
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_CUDA=ON",
        "-DGGML_CUDA_FA=OFF",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        f"-DCMAKE_CUDA_COMPILER={NVCC}",
    } <= {*configure}
    assert configure[-2:] == ["-G", "Ninja"]
    processors = sorted(os.sched_getaffinity(0))
    jobs = max(1, len(processors) - llama.SPARED)
    assert make == ["--build", folders[1], "--target", "llama-server", "--parallel", str(jobs)]
    assert json.loads((programs / "affinity.json").read_text()) == processors[-jobs:]
    assert (programs / "nice.txt").read_text() == "-n 19\n"
    assert (tmp_path / "llama" / "llama.cpp" / "CMakeLists.txt").read_text() == "text"


def test_llama_cpp_build_without_ninja_uses_the_default_generator(
    kit: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(programs / "cmake", CMAKE + BUILDS)
    monkeypatch.setattr("tests.gpu.llama.shutil.which", lambda _: None)  # no taskset either
    assert build(kit, tmp_path)[0] is not None
    assert "-G" not in calls(programs)[0]


def test_llama_cpp_build_is_ended_when_its_time_limit_timer_fires(
    kit: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(programs / "cmake", CMAKE + HANGS)
    timer = mock.MagicMock()
    monkeypatch.setattr("tests.gpu.llama.threading.Timer", timer)
    building = Building(kit, tmp_path / "llama", NVCC, [9, 0])
    try:
        child = until_started(programs)
        limit_s, end = timer.call_args.args
        assert limit_s == 240
        end()
        until_ended(child)
        assert asyncio.run(building.wait()) is None
        assert building.result == "not built within 240 s"
    finally:
        building.stop()


def test_failed_llama_cpp_build_reports_the_first_error_of_its_log(kit: Path, programs: Path, tmp_path: Path) -> None:
    executable(programs / "cmake", CMAKE + FAILS)
    assert build(kit, tmp_path) == (None, "the build failed: CMake Error: no CUDA toolkit was found")
    assert len(calls(programs)) == 1


def test_stopped_llama_cpp_build_ends_its_cmake_process(kit: Path, programs: Path, tmp_path: Path) -> None:
    executable(programs / "cmake", CMAKE + HANGS)
    building = Building(kit, tmp_path / "llama", NVCC, [12, 0])
    child = until_started(programs)
    building.stop()
    until_ended(child)
    assert "-DCMAKE_CUDA_ARCHITECTURES=120-real" in calls(programs)[0]


def test_given_llama_server_file_is_used_without_a_build_if_it_exists(
    kit: Path, programs: Path, tmp_path: Path
) -> None:
    executable(programs / "cmake", CMAKE + FAILS)
    server = tmp_path / "llama-server"
    assert build(kit, tmp_path, ready=str(server)) == (None, f"{server} does not exist")
    server.write_text("")
    assert build(kit, tmp_path, ready=str(server)) == (server, "ready-made")
    assert not (programs / "calls.jsonl").exists()
