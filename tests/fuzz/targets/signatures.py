"""Fuzz target for untrusted signatures: one line per result, no exception, and no unsigned content accepted."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts.digest import Digest
from artifacts.signatures import certificates, payloads, policy, public_keys, timestamps, transparency_log, trust_root
from artifacts.signatures.certificates import Identity
from artifacts.signatures.payloads import BadClaimError
from artifacts.signatures.policy import Bundled, Cosign, Policy
from artifacts.signatures.public_keys import BadKeyError
from artifacts.signatures.trust_root import BadRootError

_GOLDEN = Path(__file__).parents[2] / "golden" / "signatures"
MADE: dict[str, Any] = json.loads((_GOLDEN / "keys.json").read_text())
KINDS = ("p256", "rsa", "ed25519")
PUBLIC_S = 1692374735
"""Time of the public sigstore's log entry."""
DIGEST = Digest(MADE["digest"])
PUBLIC: dict[str, Any] = json.loads((_GOLDEN / "public-good.json").read_text())
ROOT = trust_root.parse_trust_root(json.dumps(PUBLIC["root"]).encode())
SECOND: dict[str, Any] = json.loads((_GOLDEN / "rekor2.json").read_text())
SECOND_ROOT = trust_root.parse_trust_root(json.dumps(SECOND["cases"]["happy-path"]["root"]).encode())
NOBODY = Identity("nobody@example.com", "https://login.example")
POLICY = Policy(
    "enforce", tuple(public_keys.parse_public_key(MADE[kind]["key"].encode()) for kind in KINDS), (NOBODY,), ROOT
)
HOLDING = {base64.b64decode(MADE[kind]["dsse"]["dsseEnvelope"]["payload"]) for kind in KINDS}
PAYLOAD: bytes = MADE["p256"]["payload"].encode()
SIGNATURE = MADE["p256"]["signature"]

SEEDS = (
    *(json.dumps(MADE[kind]["dsse"], separators=(",", ":")).encode() for kind in KINDS),
    PAYLOAD,
    MADE["p256"]["signature"].encode(),
    json.dumps(PUBLIC["entry"], separators=(",", ":")).encode(),
    base64.b64decode(PUBLIC["certificate"]),
    json.dumps(PUBLIC["root"], separators=(",", ":")).encode(),
    json.dumps(SECOND["cases"]["happy-path"]["bundle"], separators=(",", ":")).encode(),
    base64.b64decode(SECOND["late"]),
)
WORDS = (
    *(b'"dsseEnvelope":{', b'"messageSignature":{', b'"verificationMaterial":{', b'"publicKey":{', b'"certificate":{'),
    *(b'"payload":"', b'"signatures":[{', b'"sig":"', b'"critical":{', b'"image":{', b'"docker-manifest-digest":"'),
    *(DIGEST.encode(), b'"algorithm":"SHA2_256"', b"\\u0000", b"\\ud800", b"1e999", b"NaN", b"==", b"{}", b"[]"),
    *(b'"canonicalizedBody":"', b'"inclusionProof":{', b'"hashes":[', b'"integratedTime":"', b"\\u2014 ", b"\x30\x82"),
)


def signed(data: bytes) -> None:
    """Read the data as a bundle, payload, signature, key, certificate, log entry, timestamp and trusted root."""
    text = data.decode("utf-8", "replace")
    for found in (Bundled("at", data), Cosign("at", data, SIGNATURE), Cosign("at", b"{}", text)):
        verdict = policy.evaluate_signatures(DIGEST, [found], POLICY)
        assert verdict.publish == bool(verdict.signed_by)
        assert all(line.isprintable() for line in verdict.lines)
        if verdict.publish:
            assert _is_made(found), "the signature is not from a test signer"
    _read(lambda: public_keys.parse_public_key(data), BadKeyError)
    _read(lambda: trust_root.parse_trust_root(data), BadRootError)
    _read(lambda: certificates.check_certificate(data, PUBLIC_S, ROOT), BadClaimError)
    _read(
        lambda: transparency_log.check_log_entry(payloads.parse_json_object(data, len(data), "it"), ROOT.logs),
        BadClaimError,
    )
    stamp = {"rfc3161Timestamps": [{"signedTimestamp": base64.b64encode(data).decode()}]}
    _read(
        lambda: timestamps.check_timestamps({"timestampVerificationData": stamp}, b"", SECOND_ROOT.stampers),
        BadClaimError,
    )


def _read(reading: Callable[[], object], kind: type[Exception]) -> None:
    """The data is accepted, or rejected in one line."""
    try:
        reading()
    except kind as error:
        if not str(error).isprintable():
            raise AssertionError("the error is not one line") from error


def _is_made(found: Bundled | Cosign) -> bool:
    if isinstance(found, Cosign):
        return found.payload == PAYLOAD
    return base64.b64decode(json.loads(found.content)["dsseEnvelope"]["payload"]) in HOLDING
