"""`pilotlight wake`, `stop`, `cordon`, `uncordon` and `drain`: operator orders, sent to the operations port.

Resolves whether a name is a device or a node, and waits for a drain with progress. The autoscaler decides what an order
does and reports it; nothing is stored here, so interrupting a wait changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click
import msgspec
from rich.text import Text

from autoscaler.queries.response_types import DeviceView, NodeView, OrderResult
from autoscaler.text import format_count
from pilotlight.net.ops_client import fetch
from pilotlight.options import Command, key_of, key_option, ops_option, output_option
from pilotlight.safe_output import one_line, write_json
from pilotlight.tables import Console

LOOK_S = 0.5
drain_force_option = click.option(
    "--force", is_flag=True,
    help="Wait at most 10 s for running requests, and then stop the replicas anyway. Devices that a fabric attached "
    "to the node are released; if the release hangs, they are detached by force. A program that has such a device "
    "open loses it: the program may crash, and the node may hang.",
)  # fmt: skip
force_option = click.option(
    "--force", is_flag=True, help="Wait at most 10 s for running requests, and then stop the replicas anyway."
)
kind_option = click.option(
    "--kind", type=click.Choice(["device", "node"]), help="Whether NAME is a device or a node, if both exist."
)


def order_options(*more: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of all orders."""

    def decorate(command: Command) -> Command:
        options: tuple[Callable[[Command], Command], ...] = (output_option, key_option, ops_option, *reversed(more))
        for option in options:
            command = option(command)
        return command

    return decorate


@click.command(epilog="Example: pilotlight wake llama")
@click.argument("model")
@order_options()
def wake(model: str, ops: str, key_env: str | None, output: str) -> None:
    """Start a model now, as a request would. Without requests, it keeps running for one idle timeout."""
    print_order_result(send_order(ops, f"models/{model}/wake", key_env), output)


@click.command(epilog="Example: pilotlight stop llama")
@click.argument("model")
@order_options(force_option)
def stop(model: str, force: bool, ops: str, key_env: str | None, output: str) -> None:
    """Stop a model before its idle timeout, after its running requests. New requests start it unless it is paused."""
    print_order_result(send_order(ops, f"models/{model}/stop", key_env, force=force), output)


@click.command(epilog="Example: pilotlight cordon gpu0")
@click.argument("name", metavar="DEVICE|NODE")
@order_options(kind_option)
def cordon(name: str, kind: str | None, ops: str, key_env: str | None, output: str) -> None:
    """Place no new replicas on a device or node. Its replicas keep running."""
    print_order_result(send_order(ops, f"{resolve_target(ops, name, kind)}/cordon", key_env), output)


@click.command(epilog="Example: pilotlight uncordon gpu0")
@click.argument("name", metavar="DEVICE|NODE")
@order_options(kind_option)
def uncordon(name: str, kind: str | None, ops: str, key_env: str | None, output: str) -> None:
    """Allow new replicas on a device or node again."""
    print_order_result(send_order(ops, f"{resolve_target(ops, name, kind)}/uncordon", key_env), output)


@click.command(epilog="Example: pilotlight drain gpu0")
@click.argument("name", metavar="DEVICE|NODE")
@click.option("--no-wait", is_flag=True, help="Do not wait until the device or node is empty.")
@order_options(kind_option, drain_force_option)
def drain(  # noqa: PLR0917  click passes by keyword
    name: str, no_wait: bool, kind: str | None, force: bool, ops: str, key_env: str | None, output: str
) -> None:
    """Cordon a device or node, and move its replicas: a replacement starts elsewhere first if there is room."""
    where = resolve_target(ops, name, kind)
    result = send_order(ops, f"{where}/drain", key_env, force=force)
    if output == "text":
        print_order_result(result, output)
    if no_wait:
        left = list_replicas(ops, where)
    else:
        try:
            left = wait_until_empty(ops, where, quiet=output == "json")
        except KeyboardInterrupt:
            click.echo("pilotlight: the drain continues; `pilotlight uncordon` cancels it", err=True)
            raise click.Abort from None
    if output == "json":
        write_json({**msgspec.to_builtins(result), "empty": not left})


def send_order(ops: str, path: str, key_env: str | None, *, force: bool = False) -> OrderResult:
    """Post an order and return the port's description of its effect. Raises click's errors."""
    return fetch(ops, f"/api/v1/{path}", OrderResult, order={"force": force}, key=key_of(key_env))


def resolve_target(ops: str, name: str, kind: str | None) -> str:
    """Return `devices/NAME` or `nodes/NAME`. Raises click's errors for an unknown or ambiguous name."""
    devices = {row.device for row in fetch(ops, "/api/v1/devices", tuple[DeviceView, ...])}
    nodes = {row.name for row in fetch(ops, "/api/v1/nodes", tuple[NodeView, ...])}
    found = [one for one, names in (("device", devices), ("node", nodes)) if name in names and kind in {None, one}]
    if len(found) > 1:
        raise click.UsageError(f"{name} is the name of a device and of a node: select one with --kind")
    if not found and kind is not None:
        return f"{kind}s/{name}"  # the autoscaler may have an order for a device or node that is gone
    if not found:
        known = f"devices {', '.join(sorted(devices)) or 'none'}; nodes {', '.join(sorted(nodes)) or 'none'}"
        raise click.ClickException(f"no device or node {name} exists; existing: {known}")
    return f"{found[0]}s/{name}"


def list_replicas(ops: str, where: str) -> list[str]:
    """Return the replicas on a device or node, with their states."""
    kind, _, name = where.partition("/")
    rows = fetch(ops, "/api/v1/devices", tuple[DeviceView, ...])
    on_it = [row for row in rows if (row.device if kind == "devices" else row.node) == name]
    return sorted({f"{one.model} ({one.state})" for row in on_it for one in row.replicas})


def wait_until_empty(ops: str, where: str, *, quiet: bool) -> list[str]:
    """Wait until no replica is left. Shows a live line on a terminal, otherwise one line per change."""
    name, printed = where.partition("/")[2], list[str]()
    console = Console(quiet=quiet)
    with console.status("") as shown:
        while left := list_replicas(ops, where):
            if left != printed:
                line = f"{format_count(len(left), 'replica')} on {name}: {', '.join(left)}"
                shown.update(Text(line))
                if not sys.stdout.isatty():
                    console.print(line, soft_wrap=True)
                printed = left
            time.sleep(LOOK_S)
    console.print(f"{name} is empty")
    return left


def print_order_result(result: OrderResult, output: str) -> None:
    """Print the effect of an order as text or JSON."""
    if output == "json":
        write_json(result)
    else:
        click.echo(one_line(result.says))
