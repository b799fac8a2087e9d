"""Step `inventory`: devices as Pilotlight reports them, compared with nvidia-smi."""

from __future__ import annotations

import subprocess

import pynvml

from tests.gpu.bed import Bed, GpuRunError

FIELDS = ("uuid", "name", "memory.total", "memory.reserved", "mig.mode.current", "driver_version")
MIB = 1 << 20
ROUNDED_BYTES = 2 * MIB
"""Allowed difference: nvidia-smi rounds each of two numbers to MiB."""


async def run(bed: Bed) -> None:
    """The GPUs and their products, and memory and MIG mode of the one that the run uses, must be equal."""
    every_gpu: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": None}
    async with bed.serving("inventory", bed.model("small", "small"), env=every_gpu) as serve:
        found = serve.get("/api/v1/devices")
    if not isinstance(found, list) or not found:
        raise GpuRunError("Pilotlight reports no device")
    devices = {str(one["device"]): one for one in found}
    own = devices.get(bed.uuid)
    if own is None:
        raise GpuRunError(f"Pilotlight does not report {bed.uuid}, only {[*devices]}")
    bed.device_bytes = int(own["memory_bytes"])
    rows = smi()
    if not rows:
        bed.report.figure("inventory", "same devices, products and MIG modes", None, "1", holds=None)
        bed.report.row("inventory", "nvidia-smi", "not compared", "", "it is not on the PATH, or it failed")
        return
    line = next(row for row in rows if row["uuid"] == bed.uuid)
    usable = (int(line["memory.total"]) - int(line["memory.reserved"])) * MIB
    say = bed.report.row
    say("inventory", "devices, Pilotlight", len(devices))
    say("inventory", "devices, nvidia-smi", len(rows))
    say("inventory", "product, Pilotlight", str(own["product"]))
    say("inventory", "product, nvidia-smi", line["name"])
    say("inventory", "memory, Pilotlight", bed.device_bytes // MIB, "MiB")
    say(
        "inventory", "memory, nvidia-smi", int(line["memory.total"]), "MiB", f"{line['memory.reserved']} of it reserved"
    )
    say("inventory", "MIG mode, NVML", mig_mode(bed.uuid))
    say("inventory", "MIG mode, nvidia-smi", line["mig.mode.current"])
    equal = {name: one["product"] for name, one in devices.items()} == {row["uuid"]: row["name"] for row in rows}
    equal = equal and mig_mode(bed.uuid) == line["mig.mode.current"]
    bed.report.figure("inventory", "same devices, products and MIG modes", float(equal), "1", holds=equal)
    off = bed.device_bytes - usable
    within = abs(off) <= ROUNDED_BYTES
    bed.report.figure("inventory", "memory over what processes can use, MiB", off / MIB, "0, rounded", holds=within)


def mig_mode(uuid: str) -> str:
    """The MIG mode as nvidia-smi writes it."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return "[N/A]"
    return "Enabled" if current else "Disabled"


def smi() -> list[dict[str, str]]:
    """The output of nvidia-smi for each device; empty: it cannot be run."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(FIELDS, line.split(", "), strict=True)) for line in printed.splitlines() if line]
