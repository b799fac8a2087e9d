"""One fetch of ours in a process of its own: `python -m bench.weights.ours HOST/REPOSITORY:TAG FOLDER [CA]`.

Says as JSON what the fetch cost (the interpreter's start is not in it: the agent of a node runs all the time), its
largest memory (which is the process's), and how many bytes were there before. `KILL_AT=0.9` ends it there by SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from artifacts import manifest, pull, registry
from artifacts.blobs import Blob
from artifacts.client import Client
from artifacts.digests import Digest
from artifacts.mirrors import Mirrored
from artifacts.pull import Wanted
from artifacts.transport import Site


def _largest_mib() -> float:
    """Of this program; what `getrusage` says may be that of the one which started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


async def _fetch(reference: str, folder: Path, ca: Path | None) -> None:
    host, _, rest = reference.partition("/")
    name, _, tag = rest.partition(":")
    kill_at = float(os.environ.get("KILL_AT", "2"))
    came: dict[Digest, int] = {}
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    async with Client(Site(host, plain_http=ca is None, ca=ca)) as client:
        found = await registry.manifest(client, name, tag)
        parsed = manifest.parse(found.body)
        layers = parsed.layers if isinstance(parsed, manifest.Manifest) else ()
        wanted = [Wanted(Blob(name, one.digest, one.size), Path(f"{at}")) for at, one in enumerate(layers)]
        size = sum(one.size for one in layers)
        there = sum(one.blob.size for one in wanted if (folder / one.path).exists())
        wanted = [one for one in wanted if not (folder / one.path).exists()]
        first: dict[Digest, int] = {}

        def progress(digest: Digest, count: int) -> None:
            came[digest] = count
            first.setdefault(digest, count)
            if there + sum(came.values()) >= kill_at * size:
                os.kill(os.getpid(), signal.SIGKILL)

        await pull.fetch(wanted, Mirrored(client), folder, progress)
    sys.stdout.write(
        json.dumps(
            {
                "wall_s": time.perf_counter() - begun_s,
                "cpu_s": time.process_time() - begun_cpu_s,
                "rss_mib": _largest_mib(),
                "fetched_share": 1 - (there + sum(first.values())) / size,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(_fetch(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
