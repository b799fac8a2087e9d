"""`pilotlight gateway` and `pilotlight autoscaler`: one process each, as `serve` and the chart start them.

Parses the command line and calls the module that assembles the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from msgspec.structs import replace

from autoscaler.state.world import STORE
from pilotlight.net.listen import Address, AddressType
from pilotlight.options import (
    DIRECTORY,
    FILE,
    access_options,
    autoscalers_option,
    grace_option,
    health_option,
    keep_engines_option,
    listen_option,
    operations_option,
    parent_option,
    state_option,
    tls_options,
)

if TYPE_CHECKING:
    from pilotlight.net.contract_access import Access


def _access(cert: Path | None, key: Path | None, ca: Path | None, token: Path | None) -> Access:
    """Return the access that `access_options` describe."""
    from pilotlight.net.certificates import Identity
    from pilotlight.net.contract_access import Access

    return Access(identity=Identity(cert=cert, key=key, ca=ca), token=token)


@click.command(epilog="Example: pilotlight gateway --autoscaler unix:run/autoscaler.sock --listen 127.0.0.1:8080")
@autoscalers_option
@listen_option
@operations_option
@health_option
@tls_options
@access_options
@click.option("--state", type=DIRECTORY, help="The folder for the gateway's state.")
@click.option(
    "--id", "name", default="gateway-1", show_default=True, help="The name of this gateway, unique among all gateways."
)
@grace_option
@click.option("--limits", default="{}", help="Limits of the inference port, as JSON.")
@click.option("--events", type=FILE, help="Append one line per request to this file.")
@click.option("--listen-fd", type=int, hidden=True)
@click.option("--ops-socket", type=FILE, hidden=True)
@parent_option
def gateway(  # noqa: PLR0917  click passes by keyword
    autoscalers: tuple[str, ...], listen: Address, ops: Address, health: Address | None, state: Path | None,
    name: str, grace: float, limits: str, events: Path | None,
    tls_cert_file: Path | None, tls_key_file: Path | None, tls_ca_file: Path | None, token_file: Path | None,
    contract_cert_file: Path | None, contract_key_file: Path | None, contract_ca_file: Path | None,
    listen_fd: int | None, ops_socket: Path | None, parent: int | None,
) -> None:  # fmt: skip
    """Run one gateway process."""
    from pilotlight.net.certificates import Identity
    from pilotlight.processes import gateway as gateway_process

    gateway_process.run_gateway(
        gateway_process.GatewayOptions(
            id=name,
            autoscalers=autoscalers,
            listen=listen,
            ops=ops,
            health=health,
            state=state,
            grace_s=grace,
            limits=gateway_process.parse_limits(limits),
            tls=Identity(cert=tls_cert_file, key=tls_key_file, ca=tls_ca_file),
            access=_access(contract_cert_file, contract_key_file, contract_ca_file, token_file),
            events=events,
            listen_fd=listen_fd,
            ops_socket=ops_socket,
            parent=parent,
        )
    )


@click.command(
    epilog="Example: pilotlight autoscaler --driver local --documents docs.yaml --contract-socket run/autoscaler.sock"
)
@click.option(
    "--driver",
    type=click.Choice(["local", "kubernetes"]),
    required=True,
    help="Where replicas run: on this machine or in a Kubernetes cluster.",
)
@click.option(
    "--namespace", default="default", show_default=True, help="The namespace in which pods are created (kubernetes)."
)
@click.option(
    "--scope", type=click.Choice(["cluster", "namespace"]), default="cluster", show_default=True,
    help="The scope of the permissions (kubernetes). namespace: nodes and Tenants are not read.",
)  # fmt: skip
@click.option(
    "--home", default="", help="The namespace of the Lease and the gateways (kubernetes). Default: --namespace."
)
@click.option(
    "--kubeconfig",
    type=FILE,
    help="Path to a kubeconfig file. Default: the pod's service account, or kubectl's configuration.",
)
@click.option(
    "--lease", default="pilotlight", show_default=True, help="Name of the leader-election Lease (kubernetes)."
)
@click.option(
    "--identity", default="", help="The name of this process in the Lease. Default: $POD_NAME, or the host name."
)
@click.option(
    "--gateway-pods", default="app.kubernetes.io/component=gateway", show_default=True, metavar="SELECTOR",
    help="The label selector of gateway pods. The --id of each gateway must be the name of its pod (kubernetes).",
)  # fmt: skip
@click.option(
    "--gateway-account", "gateway_accounts", multiple=True, metavar="[NAMESPACE:]NAME",
    help="A service account of gateways. Its tokens for the audience `pilotlight` give access to the endpoints that "
    "gateways call (kubernetes). Repeatable.",
)  # fmt: skip
@click.option(
    "--agent-account", "agent_accounts", multiple=True, metavar="[NAMESPACE:]NAME",
    help="A service account of node agents. Its tokens give access to the endpoints that agents call (kubernetes). "
    "Repeatable.",
)  # fmt: skip
@click.option(
    "--account", "accounts", multiple=True, metavar="[NAMESPACE:]NAME",
    help="Deprecated: a service account for both gateways and agents. Repeatable.",
)  # fmt: skip
@click.option(
    "--adoption/--no-adoption", default=True, show_default=True,
    help="Also serve annotated Deployments and StatefulSets (kubernetes; docs/how-to/adopt-workloads.md).",
)  # fmt: skip
@click.option(
    "--adopt-in", multiple=True, metavar="NAMESPACE", help="Adopt workloads only in this namespace. Repeatable."
)
@click.option(
    "--watch-kubeai", is_flag=True, help="Also serve KubeAI's Models (kubernetes; docs/tutorials/from-kubeai.md)."
)
@click.option("--weights-store", default=STORE, show_default=True, metavar="PATH",
              help="The folder in which agents keep weights on their nodes (kubernetes).")  # fmt: skip
@click.option("--documents", type=FILE, required=True, help="A file with documents (YAML).")
@click.option("--contract-socket", type=FILE, help="The Unix socket for gateways of this machine.")
@click.option("--contract-listen", type=AddressType(), help="The address for gateways and agents of other machines.")
@access_options
@click.option(
    "--agent-token-file", type=FILE, help="The file with the tokens of agents. --token-file is then for gateways only."
)
@click.option(
    "--agent-certificate-name", "agent_name", default="", metavar="NAME",
    help="The DNS name in agents' certificates. If it is set, each certificate without it is treated as a gateway's.",
)  # fmt: skip
@operations_option
@health_option
@state_option
@click.option("--gateway-socket", "gateway_sockets", multiple=True, type=FILE, hidden=True)
@keep_engines_option
@click.option("--ops-fd", type=int, hidden=True)
@parent_option
def autoscaler(  # noqa: PLR0917  click passes by keyword
    driver: str, namespace: str, scope: Literal["cluster", "namespace"], home: str,
    kubeconfig: Path | None, lease: str, identity: str, gateway_pods: str,
    gateway_accounts: tuple[str, ...], agent_accounts: tuple[str, ...], accounts: tuple[str, ...],
    agent_token_file: Path | None, agent_name: str, adoption: bool, adopt_in: tuple[str, ...],
    watch_kubeai: bool, weights_store: str, documents: Path,
    contract_socket: Path | None, contract_listen: Address | None,
    contract_cert_file: Path | None, contract_key_file: Path | None, contract_ca_file: Path | None,
    token_file: Path | None, ops: Address, health: Address | None, state: Path,
    gateway_sockets: tuple[Path, ...], keep_engines: bool, ops_fd: int | None, parent: int | None,
) -> None:  # fmt: skip
    """Run one autoscaler process."""
    from pilotlight.processes import autoscaler as autoscaler_process
    from pilotlight.processes.cluster import ClusterOptions

    cluster = ClusterOptions(
        namespace=namespace, home=home, scope=scope, kubeconfig=kubeconfig, lease=lease, identity=identity,
        gateway_pods=gateway_pods, accounts=accounts, gateway_accounts=gateway_accounts,
        agent_accounts=agent_accounts, adopt_in=(adopt_in or None) if adoption else (),
        watch_kubeai=watch_kubeai, weights_store=weights_store,
    )  # fmt: skip
    autoscaler_process.run_autoscaler(
        autoscaler_process.AutoscalerOptions(
            cluster=cluster if driver == "kubernetes" else None,
            state=state,
            documents=documents,
            contract_socket=contract_socket,
            contract_listen=contract_listen,
            access=replace(
                _access(contract_cert_file, contract_key_file, contract_ca_file, token_file),
                agent_token=agent_token_file,
                agent_name=agent_name,
            ),
            ops=ops,
            health=health,
            ops_fd=ops_fd,
            gateway_sockets=gateway_sockets,
            keep_engines=keep_engines,
            parent=parent,
        )
    )
