"""Builds the OCI image of gateway, autoscaler and agent without a docker engine: dist/pilotlight-image.tar.

With `--llama` it also contains llama.cpp for the CPU: dist/pilotlight-llama-image.tar, for `pilotlight serve`.
Contents: Debian's Python with its dependencies (no shell, no package tools), our wheel, and its dependencies. Needs
mmdebstrap, which downloads from Debian's signed archive. requirements/debian.lock has the version and the SHA-256 of
each Debian package, requirements/dev.lock the hashes of the Python packages; the build fails if one differs. There are
two layers, Debian's and ours. All times in them are SOURCE_DATE_EPOCH (by default the last commit's), so that the same
input gives the same bytes. The software bill of materials is written next to the image (`.cdx.json`).

    python -m scripts.image [--llama] [WHEEL [ARCHIVE]]
    python -m scripts.image lock                 # writes the current versions of Debian's archive
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

from scripts import sbom
from scripts.sbom import Package

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements/debian.lock"
LOCK_HEAD = """# The Debian packages of the image; `make lock-image` writes them for the architecture of its machine.
# architecture name version sha256
"""
MIRROR = "DEBIAN_MIRROR"
"""The environment variable with another archive of Debian, such as one of https://snapshot.debian.org."""
LOCK_FIX = f"run `make lock-image`, or set {MIRROR} to an archive with old versions (docs/how-to/install-chart.md)"
OUT, OUT_LLAMA = Path("dist/pilotlight-image.tar"), Path("dist/pilotlight-llama-image.tar")
SUITE, PYTHON = "bookworm", "3.11"
DEBS = f"python{PYTHON},ca-certificates,tzdata,libstdc++6,libgomp1"
"""numpy needs libstdc++6, llama.cpp also libgomp1."""
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
"""The folder in which Debian's Python searches packages that are not Debian's."""
EXTRAS = ("kubernetes", "agent")
USER = 65532
LEFT_OUT = (
    "bin/tar", "usr/share/(doc|man|info|locale|lintian|perl5|debconf|bash-completion|pixmaps|applications|binfmts)",
    "usr/s?bin/(dpkg|debconf|update-|start-stop|tarcat|rmt|c_rehash|openssl|pdb|pydoc|pygettext).*", "sbin/.*",
    "var/(cache|log|lib/apt)/.*", "etc/(apt|cron.daily|logrotate.d|alternatives|dpkg|perl)", "usr/share/dpkg",
    "usr/lib/dpkg", "usr/share/polkit-1",
)  # fmt: skip
"""Package tools and manual pages, which are removed."""
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
    """One compressed layer, and the digest of its uncompressed content."""

    blob: bytes
    digest: str


class LockError(Exception):
    """The Debian packages differ from the lock. The text is one line with the fix."""


def main(words: Sequence[str]) -> None:
    """Build the image and print its digest, or write the lock."""
    if shutil.which("mmdebstrap") is None:
        sys.exit("make image needs mmdebstrap (Debian: apt install mmdebstrap)")
    os.chdir(ROOT)
    try:
        lock() if tuple(words) == ("lock",) else build(words)
    except LockError as error:
        sys.exit(f"make image: {error}")


