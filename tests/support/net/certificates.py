"""Certificates for tests: an authority of their own, files as an operator has them, and TLS for a whole test at once.

Inside of `with over_tls():` the rig (`tests.support.harness.gateway.gateway_rig`) and scripted engines
(`tests.support.fakes.engines.scripted_engine`) use TLS. Whatever a test asserts about HTTP must hold there, too.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import trustme

HOSTS = ("localhost", "127.0.0.1", "::1")


class Pair(NamedTuple):
    """Files of a certificate with its chain, and of its key."""

    cert: Path
    key: Path


class Sides(NamedTuple):
    """The two sides of TLS with one authority."""

    server: ssl.SSLContext
    client: ssl.SSLContext


OURS, THEIRS = "ours", "theirs"
"""Names of two authorities."""


@functools.cache
def authority(name: str) -> trustme.CA:
    """Creates one authority per name, because generating keys is slow."""
    return trustme.CA(organization_name=name)


def pem(name: str) -> str:
    """PEM text of an authority's certificate."""
    return authority(name).cert_pem.bytes().decode()


@functools.cache
def leaf(name: str, *hosts: str) -> trustme.LeafCert:
    """A certificate of an authority for these hosts, by default for this machine."""
    return authority(name).issue_cert(*(hosts or HOSTS))


def write(folder: Path, name: str, one: trustme.LeafCert) -> Pair:
    """Writes NAME.pem and NAME.key to the folder the way tools do: one after the other, each replaced atomically."""
    files = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    chain = b"".join(part.bytes() for part in one.cert_chain_pems)
    for path, data in zip(files, (chain, one.private_key_pem.bytes()), strict=True):
        fresh = path.with_suffix(path.suffix + ".new")
        fresh.write_bytes(data)
        fresh.chmod(0o600)
        fresh.replace(path)
    return files


def write_authority(folder: Path, name: str) -> Path:
    """Writes an authority's certificate; returns its path."""
    path = folder / f"ca-{name}.pem"
    path.write_text(pem(name))
    return path


@functools.cache
def sides(server: str = OURS, client: str = OURS) -> Sides:
    """Contexts as the product creates them, with certificates of the authority `server` and trust in `client`."""
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf(server).configure_cert(server_side)
    server_side.set_alpn_protocols(["http/1.1"])
    client_side = ssl.create_default_context(cadata=pem(client))
    return Sides(server_side, client_side)


default_sides: ContextVar[Sides | None] = ContextVar("default_sides", default=None)
"""What the rig and scripted engines use by default; None: plain HTTP."""


@contextlib.contextmanager
def over_tls() -> Iterator[None]:
    """Whatever is created inside this context uses TLS."""
    token = default_sides.set(sides())
    try:
        yield
    finally:
        default_sides.reset(token)
