"""Compares the CPU time per operation of this tree with that of another commit.

    python -m bench.compare --base main~3 plan cluster:fold
    make bench-compare BASE=main~3 PARTS='dataplane:calls plan'

Each part prints one line per pair of rounds: the ratio of the pair and the ratio so far, with its 95 % confidence
interval. A ratio of 1.02 means that this tree needs 2 % more CPU time per operation than the base. The last line is one
JSON object: {part: {"ratio": r, "low": l, "high": h, "rounds": n}}.

Uncommitted changes of this tree count. The base is checked out in a git worktree below the user's cache directory.
Exit status: 0 if every part was measured, 1 if a part failed, 2 if the input is invalid or a program is missing.

How it measures: each pair of rounds starts a fresh process for either side, because the memory layout and the hash seed
of a process alone shift its CPU time by about 1 %. Both sides of a pair have the same hash seed. The speed of a shared
core changes within 100 ms, so the sides of a pair take turns of about 15 ms on one core (AB, BA, AB). A turn of a
gateway takes at least a second, so two gateways run at the same time on one core, and the kernel alternates them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from bench import kit
from bench.documents import ROOT
from bench.kit import BenchError, say
from pilotlight import process

CONFIDENCE = 0.95
PAIRS_MIN = 8
WORKTREES_MAX = 4
"""Worktrees in the cache; the least recently used ones beyond are removed."""
READY_S_MAX, ROUND_S_MAX, STOP_S_MAX = 180.0, 120.0, 60.0
"""Limits for a worker to become ready, to measure one turn and to exit."""
STARTS = 5
"""Cold starts in a turn of `cluster:wake`."""
HISTORY = ROOT / "bench" / "history.tsv"
NETWORK = ("tests.integration.network_namespace", "tests.cluster.network")
CONTROL_PLANE = ("tests.integration.cluster.support.programs.build", "tests.cluster.building")
"""Programs of a tree's tests, by their names in newer and older commits."""
COLUMNS = ("date", "issue", "base", "head", "part", "ratio", "low", "high", "rounds")

Result = dict[str, float | int | None]


class UsageError(Exception):
    """The input is invalid or a program is missing; the message names it and the fix."""


