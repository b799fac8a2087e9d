"""Tables, progress bars and live lines on a terminal, by Rich. Text from elsewhere is escaped and is never markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.text import Text

from pilotlight.output import LINE_CHARACTERS_MAX, escape_text

PLAIN_COLUMNS = 240
"""Width of a table in a file or a pipe: one line for each row, nothing cut."""


class Console(console.Console):
    """Rich's console without markup, which escapes control characters of the text, and writes its own."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        stream = sys.stderr if stderr else sys.stdout
        raw = getattr(stream, "rich_proxied_file", stream)  # a SafeStream would escape Rich's sequences, too
        super().__init__(file=raw, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """See Rich. Before the width is measured."""
        return super().render_str(escape_text(text, LINE_CHARACTERS_MAX), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Rich. Also for Text that was made elsewhere."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_text(segment.text))


def build_console() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for a file."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)


def build_progress_bar(what: str, *, quiet: bool) -> Progress:
    """A progress bar on a terminal; elsewhere nothing."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = Console(stderr=True, quiet=quiet)
    return Progress(*columns, console=shown, disable=quiet or not shown.is_terminal, transient=True)
