"""Runs a tier of the tests: `python -m tests.run check|fast|test|deep|clients|engines [OPTIONS OF PYTEST]`.

A tier is a sequence of stages, and a stage is a set of parts that run at the same time. The output of the first part of
a stage is shown as it comes, and that of the others when the stage ends, if they fail or are tests. The last lines name
each part with its result and duration, and each missing tool with the tests that were skipped for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.go_programs import cache
from tests.support.real_services import ollama, python_engines, triton

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "build" / "test-logs"
PYTHON = sys.executable
IN_NETWORK = f"{PYTHON} -m tests.integration.network_namespace {PYTHON}"
SLOW_MS = 40.0
"""CPU time of a million empty loop turns. A machine that needs more is busy with fewer tests at the same time."""
WAITING = ("clients", "gpu", "integration/process", "wire")
"""Folders of tests that mostly wait, besides those on a control plane."""
NO_TESTS = 5
"""Exit status of pytest if it selected no test."""
NOT_FOUND = 127
"""Exit status of a program that cannot be started."""
OUTPUT_CHARACTERS_MAX = 20_000
"""Of the output of a part that is not shown as it comes."""
ERRORS_MAX, ERROR_CHARACTERS_MAX = 6, 300
"""Of a failed test at the end of the output: lines, and characters of a line."""


class Tool(NamedTuple):
    """A program that some tests need."""

    name: str
    install: str
    skipped: str
    other_names: tuple[str, ...] = ()
    variable: str = ""
    """An environment variable that can hold the program's path."""

    @property
    def is_missing(self) -> bool:
        """Whether no program of these names is on the PATH or in a system folder, and the variable names none."""
        path = os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM_FOLDERS))
        found = any(shutil.which(name, path=path) for name in (self.name, *self.other_names))
        return not found and not (self.variable and os.environ.get(self.variable))


SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Debian installs nginx and HAProxy there, where not every user's PATH leads."""
TOOLS = (
    Tool("go", "Debian: apt install golang, version 1.26 or newer",
         "all of tests/integration/cluster; oras-go in tests/integration/process; Go's JSON decoder in tests/wire"),
    Tool("gcc", "Debian: apt install gcc python3-dev", "the tests of the compiled gateway"),
    Tool("nginx", "Debian: apt install nginx-light",
         "nginx in tests/wire/requests/test_differential.py, tests/integration/process/security/test_host_check.py "
         "and tests/integration/process/serve (test_reverse_proxies.py, test_proxy_defaults.py)"),
    Tool("haproxy", "Debian: apt install haproxy",
         "HAProxy in tests/wire/requests/test_differential.py, tests/integration/process/security/test_host_check.py "
         "and tests/integration/process/serve (test_reverse_proxies.py, test_proxy_defaults.py)"),
    Tool("caddy", "Debian: apt install caddy",
         "Caddy in tests/integration/process/security/test_host_check.py "
         "and tests/integration/process/serve (test_reverse_proxies.py, test_proxy_defaults.py)"),
    Tool("curl", "Debian: apt install curl",
         "tests/integration/process/serve/test_tutorial.py and tests/integration/cluster/install/test_tutorials.py"),
    Tool("bsdtar", "Debian: apt install libarchive-tools",
         "bsdtar in tests/unit/artifacts/archives/test_tar_reader.py"),
    Tool("openssl", "Debian: apt install openssl", "all of tests/integration/cluster"),
    Tool("mmdebstrap", "Debian: apt install mmdebstrap", "tests/packaging/test_image.py (deep tier)"),
    Tool("docker-registry", "Debian: apt install docker-registry",
         "tests with a real registry in tests/integration/process", ("registry",), "PILOTLIGHT_REGISTRY"),
    Tool("skopeo", "Debian: apt install skopeo", "skopeo in tests/integration/process/real/test_oci_clients.py",
         variable="PILOTLIGHT_SKOPEO"),
    Tool("dockerd", "Debian: apt install docker.io",
         "Docker in tests/packaging/test_image.py and "
         "tests/integration/process/local_driver/test_containers.py (deep tier)"),
    Tool("podman", "Debian: apt install podman runc",
         "podman in tests/packaging/test_image.py and "
         "tests/integration/process/local_driver/test_containers.py (deep tier)"),
    Tool("minio", "CGO_ENABLED=0 go install github.com/minio/minio@latest",
         "MinIO in tests/integration/process/real/test_s3.py", variable="PILOTLIGHT_MINIO"),
    Tool("versitygw", "CGO_ENABLED=0 go install github.com/versity/versitygw/cmd/versitygw@latest",
         "versitygw in tests/integration/process/real/test_s3.py", variable="PILOTLIGHT_VERSITYGW"),
    *(
        Tool(program, f"Debian: apt install {package}", f"clients in tests/clients (make test-clients): {names}")
        for program, package, names in (
            ("npm", "nodejs npm, version 22 or newer", "those for Node and the browser"),
            ("mvn", "maven default-jdk-headless", "openai for Java"),
            ("chromium", "chromium", "openai in a browser"),
        )
    ),
    Tool("torch", "pip install torch transformers in a virtual environment; PILOTLIGHT_TORCH_PYTHON names its Python",
         "the torch engine in tests/gpu (deep tier)", variable="PILOTLIGHT_TORCH_PYTHON"),
)  # fmt: skip