class Cost(NamedTuple):
    """The CPU time of some operations."""

    cpu_us: float
    operations: int

    def __add__(self, other: object) -> Cost:
        """The sum of the costs."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.cpu_us + other.cpu_us, self.operations + other.operations)

    @property
    def us_per_operation(self) -> float:
        """Microseconds of CPU time per operation."""
        return self.cpu_us / self.operations


# --- statistics -----------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """The geometric mean of ratios and its confidence interval."""

    ratio: float
    low: float
    high: float


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for probabilities from 0.5 up to but not including 1."""
    low, high = 0.0, 1.0
    while t_cumulative(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_cumulative(t: float, degrees: int) -> float:
    """The probability of a value below `t` >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine * cosine * ((2 * k) / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    two_sided = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + two_sided) / 2


def interval(ratios: Sequence[float]) -> Interval:
    """Return the interval of the mean of the logarithms. A single ratio has the interval from 0 to infinity."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    quantile = t_quantile((1 + CONFIDENCE) / 2, len(logs) - 1)
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def is_narrow(ratios: Sequence[float], width: float) -> bool:
    """Whether there are enough pairs and their interval is narrower than `width`."""
    if len(ratios) < PAIRS_MIN:
        return False
    found = interval(ratios)
    return found.high - found.low < width


def is_finished(ratios: Sequence[float], elapsed_s: float, width: float, limit_s: float) -> bool:
    """Whether a part needs no further pair: the interval is narrow enough, or the time is up."""
    return is_narrow(ratios, width) or elapsed_s >= limit_s


def order(turn: int) -> tuple[int, int]:
    """Which side measures first and second in a turn; 0 is the base, 1 is this tree."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


# --- parts ----------------------------------------------------------------------------------------------------------

# Each part imports what it measures, so that a commit that lacks a module fails only in the parts that need the module.

Measure = Callable[[], Awaitable[Cost]]


class Part(NamedTuple):
    """Something that is measured."""

    prepare: Callable[[Path], AbstractAsyncContextManager[Measure]]
    """Starts what the part needs, in an empty folder; gives the function that measures one turn."""
    pair_s: float
    """The wall time for which the two sides of a pair alternate."""
    simultaneous: bool = False
    """Whether both sides of a pair take their turns at the same time, instead of alternating."""
    cluster: bool = False
    """Whether it needs the test control plane, and a network of its own for the pods."""
    programs: tuple[tuple[str, str], ...] = ()
    """The programs that it needs on the PATH, each with its Debian package."""


@asynccontextmanager
async def _calls(place: Path) -> AsyncIterator[Measure]:
    """One operation is a request to the gateway, which wrk sends and nginx answers."""
    from bench import calls, peers, wrk

    _take_load_core()
    script, model, shot = calls.prepare(place)
    async with peers.sides(place, model, [], shot) as (side,):

        async def measure() -> Cost:
            load = await wrk.load(script, side.url, 1, side.processes)
            if load.bad:
                raise BenchError(f"{load.bad} of {load.calls} requests failed")
            return Cost(load.us_per_call * load.calls, load.calls)

        yield measure


@asynccontextmanager
async def _chunks(place: Path) -> AsyncIterator[Measure]:
    """One operation is a chunk of a stream that the gateway forwards; both sides together have 25,000 per second."""
    from bench import chunks, peers

    _take_load_core()
    count = chunks.STREAMS // 2
    model, shot = chunks.prepare(place, ("paced", str(chunks.EVERY_MS)), count)
    async with peers.sides(place, model, [], shot) as (side,):

        async def measure() -> Cost:
            flow = await chunks.paced_flow(side, 3.0, count)
            return Cost(flow.us_per_chunk * flow.chunks, flow.chunks)

        yield measure


@asynccontextmanager
async def _blast(place: Path) -> AsyncIterator[Measure]:
    """One operation is a chunk of 64 streams that the gateway forwards as fast as it can."""
    from bench import chunks, peers

    _take_load_core()
    model, shot = chunks.prepare(place, ("blast",), chunks.BLAST_STREAMS)
    async with peers.sides(place, model, [], shot) as (side,):

        async def measure() -> Cost:
            flow = await chunks.blast_flow(side)
            return Cost(flow.us_per_chunk * flow.chunks, flow.chunks)

        yield measure


@asynccontextmanager
async def _plan(place: Path) -> AsyncIterator[Measure]:
    """One operation is a plan of 1,000 Models on 200 devices that are idle, and one where 50 Models have requests."""
    del place
    from autoscaler.planner.plan import Planner
    from bench.plan import NOW_S, build

    cases = [(Planner(), build(1000, 200, 0.7, waiting)) for waiting in (0, 50)]

    def operation() -> None:
        for planner, world in cases:
            planner.plan(world, NOW_S)

    yield _in_process(lambda: (operation, 1))


@asynccontextmanager
async def _fold(place: Path) -> AsyncIterator[Measure]:
    """One operation is an observation of a replica that is folded into the `World`."""
    del place
    from autoscaler.fold.indices import rebuild_indices
    from bench.clusterfold import changes, fold_all
    from bench.plan import NOW_S, build

    world = build(500, 1250, 0.9, 0)
    seen = changes(world)

    def fresh() -> tuple[Callable[[], None], int]:
        rebuilt = rebuild_indices(world, NOW_S)
        return lambda: fold_all(rebuilt, seen), len(seen)

    yield _in_process(fresh)


@asynccontextmanager
async def _wake(place: Path) -> AsyncIterator[Measure]:
    """One operation is a cold start of a pod on a real control plane; the CPU time is that of the autoscaler."""
    import psutil

    from bench import clusterbed, clusterhouse, clusterwake
    from bench.documents import settings
    from bench.usage import ran_us

    documents = [settings(devices=[], auth="none"), clusterwake.ours(place / "pod.jsonl")]
    async with clusterbed.bed(place) as bed, clusterhouse.house(bed, place / "house", documents) as house:
        await clusterhouse.ready(house)
        autoscaler = [psutil.Process(house.scalers[0].process.pid)]

        async def measure() -> Cost:
            before_us = ran_us(autoscaler)
            for _ in range(STARTS):
                await clusterwake.called(house.url, "pod")
                await clusterwake.zero(bed)
            return Cost(ran_us(autoscaler) - before_us, STARTS)

        yield measure


def _in_process(fresh: Callable[[], tuple[Callable[[], None], int]]) -> Measure:
    """Measures a function in this process. `fresh`, which is not measured, gives it and its number of operations."""

    async def measure() -> Cost:
        run, operations = fresh()
        begun_ns = time.process_time_ns()
        run()
        return Cost((time.process_time_ns() - begun_ns) / 1e3, operations)

    gc.collect()
    gc.freeze()
    kit.pin(kit.PROXY_CORE)
    return measure


def _take_load_core() -> None:
    """Pins this process to the core of the load generator, and raises its limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kit.pin(kit.LOAD_CORE)


PARTS = {
    "dataplane:calls": Part(_calls, 8.0, simultaneous=True, programs=(("wrk", "wrk"), ("nginx", "nginx-light"))),
    "dataplane:chunks": Part(_chunks, 8.0, simultaneous=True),
    "dataplane:blast": Part(_blast, 8.0, simultaneous=True),
    "plan": Part(_plan, 4.0),
    "cluster:fold": Part(_fold, 4.0),
    "cluster:wake": Part(_wake, 20.0, simultaneous=True, cluster=True),
}


# --- the worker: one side of one pair -------------------------------------------------------------------------------


async def serve(part: str) -> None:
    """Prepares a part and writes `ready`. For each line `round` on standard input it writes the cost of one turn."""
    output, sys.stdout = sys.stdout, sys.stderr  # what the benchmarks print must not mix with the answers
    with tempfile.TemporaryDirectory(prefix="pilotlight-compare-") as folder:
        async with PARTS[part].prepare(Path(folder)) as measure:
            print("ready", file=output, flush=True)
            while (await asyncio.to_thread(sys.stdin.readline)).strip() == "round":
                print(json.dumps((await measure())._asdict()), file=output, flush=True)


class Tree(NamedTuple):
    """A checked-out commit with its compiled gateway."""

    folder: Path
    commit: str
    """Abbreviated, with `-dirty` if there are uncommitted changes."""

    def benchmarks(self, part: str) -> Path:
        """The folder whose benchmarks measure this tree: the tree itself, or ROOT if its commit lacks the part."""
        own = self.folder / "bench" / "compare.py"
        return self.folder if own.exists() and f'"{part}": Part(' in own.read_text() else ROOT

    def environment(self, part: str, hash_seed: int) -> dict[str, str]:
        """The environment of a worker. The compiled wheel of the product precedes the benchmarks on the module path."""
        path = os.pathsep.join((str(self.folder / "build" / "compiled"), str(self.benchmarks(part))))
        return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}