def lock() -> None:
    """Write the current packages of Debian's archive; lines of other architectures are kept."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-image-") as folder:
        debs = extracted(Path(folder) / "base", DEBS.split(","))
    others = [one for one in read_lock(LOCK.read_text()) if one.architecture != architecture()] if LOCK.exists() else []
    LOCK.write_text(LOCK_HEAD + "".join(f"{' '.join(one)}\n" for one in sorted([*others, *debs])))
    sys.stdout.write(f"{LOCK.relative_to(ROOT)}: {len(debs)} packages of {architecture()}\n")


def build(words: Sequence[str]) -> None:
    """Build the image and its bill of materials."""
    llama, words = "--llama" in words, [word for word in words if word != "--llama"]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _output("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="pilotlight-image-") as folder:
        wheel = Path(words[0]) if words else built(Path(folder) / "wheel")
        base, ours = Path(folder) / "base", Path(folder) / "ours"
        packages = [*debian(base), *program(ours, wheel, Path(folder), (*EXTRAS, "llama") if llama else EXTRAS)]
        for layer in (base, ours):
            compile_python(layer)
        layers = [packed(base, epoch), packed(ours, epoch)]
    archive = Path(words[1]) if len(words) > 1 else OUT_LLAMA if llama else OUT
    version = wheel.name.split("-")[1]
    digest = write(archive, layers, "pilotlight-llama" if llama else "pilotlight", version, epoch)
    archive.with_suffix(".cdx.json").write_bytes(sbom.document(packages, version, digest, epoch))
    sys.stdout.write(f"{archive}: {archive.stat().st_size >> 20} MiB, {digest}\n")


def built(folder: Path) -> Path:
    """Build our wheel, with a compiled gateway if this Python has the image's version."""
    if sys.version_info[:2] == (3, 11):
        subprocess.run(["bash", "scripts/compiled.sh", "wheel", str(folder)], cwd=ROOT, check=True)
    else:
        sys.stdout.write(f"the gateway is not compiled: this requires a .venv of Python {PYTHON}\n")
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "."]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


class Deb(NamedTuple):
    """A Debian package, as a line of the lock."""

    architecture: str
    """Architecture of the machine for which it is installed."""
    name: str
    version: str
    sha256: str


def architecture() -> str:
    """Return Debian's name of this machine's architecture."""
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def read_lock(text: str) -> list[Deb]:
    """Parse the lock. Raises LockError."""
    found = [Deb(*line.split()) for line in text.splitlines() if line.count(" ") == 3 and not line.startswith("#")]
    if not found or any(not re.fullmatch(r"[0-9a-f]{64}", one.sha256) for one in found):
        raise LockError(f"{LOCK.relative_to(ROOT)} has a line without a SHA-256, or none at all: run `make lock-image`")
    return found


def differences(locked: Sequence[Deb], found: Sequence[Deb]) -> str:
    """Describe the first package that differs from the lock; empty if none does."""
    wanted, there = {one.name: one for one in locked}, {one.name: one for one in found}
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            return f"{name} is locked but was not installed"
        if name not in wanted:
            return f"{name} {there[name].version} is not in the lock"
        if there[name].version != wanted[name].version:
            return f"{name} has version {there[name].version}, but {wanted[name].version} in the lock"
        if there[name].sha256 != wanted[name].sha256:
            return f"{name} {there[name].version} has another SHA-256 than in the lock"
    return ""


def extracted(base: Path, packages: Sequence[str]) -> list[Deb]:
    """Unpack these packages and their dependencies, without running any of their scripts. Raises LockError."""
    hook = 'mkdir -p "$1/var/lib/dpkg/status.d"; for deb in "$1"/var/cache/apt/archives/*.deb; do '
    hook += 'dpkg-deb -f "$deb" > "$1/var/lib/dpkg/status.d/$(basename "${deb%%_*}")"; '
    hook += 'echo "$(dpkg-deb -W --showformat=\'${Package} ${Version}\' "$deb") $(sha256sum < "$deb")"; done '
    hook += f'> "{base}.debs"'
    archive = base.with_suffix(".tar")
    mode = "root" if os.getuid() == 0 else "unshare"
    options = [f"--mode={mode}", "--variant=extract", f"--include={','.join(packages)}", f"--extract-hook={hook}"]
    if mode == "root":
        options.append('--aptopt=APT::Sandbox::User "root"')  # if there is no separate user for downloads
    mirror = [os.environ[MIRROR]] if os.environ.get(MIRROR) else []
    words = ["mmdebstrap", *options, SUITE, str(archive), *mirror]
    done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        missing = re.search(r"Version '(\S+)' for '(\S+)' was not found", done.stderr)
        if missing is not None:
            raise LockError(f"Debian's archive no longer has {missing[2]} {missing[1]}: {LOCK_FIX}")
        sys.stderr.write(done.stderr)
        raise LockError("mmdebstrap failed, for the reason above")
    lines = (line.split() for line in Path(f"{base}.debs").read_text().splitlines())
    return sorted(Deb(architecture(), name, version, sha256) for name, version, sha256, _ in lines)


