"""Pulling weights: our fetch and oras-go's (three blobs at once, as the command does), in turns, from one registry.

8 blobs of 256 MiB and one of 2 GiB, over plain HTTP and by TLS, on loopback; both check every digest, and with both
everything is on the disk at the end (ours has no other way; oras-go's files are synced when it is done, in its time).
What oras-go costs without that is reported beside it (`unsynced_wall_ratio_oras`). Then one fetch is killed (SIGKILL)
at 90 % and gone on with. Prints the last line as one JSON object; a figure that could not be taken is null, with the
reason above.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from artifacts import pushing
from artifacts.blobs import Blob
from artifacts.client import Client
from artifacts.digests import Digest
from artifacts.registry import MANIFEST
from artifacts.transport import Site
from bench.kit import Figures, answers, free_port, running, say, times, title
from bench.parts import machine, quick
from tests.kit.certificates import OURS, leaf, write, write_authority

MIB = 1 << 20
SHAPES = {"many": [256 * MIB] * 8, "one": [2048 * MIB]}
"""By tag: the bytes of each blob."""
KEYS = (
    "wall_ratio_oras", "cpu_ratio_oras", "rss_mib", "one_blob_wall_ratio_oras", "tls_wall_ratio_oras",
    "unsynced_wall_ratio_oras", "resume_bytes_share",
)  # fmt: skip
NAME = "bench/model"
HERE = Path(__file__).parent
Cost = dict[str, float]


def main() -> None:
    say(machine())
    figures: Figures = dict.fromkeys(KEYS)
    registry = os.environ.get("PILOTLIGHT_REGISTRY") or shutil.which("docker-registry")
    if registry is None or shutil.which("go") is None:
        say(
            "docker-registry or go is not on the PATH (Debian: apt install docker-registry golang): nothing is measured"
        )
    else:
        with tempfile.TemporaryDirectory(prefix="pilotlight-weights-") as place:
            figures |= asyncio.run(_measured(Path(place), registry))
    say(json.dumps(figures))


async def _measured(place: Path, registry: str) -> Figures:
    rounds = 3 if quick() else 7
    oras = place / "oraspull"
    await asyncio.to_thread(subprocess.run, ["go", "build", "-o", str(oras), "."], cwd=HERE / "oras", check=True)
    ca = write_authority(place, OURS)
    async with _registry(place, registry, None) as plain, _registry(place, registry, ca) as secure:
        for tag, sizes in SHAPES.items():
            await _push(place, plain, tag, sizes)
        many = await _turns(oras, f"{plain}/{NAME}:many", None, rounds, "8 blobs of 256 MiB, plain")
        one = await _turns(oras, f"{plain}/{NAME}:one", None, rounds, "one blob of 2 GiB, plain")
        tls = await _turns(oras, f"{secure}/{NAME}:many", ca, rounds, "8 blobs of 256 MiB, TLS")
        unsynced = await _turns(
            oras, f"{plain}/{NAME}:many", None, rounds, "8 blobs of 256 MiB, plain, oras-go's not synced", sync=False
        )
        share = await _resumed(place, f"{plain}/{NAME}:many")
    return {
        "wall_ratio_oras": _ratio(many, "wall_s"),
        "cpu_ratio_oras": _ratio(many, "cpu_s"),
        "rss_mib": max(ours["rss_mib"] for ours, _ in many),
        "one_blob_wall_ratio_oras": _ratio(one, "wall_s"),
        "tls_wall_ratio_oras": _ratio(tls, "wall_s"),
        "unsynced_wall_ratio_oras": _ratio(unsynced, "wall_s"),
        "resume_bytes_share": share,
    }


def _ratio(turns: list[tuple[Cost, Cost]], key: str) -> float:
    return statistics.median(ours[key] / theirs[key] for ours, theirs in turns)


@contextlib.asynccontextmanager
async def _registry(place: Path, program: str, ca: Path | None) -> AsyncIterator[str]:
    """HOST:PORT of one; both have the same blobs."""
    host = f"127.0.0.1:{free_port()}"
    http: dict[str, object] = {"addr": host, "secret": secrets.token_hex()}
    if ca is not None:
        pair = write(place, "registry", leaf(OURS))
        http["tls"] = {"certificate": str(pair[0]), "key": str(pair[1])}
    path = place / f"registry-{'tls' if ca else 'plain'}.json"  # JSON is YAML
    storage = {"filesystem": {"rootdirectory": str(place / "data")}}
    log = {"level": "error", "accesslog": {"disabled": True}}
    path.write_text(json.dumps({"version": 0.1, "log": log, "storage": storage, "http": http}))
    with running([program, "serve", str(path)], path.with_suffix(".log")) as process:
        if ca is None:
            await answers(f"http://{host}/v2/", process, path.with_suffix(".log"))
        yield host


async def _push(place: Path, host: str, tag: str, sizes: list[int]) -> None:
    async with Client(Site(host)) as client:
        config = await _blob(client, place, b"{}")
        layers = []
        for number, size in enumerate(sizes):
            path = place / "blob"
            with path.open("wb") as file:
                for _ in range(size // MIB):
                    file.write(os.urandom(MIB))
            named = await asyncio.to_thread(_digest, path)
            await pushing.push_blob(client, Blob(NAME, named, size), pushing.FileSource(path))
            path.unlink()
            title_of = {"org.opencontainers.image.title": f"{number}"}
            layers.append(
                {"mediaType": "application/octet-stream", "digest": named, "size": size, "annotations": title_of}
            )
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/x-bench"}
        body |= {"config": config, "layers": layers}
        await pushing.push_manifest(client, NAME, tag, json.dumps(body).encode(), MANIFEST)


async def _blob(client: Client, place: Path, content: bytes) -> dict[str, object]:
    path = place / "config"
    path.write_bytes(content)
    named = _digest(path)
    await pushing.push_blob(client, Blob(NAME, named, len(content)), pushing.FileSource(path))
    return {"mediaType": "application/vnd.oci.empty.v1+json", "digest": named, "size": len(content)}


def _digest(path: Path) -> Digest:
    said = subprocess.run(["openssl", "dgst", "-sha256", "-r", str(path)], check=True, capture_output=True).stdout
    return Digest(f"sha256:{said[:64].decode()}")


async def _turns(
    oras: Path, reference: str, ca: Path | None, rounds: int, what: str, *, sync: bool = True
) -> list[tuple[Cost, Cost]]:
    """What each round cost us and them; who is first changes."""
    place, given = oras.parent, [str(ca)] if ca is not None else []
    turns = []
    for at in range(rounds + 1):
        costs = {}
        for who in ("ours", "theirs") if at % 2 else ("theirs", "ours"):
            command = [sys.executable, "-m", "bench.weights.ours"] if who == "ours" else [str(oras)]
            costs[who] = await _run(place, [*command, reference, str(place / "out"), *given], sync=sync)
            shutil.rmtree(place / "out", ignore_errors=True)
        if at:  # the first has cold caches
            turns.append((costs["ours"], costs["theirs"]))
    title(what)
    for key in ("wall_s", "cpu_s", "rss_mib"):
        ours, theirs = ([turn[side][key] for turn in turns] for side in (0, 1))
        say(f"  {key:8} ours {statistics.median(ours):7.2f}, oras-go {statistics.median(theirs):7.2f}: "
            f"{times([a / b for a, b in zip(ours, theirs, strict=True)])}")  # fmt: skip
    return turns


async def _run(place: Path, command: list[str], *, sync: bool = True) -> Cost:
    (place / "out").mkdir(exist_ok=True)
    environment = os.environ | ({"SYNC": "1"} if sync else {})
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, env=environment)
    found: Cost = json.loads(done.stdout)
    return found


async def _resumed(place: Path, reference: str) -> float:
    """Which share of all bytes the second fetch had to ask for, after the first was killed at 90 %."""
    command = [sys.executable, "-m", "bench.weights.ours", reference, str(place / "out")]
    (place / "out").mkdir(exist_ok=True)
    environment = {**os.environ, "KILL_AT": "0.9"}
    await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, env=environment)
    share = (await _run(place, command))["fetched_share"]
    title("going on after SIGKILL at 90 %")
    say(f"  asked for {share:.1%} of all bytes")
    return share


if __name__ == "__main__":
    main()
