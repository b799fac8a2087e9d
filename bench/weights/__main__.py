"""Weights from and to a registry: Pilotlight, oras-go (three blobs at once, as its command does) and oras-py, in turns.

8 blobs of 256 MiB and one of 2 GiB, over plain HTTP and TLS, on loopback. Pilotlight and oras-go verify every digest.
Each is measured twice. First with everything on the disk at the end: the files of oras-go are synced afterwards, which
counts. Then as both do it by default, where an engine may read verified files before they are on the disk
(`unsynced_`); Pilotlight verifies its files again after an unclean boot, oras-go does not.

Further parts: oras-py's pull, which verifies nothing; a fetch that is killed (SIGKILL) at 90 % and resumed; both pushes
of 2 GiB. Then 50 processes of one node need one digest, and later replicas wait for their weights. `--scale 8` makes
all blobs 8 times smaller. The last line is one JSON object; a figure that could not be measured is null, with the
reason above.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit import MIB, Figures, say, spread, times, title
from bench.parts import machine, quick
from bench.weights.registries import NAME, artifact, fetches, random_file, registry
from tests.support.net.certificates import OURS, write_authority

KEYS = (
    "wall_ratio_oras", "cpu_ratio_oras", "rss_mib", "one_blob_wall_ratio_oras", "one_blob_cpu_ratio_oras",
    "tls_wall_ratio_oras", "tls_cpu_ratio_oras", "tls_rss_mib", "unsynced_wall_ratio_oras", "unsynced_cpu_ratio_oras",
    "unsynced_one_blob_wall_ratio_oras", "unsynced_tls_wall_ratio_oras", "wall_ratio_oras_py",
    "resume_bytes_share", "push_rss_mib", "push_rss_mib_oras_py", "push_wall_ratio_oras_py", "fetches_of_50",
    "second_replica_ms_max",
)  # fmt: skip
WANTING = 50
HERE = Path(__file__).parent
Cost = dict[str, float]
Sides = Mapping[str, Sequence[str]]
"""Name -> the command of each side, without source and destination."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.weights")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the blob sizes; figures count only at 1")
    scale = parser.parse_args().scale
    say(machine())
    figures: Figures = dict.fromkeys(KEYS)
    program = os.environ.get("PILOTLIGHT_REGISTRY") or shutil.which("docker-registry")
    if program is None or shutil.which("go") is None:
        say(
            "docker-registry or go is not on the PATH (Debian: apt install docker-registry golang): nothing is measured"
        )
    else:
        with tempfile.TemporaryDirectory(prefix="pilotlight-weights-") as place:
            figures |= asyncio.run(_Bench(Path(place), program, scale).all())
    say(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}))


