"""Checks one machine: system, driver, engines, open files, ports, state directory. I/O.

Nothing is changed; ports are opened only briefly.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from autoscaler.drivers.local.nvml import Nvml, NvmlError, NvmlGpu, open_nvml
from autoscaler.drivers.local.state_directory import StateDirectory, StateError, serving_pid
from autoscaler.engines.programs.installed import computes_on_cpu_only, find_installed_programs
from autoscaler.text import format_count, format_size
from pilotlight.doctor.finding import Finding
from pilotlight.net.listen import Address, open_listeners

FILES_MIN = 65_536
"""Each running request needs two file descriptors; with 4,096 a gateway can serve about 2,000 requests."""
SOCKET_CHARACTERS_MAX = 80
"""Maximum length of the state directory's path: a Unix socket's path has at most 108 bytes (unix(7))."""
DRIVER_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def check_machine(listen: Address, ops: Address, state: Path) -> list[Finding]:
    """Run all checks."""
    gpus = check_driver(open_nvml, DRIVER_SIGNS)
    found = find_installed_programs()
    findings = [check_system(sys.platform), gpus, check_engines(found)]
    if gpus.grade == "ok":
        findings.append(check_llama_on_gpu(found))
    owner = serving_pid(state)
    findings.append(check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    findings += [
        check_port("inference port", "--listen", listen, owner),
        check_port("operations port", "--ops", ops, owner),
    ]
    return [*findings, check_state_directory(state)]


def check_system(platform: str) -> Finding:
    """Check that the operating system is supported."""
    if platform == "linux":
        return Finding("system", "ok", "Linux")
    if platform == "darwin":
        return Finding("system", "info", "macOS: `serve` works, without memory limits for engines")
    return Finding("system", "blocker", f"{platform} is not supported", "use Linux, or WSL 2 on Windows")


def check_driver(opener: Callable[[], Nvml | None], signs: tuple[str, ...]) -> Finding:
    """Check the driver, and report the GPUs that NVML finds."""
    try:
        nvml = opener()
        gpus: tuple[NvmlGpu, ...] = nvml.gpus() if nvml is not None else ()
    except NvmlError as error:
        return Finding("driver", "warning", f"NVML failed: {error}", "check `nvidia-smi`; reload the driver or reboot")
    if gpus:
        ill = [gpu.uuid for gpu in gpus if not gpu.healthy]
        if ill:
            return Finding(
                "driver", "warning", f"unhealthy GPUs: {', '.join(ill)}", "check `dmesg` for Xid errors; reset the GPU"
            )
        listed = ", ".join(f"{gpu.product} {format_size(gpu.memory_bytes)}" for gpu in gpus)
        return Finding("driver", "ok", f"{format_count(len(gpus), 'GPU')}: {listed}")
    if any(Path(sign).exists() for sign in signs):
        says = "an NVIDIA driver is installed, but NVML reports no GPU"
        fix = "check `nvidia-smi`; if this is a container, start it with the GPUs of the host (--gpus all)"
        return Finding("driver", "warning", says, fix)
    says = "no NVIDIA GPU: models share the host's memory"
    return Finding("driver", "info", says, "install the NVIDIA driver, or declare `devices` in Settings")


def check_engines(found: Mapping[str, str]) -> Finding:
    """Check that an engine program is installed."""
    if found:
        return Finding("engines", "ok", ", ".join(sorted(found)))
    fix = "pip install xllamacpp, or put llama-server, vllm or ollama on the PATH"
    return Finding("engines", "blocker", "no engine is installed; only Models of engine `command` can start", fix)


def check_llama_on_gpu(found: Mapping[str, str], cpu_only: Callable[[str], bool] = computes_on_cpu_only) -> Finding:
    """Check that the installed llama.cpp can compute on the GPUs."""
    python = found.get("xllamacpp")
    if python is None or "llama-server" in found or not cpu_only(python):
        return Finding("llama.cpp on GPU", "ok", "no problem found")
    fix = "install an xllamacpp that is built for CUDA, or put such a llama-server on the PATH"
    return Finding("llama.cpp on GPU", "warning", "xllamacpp computes on the CPU only", fix)


def check_open_files(hard: int) -> Finding:
    """Check the hard limit of file descriptors, to which a gateway raises its own."""
    if hard in {resource.RLIM_INFINITY, -1} or hard >= FILES_MIN:
        return Finding("open files", "ok", "no limit" if hard in {resource.RLIM_INFINITY, -1} else f"{hard:,}")
    fix = "raise the limit: LimitNOFILE=1048576 in a service, `nofile` in /etc/security/limits.conf"
    says = f"at most {hard:,} open files per process: each running request needs two"
    return Finding("open files", "warning", says, fix)


def check_port(check: str, option: str, address: Address, owner: str) -> Finding:
    """Check that the port is free, or used by our own `pilotlight serve`."""
    try:
        for made in open_listeners(address, 1):
            made.close()
    except click.ClickException as error:
        if owner:
            return Finding(check, "info", f"{address.text} is in use, and `pilotlight serve` runs (pid {owner})")
        return Finding(
            check, "blocker", error.message, f"choose another with {option}, or stop the process that listens there"
        )
    return Finding(check, "ok", f"{address.text} is free")


def check_state_directory(state: Path) -> Finding:
    """Check that the state directory is writable or can be created."""
    name, fix = "state directory", "choose another with --state"
    if len(os.fsencode(state.absolute())) > SOCKET_CHARACTERS_MAX:
        says = f"the path {state} is too long: Unix sockets in this folder would exceed the limit of 108 bytes"
        return Finding(name, "blocker", says, f"{fix} and a shorter path")
    nearest = next(path for path in (state.absolute(), *state.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return Finding(name, "blocker", f"{nearest} is not a folder", fix)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Finding(name, "blocker", f"{nearest} is not writable", f"{fix}, or change its owner")
    if (state / "installation").exists():
        try:
            StateDirectory.attach(state)
        except StateError as error:
            return Finding(name, "blocker", str(error), fix)
    return Finding(name, "ok", str(state) if nearest == state.absolute() else f"{state} will be created")
