"""Takes memory of the device through the CUDA driver and ends; exit status 1 and one line if that is refused.

python allocate.py BYTES [--simulate]
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


def main(size_bytes: int, *, simulate: bool) -> str:
    """Take the memory; return the reason if it is refused, empty otherwise."""
    if simulate:
        sys.path.insert(0, str(Path(__file__).parents[1] / "simulated"))
        import pynvml

        try:
            pynvml.allocate(size_bytes)
        except pynvml.OutOfMemoryError as error:
            return str(error)
        return ""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuCtxCreate_v2", (ctypes.byref(context), 0, device)),
        ("cuMemAlloc_v2", (ctypes.byref(memory), ctypes.c_size_t(size_bytes))),
    ):
        if status := getattr(cuda, name)(*arguments):
            return f"{name}: {'out of memory' if status == OUT_OF_MEMORY else f'CUDA error {status}'}"
    return ""


if __name__ == "__main__":
    if refused := main(int(sys.argv[1]), simulate="--simulate" in sys.argv):
        sys.exit(refused)
