"""Signatures that strangers wrote: read without anything raised, told in one line, and none holds that nobody made."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from artifacts import publickeys, signatures
from artifacts.digests import Digest
from artifacts.signatures import Bundled, Cosign, Policy

_GOLDEN = Path(__file__).parents[1] / "golden" / "signatures"
MADE: dict[str, Any] = json.loads((_GOLDEN / "keys.json").read_text())
KINDS = ("p256", "rsa", "ed25519")
DIGEST = Digest(MADE["digest"])
POLICY = Policy("enforce", tuple(publickeys.parse(MADE[kind]["key"].encode()) for kind in KINDS))
HOLDING = {base64.b64decode(MADE[kind]["dsse"]["dsseEnvelope"]["payload"]) for kind in KINDS}
SIGNATURE = MADE["p256"]["signature"]

SEEDS = (
    *(json.dumps(MADE[kind]["dsse"], separators=(",", ":")).encode() for kind in KINDS),
    MADE["p256"]["payload"].encode(),
    MADE["p256"]["signature"].encode(),
)
WORDS = (
    *(b'"dsseEnvelope":{', b'"messageSignature":{', b'"verificationMaterial":{', b'"publicKey":{', b'"certificate":{'),
    *(b'"payload":"', b'"signatures":[{', b'"sig":"', b'"critical":{', b'"image":{', b'"docker-manifest-digest":"'),
    *(DIGEST.encode(), b'"algorithm":"SHA2_256"', b"\\u0000", b"\\ud800", b"1e999", b"NaN", b"==", b"{}", b"[]"),
)


def signed(data: bytes) -> None:
    """As a bundle, as a payload, as a signature and as a key."""
    text = data.decode("utf-8", "replace")
    for found in (Bundled("at", data), Cosign("at", data, SIGNATURE), Cosign("at", b"{}", text)):
        verdict = signatures.judge(DIGEST, [found], POLICY)
        assert verdict.publish == bool(verdict.signed_by)
        assert all(line.isprintable() for line in verdict.lines)
        if verdict.publish:
            assert _is_made(found), "nobody signed this"
    try:
        publickeys.parse(data)
    except publickeys.BadKeyError as error:
        text = str(error)
        if not text.isprintable():
            raise AssertionError("the error is not one line") from error


def _is_made(found: Bundled | Cosign) -> bool:
    if isinstance(found, Cosign):
        return found.payload == MADE["p256"]["payload"].encode()
    return base64.b64decode(json.loads(found.content)["dsseEnvelope"]["payload"]) in HOLDING
