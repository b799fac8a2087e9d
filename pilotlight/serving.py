"""`pilotlight serve`: from what a person typed to a running supervisor, and what the person is told meanwhile.

Owns the layout of STATE/run (documents, sockets) and the checks that must fail before anything starts.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from pathlib import Path

import click
import msgspec

from autoscaler.documents import Documents, to_yaml
from autoscaler.drivers.records import StateDirectory, StateError
from autoscaler.settings import Limits
from pilotlight import snippets
from pilotlight.gathering import gather, needs_tenant
from pilotlight.listen import Address, listeners
from pilotlight.supervisor import Role, Supervisor, say

SOCKET_PATH_MAX = 100
"""A Unix socket's path may have about 107 bytes (unix(7)); a longer state directory is refused with words."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` was told."""

    models: tuple[Path, ...]
    configs: tuple[Path, ...]
    listen: Address
    ops: Address
    state: Path
    gateways: int
    keep_engines: bool
    grace_s: float
    print_config: bool


def run(options: ServeOptions) -> int:
    """The exit status of `serve`."""
    documents = gather(options.models, options.configs, options.state)
    if options.print_config:
        click.echo(to_yaml(documents), nl=False)
        return 0
    check(options, documents)
    try:
        state = StateDirectory.open(options.state)
    except StateError as error:
        raise click.ClickException(str(error)) from None
    with contextlib.closing(state):
        inference = listeners(options.listen, options.gateways)
        operations = listeners(options.ops, 1)[0]
        run_directory = state.path / "run"
        write_private(run_directory / "documents.yaml", to_yaml(documents))
        listen = Address(options.listen.host, inference[0].getsockname()[1])
        ops = Address(options.ops.host, operations.getsockname()[1])
        autoscaler, gateways = roles(
            options, run_directory, inference, operations, limits_json(documents.settings.limits)
        )
        ready_sockets = [run_directory / f"{role.name}.sock" for role in gateways]
        supervisor = Supervisor(
            autoscaler,
            gateways,
            ready=lambda: all(answers(path) for path in ready_sockets),
            on_ready=lambda: welcome(documents, listen, ops),
        )
        say(f"starting with {len(documents.models)} models, {options.gateways} gateway(s); state in {options.state}")
        return supervisor.run()


def check(options: ServeOptions, documents: Documents) -> None:
    """What must be refused before anything is touched."""
    if not documents.models:
        raise click.UsageError("nothing to serve: give a .gguf file, a folder of them, or -c DOCUMENTS")
    if needs_tenant(documents, loopback=options.listen.loopback):
        raise click.UsageError(
            f"{options.listen.host} can be reached by others and no Tenant has a key: make one with "
            "`pilotlight key new --tenant NAME --state DIR`, or say `auth: none` in Settings"
        )
    if len(os.fsencode(options.state.absolute())) + len("/run/autoscaler.sock") > SOCKET_PATH_MAX:
        raise click.UsageError(f"--state {options.state}: the path is too long for a Unix socket; choose a shorter one")


def roles(
    options: ServeOptions, run: Path, inference: list[socket.socket], operations: socket.socket, limits: str
) -> tuple[Role, list[Role]]:
    """The children: (autoscaler, gateways)."""
    contract = run / "autoscaler.sock"
    names = [f"gateway-{number}" for number in range(1, options.gateways + 1)]
    gateways = [
        Role(
            name,
            (
                "gateway", "--id", name, "--autoscaler", f"unix:{contract}", "--listen-fd", str(listener.fileno()),
                "--ops-socket", str(run / f"{name}.sock"), "--state", str(run), "--grace", str(options.grace_s),
                "--limits", limits, "--events", str(options.state / "logs" / f"{name}.calls.log"),
            ),
            (listener,),
        )
        for name, listener in zip(names, inference, strict=True)
    ]  # fmt: skip
    arguments = [
        "autoscaler", "--driver", "local", "--state", str(options.state), "--documents", str(run / "documents.yaml"),
        "--contract-socket", str(contract), "--ops-fd", str(operations.fileno()),
    ]  # fmt: skip
    for name in names:
        arguments += ["--gateway-socket", str(run / f"{name}.sock")]
    if options.keep_engines:
        arguments.append("--keep-engines")
    return Role("autoscaler", tuple(arguments), (operations,)), gateways


def limits_json(limits: Limits) -> str:
    """The Settings' limits as the gateway takes them: by their Python names, bytes as numbers."""
    values = {name: getattr(limits, name) for name in limits.__struct_fields__}
    return msgspec.json.encode({k: int(v) if isinstance(v, int) else v for k, v in values.items()}).decode()


def answers(path: Path) -> bool:
    """Whether the gateway behind this Unix socket is ready."""
    connection = http.client.HTTPConnection("gateway")
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(1.0)
            link.connect(str(path))
            connection.sock = link
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def write_private(path: Path, text: str) -> None:
    """A 0600 file (documents may hold key hashes)."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def welcome(documents: Documents, listen: Address, ops: Address) -> None:
    """What the person at the terminal needs now."""
    key = documents.settings.auth == "keys" or (documents.settings.auth == "auto" and bool(documents.tenants))
    name = documents.models[0].name
    say(f"ready on {listen.url} (operations: {ops.url}); every model is at zero until it is called")
    click.echo(f"\n{snippets.curl(listen.url, name, key=key)}\n\n{snippets.python(listen.url, name, key=key)}\n")
