"""Reads and checks certificate, key, CA and token files, and builds TLS contexts. Errors are one line.

TLS policy: Python's default contexts (with their ciphers), TLS 1.2 or newer, no renegotiation, HTTP/1.1, and clients
always verify the server. Messages never contain a key or a token.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from pilotlight import bounded_files as files

TOKEN_CHARACTERS_MIN = 32
"""128 bits: half of what `openssl rand -hex 32` prints."""
TOKENS_MAX = 16
TOKEN_FILE_BYTES_MAX = 16 << 10
MAKE_TOKEN = "create one with `openssl rand -hex 32`"  # noqa: S105  a command, no password


class FileError(Exception):
    """A file cannot be used. The text is one line that names the file and the fix."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The PEM files of one side of TLS. `ca`: authorities accepted for the other side's certificates."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The configured files."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


def build_server_context(identity: Identity) -> ssl.SSLContext:
    """Return a server context. With `ca`, clients need a certificate of that authority. Raises FileError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if identity.ca is not None:
        context.load_verify_locations(cadata=_certificates(identity.ca))
        context.verify_mode = ssl.CERT_REQUIRED
    _show(context, identity)
    return _hardened(context)


def build_client_context(identity: Identity) -> ssl.SSLContext:
    """Return a client context; without `ca`, the system's authorities are trusted. Raises FileError."""
    context = ssl.create_default_context(cadata=None if identity.ca is None else _certificates(identity.ca))
    if identity.cert is not None:
        _show(context, identity)
    return _hardened(context)


def build_renewing_context(context: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a server context that uses the current result of `context` for each handshake, for renewed files."""

    def choose(handshake: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        handshake.context = context()

    first = context()
    first.sni_callback = choose
    return first


def load_tokens(path: Path) -> tuple[str, ...]:
    """Read a file of tokens, one per line: a client sends the first, a server accepts any. Raises FileError."""
    text = load_text(path, TOKEN_FILE_BYTES_MAX)
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        raise FileError(f"{path}: the file contains no token: {MAKE_TOKEN}")
    if len(found) > TOKENS_MAX:
        raise FileError(f"{path}: more than {TOKENS_MAX} tokens: remove the old ones")
    if any(
        len(one) < TOKEN_CHARACTERS_MIN or not one.isascii() or not one.isprintable() or " " in one for one in found
    ):
        raise FileError(
            f"{path}: a token is {TOKEN_CHARACTERS_MIN} or more visible ASCII characters on one line: {MAKE_TOKEN}"
        )
    return found


def list_exposed_files(*secrets: Path | None) -> list[str]:
    """Return a line for each secret file that other users can read."""
    return [
        f"{path} can be read by other users of this machine: chmod 600 {path}"
        for path in dict.fromkeys(secrets)
        if path is not None and os.path.exists(path) and path.stat().st_mode & stat.S_IROTH  # noqa: PTH110  Path's raises
    ]


def _hardened(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _certificates(path: Path) -> str:
    """Return the text of a certificate file after checking that it can be loaded."""
    text = load_text(path)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise FileError(f"{path}: the file contains no usable PEM certificate") from None
    return text


def _show(context: ssl.SSLContext, identity: Identity) -> None:
    """Load certificate and key. Raises FileError that names the faulty one and the reason."""
    cert, key = identity.cert, identity.key
    if cert is None or key is None:
        raise FileError(f"{cert or key}: certificate and key are needed together")
    _certificates(cert)
    load_text(key)

    def encrypted() -> str:
        raise FileError(f"{key}: the key is encrypted: decrypt it with `openssl pkey -in {key} -out NEW`")

    try:
        context.load_cert_chain(cert, key, encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            wrong = f"this key does not belong to the certificate {cert}: use the key of this certificate"
            raise FileError(f"{key}: {wrong}") from None
        raise FileError(f"{key}: the file contains no usable PEM private key") from None


def load_text(path: Path, bytes_max: int = 1 << 20) -> str:
    """Return the text of a PEM or token file. Raises FileError."""
    try:
        data = files.read_bytes(path, bytes_max)
    except files.TooLargeError:
        raise FileError(f"{path}: larger than {bytes_max >> 10} KiB: not a PEM or token file") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: {files.describe_error(error)}: use a file that this user can read") from None
    return data.decode("ascii", "ignore")  # CA bundles contain names between certificates
