"""Writes to a terminal, a file or a pipe: escapes control characters and never blocks on a reader.

Names, reasons and headers come from clients, registries, weights files and other servers. Unescaped, they could clear a
terminal, forge a line or reorder text. The stream (`safe_streams`), `write_line` and `pilotlight.tables` apply
`escape_text`, so callers need not.

A stopped terminal or a pipe without a reader must not block a process: `write_line` returns whether the line was
written, and `QuietStderr` writes the log lines of libraries the same way.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import click
import msgspec

LINE_CHARACTERS_MAX = 8192
"""Maximum length of a line of text. JSON and YAML (`write_document`) are never truncated."""

_KEPT = str.maketrans("", "", "\t\n")


def escape_text(text: str, line_characters_max: int | None = None) -> str:
    r"""Return `text` with unprintable characters (controls, invisible and bidirectional characters, separators, lone
    surrogates; `str.isprintable`) as `\u001b`, and lines truncated to `line_characters_max`.

    JSON stays valid and keeps its values, since the replacement is an escape sequence inside a string. Tabs and line
    feeds are kept.
    """
    safe = text if text.translate(_KEPT).isprintable() else "".join(map(_escape, text))
    if line_characters_max is None or len(safe) <= line_characters_max:
        return safe
    return "\n".join(_cut(line, line_characters_max) for line in safe.split("\n"))


def _escape(letter: str) -> str:
    """Escape a character as JSON does, in UTF-16 units."""
    if letter.isprintable() or letter in "\t\n":
        return letter
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _cut(line: str, characters_max: int) -> str:
    if len(line) <= characters_max:
        return line
    mark = f"... ({len(line)} characters)"
    return line[: max(0, characters_max - len(mark))] + mark


class SafeStream(io.TextIOWrapper):
    """A text stream over another stream's buffer that escapes and truncates what is written."""

    def __init__(self, stream: TextIO) -> None:
        encoding = "utf-8" if stream.encoding.lower() in {"ascii", "us-ascii", "ansi_x3.4-1968"} else stream.encoding
        super().__init__(
            stream.buffer,
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=getattr(stream, "line_buffering", False),
        )
        self.rich_proxied_file = stream
        """The original stream. Rich writes its own control sequences to it (as for its FileProxy)."""

    def write(self, text: str) -> int:
        """Write escaped text. Raises click.ClickException if the write fails, for example on a full disk."""
        with _write_errors():
            super().write(escape_text(text, LINE_CHARACTERS_MAX))
        return len(text)

    def flush(self) -> None:
        """Flush the buffer. Raises click.ClickException if the write fails."""
        with _write_errors():
            super().flush()


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    """Raise a failed write as click's error, except for a closed pipe, which click handles."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Replace standard output and standard error by SafeStreams inside the context."""
    before = sys.stdout, sys.stderr
    made = [SafeStream(stream) if hasattr(stream, "buffer") else None for stream in before]
    sys.stdout, sys.stderr = (one or stream for one, stream in zip(made, before, strict=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for one in made:
            if one is not None:
                _detach(one)


def _detach(stream: SafeStream) -> None:
    try:
        stream.detach()  # flushes
    except (click.ClickException, OSError):  # click has reported it, or the reader is gone
        with contextlib.suppress(OSError):  # flushing the rest would fail again when the interpreter exits
            number = os.open(os.devnull, os.O_WRONLY)
            os.dup2(number, stream.fileno())
            os.close(number)
            stream.detach()


def write_document(text: str) -> None:
    """Write JSON or YAML to standard output, escaped but never truncated."""
    with _write_errors():
        click.echo(escape_text(text).encode(), nl=bool(text) and not text.endswith("\n"))


def one_line(text: str) -> str:
    """Collapse each run of whitespace into one space, so that a value cannot add lines to a message."""
    return " ".join(text.split())


def list_names(names: Sequence[str], names_max: int) -> str:
    """Return the first `names_max` names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - names_max} more" if len(names) > names_max else ""
    return ", ".join(names[:names_max]) + more


def write_json(value: object) -> None:
    """Write `value` (Structs, lists, dicts) as indented ASCII JSON."""
    write_document(json.dumps(msgspec.to_builtins(value), indent=2))


LINE_BYTES_MAX = 4096
"""PIPE_BUF: what a writable pipe accepts without blocking (pipe(7))."""


def write_line(fd: int, line: str) -> bool:
    """Write one line and return whether all of it was written; never blocks and never raises."""
    text = escape_text(" ".join(line.splitlines()).rstrip()).encode()[: LINE_BYTES_MAX - 1]
    taken = text.decode(errors="ignore").encode() + b"\n"  # drops an incomplete character
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    try:
        return any(flags & select.POLLOUT for _, flags in ready.poll(0)) and os.write(fd, taken) == len(taken)
    except OSError:
        return False  # the terminal is gone, or the pipe has no reader any more


def write_stderr(text: str) -> None:
    """Write a line to standard error, prefixed with the command's name."""
    write_line(sys.stderr.fileno(), f"pilotlight: {text}")


def write_stdout(text: str) -> None:
    """Write lines to standard output."""
    for line in text.splitlines():
        write_line(sys.stdout.fileno(), line)


class QuietStderr:
    """Standard error as a stream for `logging`, whose own stream handler would block without a reader."""

    def write(self, text: str) -> None:
        """Write the text line by line."""
        for line in text.splitlines():
            write_line(sys.stderr.fileno(), line)

    def flush(self) -> None:
        """Do nothing: no output is buffered."""
