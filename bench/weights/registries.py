"""Debian's registry on this machine, and artifacts of random bytes in it. I/O.

Starts the processes and pushes the artifacts before anything is measured. Independent of the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from artifacts.digest import Digest
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from bench.kit import MIB, answers, free_port, running
from tests.support.net.certificates import OURS, leaf, write

NAME = "bench/model"
_BLOB = re.compile(r'"GET /v2/[^ "]*/blobs/(sha256:[0-9a-f]{64}) ')


@contextlib.asynccontextmanager
async def registry(place: Path, program: str, ca: Path | None = None, *, tells: bool = False) -> AsyncIterator[str]:
    """Run a registry and yield HOST:PORT; all of one `place` share blobs. `tells`: `fetches` returns its requests."""
    host = f"127.0.0.1:{free_port()}"
    http: dict[str, object] = {"addr": host, "secret": secrets.token_hex()}
    if ca is not None:
        pair = write(place, "registry", leaf(OURS))
        http["tls"] = {"certificate": str(pair[0]), "key": str(pair[1])}
    name = "telling" if tells else "tls" if ca else "plain"
    path = place / f"registry-{name}.json"  # JSON is YAML
    storage = {"filesystem": {"rootdirectory": str(place / "data")}}
    log = {"level": "error", "accesslog": {"disabled": not tells}}
    path.write_text(json.dumps({"version": 0.1, "log": log, "storage": storage, "http": http}))
    with running([program, "serve", str(path)], path.with_suffix(".log")) as process:
        if ca is None:
            await answers(f"http://{host}/v2/", process, path.with_suffix(".log"))
        yield host


def fetches(place: Path) -> list[str]:
    """Return the digests requested from the registry with `tells`, in order."""
    return _BLOB.findall((place / "registry-telling.log").read_text(errors="replace"))


async def artifact(place: Path, host: str, tag: str, sizes: Sequence[int], titles: Sequence[str] = ()) -> None:
    """Push blobs of random bytes, one file each, and a manifest of them."""
    async with Client(Site(host)) as client:
        config = await _blob(client, place, b"{}", "application/vnd.oci.empty.v1+json")
        layers = []
        for number, size in enumerate(sizes):
            path = place / "blob"
            await asyncio.to_thread(random_file, path, size)
            named = await asyncio.to_thread(digest, path)
            await push.push_blob(client, Blob(NAME, named, size), push.FileSource(path))
            path.unlink()
            title_of = {"org.opencontainers.image.title": titles[number] if titles else f"{number}"}
            layers.append(
                {"mediaType": "application/octet-stream", "digest": named, "size": size, "annotations": title_of}
            )
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/x-bench"}
        body |= {"config": config, "layers": layers}
        await push.push_manifest(client, NAME, tag, json.dumps(body).encode(), MANIFEST)


async def _blob(client: Client, place: Path, content: bytes, kind: str) -> dict[str, object]:
    path = place / "config"
    path.write_bytes(content)
    named = digest(path)
    await push.push_blob(client, Blob(NAME, named, len(content)), push.FileSource(path))
    return {"mediaType": kind, "digest": named, "size": len(content)}


def random_file(path: Path, size: int) -> None:
    """Write a file of this size, a whole number of MiB."""
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def digest(path: Path) -> Digest:
    """Return the digest of a file, computed by openssl."""
    output = subprocess.run(["openssl", "dgst", "-sha256", "-r", str(path)], check=True, capture_output=True).stdout
    return Digest(f"sha256:{output[:64].decode()}")