class _Bench:
    """One run, in an empty folder."""

    def __init__(self, place: Path, program: str, scale: int) -> None:
        self._place = place
        self._program = program
        self._mib = 2048 // scale
        """The size of each artifact."""
        self._rounds = 3 if quick() else 7
        self._oras = place / "oraspull"
        self._ours = [sys.executable, "-m", "bench.weights.ours"]

    async def all(self) -> Figures:
        place = self._place
        build = ["go", "build", "-o", str(self._oras), "."]
        await asyncio.to_thread(subprocess.run, build, cwd=HERE / "oras", check=True)
        ca = write_authority(place, OURS)
        async with registry(place, self._program) as plain, registry(place, self._program, ca) as secure:
            await artifact(place, plain, "many", [self._mib // 8 * MIB] * 8)
            await artifact(place, plain, "one", [self._mib * MIB])
            await artifact(place, plain, "little", [64 * MIB], ["model.gguf"])
            figures = await self._pulls(plain, secure, ca)
            figures["resume_bytes_share"] = await self._resumed(f"{plain}/{NAME}:many")
            figures |= await self._oras_py(plain)
        async with registry(place, self._program, tells=True) as telling:
            figures |= await self._crowd(f"{telling}/{NAME}:little")
        return figures

    async def _pulls(self, plain: str, secure: str, ca: Path) -> Figures:
        sides = {"ours": self._ours, "oras-go": [str(self._oras)]}
        many, one = f"{plain}/{NAME}:many", f"{plain}/{NAME}:one"
        eight = f"8 blobs of {self._mib // 8} MiB"
        whole = f"one blob of {self._mib} MiB, plain HTTP"
        private = f"{secure}/{NAME}:many"
        found = await self._turns(f"{eight}, plain HTTP, with fsync", sides, [many])
        single = await self._turns(f"{whole}, with fsync", sides, [one])
        tls = await self._turns(f"{eight}, TLS, with fsync", sides, [private], str(ca))
        found_soon = await self._turns(f"{eight}, plain HTTP, without fsync", sides, [many], sync=False)
        single_soon = await self._turns(f"{whole}, without fsync", sides, [one], sync=False)
        tls_soon = await self._turns(f"{eight}, TLS, without fsync", sides, [private], str(ca), sync=False)
        return {
            "wall_ratio_oras": _ratio(found, "wall_s"),
            "cpu_ratio_oras": _ratio(found, "cpu_s"),
            "rss_mib": max(one["ours"]["rss_mib"] for one in found),
            "one_blob_wall_ratio_oras": _ratio(single, "wall_s"),
            "one_blob_cpu_ratio_oras": _ratio(single, "cpu_s"),
            "tls_wall_ratio_oras": _ratio(tls, "wall_s"),
            "tls_cpu_ratio_oras": _ratio(tls, "cpu_s"),
            "tls_rss_mib": max(one["ours"]["rss_mib"] for one in tls),
            "unsynced_wall_ratio_oras": _ratio(found_soon, "wall_s"),
            "unsynced_cpu_ratio_oras": _ratio(found_soon, "cpu_s"),
            "unsynced_one_blob_wall_ratio_oras": _ratio(single_soon, "wall_s"),
            "unsynced_tls_wall_ratio_oras": _ratio(tls_soon, "wall_s"),
        }

    async def _oras_py(self, plain: str) -> Figures:
        if importlib.util.find_spec("oras") is None:
            say("\noras-py is not installed: it is not measured")
            return {}
        theirs = [sys.executable, "-m", "bench.weights.theirs"]
        sides = {"ours": self._ours, "oras-py": [*theirs, "pull"]}
        what = "compared with oras-py, which verifies no digest and syncs nothing"
        pulls = await self._turns(what, sides, [f"{plain}/{NAME}:many"], sync=False)
        path = self._place / "pushed"
        await asyncio.to_thread(random_file, path, self._mib * MIB)
        sides = {"ours": [*self._ours, "push"], "oras-py": [*theirs, "push"]}
        pushes = await self._pushes(f"pushing one blob of {self._mib} MiB", sides, plain, path)
        path.unlink()
        return {
            "wall_ratio_oras_py": _ratio(pulls, "wall_s", "oras-py"),
            "push_rss_mib": max(one["ours"]["rss_mib"] for one in pushes),
            "push_rss_mib_oras_py": max(one["oras-py"]["rss_mib"] for one in pushes),
            "push_wall_ratio_oras_py": _ratio(pushes, "wall_s", "oras-py"),
        }

    async def _turns(
        self, what: str, sides: Sides, given: Sequence[str], *more: str, sync: bool = True
    ) -> list[dict[str, Cost]]:
        """Return the cost of each side in each round. The order alternates."""
        turns = []
        out = self._place / "out"
        for at in range(self._rounds + 1):
            costs = {}
            for who in sides if at % 2 else reversed([*sides]):
                costs[who] = await self._run([*sides[who], *given, str(out), *more], sync=sync)
                shutil.rmtree(out, ignore_errors=True)
            if at:  # the first round has cold caches
                turns.append(costs)
        _print_turns(what, turns)
        return turns

    async def _pushes(self, what: str, sides: Sides, host: str, path: Path) -> list[dict[str, Cost]]:
        """Push each time into a new repository, because a registry does not get blobs again that it has."""
        turns = []
        for at in range(3):
            costs = {}
            for who in sides if at % 2 else reversed([*sides]):
                to = f"{host}/bench/{who}-{at}{':pushed' if who != 'ours' else ''}"
                costs[who] = await self._run([*sides[who], to, str(path)])
            turns.append(costs)
        _print_turns(what, turns)
        return turns

    async def _run(self, command: Sequence[str], *, sync: bool = True) -> Cost:
        (self._place / "out").mkdir(exist_ok=True)
        environment = os.environ | ({"SYNC": "1"} if sync else {})
        done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, env=environment)
        found: Cost = json.loads(done.stdout[done.stdout.rindex(b"{") :])  # oras-py prints other text before it
        return found

    async def _resumed(self, reference: str) -> float:
        """Return the share of all bytes that the second fetch requested, after the first was killed at 90 %."""
        command = [*self._ours, reference, str(self._place / "out")]
        (self._place / "out").mkdir(exist_ok=True)
        environment = {**os.environ, "KILL_AT": "0.9"}
        await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, env=environment)
        share = (await self._run(command))["fetched_share"]
        shutil.rmtree(self._place / "out")
        title("resuming after SIGKILL at 90 %")
        say(f"  requested {share:.1%} of all bytes")
        return share

    async def _crowd(self, reference: str) -> Figures:
        """Measure processes of one node that need the same digest at the same time, and later ones."""
        command = [sys.executable, "-m", "bench.weights.node", reference, str(self._place / "store")]
        crowd = [
            await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(WANTING)
        ]
        for one in crowd:
            if one.stdout is not None:
                await one.stdout.readline()
        reports = [json.loads(out) for out, _ in await asyncio.gather(*(one.communicate(b"\n") for one in crowd))]
        alone = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = await alone.communicate(b"\n")
        quiet = json.loads(out.partition(b"\n")[2])
        asked = [one for one in fetches(self._place) if one != EMPTY]
        title(f"{WANTING} processes need the same blob of 64 MiB")
        last_s = max(one["first_ms"] for one in reports) / 1e3
        say(f"  {len(reports)} had it, fetched {len(asked)} time(s); the last had it after {last_s:.1f} s")
        title("weights in the store, for the next replica")
        say(f"  {spread(quiet['more_ms'])} ms; the first of a new process {quiet['first_ms']:.1f} ms")
        return {"fetches_of_50": len(asked), "second_replica_ms_max": max(quiet["more_ms"])}


EMPTY = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
"""The config, `{}`."""


def _ratio(turns: list[dict[str, Cost]], key: str, other: str = "oras-go") -> float:
    return statistics.median(one["ours"][key] / one[other][key] for one in turns)


def _print_turns(what: str, turns: list[dict[str, Cost]]) -> None:
    other = next(name for name in turns[0] if name != "ours")
    title(what)
    for key in ("wall_s", "cpu_s", "rss_mib"):
        ours, theirs = ([one[side][key] for one in turns] for side in ("ours", other))
        ratio = times([a / b for a, b in zip(ours, theirs, strict=True)])
        say(f"  {key:8} ours {statistics.median(ours):7.2f}, {other} {statistics.median(theirs):7.2f}: {ratio}")


if __name__ == "__main__":
    main()
