"""`pilotlight serve`: checks the options, starts the supervisor, and prints messages for the user.

Defines the layout of STATE/run (documents, sockets).
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

import click
import msgspec

from autoscaler.documents.document_types import Documents
from autoscaler.documents.render import to_yaml
from autoscaler.drivers.local.state_directory import InUseError, StateDirectory, StateError, replace_file
from autoscaler.spec.settings import Limits, Settings, Tls
from autoscaler.text import format_count
from pilotlight.models.document_loading import gather_documents
from pilotlight.net import certificates
from pilotlight.net.listen import Address, open_listeners
from pilotlight.processes import console
from pilotlight.processes.serve_options import ServeOptions, check_serve_options
from pilotlight.processes.serve_reload import Reload, note_problem, report_undecoded
from pilotlight.processes.supervisor import Role, Supervisor
from pilotlight.safe_output import write_document, write_stderr, write_stdout

DOCUMENTS_FILE = "documents.yaml"


def run_serve(options: ServeOptions) -> int:
    """Run `serve` and return its exit status."""
    documents = gather_documents(options.models, options.configs, options.state, contain=not options.print_config)
    if options.print_config:
        write_document(to_yaml(documents, with_references=True))
        return 0
    check_serve_options(options, documents)
    try:
        state = StateDirectory.open(options.state)
    except InUseError as error:
        raise click.ClickException(str(error)) from None
    except StateError as error:
        raise click.UsageError(str(error)) from None
    with contextlib.closing(state):
        inference = open_listeners(options.listen, options.gateways)
        operations = open_listeners(options.ops, 1)[0]
        run_directory = state.path / "run"
        content = to_yaml(documents).encode()
        forget_other_documents(run_directory, content)
        replace_file(run_directory / DOCUMENTS_FILE, content)
        note_problem(run_directory / DOCUMENTS_FILE, "")
        report_undecoded(documents)
        listen = Address(options.listen.host, inference[0].getsockname()[1])
        ops = Address(options.ops.host, operations.getsockname()[1])
        autoscaler, gateways = build_roles(options, run_directory, inference, operations, documents.settings)
        ready_sockets = [run_directory / f"{role.name}.sock" for role in gateways]
        supervisor = Supervisor(
            autoscaler,
            gateways,
            ready=lambda: all(is_gateway_ready(path) for path in ready_sockets),
            on_ready=lambda: print_welcome(documents, listen, ops),
            on_reload=Reload(options, documents, run_directory / DOCUMENTS_FILE),
            grace_s=options.grace_s,
        )
        tls = documents.settings.tls
        for line in certificates.list_exposed_files(None if tls.key_file is None else Path(tls.key_file)):
            write_stderr(line)
        what = f"{format_count(len(documents.models), 'model')}, {format_count(options.gateways, 'gateway')}"
        write_stderr(f"starting with {what}; state in {options.state}")
        return supervisor.run()


def forget_other_documents(run_directory: Path, documents: bytes) -> None:
    """Delete the gateways' snapshots of a run with other documents: its models and keys are no longer valid."""
    try:
        same = (run_directory / DOCUMENTS_FILE).read_bytes() == documents
    except OSError:
        same = False
    if not same:
        for kept in run_directory.glob("*.kept.json"):
            kept.unlink()


def build_roles(
    options: ServeOptions, run: Path, inference: list[socket.socket], operations: socket.socket, settings: Settings
) -> tuple[Role, list[Role]]:
    """Return the child processes: (autoscaler, gateways)."""
    contract = run / "autoscaler.sock"
    limits, tls = limits_json(settings.limits), tls_arguments(settings.tls)
    names = [f"gateway-{number}" for number in range(1, options.gateways + 1)]
    gateways = [
        Role(
            name,
            (
                "gateway", "--id", name, "--autoscaler", f"unix:{contract}", "--listen-fd", str(listener.fileno()),
                "--ops-socket", str(run / f"{name}.sock"), "--state", str(run), "--grace", str(options.grace_s),
                "--limits", limits, "--events", str(options.state / "calls" / f"{name}.log"), *tls,
            ),
            (listener,),
        )
        for name, listener in zip(names, inference, strict=True)
    ]  # fmt: skip
    arguments = [
        "autoscaler", "--driver", "local", "--state", str(options.state), "--documents", str(run / DOCUMENTS_FILE),
        "--contract-socket", str(contract), "--ops-fd", str(operations.fileno()),
    ]  # fmt: skip
    for name in names:
        arguments += ["--gateway-socket", str(run / f"{name}.sock")]
    if options.keep_engines:
        arguments.append("--keep-engines")
    return Role("autoscaler", tuple(arguments), (operations,)), gateways


def limits_json(limits: Limits) -> str:
    """Return the Settings' limits in the gateway's form: Python names, and bytes as numbers."""
    values = {name: getattr(limits, name) for name in limits.__struct_fields__}
    return msgspec.json.encode({k: int(v) if isinstance(v, int) else v for k, v in values.items()}).decode()


def tls_arguments(tls: Tls) -> list[str]:
    """Return the Settings' TLS files as options of the gateway."""
    files = (("--tls-cert-file", tls.cert_file), ("--tls-key-file", tls.key_file), ("--tls-ca-file", tls.ca_file))
    return [word for name, path in files if path is not None for word in (name, path)]


def is_gateway_ready(path: Path) -> bool:
    """Return whether the gateway behind this Unix socket is ready."""
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


def print_welcome(documents: Documents, listen: Address, ops: Address) -> None:
    """Print the address and example commands."""
    key = documents.settings.auth == "keys" or (documents.settings.auth == "auto" and bool(documents.tenants))
    name = documents.models[0].name
    url = listen.url if documents.settings.tls.cert_file is None else f"https://{listen.text}"
    write_stderr(f"ready on {url} (operations: {ops.url}); models start on their first request")
    write_stdout(
        f"\n{console.format_curl_command(url, name, key=key)}\n"
        f"\n{console.format_python_program(url, name, key=key)}\n\n"
    )
