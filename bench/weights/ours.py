"""One fetch or push of Pilotlight in its own process.

`python -m bench.weights.ours HOST/REPOSITORY:TAG FOLDER [CA]`, or `... push HOST/REPOSITORY FILE`.

Prints as JSON the cost (without the interpreter's start, because the agent of a node runs continuously), the maximum
memory of the process, and the number of bytes that existed before. `KILL_AT=0.9` ends a fetch there by SIGKILL. With
`SYNC=1` everything is on the disk at the end; otherwise as in a node's store (`artifacts.store.unsynced_copies`):
usable when it is verified, and synced afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from pathlib import Path

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk
from artifacts.download import blob_download
from artifacts.download.blob_download import BlobTarget
from artifacts.http.transport import Site
from artifacts.oci import manifest
from artifacts.registry import manifests, push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirrored
from bench.weights.cost import Cost


async def _fetch(reference: str, folder: Path, ca: Path | None) -> None:
    host, _, rest = reference.partition("/")
    name, _, tag = rest.partition(":")
    kill_at = float(os.environ.get("KILL_AT", "2"))
    came: dict[Digest, int] = {}
    cost = Cost()
    async with Client(Site(host, plain_http=ca is None, ca=ca)) as client:
        found = await manifests.fetch_manifest(client, name, tag)
        parsed = manifest.parse_manifest(found.body)
        layers = parsed.layers if isinstance(parsed, manifest.Manifest) else ()
        wanted = [BlobTarget(Blob(name, one.digest, one.size), Path(f"{at}")) for at, one in enumerate(layers)]
        size = sum(one.size for one in layers)
        there = sum(one.blob.size for one in wanted if (folder / one.path).exists())
        wanted = [one for one in wanted if not (folder / one.path).exists()]
        first: dict[Digest, int] = {}

        def progress(digest: Digest, count: int) -> None:
            came[digest] = count
            first.setdefault(digest, count)
            if there + sum(came.values()) >= kill_at * size:
                os.kill(os.getpid(), signal.SIGKILL)

        disk = Disk() if os.environ.get("SYNC") else Disk().later()
        await blob_download.fetch_blobs(wanted, Mirrored(client), folder, progress, file_system=disk)
    cost.report(fetched_share=1 - (there + sum(first.values())) / size)


async def _push(reference: str, path: Path) -> None:
    """Push a file. It is also hashed first, as every push requires."""
    host, _, name = reference.partition("/")
    cost = Cost()
    with path.open("rb") as file:
        summed = hashlib.file_digest(file, "sha256").hexdigest()
    async with Client(Site(host)) as client:
        blob = Blob(name, Digest(f"sha256:{summed}"), path.stat().st_size)
        came = await push.push_blob(client, blob, push.FileSource(path))
    cost.report(came=came)


if __name__ == "__main__":
    if sys.argv[1] == "push":
        asyncio.run(_push(sys.argv[2], Path(sys.argv[3])))
    else:
        asyncio.run(_fetch(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
