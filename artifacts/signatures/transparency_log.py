"""Verifies transparency log entries from bundles: that the log contains the entry, since when, and its content. Pure.

Checks Rekor's proofs without network access: that the entry is in a tree whose head the log signed (RFC 6962, 2.1.1;
C2SP checkpoints), and for Rekor v1 also its promise (the signed entry timestamp, the only source of the time). Rekor v2
gives no promise and no time; a timestamp authority provides the time instead (`artifacts.signatures.timestamps`). The
entry's body, which the tree contains, determines the version.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from artifacts.signatures import payloads
from artifacts.signatures.bundles import Envelope, Message
from artifacts.signatures.payloads import BadClaimError, decode_base64, parse_json_object, require_object, require_text
from artifacts.signatures.public_keys import SIGNATURE_BYTES_MAX
from artifacts.signatures.trust_root import Log

BODY_BYTES_MAX = 256 << 10
HASHES_MAX = 64
CHECKPOINT_CHARS_MAX = 8 << 10
_SUM_BYTES = 32
_WHAT = "its log entry"
V1, V2 = "0.0.1", "0.0.2"
SECOND = {("hashedrekord", V2), ("dsse", V2)}
"""Entry kinds that exist only in Rekor v2."""


class LogEntry(NamedTuple):
    """A verified log entry."""

    unix_s: int | None
    """Time of inclusion; None for Rekor v2, which states none."""
    log: Log
    body: Mapping[str, object]
    """The logged content."""


def check_log_entry(found: Mapping[str, object], logs: Sequence[Log]) -> LogEntry:
    """Verify an element of `tlogEntries`. Raises BadClaimError."""
    body = decode_base64(found.get("canonicalizedBody"), BODY_BYTES_MAX, f"{_WHAT}'s body")
    log_id = decode_base64(require_object(found, "logId", _WHAT).get("keyId"), _SUM_BYTES, f"{_WHAT}'s log")
    log = next((one for one in logs if one.id == log_id), None)
    if log is None:
        raise BadClaimError(f"{_WHAT} is from a log that is not in the trusted root")
    read_body = parse_json_object(body, BODY_BYTES_MAX, f"{_WHAT}'s body")
    second = (read_body.get("kind"), read_body.get("apiVersion")) in SECOND
    unix_s = None if second else _promised(found, body, log)
    _check_inclusion(require_object(found, "inclusionProof", _WHAT), body, log)
    return LogEntry(unix_s, log, read_body)


def _promised(found: Mapping[str, object], body: bytes, log: Log) -> int:
    """Verify the promise of Rekor v1, and return the time of inclusion."""
    if not isinstance(found.get("inclusionPromise"), dict):
        raise BadClaimError(f"{_WHAT} has no inclusion promise of its log; Rekor v1 requires one")
    unix_s, index = _number(found, "integratedTime"), _number(found, "logIndex")
    if not log.at(unix_s):
        raise BadClaimError(f"{_WHAT} has a time at which the log was not in use")
    said = {"body": base64.b64encode(body).decode(), "integratedTime": unix_s, "logID": log.id.hex(), "logIndex": index}
    promise = require_object(found, "inclusionPromise", _WHAT)
    timestamp = decode_base64(promise.get("signedEntryTimestamp"), SIGNATURE_BYTES_MAX, f"{_WHAT}'s promise")
    if not log.key.signed(timestamp, json.dumps(said, separators=(",", ":")).encode()):
        raise BadClaimError(f"{_WHAT}'s promise is not signed by its log")
    return unix_s


def _check_inclusion(proof: Mapping[str, object], body: bytes, log: Log) -> None:
    hashes = proof.get("hashes", [])
    if not isinstance(hashes, list) or len(hashes) > HASHES_MAX:
        raise BadClaimError(f"{_WHAT}'s proof has more than {HASHES_MAX} hashes")
    path = [decode_base64(one, _SUM_BYTES, f"{_WHAT}'s proof") for one in hashes]
    if any(len(one) != _SUM_BYTES for one in path):
        raise BadClaimError(f"{_WHAT}'s proof has an invalid hash")
    size, index = _number(proof, "treeSize"), _number(proof, "logIndex")
    root = decode_base64(proof.get("rootHash"), _SUM_BYTES, f"{_WHAT}'s proof")
    if not 0 <= index < size or compute_tree_root(body, index, size, path) != root:
        raise BadClaimError(f"{_WHAT} is not in the tree of its proof")
    text = require_text(require_object(proof, "checkpoint", _WHAT), "envelope", _WHAT)
    if len(text) > CHECKPOINT_CHARS_MAX or _head(text, log) != (size, root):
        raise BadClaimError(f"{_WHAT}'s checkpoint is for another tree, or not signed by its log")


def compute_tree_root(body: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """Return the root for entry `index` of `size` and this path (RFC 9162, 2.1.3.2); None for an invalid path."""
    at, last = index, size - 1
    reached = hashlib.sha256(b"\x00" + body).digest()
    for one in path:
        if last == 0:
            return None
        if at & 1 or at == last:
            reached = hashlib.sha256(b"\x01" + one + reached).digest()
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            reached = hashlib.sha256(b"\x01" + reached + one).digest()
        at, last = at >> 1, last >> 1
    return reached if last == 0 else None


def _head(checkpoint: str, log: Log) -> tuple[int, bytes] | None:
    """Return the tree size and root signed by the log; None if the signature is missing or invalid."""
    text, _, signatures = checkpoint.partition("\n\n")
    lines = text.split("\n")
    if len(lines) < 3 or not lines[1].isascii() or not lines[1].isdigit() or len(lines[1]) > 19:
        return None
    for line in signatures.split("\n"):
        dash, _, rest = line.partition(" ")
        try:
            signature = base64.b64decode(rest.rpartition(" ")[2], validate=True)
        except ValueError:
            continue
        if dash == "\u2014" and signature[:4] == log.id[:4] and log.key.signed(signature[4:], f"{text}\n".encode()):
            return int(lines[1]), decode_base64(lines[2], _SUM_BYTES, f"{_WHAT}'s checkpoint")
    return None


def _number(found: Mapping[str, object], name: str) -> int:
    """Parse an integer in protobuf's JSON form: a string, absent if 0."""
    text = found.get(name, "0")
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BadClaimError(f"{_WHAT} has no {name} that is a whole number")
    return int(text)


