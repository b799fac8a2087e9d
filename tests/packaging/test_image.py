"""The image: built if outdated, unpacked, and run with chroot as its unprivileged user."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import yaml

from loadtest import tiny_gguf
from scripts.gates import PACKAGES
from tests.support.chart import ROOT
from tests.support.net.ports import free_port
from tests.support.real_services.container_runtimes import LIMITS, RUNTIMES, real_runtime

ARCHIVE, LLAMA_ARCHIVE = ROOT / "build/image-of-tests.tar", ROOT / "build/llama-image-of-tests.tar"
"""Kept until a source is newer."""
BUILD_S_MAX = 300
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
SENTENCE = "Hello, I am Ada, asleep until you called."
pytestmark = [pytest.mark.xdist_group("image"), pytest.mark.deep]  # building an image takes two minutes


class Image(NamedTuple):
    """An unpacked image."""

    config: dict[str, Any]
    root: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes."""
        return dict(one.split("=", 1) for one in self.config["config"]["Env"])

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as its user, with only its environment."""
        user = self.config["config"]["User"]
        return subprocess.run(
            [CHROOT, f"--userspec={user}", str(self.root), *words],
            env=self.environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from unpacked(tmp_path_factory, ARCHIVE)


@pytest.fixture(scope="module")
def llama_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image with llama.cpp."""
    yield from unpacked(tmp_path_factory, LLAMA_ARCHIVE, "--llama")


def unpacked(tmp_path_factory: pytest.TempPathFactory, archive: Path, *options: str) -> Iterator[Image]:
    """Build the image if it is outdated, and unpack it."""
    if os.getuid() != 0:
        pytest.skip("chroot needs root")
    if outdated(archive):
        if shutil.which("mmdebstrap") is None:
            pytest.skip("mmdebstrap is not installed (Debian: apt install mmdebstrap)")
        folder = tmp_path_factory.mktemp("wheel")
        wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "."]
        subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True, timeout=BUILD_S_MAX)
        made = subprocess.run(
            [sys.executable, "-m", "scripts.image", *options, str(next(folder.glob("*.whl"))), str(archive)], cwd=ROOT,
            capture_output=True, text=True, timeout=BUILD_S_MAX, check=False,
        )  # fmt: skip
        if "could not resolve" in made.stderr.lower() or "failed to fetch" in made.stderr.lower():
            pytest.skip("Debian's archive cannot be reached from here")
        assert made.returncode == 0, made.stderr
    root = tmp_path_factory.mktemp("image")
    root.chmod(0o755)  # readable to its user as `/`
    yield unpack_image(root, archive)
    shutil.rmtree(root)


def outdated(archive: Path) -> bool:
    """Return whether the image must be built."""
    sources = [
        ROOT / "scripts/image.py",
        ROOT / "scripts/sbom.py",
        ROOT / "requirements/dev.lock",
        ROOT / "requirements/debian.lock",
        *(p for one in PACKAGES for p in (ROOT / one).rglob("*.py")),
    ]
    return not archive.exists() or max(path.stat().st_mtime for path in sources) > archive.stat().st_mtime


