"""`pilotlight serve`: checks the options, starts the supervisor, and prints messages for the user.

Defines the layout of STATE/run (documents, sockets) and the checks that must fail before anything starts.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from pathlib import Path

import click
import msgspec

from autoscaler.documents.document_types import Documents
from autoscaler.documents.render import to_yaml
from autoscaler.drivers.local.state_directory import InUseError, StateDirectory, StateError, replace_file
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.spec.settings import Limits, Settings, Signatures, Tls
from autoscaler.text import format_count
from pilotlight.models.document_loading import gather_documents, problem_file
from pilotlight.models.registry_access import SignersError, load_signature_policy
from pilotlight.net import certificates
from pilotlight.net.certificates import FileError, Identity
from pilotlight.net.listen import Address, check_operations, open_listeners
from pilotlight.processes import console
from pilotlight.processes.supervisor import Role, Supervisor
from pilotlight.safe_output import escape_text, one_line, write_document, write_stderr, write_stdout

DOCUMENTS_FILE = "documents.yaml"
PROBLEM_CHARACTERS_MAX = 2000
SOCKET_PATH_MAX = 100
"""A Unix socket's path is limited to about 107 bytes (unix(7)); a longer state directory is rejected with a message."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `serve`."""

    models: tuple[Path, ...]
    configs: tuple[Path, ...]
    listen: Address
    ops: Address
    state: Path
    gateways: int
    keep_engines: bool
    grace_s: float
    print_config: bool


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


def check_serve_options(options: ServeOptions, documents: Documents) -> None:
    """Raise click's usage error for anything that must be rejected before startup."""
    if not documents.models:
        raise click.UsageError("nothing to serve: pass a .gguf file, a folder with such files, or -c DOCUMENTS")
    if needs_tenant(documents, loopback=options.listen.loopback):
        raise click.UsageError(
            f"{options.listen.host} can be reached from other machines and no Tenant has a key: create one with "
            "`pilotlight key new --tenant NAME --state DIR`, or set `auth: none` in Settings"
        )
    check_operations(options.ops, documents.settings.auth)
    check_tls(documents.settings.tls)
    check_signers(documents.settings.weights.signatures)
    if len(os.fsencode(options.state.absolute())) + len("/run/autoscaler.sock") > SOCKET_PATH_MAX:
        raise click.UsageError(f"--state {options.state}: the path is too long for a Unix socket; choose a shorter one")


def check_signers(signatures: Signatures) -> None:
    """Raise click's usage error for keys and roots that cannot be used to verify signatures of weights."""
    try:
        load_signature_policy(signatures)
    except SignersError as error:
        raise click.UsageError(f"Settings: {error}") from None


def check_tls(tls: Tls) -> None:
    """Raise click's usage error for TLS files that gateways cannot use."""
    cert, key, ca = (None if path is None else Path(path) for path in (tls.cert_file, tls.key_file, tls.ca_file))
    try:
        if cert is not None:
            certificates.build_server_context(Identity(cert=cert, key=key))
        if ca is not None:
            certificates.build_client_context(Identity(ca=ca))
    except FileError as error:
        raise click.UsageError(f"Settings: tls: {error}") from None


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


def note_problem(documents: Path, problem: str) -> None:
    """Store the reason of a failed reload, which the autoscaler serves to `status`; empty: the reload succeeded."""
    with contextlib.suppress(OSError):  # the problem was already logged
        path = problem_file(documents)
        if problem:
            replace_file(path, escape_text(one_line(problem), PROBLEM_CHARACTERS_MAX).encode())
        else:
            path.unlink(missing_ok=True)


def report_undecoded(documents: Documents) -> None:
    """Print a line for each Model whose document raised an exception. The autoscaler decodes it again."""
    for name, found in documents.undecoded.items():
        write_stderr(f"{found.source}: Model {name}: internal error ({found.reason}); please report it")


class Reload:
    """Reloads the documents of `serve` on SIGHUP; an error is reported in one line and changes nothing.

    GGUF files and folders on the command line and the stored keys are also read again. A file that cannot be served is
    skipped, so that it does not block other changes.
    """

    def __init__(self, options: ServeOptions, documents: Documents, path: Path) -> None:
        self._options = options
        self._begun = documents.settings
        self._in_force = documents
        self._path = path

    def __call__(self) -> bool:
        """Return whether the autoscaler should reload the documents at `path`."""
        options = self._options
        try:
            documents = gather_documents(
                options.models, options.configs, options.state, contain=True, in_force=self._in_force
            )
            check_serve_options(options, documents)
            replace_file(self._path, to_yaml(documents).encode())
        except Exception as error:  # noqa: BLE001  a faulty file must not terminate running requests; the error is logged
            reraise_memory_error(error)
            message = error.message if isinstance(error, click.UsageError) else f"{self._path}: {_reason(error)}"
            problem = f"{message}; the last valid documents stay in force"
            write_stderr(problem)
            note_problem(self._path, problem)
            return False
        self._in_force = documents
        note_problem(self._path, "")
        report_undecoded(documents)
        models, tenants = format_count(len(documents.models), "model"), format_count(len(documents.tenants), "tenant")
        write_stderr(f"documents reloaded: {models}, {tenants}")
        for key in ("limits", "devices", "tls", "weights"):
            if getattr(documents.settings, key) != getattr(self._begun, key):
                write_stderr(f"Settings: {key}: the change takes effect at the next start of `serve`")
        return True


def _reason(error: Exception) -> str:
    """Return why documents cannot be read. Any error other than OSError is a bug in Pilotlight to be reported."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"internal error ({type(error).__name__}); please report it"


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


def needs_tenant(documents: Documents, *, loopback: bool) -> bool:
    """Return whether a listener must not start because anyone could use it.

    This is so if it is not on loopback, `auth` is `auto`, and there is no Tenant.
    """
    return documents.settings.auth == "auto" and not loopback and not documents.tenants
