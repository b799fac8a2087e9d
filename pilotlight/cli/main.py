"""The `pilotlight` command: parses the command line and calls the modules that do the work.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, with a one-line message that names the problem.
"""

from __future__ import annotations

import contextlib
import importlib
import keyword
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gateway.dispatch import memory_pressure
from pilotlight import __version__
from pilotlight import safe_output as terminal
from pilotlight.net.listen import Address
from pilotlight.options import (
    DIRECTORY,
    FILE,
    grace_option,
    keep_engines_option,
    listen_option,
    operations_option,
    ops_option,
    output_option,
    state_option,
)

EXAMPLES = {
    "serve": "pilotlight serve llama.gguf qwen.gguf",
    "status": "pilotlight status --watch",
    "explain": "pilotlight explain model llama",
    "key": "pilotlight key new --tenant acme",
}
COMPILED = not memory_pressure.__file__.endswith(".py")
"""Whether the gateway's modules are compiled to C (hatch_build.py)."""


ELSEWHERE = {
    "load": "loadtest.cli",
    "import": "pilotlight.cli.import_",
    "doctor": "pilotlight.doctor.command",
    "plan": "pilotlight.cli.plan",
    "service": "pilotlight.cli.service",
    "agent": "pilotlight.cli.agent",
    "weights": "pilotlight.cli.weights.group",
    **dict.fromkeys(("gateway", "autoscaler"), "pilotlight.cli.processes"),
    **dict.fromkeys(("wake", "stop", "cordon", "uncordon", "drain"), "pilotlight.cli.operator"),
}
"""Commands in other modules, by name; these modules are imported only when the command is used."""


class Front(click.Group):
    """The top-level command group."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> Any:  # fmt: skip
        """Run as click does, but report an error in one line: `pilotlight: MESSAGE`."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        with terminal.safe_streams():
            sys.exit(self._status(args, prog_name, complete_var, **extra))

    def _status(self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, **extra: Any) -> int:
        """Run the command, report its error, and return the exit status."""
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except click.ClickException as error:
            with contextlib.suppress(click.ClickException, OSError):  # writing to standard error may fail too
                click.echo(f"pilotlight: {format_error(error)}", err=True)
            return error.exit_code
        except click.Abort:
            return 130  # 128 + SIGINT, as in shells
        return status if isinstance(status, int) else 0

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*super().list_commands(ctx), *ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module if necessary."""
        if cmd_name in ELSEWHERE:
            attribute = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
            command: click.Command = getattr(importlib.import_module(ELSEWHERE[cmd_name]), attribute)
            return command
        return super().get_command(ctx, cmd_name)


def format_error(error: click.ClickException) -> str:
    """Return the error's message; for a usage error also where to read the usage."""
    message = terminal.one_line(error.format_message())
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
    """LLM gateway with GPU-aware scale-to-zero: models start on request and stop when they are idle."""


@cli.command(epilog=f"Example: {EXAMPLES['serve']}")
@click.argument("models", nargs=-1, type=FILE, metavar="[FILE.gguf | DIR]...")
@click.option("-c", "--config", multiple=True, type=FILE, help="A file with documents (YAML). Repeatable.")
@listen_option
@operations_option
@state_option
@click.option(
    "--gateways", type=click.IntRange(1, 64), default=1, show_default=True, help="The number of gateway processes."
)
@keep_engines_option
@grace_option
@click.option("--print-config", is_flag=True, help="Print the equivalent documents and exit.")
def serve(  # noqa: PLR0917  click passes by keyword
    models: tuple[Path, ...], config: tuple[Path, ...], listen: Address, ops: Address, state: Path,
    gateways: int, keep_engines: bool, grace: float, print_config: bool,
) -> None:  # fmt: skip
    """Serve models on this machine. Each one starts on its first request and scales to zero when it is idle."""
    # A SIGHUP stays pending until the supervisor can reload. The threads that the import below starts inherit the mask.
    # If one did not block the signal, the kernel would deliver it to that thread and end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from pilotlight.processes.serve import run_serve
    from pilotlight.processes.serve_options import ServeOptions

    options = ServeOptions(
        models=models, configs=config, listen=listen, ops=ops, state=state,
        gateways=gateways, keep_engines=keep_engines, grace_s=grace, print_config=print_config,
    )  # fmt: skip
    raise SystemExit(run_serve(options))