def debian(base: Path) -> list[Package]:
    """Unpack the locked Python and its dependencies, and return the packages for scanners. Raises LockError."""
    locked = [one for one in read_lock(LOCK.read_text()) if one.architecture == architecture()]
    if not locked:
        raise LockError(f"{LOCK.relative_to(ROOT)} has no packages of {architecture()}: run `make lock-image` here")
    found = extracted(base, [f"{one.name}={one.version}" for one in locked])
    if wrong := differences(locked, found):
        raise LockError(f"{LOCK.relative_to(ROOT)}: {wrong}: {LOCK_FIX}")
    base.mkdir()
    subprocess.run(["tar", "-xf", base.with_suffix(".tar"), "-C", base, "--exclude=./dev/*"], check=True)
    packages = [of_debian(one, base) for one in found]
    left_out = re.compile("|".join(LEFT_OUT))
    for path in sorted(base.rglob("*")):
        if left_out.fullmatch(str(path.relative_to(base))) and os.path.lexists(path):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    authorities = sorted((base / "usr/share/ca-certificates").rglob("*.crt"))
    put(base, "etc/ssl/certs/ca-certificates.crt", "".join(one.read_text() for one in authorities))
    (base / "usr/bin/python3").symlink_to(f"python{PYTHON}")
    return packages


def of_debian(deb: Deb, base: Path) -> Package:
    """Return the package with the licences in its copyright file."""
    about = base / "usr/share/doc" / deb.name / "copyright"
    licences = sbom.debian_licences(about.read_text(errors="replace")) if about.exists() else ()
    return Package("deb", deb.name, deb.version, deb.sha256, licences, deb.architecture)


