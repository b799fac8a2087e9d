"""pip, pipx and `uv tool install` install the wheel of `make wheel` with its dependencies from the package index.

Each one gets an empty home and an environment of its own. The commands are those of docs/how-to/install.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest import tiny_gguf
from tests.integration.process.packaging.test_wheel import ROOT, WITHIN_S, answer
from tests.support.net.ports import free_port

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("installers")]
PYTHON = os.path.realpath(sys.executable)
PAGE = ROOT / "docs" / "how-to" / "install.md"
INSTALL_S_MAX = 600.0
"""Downloads, and compiling the gateway, on a machine that runs other tests."""
SENTENCE = "Installed from a wheel."
COMMANDS = {
    "pip": 'pip install "$(ls dist/pilotlight-*.whl)[llama]"',
    "pipx": 'pipx install "$(ls dist/pilotlight-*.whl)[llama]"',
    "uv": 'uv tool install "$(ls dist/pilotlight-*.whl)[llama]"',
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a folder with the wheel in dist/, as `make wheel` writes it, and an environment with pip, pipx and uv."""
    if find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip (Debian: apt install python3-venv)")
    path = Path(tempfile.mkdtemp(prefix="pilotlight-"))
    try:
        (path / "dist").mkdir()
        plain = f"{sys.executable} -m build --wheel --no-isolation --outdir {path}/dist ."
        compiled = f"bash scripts/compiled.sh && cp build/wheel-cached/*.whl {path}/dist"  # compiled once for all tests
        shell(plain if shutil.which("gcc") is None else compiled, ROOT, dict(os.environ))
        subprocess.run([PYTHON, "-m", "venv", path / "tools"], check=True)
        locked = ["--quiet", "--require-hashes", "--no-deps", "-r", str(ROOT / "requirements" / "installers.lock")]
        subprocess.run([path / "tools" / "bin" / "pip", "install", *locked], check=True, timeout=INSTALL_S_MAX)
        yield path
    finally:
        shutil.rmtree(path)


def shell(command: str, place: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-ec", command], cwd=place, env=environment, capture_output=True, text=True, check=False,
        timeout=INSTALL_S_MAX,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", COMMANDS)
def test_systemd_unit_command_serves_after_a_pip_pipx_or_uv_install(folder: Path, tool: str) -> None:
    assert COMMANDS[tool] in PAGE.read_text()
    home = folder / tool
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    path = f"{home}/bin:{home}/.local/bin:{folder}/tools/bin:/usr/bin:/bin"
    environment = kept | {"HOME": str(home), "PATH": path, "PIPX_DEFAULT_PYTHON": PYTHON, "UV_PYTHON": PYTHON}
    if tool == "pip":
        subprocess.run([PYTHON, "-m", "venv", home], check=True)
    try:
        shell(COMMANDS[tool], folder, environment)
        check_service(home, environment)
    finally:
        shutil.rmtree(home)


def check_service(home: Path, environment: dict[str, str]) -> None:
    """Run the command line of the unit that the installed command prints, and get an answer from it."""
    tiny_gguf.make_model(home / "ada.gguf", SENTENCE)
    url = f"127.0.0.1:{free_port()}"
    words = f"ada.gguf --listen {url} --ops 127.0.0.1:0 --state {home}/state"
    shell(f"pilotlight service print {words} > unit", home, environment)
    (line,) = (line for line in (home / "unit").read_text().splitlines() if line.startswith("ExecStart="))
    with subprocess.Popen(
        line.removeprefix("ExecStart=").split(), cwd="/", env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as serve:  # fmt: skip
        try:
            assert answer(url) == SENTENCE
        finally:
            serve.terminate()
            output, _ = serve.communicate(timeout=WITHIN_S)
    assert (serve.returncode, output.strip().splitlines()[-1]) == (0, "pilotlight: stopped")
