"""`pilotlight plan`: shows what would be started where under an assumed demand. I/O: reads files; starts nothing.

Reads the demand file, and chooses the devices: those in Settings (`list_devices`, `nodes`), else those of this machine,
or with `--live` all devices of the running system with what is on them now. `autoscaler.planner.what_if` computes the
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import click
import msgspec

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import Documents
from autoscaler.drivers.kubernetes.inventory import declared_devices
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.nvml import NvmlError
from autoscaler.planner.what_if import CALLS_MAX, PATH, Answer, AssumedDemand, what_if
from autoscaler.spec import yaml
from autoscaler.state.world import Slice
from autoscaler.text import format_size
from pilotlight import bounded_files
from pilotlight.models.document_loading import fill_memory_estimate, load_files
from pilotlight.net import ops_client
from pilotlight.options import FILE, OPS, key_of, key_option, output_option
from pilotlight.safe_output import write_json

LIVE_TIMEOUT_S = 60.0
EXPECTED = "expected {waiting: NUMBER, running: NUMBER} or a number of waiting requests"


@click.command(
    epilog="For the running system: pilotlight plan --live --demand demand.yaml\n\n"
    "Example: pilotlight plan -c pilotlight.yaml --demand demand.yaml"
)
@click.option("-c", "--config", multiple=True, type=FILE, help="A file with documents (YAML). Repeatable.")
@click.option(
    "--live",
    is_flag=True,
    help="Use the current state of the running system instead of -c, with this demand in addition.",
)
@click.option("--ops", help=f"With --live: the address of the operations port.  [default: {OPS.url}]")
@click.option(
    "--demand",
    required=True,
    type=FILE,
    help="A YAML file with the number of waiting requests of each model, for example `llama: 3` or `llama: "
    "{waiting: 3, running: 1}`.",
)
@key_option
@output_option
def plan(  # noqa: PLR0917  click passes by keyword
    config: tuple[Path, ...], live: bool, ops: str | None, demand: Path, key_env: str | None, output: str
) -> None:
    """Show which replicas would start where for an assumed demand. Starts nothing."""
    if live == bool(config) or ((ops or key_env) and not live):
        raise click.UsageError(
            "expected either -c FILE for documents, or --live (with --ops, --key-env) for the running system"
        )
    answer = fetch_live_plan(ops or OPS.url, demand, key_of(key_env)) if live else plan_from_files(config, demand)
    if output == "json":
        write_json(answer)
    else:
        print_plan(answer)


def plan_from_files(config: tuple[Path, ...], demand: Path) -> Answer:
    """Plan for an idle system; report configured capacity providers as not simulated. Raises click's errors."""
    documents = load_files(config, references=True)
    if rented := ", ".join(one.name for one in documents.settings.capacity):
        click.echo(
            f"pilotlight: `capacity` ({rented}) is not simulated, and each entry of `nodes` counts as one existing"
            " node; --live uses the running system",
            err=True,
        )
    models = tuple(fill_memory_estimate(model) for model in documents.models)
    documents = msgspec.structs.replace(documents, models=models)
    return what_if(documents, list_devices(documents), read_demand(demand, {model.name for model in models}))


def fetch_live_plan(ops: str, demand: Path, key: str | None) -> Answer:
    """Plan with the running system behind the operations port, which knows its Models. Raises click's errors."""
    asked = {name: one._asdict() for name, one in read_demand(demand, None).items()}
    return ops_client.fetch(ops, PATH, Answer, order={"demand": asked}, key=key, timeout_s=LIVE_TIMEOUT_S)


def list_devices(documents: Documents) -> tuple[Slice, ...]:
    """Return the devices in Settings, else this machine's. Raises click.ClickException."""
    settings = documents.settings
    if settings.nodes:
        return declared_devices.build_declared_slices(settings.nodes, (), {})
    try:
        return asyncio.run(Devices(settings.devices).open())
    except NvmlError as error:
        raise click.ClickException(f"NVML failed, so this machine's GPUs are unknown: {error}") from None


def read_demand(path: Path, models: Collection[ModelName] | None) -> dict[ModelName, AssumedDemand]:
    """Return the demand per Model. `models`: all existing Models, if known here. Raises click.UsageError with a
    one-line message.
    """
    try:
        documents = yaml.parse_yaml(bounded_files.read_text(path, yaml.TEXT_CHARS_MAX))
    except yaml.YamlError as error:
        raise click.UsageError(error.in_file(str(path))) from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path}: {bounded_files.describe_error(error)}") from None
    found = documents[0] if len(documents) == 1 else None
    if not isinstance(found, dict) or not found:
        raise click.UsageError(f"{path}: expected one line per requested Model, such as `llama: 3`")
    asked: dict[ModelName, AssumedDemand] = {}
    for name, said in found.items():
        if models is not None and name not in models:
            known = ", ".join(sorted(models)) or "none"
            raise click.UsageError(f"{path}: {name}: no such Model in the documents; existing: {known}")
        asked[ModelName(name)] = _asked(f"{path}: {name}", said)
    return asked


def _asked(at: str, said: object) -> AssumedDemand:
    fields = said if isinstance(said, dict) else {"waiting": said}
    wrong = next((key for key in fields if key not in AssumedDemand._fields), None)
    if wrong is not None or not fields:
        raise click.UsageError(f"{at}: {EXPECTED}")
    for key, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= CALLS_MAX:
            raise click.UsageError(f"{at}.{key}: {EXPECTED}, from 0 to {CALLS_MAX}")
    return AssumedDemand(**fields)


def print_plan(answer: Answer) -> None:
    """Print the plan as text."""
    for one in answer.starts:
        where = ", ".join(one.slices) or "no device"
        click.echo(f"start {one.model} on {where} ({format_size(one.memory_bytes)} of each): {one.reason}")
    for stop in answer.stops:
        click.echo(f"stop  {stop.model} ({stop.replica}): {stop.reason}")
    for order in answer.orders:
        click.echo(f"{order.kind:5} {order.what}: {order.reason}")
    for unmet in answer.unmet:
        click.echo(f"unmet {unmet.model}: {unmet.reason}")
    if answer.more:
        click.echo("and more: the simulation was stopped at its limit of steps")
    if not (answer.starts or answer.unmet or answer.stops or answer.orders):
        click.echo("nothing would be started")
    for left in answer.left:
        click.echo(f"free  {left.slice}: {format_size(left.free_bytes)} of {format_size(left.memory_bytes)} remain")
