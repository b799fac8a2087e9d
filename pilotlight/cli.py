"""The `pilotlight` command: parses what people type and calls the room that does it. Holds no logic of its own.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, with one line that names what is wrong.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from gateway import pressure
from pilotlight import __version__
from pilotlight.listen import Address, AddressType

EXAMPLES = {
    "serve": "pilotlight serve llama.gguf qwen.gguf",
    "status": "pilotlight status --watch",
    "explain": "pilotlight explain model llama",
    "key": "pilotlight key new --tenant acme",
}
COMPILED = not pressure.__file__.endswith(".py")
"""Whether the gateway's modules run as C (hatch_build.py)."""
LISTEN, OPS = Address("127.0.0.1", 8080), Address("127.0.0.1", 8081)
DIRECTORY = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path)
Command = Callable[..., None]


def default_state() -> Path:
    """`$XDG_STATE_HOME/pilotlight`, by default ~/.local/state/pilotlight."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "pilotlight"


state_option = click.option(
    "--state", type=DIRECTORY, default=default_state, show_default="~/.local/state/pilotlight",
    help="Where Pilotlight keeps what must outlive it.",
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
    """Several options that each name a file."""

    def decorate(command: Command) -> Command:
        for name, what in reversed(options.items()):
            command = click.option(name, type=FILE, help=what)(command)
        return command

    return decorate


tls_options, access_options = file_options(TLS_OPTIONS), file_options(ACCESS_OPTIONS)
parent_option = click.option("--parent", type=int, hidden=True)
ops_option = click.option("--ops", default=OPS.url, show_default=True, help="The operations port to ask.")
output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", help="For people or programs."
)


ELSEWHERE = {
    "load": "loadtest.cli",
    "import": "pilotlight.importing",
    "doctor": "pilotlight.doctor",
    "agent": "pilotlight.agent_process",
    **dict.fromkeys(("wake", "stop", "cordon", "uncordon", "drain"), "pilotlight.operating"),
}
"""Commands that other modules define, each by its name, and that are imported only when they are asked for."""


class Front(click.Group):
    """The top-level group."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        """As click's, but an error is one line: `pilotlight: what is wrong`."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = error.exit_code
        except click.ClickException as error:
            click.echo(f"pilotlight: {one_line(error)}", err=True)
            status = error.exit_code
        except click.Abort:
            status = 130  # 128 + SIGINT, as shells say it
        sys.exit(status if isinstance(status, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands by name."""
        return sorted([*super().list_commands(ctx), *ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, from where it is defined."""
        if cmd_name in ELSEWHERE:
            attribute = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
            command: click.Command = getattr(importlib.import_module(ELSEWHERE[cmd_name]), attribute)
            return command
        return super().get_command(ctx, cmd_name)


def one_line(error: click.ClickException) -> str:
    """What is wrong; where the words were typed wrongly, also where to read how they are typed."""
    message = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and type(error) is not click.UsageError and error.ctx is not None:
        return f"{message} (see {error.ctx.command_path} --help)"
    return message


@click.group(
    cls=Front,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Example: {EXAMPLES['serve']}",
)
@click.version_option(__version__ + " (compiled)" * COMPILED, message="pilotlight %(version)s")
def cli() -> None:
    """An LLM gateway with GPU-aware scale-to-zero: models start when they are called and stop when they are not."""


@cli.command(epilog=f"Example: {EXAMPLES['serve']}")
@click.argument("models", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE.gguf | DIR]...")
@click.option(
    "-c", "--config", multiple=True, type=click.Path(path_type=Path), help="Documents (YAML); may be repeated."
)
@listen_option
@operations_option
@state_option
@click.option("--gateways", type=click.IntRange(1, 64), default=1, show_default=True, help="Gateway processes.")
@keep_engines_option
@grace_option
@click.option("--print-config", is_flag=True, help="Print the equivalent documents and exit.")
def serve(  # noqa: PLR0917  click passes by keyword
    models: tuple[Path, ...], config: tuple[Path, ...], listen: Address, ops: Address, state: Path,
    gateways: int, keep_engines: bool, grace: float, print_config: bool,
) -> None:  # fmt: skip
    """Serve models on this machine: each starts when it is called and goes back to zero when nobody asks any more."""
    from pilotlight.serving import ServeOptions, run

    options = ServeOptions(
        models=models, configs=config, listen=listen, ops=ops, state=state,
        gateways=gateways, keep_engines=keep_engines, grace_s=grace, print_config=print_config,
    )  # fmt: skip
    raise SystemExit(run(options))


@cli.command(epilog=f"Example: {EXAMPLES['status']}")
@click.argument("model", required=False)
@click.option("--watch", is_flag=True, help="Keep the table up to date.")
@ops_option
@output_option
def status(model: str | None, watch: bool, ops: str, output: str) -> None:
    """What runs, waits and sleeps, and why."""
    from pilotlight import show

    show.status(ops, model, watch=watch, output=output)


@cli.group(epilog=f"Example: {EXAMPLES['explain']}")
def explain() -> None:
    """Why things are as they are: reasons of the latest decisions, with times."""


@explain.command("model", epilog=f"Example: {EXAMPLES['explain']}")
@click.argument("name")
@ops_option
@output_option
def explain_model(name: str, ops: str, output: str) -> None:
    """Why a model runs, waits or stopped."""
    from pilotlight import show

    show.explain(ops, f"model/{name}", output)


@explain.command("last", epilog="Example: pilotlight explain last")
@ops_option
@output_option
def explain_last(ops: str, output: str) -> None:
    """The latest decisions."""
    from pilotlight import show

    show.explain(ops, "last", output)


@cli.group(epilog=f"Example: {EXAMPLES['key']}")
def key() -> None:
    """API keys."""


@key.command("new", epilog=f"Example: {EXAMPLES['key']}")
@click.option("--tenant", required=True, help="Whose key it is.")
@click.option(
    "--role", type=click.Choice(["tenant", "viewer", "operator", "finance"]), default="tenant", show_default=True,
    help="What it is for: a Tenant's calls, or also orders (operator); the others are not in force yet.",
)  # fmt: skip
@click.option("--name", default="key", show_default=True, help="What to call it.")
@click.option("--state", type=DIRECTORY, help="Store it here for `serve`, too.")
def key_new(tenant: str, role: str, name: str, state: Path | None) -> None:
    """Make a new API key: printed once, with the `keys:` entry (its hash) to paste."""
    from pilotlight import keys

    keys.check_tenant_name(tenant)
    keys.check_role(role)
    secret, entry = keys.new(role, name)
    if state is None:
        click.echo(f"key (shown once): {secret}\npaste into Tenant {tenant}:\n  keys:\n  {keys.entry_yaml(entry)}")
        return
    path, pid = keys.store(state, tenant, entry), keys.reader(state)
    now = f", or now: kill -HUP {pid}" if pid else ""
    click.echo(
        f"key (shown once): {secret}\nstored for tenant {tenant} in {path}; `serve` reads it when it starts{now}"
    )


@cli.command(epilog="Example: pilotlight gateway --autoscaler unix:run/autoscaler.sock --listen 127.0.0.1:8080")
@click.option(
    "--autoscaler", "autoscalers", multiple=True, required=True,
    help="unix:PATH, https://HOST:PORT, or dns+https://NAME:PORT for every address of a name; repeatable.",
)  # fmt: skip
@listen_option
@operations_option
@health_option
@tls_options
@access_options
@click.option("--state", type=DIRECTORY, help="Keeps what it knows here.")
@click.option("--id", "name", default="gateway-1", show_default=True, help="Its name among all gateways.")
@grace_option
@click.option("--limits", default="{}", help="Bounds of the inference port, as JSON.")
@click.option("--events", type=click.Path(path_type=Path), help="Append one line per call to this file.")
@click.option("--listen-fd", type=int, hidden=True)
@click.option("--ops-socket", type=click.Path(path_type=Path), hidden=True)
@parent_option
def gateway(  # noqa: PLR0917  click passes by keyword
    autoscalers: tuple[str, ...], listen: Address, ops: Address, health: Address | None, state: Path | None,
    name: str, grace: float, limits: str, events: Path | None,
    tls_cert_file: Path | None, tls_key_file: Path | None, tls_ca_file: Path | None, token_file: Path | None,
    contract_cert_file: Path | None, contract_key_file: Path | None, contract_ca_file: Path | None,
    listen_fd: int | None, ops_socket: Path | None, parent: int | None,
) -> None:  # fmt: skip
    """One gateway process."""
    from pilotlight import gateway_process
    from pilotlight.access import Access
    from pilotlight.certificates import Identity

    gateway_process.run(
        gateway_process.GatewayOptions(
            id=name,
            autoscalers=autoscalers,
            listen=listen,
            ops=ops,
            health=health,
            state=state,
            grace_s=grace,
            limits=gateway_process.limits_of(limits),
            tls=Identity(cert=tls_cert_file, key=tls_key_file, ca=tls_ca_file),
            access=Access(
                identity=Identity(cert=contract_cert_file, key=contract_key_file, ca=contract_ca_file), token=token_file
            ),
            events=events,
            listen_fd=listen_fd,
            ops_socket=ops_socket,
            parent=parent,
        )
    )


@cli.command(
    epilog="Example: pilotlight autoscaler --driver local --documents docs.yaml --contract-socket run/autoscaler.sock"
)
@click.option("--driver", type=click.Choice(["local", "kubernetes"]), required=True, help="What runs Replicas.")
@click.option("--namespace", default="default", show_default=True, help="Where pods are made (kubernetes).")
@click.option(
    "--scope", type=click.Choice(["cluster", "namespace"]), default="cluster", show_default=True,
    help="How far its rights reach: with namespace it reads no nodes and no Tenants (kubernetes).",
)  # fmt: skip
@click.option("--home", default="", help="Where the lease and the gateways are (kubernetes); default: --namespace.")
@click.option("--kubeconfig", type=FILE, help="The way to the API server; default: the pod's own, or kubectl's.")
@click.option("--lease", default="pilotlight", show_default=True, help="By which one autoscaler leads (kubernetes).")
@click.option("--identity", default="", help="Its name in the lease; default: $POD_NAME, or the host's.")
@click.option(
    "--gateway-pods", default="app.kubernetes.io/component=gateway", show_default=True, metavar="SELECTOR",
    help="Which pods are gateways, each named (--id) as its pod (kubernetes).",
)  # fmt: skip
@click.option(
    "--account", "accounts", multiple=True, metavar="[NAMESPACE:]NAME",
    help="A service account whose tokens, for the audience pilotlight, may report (kubernetes); repeatable.",
)  # fmt: skip
@click.option(
    "--adoption/--no-adoption", default=True, show_default=True,
    help="Serves annotated Deployments and StatefulSets, too (kubernetes; docs/adoption.md).",
)  # fmt: skip
@click.option("--adopt-in", multiple=True, metavar="NAMESPACE", help="Only those of this namespace; repeatable.")
@click.option("--watch-kubeai", is_flag=True, help="Serves KubeAI's Models, too (kubernetes; docs/import.md).")
@click.option("--documents", type=click.Path(path_type=Path), required=True, help="Documents (YAML).")
@click.option("--contract-socket", type=FILE, help="Where gateways of this machine report.")
@click.option("--contract-listen", type=AddressType(), help="Where gateways of other machines report.")
@access_options
@operations_option
@health_option
@state_option
@click.option("--gateway-socket", "gateway_sockets", multiple=True, type=click.Path(path_type=Path), hidden=True)
@keep_engines_option
@click.option("--ops-fd", type=int, hidden=True)
@parent_option
def autoscaler(  # noqa: PLR0917  click passes by keyword
    driver: str, namespace: str, scope: Literal["cluster", "namespace"], home: str,
    kubeconfig: Path | None, lease: str, identity: str, gateway_pods: str,
    accounts: tuple[str, ...], adoption: bool, adopt_in: tuple[str, ...], watch_kubeai: bool, documents: Path,
    contract_socket: Path | None, contract_listen: Address | None,
    contract_cert_file: Path | None, contract_key_file: Path | None, contract_ca_file: Path | None,
    token_file: Path | None, ops: Address, health: Address | None, state: Path,
    gateway_sockets: tuple[Path, ...], keep_engines: bool, ops_fd: int | None, parent: int | None,
) -> None:  # fmt: skip
    """One autoscaler process."""
    from pilotlight import autoscaler_process
    from pilotlight.access import Access
    from pilotlight.certificates import Identity
    from pilotlight.cluster import ClusterOptions

    cluster = ClusterOptions(
        namespace=namespace, home=home, scope=scope, kubeconfig=kubeconfig, lease=lease, identity=identity,
        gateway_pods=gateway_pods, accounts=accounts, adopt_in=(adopt_in or None) if adoption else (),
        watch_kubeai=watch_kubeai,
    )  # fmt: skip
    autoscaler_process.run(
        autoscaler_process.AutoscalerOptions(
            cluster=cluster if driver == "kubernetes" else None,
            state=state,
            documents=documents,
            contract_socket=contract_socket,
            contract_listen=contract_listen,
            access=Access(
                identity=Identity(cert=contract_cert_file, key=contract_key_file, ca=contract_ca_file), token=token_file
            ),
            ops=ops,
            health=health,
            ops_fd=ops_fd,
            gateway_sockets=gateway_sockets,
            keep_engines=keep_engines,
            parent=parent,
        )
    )