class Worker:
    """A process that measures one part of one tree."""

    def __init__(self, process: asyncio.subprocess.Process, commit: str, log: Path) -> None:
        self._process = process
        self._commit = commit
        self._log = log

    async def turn(self) -> Cost:
        """Measures one turn."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"round\n")
        return Cost(**json.loads(await self.line(ROUND_S_MAX)))

    async def line(self, limit_s: float) -> str:
        """The next line that it writes. Raises BenchError with the end of its log if it exits or takes too long."""
        line = b""
        with contextlib.suppress(TimeoutError):
            if self._process.stdout is not None:
                line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        if not line:
            logged = self._log.read_text(errors="replace").strip().splitlines()
            last = logged[-1] if logged else f"no answer within {limit_s:.0f} s"
            raise BenchError(f"commit {self._commit}: {last}")
        return line.decode()

    async def stop(self) -> None:
        """Closes its standard input, so that it stops what it has started and exits."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S_MAX)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def module(tree: Path, names: Sequence[str]) -> str:
    """The first of these modules that a tree has: older commits have other names."""
    return next(name for name in names if (tree / f"{name.replace('.', '/')}.py").exists())


@asynccontextmanager
async def working(part: str, tree: Tree, hash_seed: int, log: Path) -> AsyncIterator[Worker]:
    """Start a worker and wait until it is ready. Ctrl-C does not reach its session, so that it can clean up."""
    python = [str(tree.folder / ".venv" / "bin" / "python"), "-Pm"]
    command = [*python, "bench.compare", "--serve", part]
    if PARTS[part].cluster:
        command = [*python, module(tree.benchmarks(part), NETWORK), *command]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tree.benchmarks(part), env=tree.environment(part, hash_seed), start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output,
        )  # fmt: skip
    worker = Worker(process, tree.commit, log)
    try:
        yield worker
    finally:
        await worker.stop()


# --- the trees ------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of the worktrees."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight" / "compare"