def program(ours: Path, wheel: Path, folder: Path, extras: Sequence[str]) -> list[Package]:
    """Install our wheel, its dependencies with those of the extras, and the few files around it."""
    requirements, report = folder / "requirements.txt", folder / "report.json"
    requirements.write_text("".join(locked(extras)))
    files: dict[str, str] = {}
    machine = platform.machine()
    for what in (["--require-hashes", "-r", str(requirements)], [str(wheel)]):
        subprocess.run(
            [
                sys.executable if _has_pip() else "python3", "-m", "pip", "install", "--quiet",
                "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version",
                PYTHON, "--implementation", "cp", *(f"--platform=manylinux_2_{n}_{machine}" for n in range(36, 16, -1)),
                f"--platform=manylinux2014_{machine}", f"--platform=linux_{machine}", "--target", str(ours / SITE),
                "--upgrade", "--report", str(report), *what,
            ],
            check=True,
        )  # fmt: skip
        for one in json.loads(report.read_text())["install"]:
            name = str(one["metadata"]["name"]).lower()
            files[name] = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
    shutil.rmtree(ours / SITE / "bin", ignore_errors=True)
    for path, text in FILES.items():
        put(ours, path, text)
    (ours / "usr/bin/pilotlight").chmod(0o755)
    for path, mode in (("tmp", 0o1777), ("state", 0o755)):
        (ours / path).mkdir()
        (ours / path).chmod(mode)
    files["pilotlight"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return [
        Package("pypi", one.name, one.version, files[one.name.lower()], sbom.python_licences(one.metadata))
        for one in metadata.distributions(path=[str(ours / SITE)])
    ]


def locked(extras: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the lock that the product needs, with their hashes."""
    entries = {
        re.split(r"[=\[ ]", entry)[0].lower(): entry
        for entry in re.split(r"(?m)^(?=[a-zA-Z0-9])", (ROOT / "requirements/dev.lock").read_text())
        if "==" in entry
    }
    for name in sorted(needed(extras)):
        yield entries[name]


def needed(extras: Sequence[str]) -> set[str]:
    """Return the names of all distributions that the product and the extras need, as installed here."""
    project = (ROOT / "pyproject.toml").read_text()
    blocks = [re.search(r"(?ms)^dependencies = \[$(.*?)^\]", project)]
    blocks += [re.search(rf"(?m)^{extra} = \[(.*?)\]", project) for extra in extras]
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
    """Return whether it is installed here, which its marker decides."""
    try:
        metadata.version(_plain(requirement))
    except metadata.PackageNotFoundError:
        return False
    return True


def compile_python(layer: Path) -> None:
    """Compile all modules now, since containers may not write and would compile them at every start."""
    python = sys.executable if sys.version_info[:2] == (3, 11) else f"python{PYTHON}"
    words = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(layer), "-p", "/"]
    subprocess.run([python, *words, str(layer / "usr")], check=False, stdout=subprocess.DEVNULL)  # lib2to3 has examples


def put(layer: Path, path: str, text: str) -> None:
    """Write one file of ours."""
    place = layer / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def packed(folder: Path, epoch: int) -> Layer:
    """Pack a whole folder in order. root owns everything but the folder of the state."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            one = tar.gettarinfo(path, str(path.relative_to(folder)))
            one.uid = one.gid = USER if one.name == "state" else 0
            one.uname = one.gname = ""
            one.mtime = epoch
            if one.islnk():  # a second name of a file: its own content, so that the order of names does not matter
                one.type, one.size = tarfile.REGTYPE, path.stat().st_size
            with path.open("rb") if one.isreg() else io.BytesIO() as content:
                tar.addfile(one, content if one.isreg() else None)
    return Layer(gzip.compress(plain.getvalue(), 6, mtime=0), _digest(plain.getvalue()))


def write(archive: Path, layers: Sequence[Layer], name: str, version: str, epoch: int) -> str:
    """Write the OCI layout as one archive; return its digest. https://github.com/opencontainers/image-spec"""
    about = {
        "org.opencontainers.image.title": "pilotlight", "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0", "org.opencontainers.image.base.name": f"debian:{SUITE}",
        "org.opencontainers.image.description": "LLM gateway with GPU-aware scale-to-zero",
    }  # fmt: skip
    made = _output("date", "-u", f"-d@{epoch}", "+%Y-%m-%dT%H:%M:%SZ")
    config = {
        "created": made, "architecture": architecture(), "os": "linux",
        "config": {
            "User": f"{USER}:{USER}", "Env": [f"{key}={value}" for key, value in ENVIRONMENT.items()],
            "Entrypoint": ["pilotlight"], "Cmd": ["--help"], "WorkingDir": "/", "Labels": about,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created": made, "created_by": step} for step in (f"debian {SUITE}: {DEBS}", "pilotlight")],
    }  # fmt: skip
    blobs: dict[str, bytes] = {}

    def keep(blob: bytes, kind: str) -> dict[str, Any]:
        blobs[_digest(blob)] = blob
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": _digest(blob), "size": len(blob)}

    manifest: dict[str, Any] = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": keep(_json(config), "config.v1+json"),
        "layers": [keep(layer.blob, "layer.v1.tar+gzip") for layer in layers], "annotations": about,
    }  # fmt: skip
    named = {
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": f"docker.io/library/{name}:{version}",
    }  # fmt: skip
    top = keep(_json(manifest), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**top, "annotations": named}]}
    contents = {f"blobs/sha256/{digest.partition(':')[2]}": blob for digest, blob in sorted(blobs.items())}
    config_path, *layer_paths = (
        f"blobs/sha256/{one['digest'].partition(':')[2]}" for one in (manifest["config"], *manifest["layers"])
    )
    for_docker = [{"Config": config_path, "RepoTags": [f"{name}:{version}"], "Layers": layer_paths}]
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
    files |= {"manifest.json": _json(for_docker), **contents}  # `docker load` before Docker 25 reads only this one
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for path, content in files.items():
            one = tarfile.TarInfo(path)
            one.size, one.mtime, one.mode = len(content), epoch, 0o644
            tar.addfile(one, io.BytesIO(content))
    partial.replace(archive)
    return str(top["digest"])


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _output(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1:])