@cli.command(epilog=f"Example: {EXAMPLES['status']}")
@click.argument("model", required=False)
@click.option("--watch", is_flag=True, help="Keep the table up to date.")
@ops_option
@output_option
def status(model: str | None, watch: bool, ops: str, output: str) -> None:
    """Show the state of each model: running, waiting or at zero, and the reason."""
    from pilotlight.cli import status as show

    show.print_status(ops, model, watch=watch, output=output)


class Explain(click.Group):
    """Suggests the right command if only a Model's name is given."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but treat an unknown command as a Model's name."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"no such command {args[0]!r}; for a Model use `pilotlight explain model {args[0]}`")
        return super().resolve_command(ctx, args)


@cli.group(cls=Explain, epilog=f"Example: {EXAMPLES['explain']}")
def explain() -> None:
    """Explain the latest decisions: their reasons and times."""


@explain.command("model", epilog=f"Example: {EXAMPLES['explain']}")
@click.argument("name")
@ops_option
@output_option
def explain_model(name: str, ops: str, output: str) -> None:
    """Explain why a model runs, waits or is stopped."""
    from autoscaler.explain.model import Explanation
    from pilotlight.cli import status as show

    show.print_explanation(ops, f"model/{name}", Explanation, output)


@explain.command("fit", epilog="Example: pilotlight explain fit llama")
@click.argument("model")
@ops_option
@output_option
def explain_fit(model: str, ops: str, output: str) -> None:
    """Explain how much memory a model needs, part by part, and where it fits."""
    from autoscaler.explain.fit import Fit
    from pilotlight.cli import status as show

    show.print_explanation(ops, f"fit/{model}", Fit, output)


@explain.command("last", epilog="Example: pilotlight explain last")
@ops_option
@output_option
def explain_last(ops: str, output: str) -> None:
    """List the latest decisions."""
    from autoscaler.queries.response_types import Sentences
    from pilotlight.cli import status as show

    show.print_explanation(ops, "last", Sentences, output)


@cli.group(epilog=f"Example: {EXAMPLES['key']}")
def key() -> None:
    """Manage API keys."""


@key.command("new", epilog=f"Example: {EXAMPLES['key']}")
@click.option("--tenant", required=True, help="The Tenant of the key.")
@click.option(
    "--role", type=click.Choice(["tenant", "viewer", "operator", "finance"]), default="tenant", show_default=True,
    help="The role of the key. tenant: inference requests. operator: inference requests and commands such as "
    "wake, stop, cordon and drain. viewer and finance are not supported yet.",
)  # fmt: skip
@click.option("--name", default="key", show_default=True, help="The name of the key.")
@click.option("--state", type=DIRECTORY, help="The state folder of `serve`. The hash of the key is also stored there.")
def key_new(tenant: str, role: str, name: str, state: Path | None) -> None:
    """Create an API key. It is printed once, with the `keys:` entry (its hash) to paste into a Tenant."""
    from autoscaler.drivers.local import state_directory
    from pilotlight.cli import keys

    keys.check_names(tenant, name)
    keys.check_role(role)
    secret, entry = keys.generate_key(role, name)
    if state is None:
        click.echo(f"key (shown once): {secret}\npaste into Tenant {tenant}:\n  keys:\n  {keys.entry_yaml(entry)}")
        return
    path, pid = keys.store_key(state, tenant, entry), state_directory.serving_pid(state)
    now = f", or now: kill -HUP {pid}" if pid else ""
    click.echo(
        f"key (shown once): {secret}\nstored for tenant {tenant} in {path}; `serve` reads it when it starts{now}"
    )
