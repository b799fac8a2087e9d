"""The options of `pilotlight serve`, and the checks that must fail before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from autoscaler.documents.document_types import Documents
from autoscaler.spec.settings import Signatures, Tls
from pilotlight.models.registry_access import SignersError, load_signature_policy
from pilotlight.net import certificates
from pilotlight.net.certificates import FileError, Identity
from pilotlight.net.listen import Address, check_operations

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


def needs_tenant(documents: Documents, *, loopback: bool) -> bool:
    """Return whether a listener must not start because anyone could use it.

    This is so if it is not on loopback, `auth` is `auto`, and there is no Tenant.
    """
    return documents.settings.auth == "auto" and not loopback and not documents.tenants
