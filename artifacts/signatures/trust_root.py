"""Trust anchors of keyless signatures: parses sigstore's `trusted_root.json` into authorities and logs. Pure.

Format: github.com/sigstore/protobuf-specs, sigstore_trustroot.proto, as JSON; `cosign trusted-root create` writes it.
The administrator provides the file, so its content is trusted; entries of unknown kinds are ignored, since such files
also list logs and authorities of other kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import inf
from typing import NamedTuple, cast

from cryptography.hazmat.primitives.serialization import load_der_public_key
from cryptography.x509 import Certificate, load_der_x509_certificate

from artifacts.signatures.payloads import BadClaimError, decode_base64, parse_json_object, require_object
from artifacts.signatures.public_keys import BadKeyError, PublicKey, hash_public_key, read_public_key

ROOT_BYTES_MAX = 1 << 20
CHAIN_MAX = 8
_DER_BYTES_MAX = 16 << 10
_ID_BYTES = 32


class BadRootError(ValueError):
    """The trusted root is unusable; the message is a lowercase clause with the reason."""


class Log(NamedTuple):
    """A log of signatures (Rekor) or of certificates (CT)."""

    id: bytes
    """SHA-256 of its key's DER, or the id in the root (for Rekor v2 derived from the log's name, too)."""
    key: PublicKey
    since_s: float
    until_s: float

    def at(self, unix_s: float) -> bool:
        """Whether the log was in use at that time."""
        return self.since_s <= unix_s <= self.until_s


class Authority(NamedTuple):
    """An issuer of certificates or timestamps."""

    chain: tuple[Certificate, ...]
    """From the signing certificate to its root."""
    since_s: float
    until_s: float


class Root(NamedTuple):
    """The trusted root."""

    authorities: tuple[Authority, ...]
    logs: tuple[Log, ...]
    certificate_logs: tuple[Log, ...]
    stampers: tuple[Authority, ...] = ()
    """Timestamp authorities for Rekor v2 entries, which have no time."""


def parse_trust_root(content: bytes) -> Root:
    """Parse a trusted root. Raises BadRootError."""
    try:
        found = parse_json_object(content, ROOT_BYTES_MAX, "the trusted root")
        root = Root(
            tuple(_authority(one) for one in _list(found, "certificateAuthorities")),
            tuple(log for one in _list(found, "tlogs") if (log := _log(one)) is not None),
            tuple(log for one in _list(found, "ctlogs") if (log := _log(one)) is not None),
            tuple(_authority(one) for one in _list(found, "timestampAuthorities")),
        )
    except (BadClaimError, ValueError) as error:
        raise BadRootError(str(error)) from None
    if not all(root[:3]):
        raise BadRootError("the trusted root lacks a certificateAuthority, a tlog or a ctlog of a known kind")
    return root


def _authority(found: Mapping[str, object]) -> Authority:
    chain = _list(require_object(found, "certChain", "an authority"), "certificates")
    if not 1 <= len(chain) <= CHAIN_MAX:
        raise BadClaimError(f"an authority does not have 1 to {CHAIN_MAX} certificates")
    certificates = (load_der_x509_certificate(_der(one)) for one in chain)
    return Authority(tuple(certificates), *_times(found))


def _log(found: Mapping[str, object]) -> Log | None:
    """Parse a log; None if its key is of an unsupported kind."""
    of = require_object(found, "publicKey", "a log")
    try:
        key = read_public_key(load_der_public_key(_der(of)))
    except BadKeyError:
        return None
    said = b""
    if found.get("logId") is not None:
        said = decode_base64(require_object(found, "logId", "a log").get("keyId"), _ID_BYTES, "a log's keyId")
    return Log(said or hash_public_key(key.public), key, *_times(of))


def _der(found: Mapping[str, object]) -> bytes:
    return decode_base64(found.get("rawBytes"), _DER_BYTES_MAX, "rawBytes of the trusted root")


def _times(found: Mapping[str, object]) -> tuple[float, float]:
    """Parse the validity period; an entry without a start is never valid."""
    valid = require_object(found, "validFor", "the trusted root")
    return _unix_s(valid.get("start"), inf), _unix_s(valid.get("end"), inf)


def _unix_s(text: object, missing: float) -> float:
    if text is None:
        return missing
    moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    if moment is None or moment.tzinfo is None:
        raise BadClaimError("a time of the trusted root is invalid")
    return moment.timestamp()


def _list(found: Mapping[str, object], name: str) -> list[dict[str, object]]:
    of = found.get(name, [])
    if not isinstance(of, list) or not all(isinstance(one, dict) for one in of):
        raise BadClaimError(f"{name} of the trusted root is not a list of objects")
    return cast("list[dict[str, object]]", of)