OLLAMA_TESTS = (
    "the real Ollama in tests/integration/process/clients (test_ollama_transcript.py, test_open_webui.py, deep tier)"
)
TRITON_TESTS = "Triton in tests/integration/process/engines and tests/integration/process/clients"


@dataclass(eq=False)
class Part:
    """One command of a tier."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None
    """Exit status; None before it has ended."""
    seconds: float = 0.0
    is_optional: bool = False
    """Whether its failure only skips tests, which the last lines name."""

    @property
    def is_tests(self) -> bool:
        """Whether it runs pytest."""
        return "pytest" in self.command or "test" in self.command

    @property
    def log(self) -> Path:
        """Where the output goes, if it is not shown."""
        return LOGS / f"{self.name.replace(' ', '-')}.txt"

    def run(self, *, show: bool) -> None:
        """Runs the command to its end."""
        begin = time.monotonic()
        # Some containers disable the cache of bytecode; then each of 1,000 processes compiles all modules again.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **self.environment}
        with contextlib.ExitStack() as stack:
            output = None if show else stack.enter_context(self.log.open("wb"))
            try:
                done = subprocess.run(
                    self.command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False
                )
            except OSError as error:
                print(f"{self.name}: {error}", flush=True)
                self.status = NOT_FOUND
            else:
                self.status = done.returncode
        self.seconds = time.monotonic() - begin
        may_be_empty = any(word.startswith(("--shard", "--changed")) for word in self.command)
        if self.status == NO_TESTS and self.is_tests and may_be_empty:
            self.status = 0

    @property
    def result(self) -> str:
        """In one word or two."""
        failed = "skipped" if self.is_optional else "failed"
        return {0: "passed", None: "not run"}.get(self.status, failed)


class Stage(NamedTuple):
    """Parts that run at the same time: the first is shown, the others run one after another behind it."""

    shown: Part
    others: Sequence[Part] = ()

    def run(self) -> None:
        """Runs all parts; shows the output of the others that failed."""
        LOGS.mkdir(parents=True, exist_ok=True)
        behind = threading.Thread(target=self._run_others)
        behind.start()
        self.shown.run(show=True)
        behind.join()
        for part in self.others:
            if part.status or part.is_tests:
                print(f"\n===== {part.name} ({part.log.relative_to(ROOT)})", flush=True)
                print(part.log.read_text(errors="replace")[-OUTPUT_CHARACTERS_MAX:], flush=True)

    def _run_others(self) -> None:
        for part in self.others:
            part.run(show=False)


def pytest(*words: str) -> list[str]:
    """A run of pytest."""
    return [PYTHON, "-m", "pytest", *words]


def is_slow() -> bool:
    """Whether a core of this machine has less than half of the speed that the numbers of workers are for."""
    begin = time.process_time()
    for _ in range(1_000_000):
        pass
    return 1000 * (time.process_time() - begin) > SLOW_MS


def workers() -> tuple[int, int]:
    """The numbers of workers of the waiting tests and of the cluster tests, which run concurrently.

    Each worker has a network of its own, and each worker of the cluster tests a control plane, which takes a tenth of a
    core even if it is idle.
    """
    waiting, cluster = ("4", "2") if is_slow() else ("5", "3")
    return int(os.environ.get("WAITING_WORKERS", waiting)), int(os.environ.get("CLUSTER_WORKERS", cluster))


def in_networks(workers: int, *words: str) -> list[str]:
    """A run of pytest whose workers have a network of their own each."""
    return pytest("--dist", "loadgroup", "--tx", f"{workers}*popen//python={IN_NETWORK}", *words)


def checks() -> list[Part]:
    """What `make check` runs."""
    types = {"MYPY_CACHE_DIR": str(cache() / "mypy")}
    return [
        Part("ruff format", [PYTHON, "-m", "ruff", "format", "--check", "."]),
        Part("ruff check", [PYTHON, "-m", "ruff", "check", "."]),
        Part("import-linter", [str(Path(PYTHON).parent / "lint-imports")]),
        Part("gates", [PYTHON, "-m", "scripts.gates"]),
        Part("prose", [PYTHON, "-m", "scripts.prose"]),
        Part("mypy", [PYTHON, "-m", "mypy"], types),
    ]


def builds() -> list[Part]:
    """What is built once and kept in the cache: control planes, the compiled gateway and Triton."""
    plane = [PYTHON, "-m", "tests.integration.cluster.support.programs.build"]
    go = [Part("control plane", plane), Part("Karpenter", [*plane, "karpenter"])] if shutil.which("go") else []
    install = Part("install Triton", [PYTHON, "-m", "tests.support.real_services.triton"], is_optional=True)
    return [install, *go, Part("build gateway", ["bash", "scripts/compiled.sh"])]


def engine_installations() -> list[Part]:
    """The parts that install the engines of `make test-engines`. Without one of them, its tests are skipped."""
    parts = [Part("install Triton", [PYTHON, "-m", "tests.support.real_services.triton"], is_optional=True)]
    if ollama.can_build():
        parts.append(Part("build Ollama", [PYTHON, "-m", "tests.support.real_services.ollama"], is_optional=True))
    module = "tests.support.real_services.python_engines"
    return [
        *parts,
        *(Part(f"install {name}", [PYTHON, "-m", module, name], is_optional=True) for name in python_engines.PROGRAMS),
    ]


def engine_tests(options: Sequence[str]) -> Part:
    """The contract of every engine, one engine after another: two at a time would need 10 GB of memory."""
    folder = "tests/integration/process/engines"
    return Part("engine tests", in_networks(1, "-m", "engines or standard", *options, folder))


def stages(tier: str, options: Sequence[str]) -> list[Stage]:
    """The stages of a tier; `options` go to each run of pytest."""
    folders = [f"--ignore=tests/{folder}" for folder in ("integration", *WAITING)]
    if tier == "check":
        first, *others = checks()
        return [Stage(first, others)]
    if tier == "fast":
        fast = ("-n", "2", "--dist", "worksteal", "-m", "fast", *folders)
        return [Stage(Part("fast tests", pytest(*fast, *options, "tests")))]
    if tier == "clients":
        installed = Part("install clients", [PYTHON, "-m", "tests.clients.matrix"])
        matrix = Part("client tests", in_networks(2, "-m", "clients or standard", *options, "tests/clients"))
        return [Stage(installed), Stage(matrix)]
    if tier == "engines":
        return [Stage(part) for part in (*engine_installations(), engine_tests(options))]
    deep = ["-m", "not (clients or engines)", "--hypothesis-profile=deep"]
    chosen = ["-m", "not (deep or clients or engines)"] if tier == "test" else deep
    words = (*chosen, *options)
    computing = Part("computing tests", pytest("-n", "2", "--dist", "loadgroup", *folders, *words, "tests"))
    shard = any(option.startswith("--shard") for option in options)
    at_once, planes = workers()
    cluster = Part("cluster tests", in_networks(planes, *words, "tests/integration/cluster"))
    compiled = Part("compiled gateway", ["bash", "scripts/compiled.sh", "test", "-n", str(at_once), *words])
    waiting = Part("waiting tests", in_networks(at_once, *words, *(f"tests/{folder}" for folder in WAITING)))
    behind = builds() if shard else [*checks(), *builds()]
    if tier == "deep" and not shard and ollama.can_build():
        behind.append(Part("build Ollama", ["nice", PYTHON, "-m", "tests.support.real_services.ollama"]))
    return [Stage(computing, behind), Stage(waiting, [cluster, compiled])]


def summary(parts: Sequence[Part], seconds: float) -> str:
    """The last lines of a run."""
    lines = ["", "part                 result   seconds"]
    lines += [f"{part.name:20} {part.result:8} {part.seconds:7.0f}" for part in parts]
    lines.append(f"{'total':20} {'passed' if is_passed(parts) else 'failed':8} {seconds:7.0f}")
    return "\n".join(lines)


def is_passed(parts: Sequence[Part]) -> bool:
    """Whether every part ran and passed."""
    return all(part.status == 0 or part.is_optional for part in parts)


def failures(logs: Path = LOGS) -> list[str]:
    """Of each failed test, the name of its log and the errors in it. They come last, where a cut log has them too."""
    lines = []
    for log in sorted(logs.glob("*.log")):
        errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E ")]
        lines += [f"failed: {log.name}", *(line[:ERROR_CHARACTERS_MAX] for line in errors[:ERRORS_MAX])]
    return lines


def missing_tools() -> list[str]:
    """One line for each missing tool: its name, how to install it, which tests were skipped."""
    lines = [f"missing: {tool.name} ({tool.install}); skipped: {tool.skipped}" for tool in TOOLS if tool.is_missing]
    if ollama.why_missing():
        lines.append(f"missing: Ollama {ollama.VERSION} ({ollama.INSTALL}); skipped: {OLLAMA_TESTS}")
    if triton.why_missing():
        lines.append(f"missing: Triton {triton.VERSION} ({triton.INSTALL}); skipped: {TRITON_TESTS}")
    enters = [PYTHON, "-c", "from tests.integration import network_namespace; network_namespace.enter()"]
    if subprocess.run(enters, cwd=ROOT, check=False, capture_output=True).returncode:
        lines.append(
            "missing: network namespaces (run as root, or allow user namespaces); "
            "skipped: all of tests/integration/cluster"
        )
    return lines


def missing_engines() -> list[str]:
    """One line for each engine that is not installed: why, how to install it, what was skipped."""
    reasons = {"Triton": triton.why_missing(), "Ollama": ollama.why_missing()}
    reasons |= {name: python_engines.why_missing(name) for name in python_engines.PROGRAMS}
    skipped = "in tests/integration/process/engines"
    return [f"missing: {name}: {why}; skipped: {name} {skipped}" for name, why in reasons.items() if why]


def main() -> int:
    """Exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Run a tier of the tests.")
    parser.add_argument("tier", choices=("check", "fast", "test", "deep", "clients", "engines"))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options for pytest, e.g. --shard 3 or -x")
    asked = parser.parse_args()
    begin = time.monotonic()
    shutil.rmtree(LOGS, ignore_errors=True)  # of the run before
    parts: list[Part] = []
    for stage in stages(asked.tier, asked.options):
        stage.run()
        parts += (stage.shown, *stage.others)
    print(summary(parts, time.monotonic() - begin))
    if asked.tier in {"test", "deep", "clients", "engines"}:
        is_clients = asked.tier == "clients"
        missing = [line for line in missing_tools() if ("tests/clients" in line) == is_clients]
        if asked.tier == "engines":
            missing = missing_engines()
        print("\n".join([*missing, *failures()]), flush=True)
    return 0 if is_passed(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