def git(folder: Path, *words: str) -> str | None:
    """Return the output of the command. None: it failed."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def resolve(commit: str) -> str:
    """The full hash of a commit. Raises UsageError if there is none."""
    found = git(ROOT, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if not found:
        raise UsageError(f"commit {commit!r} does not exist; choose one that `git log` lists, or run `git fetch` first")
    return found


def prepare_trees(base: str) -> tuple[Tree, Tree]:
    """The tree of the commit `base` and this tree, both with a compiled gateway."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with _locked(cache_folder() / "lock"):
        folder = _check_out(base)
        _compile(folder)
        _compile(ROOT)
    changed = git(ROOT, "status", "--porcelain", "--", ".", ":!bench/history.tsv")
    head = (git(ROOT, "rev-parse", "--short", "HEAD") or "") + ("-dirty" if changed else "")
    return Tree(folder, git(ROOT, "rev-parse", "--short", base) or base), Tree(ROOT, head)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_out(commit: str) -> Path:
    """The worktree of a commit, in the cache; removes the least recently used ones."""
    folder = cache_folder() / commit
    if git(folder, "rev-parse", "HEAD") != commit:
        _remove(folder)
        git(ROOT, "worktree", "prune")
        if git(ROOT, "worktree", "add", "--detach", "--force", str(folder), commit) is None:
            raise BenchError(f"git cannot create a worktree in {folder}")
    os.utime(folder)
    for old in least_recent([path for path in cache_folder().iterdir() if path.is_dir()]):
        _remove(old)
    _give_environment(folder)
    return folder


def least_recent(folders: Sequence[Path]) -> list[Path]:
    """The folders to remove: all but the WORKTREES_MAX that were used last."""
    return sorted(folders, key=lambda path: path.stat().st_mtime)[:-WORKTREES_MAX]


