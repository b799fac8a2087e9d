"""Options shared by several `pilotlight` commands, each described once. Only parses values; does not read files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import click

from pilotlight.net.listen import Address, AddressType

LISTEN, OPS = Address("127.0.0.1", 8080), Address("127.0.0.1", 8081)
PATH_BYTES_MAX = 4096 - 256
"""PATH_MAX (limits.h) minus the longest file name that a command appends to a folder."""


class PathType(click.Path):
    """A path that the file system accepts; `Path.exists` and similar raise for a longer one."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raises click's usage error."""
        path = Path(os.fsdecode(os.fspath(super().convert(str(value), param, ctx))))
        if is_path_too_long(path):
            self.fail(f"{path}: File name too long", param, ctx)
        return path


def is_path_too_long(path: Path) -> bool:
    """Return whether the path is too long for any file."""
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return True
    return len(os.fsencode(path)) > PATH_BYTES_MAX


DIRECTORY = PathType(path_type=Path, file_okay=False)
FILE = PathType(path_type=Path)
Command = Callable[..., None]


def default_state() -> Path:
    """Return `$XDG_STATE_HOME/pilotlight`, by default ~/.local/state/pilotlight."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "pilotlight"


state_option = click.option(
    "--state", type=DIRECTORY, default=default_state, show_default="~/.local/state/pilotlight",
    help="Where Pilotlight keeps what must outlive it.",
)  # fmt: skip
store_option = click.option(
    "--store", type=DIRECTORY, default=lambda: default_state() / "weights",
    show_default="~/.local/state/pilotlight/weights", help="The folder of the store.",
)  # fmt: skip
listen_option = click.option(
    "--listen", type=AddressType(), default=LISTEN, show_default=LISTEN.text, help="The inference port."
)
operations_option = click.option(
    "--ops", type=AddressType(), default=OPS, show_default=OPS.text,
    help="The operations port. Reading asks for no key: keep it on loopback. Orders ask for an operator's key where "
    "Calls need one: `key new --role operator`, then --key-env of the order.",
)  # fmt: skip
health_option = click.option(
    "--health", type=AddressType(),
    help="Also where it says whether it lives and can serve, and its metrics, without a key; others may reach it.",
)  # fmt: skip
grace_option = click.option(
    "--grace", type=click.FloatRange(0, 86_400), default=30.0, show_default=True, metavar="SECONDS",
    help="How long running calls may take to finish at the end.",
)  # fmt: skip
keep_engines_option = click.option(
    "--keep-engines", is_flag=True, help="At the end leave engines running; the next start adopts them."
)
TLS_OPTIONS = {
    "--tls-cert-file": "The certificate that clients are shown (PEM, with its chain): the port speaks TLS.",
    "--tls-key-file": "Its key (PEM).",
    "--tls-ca-file": "Authorities that engines' certificates must come from (PEM); by default the system's.",
}
ACCESS_OPTIONS = {
    "--token-file": "Beyond a Unix socket: the token that gateways show to the autoscaler.",
    "--contract-cert-file": "The certificate shown to the other side of the contract (PEM).",
    "--contract-key-file": "Its key (PEM).",
    "--contract-ca-file": "Authorities that the other side's certificate must come from (PEM).",
}


def file_options(options: dict[str, str]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, each of which names a file."""

    def decorate(command: Command) -> Command:
        for name, what in reversed(options.items()):
            command = click.option(name, type=FILE, help=what)(command)
        return command

    return decorate


tls_options, access_options = file_options(TLS_OPTIONS), file_options(ACCESS_OPTIONS)
parent_option = click.option("--parent", type=int, hidden=True)
ops_option = click.option("--ops", default=OPS.url, show_default=True, help="The operations port to ask.")
key_option = click.option(
    "--key-env", metavar="NAME", help="The environment variable that holds a key of role operator, where one is needed."
)
output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", help="For people or programs."
)
autoscalers_option = click.option(
    "--autoscaler", "autoscalers", multiple=True, required=True,
    help="unix:PATH, https://HOST:PORT, or dns+https://NAME:PORT for every address of a name; repeatable.",
)  # fmt: skip


def key_of(key_env: str | None) -> str | None:
    """Return the key that `--key-env` names, or None if no key is sent. Raises click.UsageError."""
    key = None if key_env is None else os.environ.get(key_env)
    if key_env is not None and not key:
        raise click.UsageError(f"--key-env: the environment variable {key_env} is not set")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise click.UsageError(f"--key-env: the environment variable {key_env} holds no key: expected printable ASCII")
    return key