def unpack_image(root: Path, path: Path) -> Image:
    """Read the layout, verify every digest and unpack the layers in order."""
    with tarfile.open(path) as archive:
        blobs = {one.name: archive.extractfile(one) for one in archive}

        def read(name: str) -> bytes:
            file = blobs[name]
            assert file is not None
            return file.read()

        def blob(of: dict[str, Any]) -> bytes:
            kind, _, digest = of["digest"].partition(":")
            content = read(f"blobs/{kind}/{digest}")
            assert (hashlib.sha256(content).hexdigest(), len(content)) == (digest, of["size"])
            return content

        assert json.loads(read("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        (top,) = json.loads(read("index.json"))["manifests"]
        manifest = json.loads(blob(top))
        for layer in manifest["layers"]:
            subprocess.run(["tar", "-xzf", "-", "-C", str(root)], input=blob(layer), check=True)
        return Image(json.loads(blob(manifest["config"])), root)


def test_image_entry_point_runs_pilotlight_and_its_subcommands(image: Image) -> None:
    assert image.config["config"]["Entrypoint"] == ["pilotlight"]
    for words in (("--version",), ("--help",), ("gateway", "--help"), ("autoscaler", "--help"), ("doctor", "--help")):
        done = image.run("/usr/bin/pilotlight", *words)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert "Usage: pilotlight autoscaler" in image.run("/usr/bin/pilotlight", "autoscaler", "--help").stdout


def test_engine_command_of_the_tiny_example_runs_in_the_image(image: Image) -> None:
    words = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())["spec"]["command"]
    assert image.run(f"/usr/bin/{words[0]}", *words[1:3], "--help").returncode == 0


def test_image_python_loads_ca_certificates_time_zones_and_libraries(image: Image) -> None:
    script = (
        "import ssl, zoneinfo, kubernetes.aio, grpc, numpy, uvloop, yaml, psutil\n"
        "zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "print(len(ssl.create_default_context().get_ca_certs()))"
    )
    done = image.run("/usr/bin/python3", "-c", script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_built_image_has_no_root_user_shell_or_setuid_program(image: Image) -> None:
    assert image.config["config"]["User"] == "65532:65532"
    programs = {
        path.name for folder in ("bin", "sbin", "usr/bin", "usr/sbin") for path in (image.root / folder).glob("*")
    }
    assert programs == {"pilotlight", "python3", "python3.11"}
    others = [path for path in image.root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000]
    assert others == [], "no process runs as another user"


def test_sbom_lists_every_package_of_the_image_with_its_hash(image: Image) -> None:
    bill = json.loads(ARCHIVE.with_suffix(".cdx.json").read_text())
    listed = {one["purl"].partition("?")[0]: one for one in bill["components"]}
    there = metadata.distributions(path=[str(image.root / "usr/local/lib/python3.11/dist-packages")])
    python = {f"pkg:pypi/{one.name.lower().replace('_', '-')}@{quote(one.version, safe='')}" for one in there}
    debian = {path.name for path in (image.root / "var/lib/dpkg/status.d").iterdir()}
    assert {purl for purl in listed if purl.startswith("pkg:pypi/")} == python
    assert {one["name"] for purl, one in listed.items() if purl.startswith("pkg:deb/")} == debian
    assert all(re.fullmatch("[0-9a-f]{64}", one["hashes"][0]["content"]) for one in listed.values())
    named = [one for one in listed.values() if one["licenses"][0]["license"]["name"] != "NOASSERTION"]
    assert len(named) > 0.8 * len(listed)
    assert not [one["name"] for one in listed.values() if one["purl"].startswith("pkg:pypi/") and one not in named]


def test_top_level_modules_in_the_image_have_compiled_bytecode(image: Image) -> None:
    packages = image.root / "usr/local/lib/python3.11/dist-packages"
    for name in ("gateway", "autoscaler", "pilotlight"):
        sources = {path.stem for path in (packages / name).glob("*.py")}
        assert sources == {path.name.split(".")[0] for path in (packages / name / "__pycache__").glob("*.pyc")}


def run_documented_command(client: Sequence[str], folder: Path, *options: str) -> list[str]:
    """Return the words of the documented `docker run` for this client and folder of models."""
    page = (ROOT / "docs/how-to/install.md").read_text()
    (command,) = re.findall(r"(?m)^docker (run .*)$", page)
    words = shlex.split(command.replace("$HOME/models", str(folder)))
    return [*client, words[0], *options, *words[1:]]


def run_in_chroot(root: Path, folder: Path) -> list[str]:
    """Return the words that run the same entry point without a container runtime."""
    shutil.copytree(folder, root / "models")
    for name in ("proc", "dev"):
        (root / name).mkdir(exist_ok=True)
    mounts = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev"'
    enter = f'{mounts} && exec {CHROOT} --userspec=65532:65532 "$0" "$@"'
    return ["unshare", "--mount", "sh", "-c", enter, str(root), "/usr/bin/pilotlight", "serve", "/models"]


@pytest.mark.parametrize("name", ["chroot", *sorted(RUNTIMES)])
def test_documented_command_serves_models_from_the_llama_cpp_image(
    name: str, llama_image: Image, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    tmp_path.chmod(0o755)
    tiny_gguf.make_model(models / "ada.gguf", SENTENCE)
    with contextlib.ExitStack() as stack:
        if name == "chroot":
            command, env = run_in_chroot(llama_image.root, models), llama_image.environment()
        else:
            client, env = stack.enter_context(real_runtime(name)), dict(os.environ)
            subprocess.run([*client, "load", "--input", str(LLAMA_ARCHIVE)], check=True, timeout=BUILD_S_MAX)
            command = run_documented_command(client, models, *LIMITS)
        port = free_port()
        addresses = ("--listen", f"127.0.0.1:{port}", "--ops", f"127.0.0.1:{free_port()}")
        serve = stack.enter_context(subprocess.Popen([*command, *addresses], env=env))
        stack.callback(serve.terminate)
        answer = ask_until_ready(serve, f"http://127.0.0.1:{port}/v1/chat/completions")
        serve.terminate()
        assert (answer, serve.wait(60)) == (SENTENCE, 0)


def ask_until_ready(serve: subprocess.Popen[bytes], url: str) -> str:
    """Return the answer of the tiny model as soon as the port is open."""
    body = {"model": "ada", "max_tokens": 50, "messages": [{"role": "user", "content": "Who are you?"}]}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    until_s = time.monotonic() + BUILD_S_MAX
    while True:
        try:
            with urllib.request.urlopen(request, timeout=BUILD_S_MAX) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except OSError:
            assert serve.poll() is None, "it ended; its output says why"
            assert time.monotonic() < until_s
            time.sleep(0.1)
