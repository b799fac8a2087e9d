"""Files that are replaced while a process runs: what is reloaded, when, and what is logged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
import pytest

from pilotlight.net import file_reload
from pilotlight.net.certificates import FileError
from pilotlight.net.file_reload import Files
from tests.support.waiting import until


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(file_reload.log, "warning", lambda line, *values: lines.append(line % values))
    monkeypatch.setattr(file_reload, "LOOK_S", 0.01)
    return lines


def number(path: Path) -> Callable[[], int]:
    """A function that reads a number from a file."""

    def read() -> int:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            raise FileError(f"{path}: no number") from None

    return read


@contextlib.asynccontextmanager
async def following(files: Files) -> AsyncIterator[None]:
    task = asyncio.create_task(files.follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changed_file_is_reloaded_unless_its_content_is_invalid(tmp_path: Path, messages: list[str]) -> None:
    path, files = tmp_path / "n", Files()
    path.write_text("1")
    value = files.read(number(path), (path,))
    async with following(files):
        assert value() == 1
        path.write_text("22")
        await until("the new one is in force", lambda: value() == 22)
        path.write_text("broken")
        await until("it is messages", lambda: len(messages) == 2)
        assert value() == 22
        path.unlink()
        await until("it is messages", lambda: len(messages) == 3)
        path.write_text("333")
        await until("the next good one is in force", lambda: value() == 333)
    reloaded, kept = f"event=file_reloaded files={str(path)!r}", f"event=file_reload_failed error={path}: no number"
    assert messages == [reloaded, kept, kept, reloaded]


async def test_file_still_being_written_is_not_reloaded(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check finds a changed file, except for the last two."""
    path, files, looks = tmp_path / "n", Files(), iter(range(2, 6))
    path.write_text("1")
    value = files.read(number(path), (path,))
    marks = file_reload.stat_files

    def written(paths: tuple[Path, ...]) -> object:
        step = next(looks, None)
        if step is not None:
            path.write_text("broken" * step if step < 5 else "5")
        return marks(paths)

    monkeypatch.setattr(file_reload, "stat_files", written)
    async with following(files):
        await until("the whole file is in force", lambda: value() == 5)
    assert messages == [f"event=file_reloaded files={str(path)!r}"]


def test_first_read_of_an_unreadable_file_raises_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="no number"):
        Files().read(number(tmp_path / "none"), (tmp_path / "none",))
