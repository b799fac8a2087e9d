"""`pilotlight doctor`: one line for each prerequisite, with its fix; exit 1 when something cannot work.

Defines the command's options and output. The checks are in `pilotlight.doctor.machine_checks` (one machine) and
`pilotlight.doctor.cluster_checks`. The command changes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.text import Text

from autoscaler.spec.capacity import KINDS, PUBLISH, kinds_of
from autoscaler.spec.settings import Settings
from pilotlight.doctor import machine_checks
from pilotlight.doctor.finding import Finding, Grade, has_blocker
from pilotlight.models.document_loading import load_settings
from pilotlight.net.listen import Address
from pilotlight.options import FILE, listen_option, operations_option, output_option, state_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_console

MARKS: dict[str, str] = {"ok": "green", "info": "cyan", "warning": "yellow", "blocker": "bold red"}


@click.command(epilog="Example: pilotlight doctor --driver kubernetes --namespace engines")
@click.option(
    "--driver", type=click.Choice(["local", "kubernetes"]), default="local", show_default=True,
    help="Where replicas run: on this machine or in a Kubernetes cluster.",
)  # fmt: skip
@click.option(
    "--kubeconfig",
    type=FILE,
    help="Path to a kubeconfig file. Default: the pod's service account, or kubectl's configuration.",
)
@click.option("--namespace", default="default", show_default=True,
              help="The namespace of the engines (kubernetes); the chart's `engines.namespace`.")  # fmt: skip
@click.option("--home", default="", help="The namespace of the gateways and autoscalers. Default: --namespace.")
@click.option(
    "--lease", default="pilotlight", show_default=True, help="Name of the leader-election Lease (kubernetes)."
)
@click.option("--scope", type=click.Choice(["cluster", "namespace"]), default="cluster", show_default=True,
              help="The chart's `scope`, which determines the required permissions.")  # fmt: skip
@click.option(
    "--adoption", is_flag=True, help="Check the permissions to serve all annotated workloads (`adoption.everywhere`)."
)
@click.option(
    "--adopt-in",
    multiple=True,
    metavar="NAMESPACE",
    help="A namespace whose annotated workloads are served. Repeatable.",
)
@click.option("--cordon", is_flag=True, help="Check the permissions to store cordons on nodes (`cordon.enabled`).")
@click.option(
    "--cutting",
    default="",
    metavar="NAMESPACE/NAME",
    help="The ConfigMap of mig-manager for MIG repartitioning (`cutting.enabled`).",
)
@click.option(
    "--volumes",
    is_flag=True,
    help="Check the permissions for engines that mount weights as volumes of their nodes (`agent.enabled`).",
)
@click.option("--capacity", multiple=True, type=click.Choice(sorted({*KINDS, PUBLISH})),
              help=f"A provider kind in Settings `capacity`, or the word `{PUBLISH}`. Repeatable.")  # fmt: skip
@click.option("--settings", type=FILE,
              help="A file with Settings or chart values (YAML). Each entry of its `capacity` is checked.")  # fmt: skip
@click.option(
    "--account",
    default="",
    metavar="NAMESPACE:NAME",
    help="The service account whose permissions are checked. Default: the current user.",
)
@listen_option
@operations_option
@state_option
@output_option
def doctor(  # noqa: PLR0917  click passes by keyword
    driver: str, kubeconfig: Path | None, namespace: str, home: str, lease: str, scope: str, adoption: bool,
    adopt_in: tuple[str, ...], cordon: bool, cutting: str, volumes: bool, capacity: tuple[str, ...],
    settings: Path | None, account: str,
    listen: Address, ops: Address, state: Path, output: str,
) -> None:  # fmt: skip
    """Check the prerequisites of Pilotlight, and report how to fix missing ones."""
    if account and account.count(":") != 1:
        raise click.UsageError("--account: expected NAMESPACE:NAME of a service account")
    if cutting and cutting.count("/") != 1:
        raise click.UsageError("--cutting: expected NAMESPACE/NAME of a ConfigMap")
    if driver == "local":
        _alone(settings=settings, capacity=capacity, account=account, cutting=cutting)
        findings = machine_checks.check_machine(listen, ops, state)
    else:
        wanted: dict[str, object] = {
            "engines": namespace, "home": home or namespace, "lease": lease, "scope": scope, "account": account,
            "adopted": None if adoption else adopt_in, "cordons": cordon, "volumes": volumes,
            "cutting": cutting.split("/") if cutting else None, "capacity": capacity,
        }  # fmt: skip
        loaded = Settings() if settings is None else load_settings(settings)
        findings = asyncio.run(_cluster(kubeconfig, wanted, loaded))
    print_findings(findings, output)
    raise SystemExit(1 if has_blocker(findings) else 0)


def _alone(**clusters: object) -> None:
    """Reject options that apply only to a cluster, which would otherwise be ignored silently."""
    for name, given in clusters.items():
        if given:
            raise click.UsageError(f"--{name}: only for clusters: add --driver kubernetes")


async def _cluster(kubeconfig: Path | None, wanted: dict[str, object], loaded: Settings) -> list[Finding]:
    from autoscaler.kubernetes.api import Api
    from autoscaler.kubernetes.kubeconfig import ApiAccessError, load_api_access
    from pilotlight.doctor.cluster_checks import Scene, check_cluster

    try:
        way = await load_api_access(kubeconfig)
    except ApiAccessError as error:
        return [Finding("API server", "blocker", error.says, error.fix)]
    async with Api(way) as api:
        scene = msgspec.convert(wanted, Scene)
        kinds = tuple(dict.fromkeys((*scene.capacity, *kinds_of(loaded.capacity))))
        return await check_cluster(api, msgspec.structs.replace(scene, settings=loaded, capacity=kinds))


def print_findings(findings: list[Finding], output: str) -> None:
    """Print all findings as text or JSON."""
    if output == "json":
        write_json(findings)
        return
    console = build_console()
    width = max(len(one.check) for one in findings)
    for one in findings:
        line = Text.assemble((f"{one.grade:8}", MARKS[one.grade]), f" {one.check:{width}}  {one.says}")
        console.print(line, soft_wrap=True)
        if one.fix and one.grade != "ok":
            console.print(Text(f"{'':8} {'':{width}}  -> {one.fix}", style="dim"), soft_wrap=True)
    counts = {grade: sum(one.grade == grade for one in findings) for grade in get_args(Grade)}
    console.print(", ".join(f"{count} {grade}" for grade, count in counts.items() if count), soft_wrap=True)
