"""Tables, progress bars and live lines on a terminal, using Rich. Foreign text is escaped and never used as markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.text import Text

from pilotlight.safe_output import LINE_CHARACTERS_MAX, escape_text

PLAIN_COLUMNS = 240
"""Width of a table in a file or a pipe, wide enough for one line per row without truncation."""


class Console(console.Console):
    """A Rich console without markup that escapes control characters in text but keeps Rich's own."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        stream = sys.stderr if stderr else sys.stdout
        raw = getattr(stream, "rich_proxied_file", stream)  # a SafeStream would also escape Rich's sequences
        super().__init__(file=raw, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape the text before Rich measures its width."""
        return super().render_str(escape_text(text, LINE_CHARACTERS_MAX), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape rendered segments too, for Text objects that were not created by `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_text(segment.text))


def build_console() -> Console:
    """Return the console for tables: as wide as the terminal, or PLAIN_COLUMNS if stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)


def build_progress_bar(what: str, *, quiet: bool) -> Progress:
    """Return a progress bar that is shown on a terminal only."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = Console(stderr=True, quiet=quiet)
    return Progress(*columns, console=shown, disable=quiet or not shown.is_terminal, transient=True)
