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
    help="The folder for Pilotlight's persistent state.",
)  # fmt: skip
store_option = click.option(
    "--store", type=DIRECTORY, default=lambda: default_state() / "weights",
    show_default="~/.local/state/pilotlight/weights", help="The folder of the weights store.",
)  # fmt: skip
listen_option = click.option(
    "--listen", type=AddressType(), default=LISTEN, show_default=LISTEN.text, help="The address of the inference port."
)
operations_option = click.option(
    "--ops", type=AddressType(), default=OPS, show_default=OPS.text,
    help="The address of the operations port. Its data can be read without a key, so keep this address on loopback. "
    "If inference requests require a key, commands such as wake, stop, cordon and drain require a key with role "
    "operator: create it with `key new --role operator`, and pass it with --key-env.",
)  # fmt: skip
health_option = click.option(
    "--health", type=AddressType(),
    help="An additional address for health checks and metrics, without a key. It may be reachable from other "
    "machines.",
)  # fmt: skip
grace_option = click.option(
    "--grace", type=click.FloatRange(0, 86_400), default=30.0, show_default=True, metavar="SECONDS",
    help="The time that running requests have to finish at shutdown.",
)  # fmt: skip
keep_engines_option = click.option(
    "--keep-engines", is_flag=True, help="Leave engines running at shutdown. The next start adopts them."
)
TLS_OPTIONS = {
    "--tls-cert-file": "The certificate of the port (PEM, with its chain). With it the port accepts only TLS.",
    "--tls-key-file": "The private key of --tls-cert-file (PEM).",
    "--tls-ca-file": "The CAs for certificates of engines (PEM). Default: the system's CAs.",
}
ACCESS_OPTIONS = {
    "--token-file": "The file with the token that gateways and agents send to the autoscaler. Unix sockets need none.",
    "--contract-cert-file": "The certificate for connections between gateways, agents and autoscalers (PEM).",
    "--contract-key-file": "The private key of --contract-cert-file (PEM).",
    "--contract-ca-file": "The CAs that issued the certificates of the other gateways, agents and autoscalers (PEM).",
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
ops_option = click.option("--ops", default=OPS.url, show_default=True, help="The address of the operations port.")
key_option = click.option(
    "--key-env", metavar="NAME", help="The environment variable with an API key of role operator, if one is required."
)
output_option = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    help="The output format: text for people, json for programs.",
)
autoscalers_option = click.option(
    "--autoscaler", "autoscalers", multiple=True, required=True,
    help="The address of an autoscaler: unix:PATH, https://HOST:PORT, or dns+https://NAME:PORT for every address of"
    " a name. Repeatable.",
)  # fmt: skip


def key_of(key_env: str | None) -> str | None:
    """Return the key that `--key-env` names, or None if no key is sent. Raises click.UsageError."""
    key = None if key_env is None else os.environ.get(key_env)
    if key_env is not None and not key:
        raise click.UsageError(f"--key-env: the environment variable {key_env} is not set")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise click.UsageError(
            f"--key-env: the value of the environment variable {key_env} is not a key: expected printable ASCII"
        )
    return key


def registry_options(command: Command) -> Command:
    """Add the options for registry access."""
    command = click.option(
        "--ca-file", type=FILE, help="A file with additional CAs for the certificate of the registry (PEM)."
    )(command)
    return click.option(
        "--plain-http", is_flag=True, help="Use HTTP instead of HTTPS for a registry that is not on this machine."
    )(command)
