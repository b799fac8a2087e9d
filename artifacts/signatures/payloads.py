"""Checks that a signed payload is about a manifest: cosign's payload or an in-toto statement. Pure.

Parses both formats (github.com/containers/image docs/containers-signature.5, as cosign writes it; in-toto Statement v1)
and builds DSSE's pre-authentication encoding (PAE). Payloads must be parsed only after their signature was verified.
Only signing statements count: other statements by the same key, such as an SBOM, are no consent to run the manifest.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import cast

from artifacts.digest import Digest, get_algorithm, get_hex
from artifacts.oci import strict_json

PAYLOAD_BYTES_MAX = 64 << 10
SUBJECTS_MAX = 64
COSIGN_TYPE = "cosign container image signature"
IN_TOTO = "application/vnd.in-toto+json"
SIGNED = "https://sigstore.dev/cosign/sign/v1"
"""Predicate type of a plain signature, the only one that is accepted."""
_STATEMENTS = frozenset({"https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1"})
_CRITICAL = frozenset({"identity", "image", "type"})


class BadClaimError(ValueError):
    """The payload does not make the required claim; the message is a lowercase clause with the reason."""


def check_payload(payload: bytes, digest: Digest) -> None:
    """Check that cosign's payload is about this manifest. Raises BadClaimError."""
    found = parse_json_object(payload, PAYLOAD_BYTES_MAX, "its payload")
    critical = require_object(found, "critical", "its payload")
    if unknown := sorted(critical.keys() - _CRITICAL):
        raise BadClaimError(f"its payload has an unknown critical member: {unknown[0][:80]!r}")
    if critical.get("type") != COSIGN_TYPE:
        raise BadClaimError(f"its payload is not of type {COSIGN_TYPE!r}")
    image = require_object(critical, "image", "its payload")
    if image.keys() != {"docker-manifest-digest"} or image["docker-manifest-digest"] != digest:
        raise BadClaimError("it signs another digest")


def check_statement(payload: bytes, digest: Digest) -> None:
    """Check that an in-toto statement signs this manifest. Raises BadClaimError."""
    found = parse_json_object(payload, PAYLOAD_BYTES_MAX, "its statement")
    if found.get("_type") not in _STATEMENTS:
        raise BadClaimError("its statement is not an in-toto statement of a known version")
    if found.get("predicateType") != SIGNED:
        raise BadClaimError(f"its statement is not of type {SIGNED}, so it is not a signature")
    subjects = found.get("subject")
    if not isinstance(subjects, list) or not 1 <= len(subjects) <= SUBJECTS_MAX:
        raise BadClaimError(f"its statement does not have 1 to {SUBJECTS_MAX} subjects")
    if not any(_is_of(subject, digest) for subject in subjects):
        raise BadClaimError("it signs another digest")


def _is_of(subject: object, digest: Digest) -> bool:
    of = subject.get("digest") if isinstance(subject, dict) else None
    return isinstance(of, dict) and of.get(get_algorithm(digest)) == get_hex(digest)


def encode_pae(payload_type: str, payload: bytes) -> bytes:
    """Encode the bytes that DSSE signs (github.com/secure-systems-lab/dsse, protocol.md)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def parse_json_object(text: bytes, most: int, what: str) -> dict[str, object]:
    """Parse a JSON object. Raises BadClaimError."""
    try:
        return strict_json.decode_object(text, most)
    except strict_json.BadJsonError as error:
        raise BadClaimError(f"{what} is {error}") from None


def require_object(found: Mapping[str, object], name: str, what: str) -> dict[str, object]:
    """Return a member that must be an object. Raises BadClaimError."""
    inner = found.get(name)
    if not isinstance(inner, dict):
        raise BadClaimError(f"{what} has no {name}")
    return cast("dict[str, object]", inner)


def require_single_signature(found: Mapping[str, object], what: str) -> dict[str, object]:
    """Return the only element of `signatures`. Raises BadClaimError."""
    signatures = found.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise BadClaimError(f"{what} does not have exactly one signature")
    return cast("dict[str, object]", signatures[0])


def require_text(found: Mapping[str, object], name: str, what: str) -> str:
    """Return a member that must be a string. Raises BadClaimError."""
    inner = found.get(name)
    if not isinstance(inner, str):
        raise BadClaimError(f"{what} has no {name}")
    return inner


def decode_base64(text: object, most: int, what: str) -> bytes:
    """Decode canonical base64 of at most `most` bytes. Raises BadClaimError."""
    if not isinstance(text, str) or len(text) > 4 * (most + 2) // 3:
        raise BadClaimError(f"{what} is missing or larger than {most} bytes")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadClaimError(f"{what} is not base64") from None
    if not found or base64.b64encode(found).decode() != text:
        raise BadClaimError(f"{what} is not base64")
    return found
