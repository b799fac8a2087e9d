"""Builds the OCI image of gateway, autoscaler and agent without a docker engine: dist/pilotlight-image.tar.

Owns what is in it: Debian's Python with what it needs (no shell, no package tools), our wheel, and its dependencies as
requirements/dev.lock has them, with hashes. Needs mmdebstrap, which asks Debian's signed archive. Two layers, the
second ours; every time in them is SOURCE_DATE_EPOCH (by default the last commit's): the same input, the same bytes.

    python scripts/image.py [WHEEL [ARCHIVE]]
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("dist/pilotlight-image.tar")
SUITE, PYTHON = "bookworm", "3.11"
DEBS = f"python{PYTHON},ca-certificates,tzdata,libstdc++6"
"""The last is numpy's."""
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
"""Where Debian's Python looks for what is not Debian's."""
EXTRAS = ("kubernetes", "agent")
USER = 65532
LEFT_OUT = (
    "bin/tar", "usr/share/(doc|man|info|locale|lintian|perl5|debconf|bash-completion|pixmaps|applications|binfmts)",
    "usr/s?bin/(dpkg|debconf|update-|start-stop|tarcat|rmt|c_rehash|openssl|pdb|pydoc|pygettext).*", "sbin/.*",
    "var/(cache|log|lib/apt)/.*", "etc/(apt|cron.daily|logrotate.d|alternatives|dpkg|perl)", "usr/share/dpkg",
    "usr/lib/dpkg", "usr/share/polkit-1",
)  # fmt: skip
"""Package tools and pages that come along."""
ENTRY = f"""#!/usr/bin/python{PYTHON} -P
import sys

from pilotlight.__main__ import main

sys.exit(main())
"""
FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/none\npilotlight:x:{USER}:{USER}:pilotlight:/state:/none\n",
    "etc/group": f"root:x:0:\npilotlight:x:{USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
    "usr/bin/pilotlight": ENTRY,
}
ENVIRONMENT = {
    "PATH": "/usr/bin", "LANG": "C.UTF-8", "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "HOME": "/state",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


class Layer(NamedTuple):
    """One layer, compressed, and the digest of what it unpacks to."""

    blob: bytes
    digest: str


def main(words: Sequence[str]) -> None:
    """Builds it and prints its digest."""
    if shutil.which("mmdebstrap") is None:
        sys.exit("make image needs mmdebstrap (Debian: apt install mmdebstrap)")
    os.chdir(ROOT)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _said("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="pilotlight-image-") as folder:
        wheel = Path(words[0]) if words else built(Path(folder) / "wheel")
        base, ours = Path(folder) / "base", Path(folder) / "ours"
        debian(base)
        program(ours, wheel, Path(folder) / "requirements.txt")
        for layer in (base, ours):
            compile_python(layer)
        layers = [packed(base, epoch), packed(ours, epoch)]
    archive = Path(words[1]) if len(words) > 1 else OUT
    digest = write(archive, layers, wheel.name.split("-")[1], epoch)
    sys.stdout.write(f"{archive}: {archive.stat().st_size >> 20} MiB, {digest}\n")


def built(folder: Path) -> Path:
    """Our wheel, with the gateway compiled where this Python is the image's."""
    if sys.version_info[:2] == (3, 11):
        subprocess.run(["bash", "scripts/compiled.sh", "wheel", str(folder)], cwd=ROOT, check=True)
    else:
        sys.stdout.write(f"the gateway is not compiled: that needs a .venv of Python {PYTHON}\n")
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "."]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def debian(base: Path) -> None:
    """Python and what it needs, and for scanners which packages that is."""
    told = 'mkdir -p "$1/var/lib/dpkg/status.d"; for deb in "$1"/var/cache/apt/archives/*.deb; do '
    told += 'dpkg-deb -f "$deb" > "$1/var/lib/dpkg/status.d/$(basename "${deb%%_*}")"; done'
    archive = base.with_suffix(".tar")
    mode = "root" if os.getuid() == 0 else "unshare"
    options = [f"--mode={mode}", "--variant=extract", f"--include={DEBS}", f"--extract-hook={told}", "--quiet"]
    if mode == "root":
        options.append('--aptopt=APT::Sandbox::User "root"')  # where there is no user of its own for downloads
    subprocess.run(["mmdebstrap", *options, SUITE, str(archive)], check=True)
    base.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", base, "--exclude=./dev/*"], check=True)
    left_out = re.compile("|".join(LEFT_OUT))
    for path in sorted(base.rglob("*")):
        if left_out.fullmatch(str(path.relative_to(base))) and os.path.lexists(path):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    authorities = sorted((base / "usr/share/ca-certificates").rglob("*.crt"))
    put(base, "etc/ssl/certs/ca-certificates.crt", "".join(one.read_text() for one in authorities))
    (base / "usr/bin/python3").symlink_to(f"python{PYTHON}")


def program(ours: Path, wheel: Path, requirements: Path) -> None:
    """Our wheel, what it needs, and the few files around it."""
    requirements.write_text("".join(locked()))
    machine = platform.machine()
    for what in (["--require-hashes", "-r", str(requirements)], [str(wheel)]):
        subprocess.run(
            [
                sys.executable if _has_pip() else "python3", "-m", "pip", "install", "--quiet",
                "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version",
                PYTHON, "--implementation", "cp", *(f"--platform=manylinux_2_{n}_{machine}" for n in range(36, 16, -1)),
                f"--platform=manylinux2014_{machine}", f"--platform=linux_{machine}", "--target", str(ours / SITE),
                "--upgrade", *what,
            ],
            check=True,
        )  # fmt: skip
    shutil.rmtree(ours / SITE / "bin", ignore_errors=True)
    for path, text in FILES.items():
        put(ours, path, text)
    (ours / "usr/bin/pilotlight").chmod(0o755)
    for path, mode in (("tmp", 0o1777), ("state", 0o755)):
        (ours / path).mkdir()
        (ours / path).chmod(mode)


def locked() -> Iterator[str]:
    """The lines of the lock that the product needs, with their hashes."""
    entries = {
        re.split(r"[=\[ ]", entry)[0].lower(): entry
        for entry in re.split(r"(?m)^(?=[a-zA-Z0-9])", (ROOT / "requirements/dev.lock").read_text())
        if "==" in entry
    }
    for name in sorted(needed()):
        yield entries[name]


def needed() -> set[str]:
    """The names of all distributions that the product imports, as they are installed here."""
    sys.path.insert(0, str(ROOT))
    project = (ROOT / "pyproject.toml").read_text()
    blocks = [re.search(r"(?ms)^dependencies = \[$(.*?)^\]", project)]
    blocks += [re.search(rf"(?m)^{extra} = \[(.*?)\]", project) for extra in EXTRAS]
    waiting = [_plain(one) for block in blocks if block for one in re.findall(r'"([^"]+)"', block[1])]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        required = metadata.requires(name) or []
        waiting += [_plain(one) for one in required if "extra ==" not in one and _holds(one)]
    return found


def _plain(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def _holds(requirement: str) -> bool:
    """Whether it is installed here, which its marker decides."""
    try:
        metadata.version(_plain(requirement))
    except metadata.PackageNotFoundError:
        return False
    return True


def compile_python(layer: Path) -> None:
    """Containers may not write: what is not compiled now is compiled at every start."""
    python = sys.executable if sys.version_info[:2] == (3, 11) else f"python{PYTHON}"
    words = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(layer), "-p", "/"]
    subprocess.run([python, *words, str(layer / "usr")], check=False, stdout=subprocess.DEVNULL)  # lib2to3 has examples


def put(layer: Path, path: str, text: str) -> None:
    """One file of ours."""
    place = layer / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def packed(folder: Path, epoch: int) -> Layer:
    """All of a folder, owned by root, in order."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            one = tar.gettarinfo(path, str(path.relative_to(folder)))
            one.uid = one.gid = 0
            one.uname = one.gname = ""
            one.mtime = epoch
            if one.islnk():  # a second name of a file: its own content, so that the order of names does not matter
                one.type, one.size = tarfile.REGTYPE, path.stat().st_size
            with path.open("rb") if one.isreg() else io.BytesIO() as content:
                tar.addfile(one, content if one.isreg() else None)
    return Layer(gzip.compress(plain.getvalue(), 6, mtime=0), _digest(plain.getvalue()))


def write(archive: Path, layers: Sequence[Layer], version: str, epoch: int) -> str:
    """The OCI layout as one archive; gives the manifest's digest. https://github.com/opencontainers/image-spec"""
    about = {
        "org.opencontainers.image.title": "pilotlight", "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0", "org.opencontainers.image.base.name": f"debian:{SUITE}",
        "org.opencontainers.image.description": "LLM gateway with GPU-aware scale-to-zero",
    }  # fmt: skip
    made = _said("date", "-u", f"-d@{epoch}", "+%Y-%m-%dT%H:%M:%SZ")
    config = {
        "created": made, "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()], "os": "linux",
        "config": {
            "User": f"{USER}:{USER}", "Env": [f"{key}={value}" for key, value in ENVIRONMENT.items()],
            "Entrypoint": ["pilotlight"], "Cmd": ["--help"], "WorkingDir": "/", "Labels": about,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created": made, "created_by": name} for name in (f"debian {SUITE}: {DEBS}", "pilotlight")],
    }  # fmt: skip
    blobs: dict[str, bytes] = {}

    def keep(blob: bytes, kind: str) -> dict[str, Any]:
        blobs[_digest(blob)] = blob
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": _digest(blob), "size": len(blob)}

    manifest = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": keep(_json(config), "config.v1+json"),
        "layers": [keep(layer.blob, "layer.v1.tar+gzip") for layer in layers], "annotations": about,
    }  # fmt: skip
    named = {
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": f"docker.io/library/pilotlight:{version}",
    }  # fmt: skip
    top = keep(_json(manifest), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**top, "annotations": named}]}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
    files |= {f"blobs/sha256/{digest.partition(':')[2]}": blob for digest, blob in sorted(blobs.items())}
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for name, content in files.items():
            one = tarfile.TarInfo(name)
            one.size, one.mtime, one.mode = len(content), epoch, 0o644
            tar.addfile(one, io.BytesIO(content))
    partial.replace(archive)
    return str(top["digest"])


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _said(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1:])