def check_body(body: Mapping[str, object], content: Envelope | Message) -> bytes:
    """Check that the entry is for this signature; return the certificate in it (PEM or DER). Raises BadClaimError."""
    kind, version = body.get("kind"), body.get("apiVersion")
    spec, enveloped = require_object(body, "spec", _WHAT), isinstance(content, Envelope)
    if (kind, version) in SECOND and (enveloped or kind == "hashedrekord"):
        return _second(spec, content, whole=kind == "hashedrekord")
    if (kind, version) != ("dsse" if enveloped else "hashedrekord", V1):
        raise BadClaimError(f"{_WHAT} is of an unsupported kind")
    if enveloped:
        of, named = require_object(spec, "payloadHash", _WHAT), payloads.require_single_signature(spec, _WHAT)
        said, certificate = named.get("signature"), named.get("verifier")
    else:
        of = require_object(require_object(spec, "data", _WHAT), "hash", _WHAT)
        named = require_object(spec, "signature", _WHAT)
        said, certificate = named.get("content"), require_object(named, "publicKey", _WHAT).get("content")
    text, sha256 = base64.b64encode(content.signature).decode(), _sum_of(content, whole=False).hex()
    if (of.get("algorithm"), of.get("value"), said) != ("sha256", sha256, text):
        raise BadClaimError(f"{_WHAT} is for another signature")
    return decode_base64(certificate, BODY_BYTES_MAX, f"{_WHAT}'s certificate")


def _second(spec: Mapping[str, object], content: Envelope | Message, *, whole: bool) -> bytes:
    """Check a Rekor v2 entry (github.com/sigstore/rekor-tiles, hashedrekord.proto and dsse.proto)."""
    if whole:
        inner = require_object(spec, "hashedRekordV002", _WHAT)
        of, named = require_object(inner, "data", _WHAT), require_object(inner, "signature", _WHAT)
    else:
        inner = require_object(spec, "dsseV002", _WHAT)
        of, named = require_object(inner, "payloadHash", _WHAT), payloads.require_single_signature(inner, _WHAT)
    text, sha256 = (base64.b64encode(one).decode() for one in (content.signature, _sum_of(content, whole=whole)))
    if (of.get("algorithm"), of.get("digest"), named.get("content")) != ("SHA2_256", sha256, text):
        raise BadClaimError(f"{_WHAT} is for another signature")
    verifier = require_object(require_object(named, "verifier", _WHAT), "x509Certificate", _WHAT)
    return decode_base64(verifier.get("rawBytes"), BODY_BYTES_MAX, f"{_WHAT}'s certificate")


def _sum_of(content: Envelope | Message, *, whole: bool) -> bytes:
    """Return the content's hash. `whole`: hash all signed bytes of an envelope, not only its payload."""
    if isinstance(content, Message):
        return content.sha256
    return hashlib.sha256(payloads.encode_pae(payloads.IN_TOTO, content.payload) if whole else content.payload).digest()
