"""Sigstore's bundles, v0.3: one file with a signature and what is needed to check it. Bytes -> what they say. Pure.

Owns the form (github.com/sigstore/protobuf-specs, sigstore_bundle.proto, as JSON). Nothing of it is believed here. Of
the older versions none is read: what is in them was allowed to be less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from artifacts.signatures.payloads import (
    IN_TOTO,
    PAYLOAD_BYTES_MAX,
    BadClaimError,
    decode_base64,
    parse_json_object,
    require_object,
    require_text,
)
from artifacts.signatures.public_keys import SIGNATURE_BYTES_MAX

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUNDLE_BYTES_MAX = 1 << 20
CERTIFICATE_BYTES_MAX = 16 << 10
SUM_BYTES = 32


class Envelope(NamedTuple):
    """DSSE: a text, and a signature over `claims.pae` of it."""

    payload: bytes
    signature: bytes


class Message(NamedTuple):
    """A signature over bytes that lie elsewhere: the manifest's own."""

    sha256: bytes
    signature: bytes


class Bundle(NamedTuple):
    """What one says."""

    content: Envelope | Message
    certificate: bytes | None
    """DER; None: it is signed with a key of which only a hint is given."""
    material: Mapping[str, object]
    """The rest of what is to be checked: entries of logs, timestamps."""


def parse_bundle(content: bytes) -> Bundle:
    """Raises BadClaimError."""
    found = parse_json_object(content, BUNDLE_BYTES_MAX, "the bundle")
    if found.get("mediaType") != BUNDLE:
        raise BadClaimError(f"the bundle does not say that it is {BUNDLE}")
    material = require_object(found, "verificationMaterial", "the bundle")
    has = sorted({"publicKey", "certificate", "x509CertificateChain"} & material.keys())
    if has not in (["publicKey"], ["certificate"]):
        raise BadClaimError("the bundle has not one publicKey or certificate")
    certificate = None
    if has == ["certificate"]:
        of = require_object(material, "certificate", "the bundle")
        certificate = decode_base64(of.get("rawBytes"), CERTIFICATE_BYTES_MAX, "the bundle's certificate")
    if ("dsseEnvelope" in found) == ("messageSignature" in found):
        raise BadClaimError("the bundle has not one dsseEnvelope or messageSignature")
    return Bundle(_envelope(found) if "dsseEnvelope" in found else _message(found), certificate, material)


def _envelope(found: Mapping[str, object]) -> Envelope:
    of, what = require_object(found, "dsseEnvelope", "the bundle"), "the bundle's envelope"
    if require_text(of, "payloadType", what) != IN_TOTO:
        raise BadClaimError(f"{what} holds something else than {IN_TOTO}")
    signatures = of.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise BadClaimError(f"{what} has not one signature")
    one = cast("dict[str, object]", signatures[0])
    payload = decode_base64(of.get("payload"), PAYLOAD_BYTES_MAX, f"{what}'s payload")
    return Envelope(payload, decode_base64(one.get("sig"), SIGNATURE_BYTES_MAX, f"{what}'s signature"))


def _message(found: Mapping[str, object]) -> Message:
    of, what = require_object(found, "messageSignature", "the bundle"), "the bundle's messageSignature"
    named = require_object(of, "messageDigest", what)
    if named.get("algorithm") != "SHA2_256":
        raise BadClaimError(f"{what} is over another sum than SHA2_256")
    return Message(
        decode_base64(named.get("digest"), SUM_BYTES, f"{what}'s digest"),
        decode_base64(of.get("signature"), SIGNATURE_BYTES_MAX, f"{what}'s signature"),
    )
