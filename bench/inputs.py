"""The memory and CPU time of hostile inputs: `python -m bench.inputs`, about three minutes.

Reads headers of weight files up to the limits of the product, also as an agent reads them from a registry, YAML of
1 MiB and objects of 1.5 MiB. Each input gets a separate process; its peak above an idle process is printed. The last
line is JSON. The exit status is 1 above 200 MiB, and above 2 s of CPU for a header (more on a slow machine).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from artifacts.formats.hf_config import FILES_MAX
from tests.support.builders.worst_case_inputs import (
    GGUF,
    MIB_MAX,
    OBJECT,
    SAFETENSORS,
    YAML,
    archived,
    measure,
    write_folder,
)


def inputs(folder: Path) -> Iterator[tuple[str, str, Path, int]]:
    """Yield (kind, case, path to read, bytes) of each input, which is written on demand."""
    for case, made in GGUF.items():
        path = folder / "a.gguf"
        with path.open("wb") as file:
            file.writelines(made())
        for kind, read in (("gguf", path), ("remote raw", path), ("remote tar", archived(path))):
            yield kind, case, read, path.stat().st_size
    for case, header in SAFETENSORS.items():
        yield "folder", case, folder, write_folder(folder, header()).stat().st_size
    path = write_folder(folder, SAFETENSORS["allowed tensors"](), FILES_MAX)
    yield "folder", "as many files as are allowed", folder, FILES_MAX * path.stat().st_size
    for kind, texts in (("yaml", YAML), ("object", OBJECT)):
        for case, text in texts.items():
            path = folder / kind
            path.write_text(text())
            yield kind, case, path, path.stat().st_size


def main() -> int:
    """Measure all inputs."""
    worst, slow = dict[str, float](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for kind, case, path, size_bytes in inputs(Path(folder)):
            found = measure(kind, path)
            worst[kind] = max(worst.get(kind, 0.0), found.mib)
            if kind not in {"yaml", "object"} and found.cpu_s > found.cpu_s_max:
                slow.append(f"{kind}: {case}")
            size_mib, outcome = size_bytes / (1 << 20), "refused" if found.error else "read"
            print(
                f"{kind:11}{case:34}{size_mib:7.1f} MiB{found.mib:6.0f} MiB peak{found.cpu_s:7.1f} s  {outcome}",
                flush=True,
            )
    print(json.dumps({"peak_mib": worst, "allowed_mib": MIB_MAX, "above_cpu_limit": slow}))
    return int(max(worst.values()) > MIB_MAX or bool(slow))


if __name__ == "__main__":
    sys.exit(main())
