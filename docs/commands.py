"""Generates the reference of all commands and options from the click commands: `.venv/bin/python -m docs.commands`.

tests/project/test_docs.py compares the page with what this module would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from pilotlight.cli.main import cli

PAGE = Path(__file__).parent / "reference" / "command-options.md"
BEGINNING = """# Options of all commands

With this page you can look up every option of every command. It is generated from the commands' own help;
[Commands](cli.md) is the overview.
"""


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Context, click.Command]]:
    """Yield a command and all its subcommands, in the order of their help."""
    yield context, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from commands(found, click.Context(found, info_name=name, parent=context))


def section(context: click.Context, command: click.Command) -> str:
    """The heading, the usage, the help and the options of one command."""
    usage = " ".join(command.collect_usage_pieces(context))
    text = [f"## `{context.command_path}`", "", inspect.cleandoc(command.help or command.short_help or ""), ""]
    text += ["```console", f"$ {context.command_path} {usage}".rstrip(), "```", ""]
    if command.epilog:
        text += [inspect.cleandoc(command.epilog).replace("\b", "").strip(), ""]
    records = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [record for record in records if record is not None and "--help" not in record[0]]
    if rows:
        text += ["| option | meaning |", "| --- | --- |"]
        text += [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in rows]
        text.append("")
    return "\n".join(text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """The whole page."""
    root = click.Context(cli, info_name="pilotlight", terminal_width=10_000, max_content_width=10_000)
    return "\n".join([BEGINNING, *(section(context, command) for context, command in commands(cli, root))])


if __name__ == "__main__":
    PAGE.write_text(page())
