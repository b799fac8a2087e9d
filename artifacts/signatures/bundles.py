"""Parses Sigstore bundles v0.3: a file with a signature and the material to verify it. Pure.

Format: github.com/sigstore/protobuf-specs, sigstore_bundle.proto, as JSON. Parsing verifies nothing. Older versions are
rejected, since they permit bundles with less verification material.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from artifacts.signatures.payloads import (
    IN_TOTO,
    PAYLOAD_BYTES_MAX,
    BadClaimError,
    decode_base64,
    parse_json_object,
    require_object,
    require_single_signature,
    require_text,
)
from artifacts.signatures.public_keys import SIGNATURE_BYTES_MAX

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUNDLE_BYTES_MAX = 1 << 20
CERTIFICATE_BYTES_MAX = 16 << 10
SUM_BYTES = 32


class Envelope(NamedTuple):
    """A DSSE envelope: a payload, and a signature over its `payloads.encode_pae`."""

    payload: bytes
    signature: bytes


class Message(NamedTuple):
    """A signature over bytes stored elsewhere: the manifest itself."""

    sha256: bytes
    signature: bytes


class Bundle(NamedTuple):
    """A parsed bundle."""

    content: Envelope | Message
    certificate: bytes | None
    """DER; None if the bundle is signed with a key, of which it only has a hint."""
    material: Mapping[str, object]
    """Other verification material: log entries, timestamps."""


def parse_bundle(content: bytes) -> Bundle:
    """Parse a bundle. Raises BadClaimError."""
    found = parse_json_object(content, BUNDLE_BYTES_MAX, "the bundle")
    if found.get("mediaType") != BUNDLE:
        raise BadClaimError(f"the bundle is not of type {BUNDLE}")
    material = require_object(found, "verificationMaterial", "the bundle")
    has = sorted({"publicKey", "certificate", "x509CertificateChain"} & material.keys())
    if has not in (["publicKey"], ["certificate"]):
        raise BadClaimError("the bundle does not have exactly one publicKey or certificate")
    certificate = None
    if has == ["certificate"]:
        of = require_object(material, "certificate", "the bundle")
        certificate = decode_base64(of.get("rawBytes"), CERTIFICATE_BYTES_MAX, "the bundle's certificate")
    if ("dsseEnvelope" in found) == ("messageSignature" in found):
        raise BadClaimError("the bundle does not have exactly one dsseEnvelope or messageSignature")
    return Bundle(_envelope(found) if "dsseEnvelope" in found else _message(found), certificate, material)


def _envelope(found: Mapping[str, object]) -> Envelope:
    of, what = require_object(found, "dsseEnvelope", "the bundle"), "the bundle's envelope"
    if require_text(of, "payloadType", what) != IN_TOTO:
        raise BadClaimError(f"{what} does not contain {IN_TOTO}")
    one = require_single_signature(of, what)
    payload = decode_base64(of.get("payload"), PAYLOAD_BYTES_MAX, f"{what}'s payload")
    return Envelope(payload, decode_base64(one.get("sig"), SIGNATURE_BYTES_MAX, f"{what}'s signature"))


def _message(found: Mapping[str, object]) -> Message:
    of, what = require_object(found, "messageSignature", "the bundle"), "the bundle's messageSignature"
    named = require_object(of, "messageDigest", what)
    if named.get("algorithm") != "SHA2_256":
        raise BadClaimError(f"{what} does not use SHA2_256")
    return Message(
        decode_base64(named.get("digest"), SUM_BYTES, f"{what}'s digest"),
        decode_base64(of.get("signature"), SIGNATURE_BYTES_MAX, f"{what}'s signature"),
    )
