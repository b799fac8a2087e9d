"""Control characters are escaped wherever a process writes a line, and JSON stays unchanged."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from pilotlight import __main__, tables
from pilotlight import safe_output as output
from pilotlight.safe_output import LINE_CHARACTERS_MAX, SafeStream, escape_text

ALONE = (0x061C, 0x200E, 0x202E, 0x2066, 0x2028, 0xFEFF, 0xFFF9, 0xD800)
RAW = "".join(map(chr, [*range(9), *range(11, 32), *range(0x7F, 0xA0), *ALONE]))


class Secret(str):
    """A text whose length must not be read."""

    __slots__ = ()

    def __len__(self) -> int:
        raise ValueError("secret")


def stream() -> tuple[SafeStream, io.BytesIO]:
    below = io.BytesIO()
    return SafeStream(io.TextIOWrapper(below, encoding="utf-8")), below


def test_text_with_control_characters_or_surrogates_is_escaped() -> None:
    assert escape_text(RAW) == "".join(f"\\u{ord(one):04x}" for one in RAW)
    assert escape_text("tab\tline\né 漢 🙂") == "tab\tline\né 漢 🙂"


@given(st.text(st.characters(codec=None)))
def test_escaped_text_is_printable_and_unchanged_by_a_second_escape(text: str) -> None:
    safe = escape_text(text)
    safe.encode()
    assert all(one.isprintable() or one in "\t\n" for one in safe)
    assert escape_text(safe) == safe


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_escaped_for_output_parses_to_the_same_value(text: str) -> None:
    assert json.loads(escape_text(json.dumps(text, ensure_ascii=False))) == text


def test_long_lines_are_truncated_and_show_their_full_length() -> None:
    cut = escape_text(f"short\n{'a' * 1000}\nend", 100)
    assert [len(line) for line in cut.split("\n")] == [5, 100, 3]
    assert "... (1000 characters)\n" in cut


def test_safe_output_stream_escapes_text_but_passes_bytes_unchanged() -> None:
    safe, below = stream()
    print("\x1b[2J\udcff" + "x" * 2 * LINE_CHARACTERS_MAX, file=safe)
    safe.flush()
    first = below.getvalue().decode()
    assert first.startswith("\\u001b[2J\\udcffxxx")
    assert len(first) == LINE_CHARACTERS_MAX + 1
    safe.buffer.write(b"raw")
    assert below.getvalue().endswith(b"raw")


def test_safe_streams_restores_stdout_and_stderr_on_exit(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with output.safe_streams():
        print("\x07out")
        print("\x07err", file=sys.stderr)
        output.write_document('{"a": "\x85\u202e' + "x" * LINE_CHARACTERS_MAX + '"}')
    assert (sys.stdout, sys.stderr) == before
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert (first, captured.err) == ("\\u0007out", "\\u0007err\n")
    assert json.loads(second)["a"] == "\x85\u202e" + "x" * LINE_CHARACTERS_MAX


def test_full_disk_is_reported_as_an_output_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with output.safe_streams():
            print("x")
            with pytest.raises(click.ClickException, match="the output cannot be written: No space left on device"):
                sys.stdout.flush()
            with pytest.raises(click.ClickException, match="the output cannot be written: No space left on device"):
                output.write_document("[]")
        assert sys.stdout is full


def test_console_escapes_control_codes_in_text_but_emits_its_own_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = tables.Console(width=60)
    with shown.capture() as capture:
        shown.print("\x1b[5m[red]x[/y]")
        shown.print(Text("\x9btext", style="bold"))
    output = capture.get()
    assert "\\u001b[5m[red]x[/y]" in output
    assert "\x1b[1m\\u009btext\x1b[0m" in output


def test_log_lines_are_escaped_and_truncated_between_characters() -> None:
    read, write = os.pipe()
    try:
        assert output.write_line(write, "\x1b[2J\udcff\u202e" + "é" * 5000)
        line = os.read(read, 10_000)
    finally:
        os.close(read)
        os.close(write)
    assert line.startswith(b"\\u001b[2J\\udcff\\u202e")
    assert len(line) <= output.LINE_BYTES_MAX
    assert line.decode().endswith("é\n")


@pytest.mark.parametrize("traceback", [False, True])
def test_internal_error_prints_a_summary_without_its_message(monkeypatch: pytest.MonkeyPatch, traceback: bool) -> None:
    messages: list[str] = []
    monkeypatch.setattr(output, "write_line", lambda _, line: messages.append(line))
    monkeypatch.setenv(__main__.TRACEBACK, "1" if traceback else "")
    with pytest.raises(ValueError, match="secret") as caught:
        output.SafeStream(io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")).write(Secret())
    error = ExceptionGroup("several", [caught.value, KeyError("secret")])
    __main__.report_exception(type(error), error, error.__traceback__)
    assert messages[-1].startswith("pilotlight: internal error: ValueError in pilotlight/safe_output.py:")
    assert "please report" in messages[-1]
    assert "secret" not in messages[-1]
    assert any("Traceback" in line for line in messages[:-1]) == traceback


def test_keyboard_interrupt_or_generator_exit_uses_the_default_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, *_: seen.append(kind))
    for error in (KeyboardInterrupt(), GeneratorExit()):
        __main__.report_exception(type(error), error, None)
    assert seen == [KeyboardInterrupt, GeneratorExit]
