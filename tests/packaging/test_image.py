"""The image: built if outdated, unpacked, and run with chroot as its unprivileged user."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import yaml

from scripts.gates import PACKAGES
from tests.support.chart import ROOT

ARCHIVE = ROOT / "build" / "image-of-tests.tar"
"""Kept until a source is newer."""
BUILD_S_MAX = 300
pytestmark = [pytest.mark.xdist_group("image"), pytest.mark.deep]  # building an image takes two minutes


class Image(NamedTuple):
    """An unpacked image."""

    config: dict[str, Any]
    root: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as its user, with only its environment."""
        user = self.config["config"]["User"]
        env = dict(one.split("=", 1) for one in self.config["config"]["Env"])
        return subprocess.run(
            [shutil.which("chroot") or "/usr/sbin/chroot", f"--userspec={user}", str(self.root), *words], env=env,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if os.getuid() != 0:
        pytest.skip("chroot needs root")
    if outdated():
        if shutil.which("mmdebstrap") is None:
            pytest.skip("mmdebstrap is not installed (Debian: apt install mmdebstrap)")
        folder = tmp_path_factory.mktemp("wheel")
        wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "."]
        subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True, timeout=BUILD_S_MAX)
        made = subprocess.run(
            [sys.executable, "-m", "scripts.image", str(next(folder.glob("*.whl"))), str(ARCHIVE)], cwd=ROOT,
            capture_output=True, text=True, timeout=BUILD_S_MAX, check=False,
        )  # fmt: skip
        if "could not resolve" in made.stderr.lower() or "failed to fetch" in made.stderr.lower():
            pytest.skip("Debian's archive cannot be reached from here")
        assert made.returncode == 0, made.stderr
    root = tmp_path_factory.mktemp("image")
    root.chmod(0o755)  # readable to its user as `/`
    yield laid_open(root)
    shutil.rmtree(root)


def outdated() -> bool:
    """Return whether the image must be built."""
    sources = [
        ROOT / "scripts/image.py",
        ROOT / "scripts/sbom.py",
        ROOT / "requirements/dev.lock",
        ROOT / "requirements/debian.lock",
        *(p for one in PACKAGES for p in (ROOT / one).rglob("*.py")),
    ]
    return not ARCHIVE.exists() or max(path.stat().st_mtime for path in sources) > ARCHIVE.stat().st_mtime


def laid_open(root: Path) -> Image:
    """Read the layout, verify every digest and unpack the layers in order."""
    with tarfile.open(ARCHIVE) as archive:
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


def test_python_in_the_image_loads_ca_certificates_zones_and_libraries(image: Image) -> None:
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


def test_sbom_lists_every_package_with_hash_and_license(image: Image) -> None:
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


def test_every_module_in_the_image_has_compiled_bytecode(image: Image) -> None:
    packages = image.root / "usr/local/lib/python3.11/dist-packages"
    for name in ("gateway", "autoscaler", "pilotlight"):
        sources = {path.stem for path in (packages / name).glob("*.py")}
        assert sources == {path.name.split(".")[0] for path in (packages / name / "__pycache__").glob("*.pyc")}
