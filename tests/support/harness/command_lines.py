"""Command lines for every command of `pilotlight`, generated from a seed, and a runner for them in this process.

The values are typical causes of failures: FIFOs, devices, paths that are too long, bytes that are not UTF-8, control
characters, numbers that are not finite, invalid URLs, and ports of other servers. Daemons are stopped at the point
where they would start.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import socket
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import click
import pytest

from pilotlight.cli.main import cli
from pilotlight.net.listen import AddressType

STATUSES = frozenset({0, 1, 2, 130})
"""The exit statuses that the documentation lists."""
LIMIT_S = 60.0
BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
CONTROL, OWNED = "a\x1b[2Jb\x07\x9b", "\x1b]0;owned\x07"
TEXTS = (
    *("", "m", "a b", "a\nb", CONTROL, OWNED, "\u202etxt.exe", "[/x]", "[red]", "../..", "é漢", "\udcff", "x" * 5000),
    *("%s{}", "-", "oci://127.0.0.1:1/a/b:v", "oci://[::1/a", "hf://", "s3://a\nb/c", "team/NAME=1"),
)
PATHS = (
    *("nope", ".", "folder", "fifo", "binary", "empty", "documents.yaml", "demand.yaml", "bad.yaml", "bad.gguf"),
    *("control.gguf", "/dev/null", "/dev/full", "/proc/self/mem", "/nope/x", "documents.yaml/x", "x" * 300, "x" * 5000),
    *("y/" * 3000, "\udcff\udcfe", CONTROL, OWNED, "\u202egguf", "a\nb.gguf", ""),
)
NUMBERS = ("0", "1", "-1", "0.05", "nan", "inf", "-inf", "1e400", "1e-300", "9" * 30, "x", "", "0x10", "1_0", "\u0661")
ADDRESSES = (
    *("x", ":", "127.0.0.1:0", "127.0.0.1:99999", "[::1]:0:0", "a" * 300 + ":80", "..:80", f"{OWNED}:1", "\udcff:1"),
    "[::1]:x",
)
URLS = (
    *("http://127.0.0.1:1", "http://[::1", "::::", "http://", "http://a b", "a\nb", "http://127.0.0.1:99999"),
    *("http://\udcff", "http://" + "b" * 100 + ".x", f"http://{OWNED}", "https://127.0.0.1:1", "ftp://127.0.0.1"),
    "http://127.0.0.1:1/\u202e",
)
SHORT = {
    "--seconds": ("0.05", "0", "nan", "inf", "-1", "x"),
    "--timeout": ("0.3", "0", "nan", "inf", "-1"),
    "--grace": NUMBERS,
}
"""Parameters for which a valid value may make the command run for a long time."""
ALWAYS = {
    "load run": ("--seconds", "0.05", "--timeout", "0.3"),
    "load coldstart": ("--timeout", "0.3", "--rounds", "1"),
}


class Case(NamedTuple):
    """One command line."""

    words: tuple[str, ...]


class Ended(NamedTuple):
    """The outcome of a command."""

    status: int
    out: bytes
    err: bytes


class OverdueError(BaseException):
    """The command did not end within its limit. Not an Exception, so that no handler for Exception catches it."""


def commands(group: click.Group = cli, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands that perform an action, by their words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*at, name))
        elif command is not None:
            yield (*at, name), command


def cases(seed: int, count: int, urls: tuple[str, ...] = ()) -> Iterator[Case]:
    """Generates `count` cases, over all commands in turn. `urls`: addresses of other servers."""
    draw, known = random.Random(seed), list(commands())
    for number in range(count):
        yield drawn(draw, *known[number % len(known)], urls)


def drawn(draw: random.Random, words: tuple[str, ...], command: click.Command, urls: tuple[str, ...]) -> Case:
    """Generates one case of a command: mostly with required parameters, sometimes with others."""
    line = [*words, *ALWAYS.get(" ".join(words), ())]
    for parameter in command.params:
        needed = parameter.required and draw.random() < 0.97
        if not needed and draw.random() > 0.25:
            continue
        values = [value(draw, parameter, urls) for _ in range(draw.choice((1, 1, 2)) if several(parameter) else 1)]
        if isinstance(parameter, click.Option):
            name = parameter.opts[-1] if parameter.opts[-1].startswith("--") else parameter.opts[0]
            line += [name] if parameter.is_flag else [word for one in values for word in (name, one)]
        else:
            line += values
    if draw.random() < 0.03:
        line.append(draw.choice(("--nope", "", OWNED, "\udcff")))
    return Case(tuple(line))


def several(parameter: click.Parameter) -> bool:
    return parameter.multiple or parameter.nargs == -1


def value(draw: random.Random, parameter: click.Parameter, urls: tuple[str, ...]) -> str:
    """A valid or invalid value of a parameter."""
    kind, name = parameter.type, parameter.opts[0]
    if name in SHORT:
        return draw.choice(SHORT[name])
    if isinstance(kind, AddressType):
        return draw.choice(ADDRESSES)
    if name in {"--ops", "--url", "--autoscaler", "--peer"}:
        return draw.choice((*URLS, *urls, *urls, "unix:/nope", "unix:" + "x" * 200))
    if isinstance(kind, click.Choice):
        return str(draw.choice((*kind.choices, *kind.choices, "x", OWNED)))
    if isinstance(kind, click.Path):
        return draw.choice(PATHS)
    if isinstance(kind, click.IntRange | click.FloatRange) or kind in {click.INT, click.FLOAT}:
        return draw.choice(NUMBERS)
    return draw.choice((*TEXTS, *PATHS[:12]))


def lay_files(folder: Path) -> None:
    """Creates what PATHS names below `folder`."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").write_bytes(b"")
    (folder / "documents.yaml").write_text(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: m}\n"
        "spec: {engine: command, command: [x, '{port}'], gpu: {memory: 1Gi}}\n"
    )
    (folder / "demand.yaml").write_text("m: 1\n")
    (folder / "bad.yaml").write_text('metadata: {name: "\\u001b[2J"}\na: !!timestamp x\n')
    (folder / "bad.gguf").write_bytes(b"GGUF")
    name, text = b"general.architecture", OWNED.encode() + b"A" * 100_000
    sized = [len(one).to_bytes(8, "little") + one for one in (name, text)]
    head = (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    (folder / "control.gguf").write_bytes(b"GGUF" + head + sized[0] + (8).to_bytes(4, "little") + sized[1])


def stop_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes daemons exit at the point where they would start to run."""

    def started(*_: object, **__: object) -> NoReturn:
        raise click.ClickException("it would run now")

    def begun(main: Coroutine[object, object, None]) -> NoReturn:
        main.close()
        started()

    def lookup(host: str | bytes | None, *rest: object, **more: object) -> object:
        if host not in {None, "", "127.0.0.1", "localhost", "::1", b"127.0.0.1"}:
            raise socket.gaierror(socket.EAI_NONAME, "no network in tests")
        return found(host, *rest, **more)

    def interrupted(_: float) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("pilotlight.cli.status.time", SimpleNamespace(sleep=interrupted))  # ends `status --watch`
    found: Callable[..., object] = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr("pilotlight.process.run", begun)
    monkeypatch.setattr("pilotlight.process.stop_event", started)  # for `weights serve`, which has its own loop
    monkeypatch.setattr("pilotlight.processes.supervisor.Supervisor.run", started)
    monkeypatch.setattr("pilotlight.process.die_with_parent", started)


@contextlib.contextmanager
def limited(words: tuple[str, ...], limit_s: float = LIMIT_S) -> Iterator[None]:
    """Raises OverdueError in the main thread after `limit_s`."""

    def overdue(*_: object) -> NoReturn:
        raise OverdueError(words)

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(words: tuple[str, ...]) -> Ended:
    """Runs the command in this process, with files as its streams. Raises what the command does not handle."""
    before = sys.stdin, sys.stdout, sys.stderr
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open() as nothing:
        sys.stdin, sys.stdout, sys.stderr = nothing, io.TextIOWrapper(out), io.TextIOWrapper(err)
        status: object = None
        try:
            with limited(words):
                cli.main(list(words), prog_name="pilotlight")
        except SystemExit as ended:
            status = ended.code
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                stream.detach()
            sys.stdin, sys.stdout, sys.stderr = before
        out.seek(0)
        err.seek(0)
        return Ended(status if isinstance(status, int) else 0, out.read(), err.read())


def raw_controls(output: bytes) -> list[str]:
    """Control characters that would reach a terminal, and bytes that are not UTF-8."""
    text = output.decode("utf-8", "surrogateescape")
    kinds = {"Cc", "Cs"}
    return [one for one in text if (unicodedata.category(one) in kinds and one not in "\n\t") or one in BIDIRECTIONAL]


def faults(case: Case, ended: Ended) -> list[str]:
    """The invariants that the command violates."""
    found = []
    if ended.status not in STATUSES:
        found.append(f"exit status {ended.status}")
    if b"Traceback" in ended.out + ended.err or b"internal error" in ended.err:
        found.append("a traceback")
    if controls := raw_controls(ended.out + ended.err):
        found.append(f"raw control characters {controls[:5]!r}")
    lines = ended.err.splitlines()
    if ended.status == 2 and not all(line.startswith(b"pilotlight: ") for line in lines or [b""]):
        found.append("lines of another form")
    return found
