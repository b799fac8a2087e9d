"""Fuzzes the targets, one after another: `python -m tests.fuzz [NAME...]`, for FUZZ_S seconds in all (600).

With atheris, guided by coverage; without it (it has wheels for few Pythons), with Hypothesis and random seeds. An input
that breaks an invariant is kept in tests/fuzz/findings/NAME/ and ends its target; then the exit status is 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from hashlib import sha1
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, seed, settings

INPUT_BYTES_MAX, CASE_BYTES_MAX = 2_000, 200_000
GUIDED = importlib.util.find_spec("atheris") is not None
INSTRUMENTED = {
    "requests": ("gateway",), "answers": ("gateway",), "documents": ("gateway",), "forms": ("gateway",),
    "messages": ("autoscaler.contract",), "manifests": ("artifacts",), "archives": ("artifacts",),
    "signed": ("artifacts",), "objects": ("autoscaler.drivers.kubernetes",),
    "reports": ("autoscaler.fold.fold", "autoscaler.routing.routes"),
    "yaml": ("autoscaler.spec.yaml", "autoscaler.spec.decode", "autoscaler.documents.document_rules"),
    "gguf": ("artifacts.formats.gguf",), "safetensors": ("artifacts.formats.hf_config",),
    "port": ("pilotlight.net.ops_client", "pilotlight.cli.status", "pilotlight.cli.operator"),
    "providers": ("autoscaler.capacity",), "loads": ("loadtest.client", "loadtest.response_reader"),
    "translations": ("gateway.dialects",), "metrics": ("autoscaler.signals.metric_responses",),
    "responses": ("gateway.dialects",),
}  # fmt: skip
"""The targets, and the packages whose coverage guides each. Targets are imported after coverage is enabled."""
NAMES = tuple(INSTRUMENTED)


def with_atheris(name: str, seconds: int, folder: Path) -> None:
    """Run one target, with its files in an empty folder; this ends the process."""
    atheris = importlib.import_module("atheris")  # it has no type annotations
    with atheris.instrument_imports(include=list(INSTRUMENTED[name])):
        targets = importlib.import_module("tests.fuzz.target_registry")
        targets.target(name)
    target, kept = targets.target(name), targets.FOUND / name
    kept.mkdir(parents=True, exist_ok=True)
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for number, data in enumerate((*target.seeds, *targets.found(name))):
        (corpus / str(number)).write_bytes(data)
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words))
    arguments = [f"-max_total_time={seconds}", f"-dict={words}", f"-artifact_prefix={kept}/", "-timeout=10"]
    case, bytes_max = target.case, INPUT_BYTES_MAX if target.case is None else CASE_BYTES_MAX
    arguments += [f"-max_len={bytes_max}", "-print_final_stats=1", "-verbosity=0", str(corpus)]

    def mutate(data: bytes, size_max: int, number: int) -> bytes:
        """Every other input is generated from the format's structure."""
        if case is None or number % 2:
            return bytes(atheris.Mutate(data, size_max))
        return bytes(case(Random(number))[:size_max])

    mutator = {} if case is None else {"custom_mutator": mutate}
    atheris.Setup([name, *arguments], target.limited(), **mutator)
    atheris.Fuzz()


def with_hypothesis(name: str, seconds: int) -> None:
    """Run one target; raise its error."""
    targets, near = (
        importlib.import_module("tests.fuzz.target_registry"),
        importlib.import_module("tests.fuzz.inputs.strategies"),
    )
    target, last, inputs = targets.target(name), b"", 0
    one_input, deadline_s = target.limited(), time.monotonic() + seconds
    while time.monotonic() < deadline_s:

        @seed(int.from_bytes(os.urandom(8)))
        @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(near.inputs(target))
        def some(data: bytes) -> None:
            nonlocal last, inputs
            last, inputs = data, inputs + 1
            one_input(data)

        try:
            some()
        except BaseException:
            (targets.FOUND / name).mkdir(parents=True, exist_ok=True)
            (targets.FOUND / name / sha1(last, usedforsecurity=False).hexdigest()).write_bytes(last)
            raise
    print(f"{name}: {inputs} inputs")


def main(names: list[str]) -> int:
    """Run each target in a process of its own, for its share of the time."""
    seconds = max(1, int(os.environ.get("FUZZ_S", "600")) // len(names))
    if not GUIDED:
        print("atheris is not installed: fuzzing with Hypothesis and random seeds", flush=True)
    broken = []
    for name in names:
        print(f"fuzzing {name} for {seconds} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.fuzz", "--one", name, str(seconds), folder]
            if subprocess.run(command, check=False).returncode:
                broken.append(name)
    if broken:
        print(f"broken: {', '.join(broken)}; the inputs are in tests/fuzz/findings", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--one"]:
        sys.exit(main(sys.argv[1:] or list(NAMES)))
    if GUIDED:
        with_atheris(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        with_hypothesis(sys.argv[2], int(sys.argv[3]))
