"""`pilotlight service print`: prints a systemd unit that runs `serve` with given arguments. Starts and writes nothing.

Paths become absolute, because a service has another working directory. Quoting: systemd.syntax(7), systemd.service(5).
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.core import ParameterSource

from pilotlight.net.listen import Address
from pilotlight.safe_output import write_document

STOP_MARGIN_S = 15
"""Time that a stop may take after the grace period: 5 s until engines get SIGKILL, and the processes' own exit."""
UNIT = """\
[Unit]
Description=Pilotlight
Wants=network-online.target
After=network-online.target

[Service]
{user}ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
# Only the supervisor gets the signal and stops the other processes in order. If it crashes, engines keep running, and
# the next start adopts them.
KillMode=process
TimeoutStopSec={stop_s}
Restart=on-failure
LimitNOFILE=1048576

[Install]
WantedBy={target}
"""


@click.group(epilog="Example: pilotlight service print -c models.yaml > pilotlight.service")
def service() -> None:
    """Run Pilotlight under a service manager."""


@service.command(
    "print",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: pilotlight service print --user pl -c /etc/pl.yaml --state /var/lib/pl > pilotlight.service",
)
@click.option("--user", metavar="NAME", help="The user that runs the service. Default: the current user.")
@click.option("--user-manager", is_flag=True, help="Print a unit for `systemctl --user`, which needs no root.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF serve]...")
def print_unit(user: str | None, user_manager: bool, arguments: tuple[str, ...]) -> None:
    """Print a systemd unit that runs `pilotlight serve` with these arguments, which are checked first."""
    from pilotlight.cli.main import serve

    if user is not None and user_manager:
        raise click.UsageError("expected either --user or --user-manager: a user's manager runs units as that user")
    context = serve.make_context("pilotlight serve", [*arguments])
    if user not in {None, getpass.getuser()} and context.get_parameter_source("state") is ParameterSource.DEFAULT:
        raise click.UsageError(f"--user {user}: pass --state as well, a folder that this user can write")
    if context.params["print_config"]:
        raise click.UsageError("--print-config starts no service: leave it out")
    words = [*find_command(), "serve", *list_words(context)]
    write_document(
        UNIT.format(
            user="" if user_manager else f"User={_checked('--user', user or getpass.getuser())}\n",
            command=" ".join(quote(word) for word in words),
            stop_s=round(context.params["grace"]) + STOP_MARGIN_S,
            target="default.target" if user_manager else "multi-user.target",
        )
    )


def find_command() -> list[str]:
    """Return the words that run this installation of Pilotlight from any folder."""
    script = Path(sys.executable).with_name("pilotlight")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", "pilotlight"]


def list_words(context: click.Context) -> Iterator[str]:
    """Yield the arguments that were given, with absolute paths; --state always, whose default depends on the user."""
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params[name]
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE and name != "state":
            continue
        for one in value if isinstance(value, tuple) and not isinstance(value, Address) else (value,):
            if isinstance(parameter, click.Option):
                yield parameter.opts[-1]
            if one is not True:
                yield _format_value(one)


def _format_value(value: object) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    return value.text if isinstance(value, Address) else f"{value:g}" if isinstance(value, float) else str(value)


def quote(word: str) -> str:
    """Quote a word of ExecStart. `%` and `$` are doubled, so that systemd does not expand them."""
    escaped = _checked("an argument", word).replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(word) & set(" \t'\"\\;") or not word else escaped


def _checked(what: str, text: str) -> str:
    """Return the text. Raises click's usage error for characters that a unit cannot contain."""
    if not text.isprintable():
        raise click.UsageError(f"{what}: a unit cannot contain control characters; rename the file or the user")
    return text
