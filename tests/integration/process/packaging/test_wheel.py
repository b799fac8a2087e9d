"""The wheel as users get it: its contents, and that it serves from an empty environment with its dependencies.

Needs no network: the declared dependencies (with theirs, and nothing else) are linked from the environment that runs
the tests, so that a dependency missing in pyproject.toml is detected here.
"""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from loadtest import tiny_gguf
from pilotlight import __version__
from tests.support.net.ports import free_port

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("artifacts", "autoscaler", "gateway", "loadtest", "pilotlight")
SENTENCE = "From a wheel, far from any clone."
SETTINGS = "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\ndevices: [{name: gpu0, memory: 1Gi}]\n"
WITHIN_S = 90.0


class Installed(NamedTuple):
    """A virtual environment that contains only the wheel and its dependencies."""

    python: Path
    command: Path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = folder.glob("*.whl")
    return path


def pip() -> list[str]:
    """Return a pip that can install into another environment; this one may lack pip (scripts/venv.sh)."""
    for python in (sys.executable, "python3"):
        command = [python, "-m", "pip"]
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    return pytest.skip("neither this Python nor python3 has pip, so the wheel cannot be installed")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    options = ["--python", str(python), "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
    subprocess.run([*pip(), *options, str(wheel)], check=True)
    needed = distributions(Requirement(f"pilotlight[llama] @ {wheel.as_uri()}"), requirements(wheel))
    for place in folder.glob("lib/python*/site-packages"):
        link(needed, place)
    return Installed(python, folder / "bin" / "pilotlight")


def requirements(wheel: Path) -> list[Requirement]:
    return [Requirement(text) for text in head(wheel).get_all("Requires-Dist", [])]


def head(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def distributions(of: Requirement, requires: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Return all required distributions by name, transitive ones included."""
    found: dict[str, metadata.Distribution] = {}
    due = [(one, extra) for one in requires for extra in (*of.extras, "")]
    while due:
        one, extra = due.pop()
        if one.name in found or (one.marker is not None and not one.marker.evaluate({"extra": extra})):
            continue
        found[one.name] = metadata.distribution(one.name)
        due += [(Requirement(text), "") for text in found[one.name].requires or ()]
        due += [(Requirement(text), own) for own in one.extras for text in found[one.name].requires or ()]
    return found


def link(needed: dict[str, metadata.Distribution], place: Path) -> None:
    """Make their packages and modules, and no others, importable from `place`."""
    for one in needed.values():
        base = Path(str(one.locate_file("")))
        tops = {file.parts[0] for file in one.files or () if file.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            if not (place / top).exists():
                (place / top).symlink_to(base / top)


def test_built_wheel_contains_exactly_the_modules_and_the_operator_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    own = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == own
    assert "autoscaler/engines/programs/xllamacpp_server.py" in names
    assert {name for name in names if not name.endswith(".py")} == {"autoscaler/pages/operator.html"}


def test_built_wheel_metadata_states_name_license_and_requirements(wheel: Path) -> None:
    output = head(wheel)
    assert (output["Name"], output["Version"], output["License-Expression"]) == (
        "pilotlight",
        __version__,
        "Apache-2.0",
    )
    assert output["Requires-Python"] == ">=3.11"
    assert output["License-File"] == "LICENSE"
    assert "Pilotlight" in str(output.get_payload())
    assert {one.name for one in requirements(wheel) if one.marker is None} >= {"aiohttp", "click", "msgspec"}
    assert {one.name for one in requirements(wheel) if "llama" in str(one.marker)} == {"xllamacpp"}


def test_every_module_imports_with_the_declared_dependencies_alone(installed: Installed, tmp_path: Path) -> None:
    modules = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.stem not in {"__main__", "xllamacpp_server"}
    ]
    source = f"import importlib\nfor name in {sorted(modules)!r}: importlib.import_module(name)"
    subprocess.run([installed.python, "-c", source], cwd=tmp_path, check=True)


def test_kubernetes_driver_without_its_extra_fails_with_the_pip_command(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    words = ["autoscaler", "--driver", "kubernetes", "--documents", "settings.yaml", "--contract-socket", "c.sock"]
    done = subprocess.run(
        [installed.command, *words, "--state", "s"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert 'pip install "$(ls dist/pilotlight-*.whl)[kubernetes]"' in done.stderr.splitlines()[-1]


@pytest.fixture
def state() -> Iterator[Path]:
    """Yield a short path, because the path of a Unix socket is limited."""
    path = Path(tempfile.mkdtemp(prefix="pilotlight-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.standard
def test_exec_start_of_the_printed_systemd_unit_serves_outside_a_checkout(
    installed: Installed, tmp_path: Path, state: Path
) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", SENTENCE)
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    (tmp_path / "gateway.py").write_text("raise SystemExit('a file of the folder it is called in')")
    url = f"127.0.0.1:{free_port()}"
    words = ["serve", "ada.gguf", "-c", "settings.yaml", "--state", str(state), "--listen", url, "--ops", "127.0.0.1:0"]
    printed = subprocess.run(
        [installed.command, "service", "print", *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (unit,) = (line for line in printed.stdout.splitlines() if line.startswith("ExecStart="))
    command = unit.removeprefix("ExecStart=").split()
    assert command[:2] == [str(installed.command), "serve"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as serve:
        try:
            assert answer(url) == SENTENCE
        finally:
            serve.terminate()
            output, _ = serve.communicate(timeout=WITHIN_S)
    assert (serve.returncode, output.strip().splitlines()[-1]) == (0, "pilotlight: stopped")


def answer(url: str) -> str:
    """Return the model's response to one request, as soon as the server listens."""
    body = json.dumps({"model": "ada", "messages": [{"role": "user", "content": "Who?"}]}).encode()
    call = urllib.request.Request(f"http://{url}/v1/chat/completions", body, {"content-type": "application/json"})
    end_s = time.monotonic() + WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(call, timeout=WITHIN_S) as response:
                return str(json.load(response)["choices"][0]["message"]["content"]).strip()
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.05)


@pytest.mark.parametrize("name", ["autoscaler", "artifacts", "gateway"])
def test_command_fails_if_a_foreign_package_shadows_a_pilotlight_package(
    installed: Installed, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("WHOSE = 'not Pilotlight'\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [installed.command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"pilotlight: the package '{name}' is not Pilotlight's: ")
    assert ended.stderr.count("\n") == 1