def _remove(folder: Path) -> None:
    """Removes a worktree, even if it belongs to another clone or is no worktree any more."""
    git(folder, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _give_environment(folder: Path) -> None:
    """Links our virtual environment if the tree locks the same dependencies; otherwise makes one for it."""
    environment, lock = folder / ".venv", Path("requirements") / "dev.lock"
    if environment.is_symlink():
        environment.unlink()
    if (folder / lock).read_bytes() == (ROOT / lock).read_bytes():
        shutil.rmtree(environment, ignore_errors=True)
        environment.symlink_to(ROOT / ".venv")
    elif not (environment / "ready").exists():
        _run(folder, "scripts/venv.sh")


def _compile(folder: Path) -> None:
    """Raises UsageError if there is no C compiler."""
    _run(folder, "scripts/compiled.sh")
    if not (folder / "build" / "compiled" / "ready").exists():
        raise UsageError("the gateway cannot be compiled; install a C compiler (Debian: apt install gcc python3-dev)")


def _run(folder: Path, script: str) -> None:
    """Runs a script of a tree; its output is shown."""
    done = subprocess.run(["bash", script], cwd=folder, check=False)
    if done.returncode:
        raise BenchError(f"{script} of {folder} failed with status {done.returncode}; see its output above")


# --- the comparison -------------------------------------------------------------------------------------------------


async def compare(part: str, trees: tuple[Tree, Tree], width: float, limit_s: float) -> list[float]:
    """The ratio of each pair, this tree to the base."""
    kit.title(f"{part}: {trees[1].commit} relative to {trees[0].commit}")
    say(f"{'pair':>4} {'base us':>10} {'new us':>10} {'ratio':>7}   so far")
    ratios, begun_s = list[float](), time.monotonic()
    while not is_finished(ratios, time.monotonic() - begun_s, width, limit_s):
        base, new = await _pair(part, trees, len(ratios))
        ratios.append(new.us_per_operation / base.us_per_operation)
        found = interval(ratios)
        row = f"{len(ratios):>4} {base.us_per_operation:>10.3f} {new.us_per_operation:>10.3f} {ratios[-1]:>7.4f}"
        say(f"{row}   {found.ratio:.4f} ({found.low:.4f} to {found.high:.4f})")
    why = f"interval narrower than {width:g}" if is_narrow(ratios, width) else f"limit of {limit_s:g} s reached"
    say(f"{part}: {len(ratios)} pairs in {time.monotonic() - begun_s:.0f} s; {why}")
    return ratios


async def _pair(part: str, trees: tuple[Tree, Tree], number: int) -> list[Cost]:
    """One round of either side: both start, warm up for one turn, and then alternate or run at the same time."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-compare-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(working(part, tree, number, Path(folder) / f"{side}.log"))
                for side, tree in enumerate(trees)
            ]
            for worker in workers:
                await worker.line(READY_S_MAX)
            take = _simultaneous if PARTS[part].simultaneous else _alternating
            await take(workers, number)  # to warm up
            costs, turn, begun_s = [Cost(0.0, 0), Cost(0.0, 0)], number, time.monotonic()
            while turn == number or time.monotonic() - begun_s < PARTS[part].pair_s:
                costs = [sum_ + cost for sum_, cost in zip(costs, await take(workers, turn), strict=True)]
                turn += 1
            return costs


async def _simultaneous(workers: Sequence[Worker], turn: int) -> list[Cost]:
    del turn
    return await asyncio.gather(*(worker.turn() for worker in workers))


async def _alternating(workers: Sequence[Worker], turn: int) -> list[Cost]:
    costs = {side: await workers[side].turn() for side in order(turn)}
    return [costs[side] for side in range(len(workers))]


def build_control_plane(trees: Sequence[Tree], part: str) -> None:
    """Builds the test control plane unless it is cached. Raises UsageError if this machine cannot build it."""
    for tree in trees:
        command = [
            str(tree.folder / ".venv" / "bin" / "python"),
            "-m",
            module(tree.benchmarks(part), CONTROL_PLANE),
        ]
        if subprocess.run(command, cwd=tree.benchmarks(part), stdout=subprocess.DEVNULL, check=False).returncode:
            raise UsageError(f"{part} needs the test control plane, which cannot be built; see the message above")


async def run(
    parts: Sequence[str], trees: tuple[Tree, Tree], width: float, limit_s: float, found: dict[str, list[float]]
) -> None:
    """Compares each part; adds the ratios of those that do not fail to `found`."""
    for part in parts:
        try:
            found[part] = await compare(part, trees, width, limit_s)
        except BenchError as error:
            say(f"{part} failed: {error}")


def figures(ratios: Sequence[float]) -> Result:
    """The result of one part, for the last line and the history. A single pair has no interval: null."""
    ratio, low, high = interval(ratios)
    known = len(ratios) > 1
    return {
        "ratio": round(ratio, 4),
        "low": round(low, 4) if known else None,
        "high": round(high, 4) if known else None,
        "rounds": len(ratios),
    }


def record(path: Path, issue: int, trees: tuple[Tree, Tree], results: Mapping[str, Result]) -> None:
    """Appends one row per part to the history."""
    rows = "" if path.exists() else "\t".join(COLUMNS) + "\n"
    for part, result in results.items():
        cells = (f"{datetime.now(UTC):%Y-%m-%d}", issue, trees[0].commit, trees[1].commit, part, *result.values())
        rows += "\t".join("" if cell is None else str(cell) for cell in cells) + "\n"
    with path.open("a") as file:
        file.write(rows)


# --- the command line -----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports invalid input in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `python -m bench.compare --help`")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = _Parser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", nargs="*", help=f"what to measure: {', '.join(PARTS)}")
    made.add_argument("--base", default="", metavar="COMMIT", help="the commit to compare this tree with")
    made.add_argument("--seconds", type=float, default=600, help="time limit per part (default: 600)")
    made.add_argument("--width", type=float, default=0.02, help="width of the interval to reach (default: 0.02)")
    made.add_argument("--record", type=int, metavar="ISSUE", help="append the results to bench/history.tsv")
    made.add_argument("--serve", choices=PARTS, metavar="PART", help="measure one side (used by this program itself)")
    return made


def check(base: str, parts: Sequence[str]) -> None:
    """Raises UsageError unless all input is given, all parts are known and their programs are on the PATH."""
    if not base:
        raise UsageError("the base is missing; name a commit: make bench-compare BASE=main~1")
    if not parts:
        raise UsageError(f"the parts are missing; choose from: PARTS='{' '.join(PARTS)}'")
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"part {part!r} is unknown; choose from: {', '.join(PARTS)}")
        for program, package in PARTS[part].programs:
            if shutil.which(program) is None:
                raise UsageError(f"{part} needs {program} on the PATH (Debian: apt install {package})")


def main() -> None:
    """Serves or compares."""
    found = dict[str, list[float]]()
    try:
        asked = parser().parse_args()
        if asked.serve:
            process.run(serve(asked.serve))
            return
        check(asked.base, asked.part)
        trees = prepare_trees(resolve(asked.base))
        for part in asked.part:
            if PARTS[part].cluster:
                build_control_plane(trees, part)
        process.run(run(asked.part, trees, asked.width, asked.seconds, found))
    except UsageError as error:
        sys.stderr.write(f"bench-compare: {error}\n")
        sys.exit(2)
    except BenchError as error:
        sys.exit(f"bench-compare: {error}")
    results = {part: figures(ratios) for part, ratios in found.items() if ratios}
    if asked.record is not None:
        record(HISTORY, asked.record, trees, results)
    say(json.dumps({part: results.get(part) for part in asked.part}))
    sys.exit(0 if all(part in results for part in asked.part) else 1)


if __name__ == "__main__":
    main()
