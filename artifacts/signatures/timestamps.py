"""Verifies RFC 3161 timestamps of a signature, needed if its log entry has no time (Rekor v2). Pure.

Parses the timestamp responses in bundles and their signed data (RFC 5652), without network access. Only authorities in
the trusted root count, with the certificate given there; a certificate in the response is ignored. Any deviation from
these RFCs is rejected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.x509 import Certificate, ExtendedKeyUsage, ExtensionNotFound
from cryptography.x509.oid import ExtendedKeyUsageOID

from artifacts.signatures import certificates, der
from artifacts.signatures.der import DerError, Value
from artifacts.signatures.payloads import BadClaimError, decode_base64, require_object
from artifacts.signatures.trust_root import Authority

TIMESTAMPS_MAX = 8
BYTES_MAX = 64 << 10
_WHAT = "its timestamp"
_SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
_TST_INFO = bytes.fromhex("2a864886f70d0109100104")
_CONTENT_TYPE, _MESSAGE_DIGEST = (bytes.fromhex(f"2a864886f70d01090{number}") for number in (3, 4))
_SUMS: Mapping[bytes, tuple[str, HashAlgorithm]] = {
    bytes.fromhex("608648016503040201"): ("sha256", SHA256()),
    bytes.fromhex("608648016503040202"): ("sha384", SHA384()),
    bytes.fromhex("608648016503040203"): ("sha512", SHA512()),
}


class _Token(NamedTuple):
    """A parsed timestamp, not yet verified."""

    unix_s: float
    sum_name: str
    imprint: bytes
    """Hash of the timestamped bytes."""
    signed: bytes
    signature: bytes
    algorithm: HashAlgorithm


def check_timestamps(
    material: Mapping[str, object], signature: bytes, authorities: Sequence[Authority]
) -> tuple[float, ...]:
    """Return the timestamps of the signature, in Unix seconds: at least one. Those of unknown authorities are skipped.

    Raises BadClaimError if none is valid, or if one is unreadable or of other content.
    """
    data = require_object(material, "timestampVerificationData", "the bundle, whose log states no time,")
    found = data.get("rfc3161Timestamps")
    if not isinstance(found, list) or not 1 <= len(found) <= TIMESTAMPS_MAX:
        raise BadClaimError(f"the bundle does not have 1 to {TIMESTAMPS_MAX} timestamps")
    times = []
    for one in found:
        inner = cast("dict[str, object]", one) if isinstance(one, dict) else {}
        raw = decode_base64(inner.get("signedTimestamp"), BYTES_MAX, _WHAT)
        try:
            token = _read(raw)
        except DerError as error:
            raise BadClaimError(f"{_WHAT} cannot be read: {error}") from None
        if hashlib.new(token.sum_name, signature).digest() != token.imprint:
            raise BadClaimError(f"{_WHAT} is for other content")
        if any(_is_by(token, authority) for authority in authorities):
            times.append(token.unix_s)
    if not times:
        raise BadClaimError(
            f"{_WHAT} is not from an authority that the trusted root lists for the time in the timestamp"
        )
    return tuple(times)


def _is_by(token: _Token, authority: Authority) -> bool:
    leaf = authority.chain[0]
    if not authority.since_s <= token.unix_s <= authority.until_s or not certificates.is_valid_at(
        authority.chain, token.unix_s
    ):
        return False
    try:
        return _stamps(leaf) and certificates.is_issuer_chain(authority.chain) and _signed(token, leaf)
    except (ExtensionNotFound, UnsupportedAlgorithm, ValueError, TypeError):
        return False


def _stamps(leaf: Certificate) -> bool:
    """Whether the certificate is for timestamping only (RFC 3161, 2.3)."""
    uses = leaf.extensions.get_extension_for_class(ExtendedKeyUsage)
    return uses.critical and list(uses.value) == [ExtendedKeyUsageOID.TIME_STAMPING]


def _signed(token: _Token, leaf: Certificate) -> bool:
    public = leaf.public_key()
    try:
        if isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(token.signature, token.signed, ec.ECDSA(token.algorithm))
        elif isinstance(public, rsa.RSAPublicKey):
            public.verify(token.signature, token.signed, padding.PKCS1v15(), token.algorithm)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _read(raw: bytes) -> _Token:
    """Parse a granted TimeStampResp with one signer whose attributes match the content. Raises DerError."""
    status, token = der.expect_tags(der.parse_single_value(raw, der.SEQUENCE).inner(), der.SEQUENCE, der.SEQUENCE)
    if der.expect_tags(status.inner(), der.INTEGER)[0].content != b"\x00":
        raise DerError("the timestamp authority did not grant it")
    kind, wrapped = der.expect_tags(token.inner(), der.OID, der.context_tag(0))
    if kind.content != _SIGNED_DATA:
        raise DerError("no signed data")
    parts = der.parse_single_value(wrapped.content, der.SEQUENCE).inner()
    content = _content(der.expect_tags(parts, der.INTEGER, der.SET, der.SEQUENCE)[2])
    signers = der.expect_tags(parts[-1:], der.SET)[0].inner()
    signer = der.expect_tags(signers, der.SEQUENCE)[0]
    if len(signers) != 1:
        raise DerError("not one signer")
    _, _, algorithm, attributes, _, signature = der.expect_tags(
        signer.inner(), der.INTEGER, der.SEQUENCE, der.SEQUENCE, der.context_tag(0), der.SEQUENCE, der.OCTETS
    )
    sum_name, hashed = _sum(algorithm)
    said = _attributes(attributes)
    if said.get(_CONTENT_TYPE) != (der.OID, _TST_INFO):
        raise DerError("the content type in its signed attributes is not that of a timestamp")
    if said.get(_MESSAGE_DIGEST) != (der.OCTETS, hashlib.new(sum_name, content).digest()):
        raise DerError("the digest in its signed attributes does not match its content")
    signed = bytes([der.SET]) + attributes.whole[1:]  # hashed with the tag of a SET (RFC 5652, 5.4)
    return _info(content)._replace(signed=signed, signature=signature.content, algorithm=hashed)


def _content(encapsulated: Value) -> bytes:
    kind, wrapped = der.expect_tags(encapsulated.inner(), der.OID, der.context_tag(0))
    if kind.content != _TST_INFO:
        raise DerError("its content is not of the type of a timestamp")
    return der.parse_single_value(wrapped.content, der.OCTETS).content


def _info(content: bytes) -> _Token:
    """Parse a TSTInfo of version 1."""
    parts = der.parse_single_value(content, der.SEQUENCE).inner()
    version, _, imprint, _, time = der.expect_tags(parts, der.INTEGER, der.OID, der.SEQUENCE, der.INTEGER, der.TIME)
    if version.content != b"\x01":
        raise DerError("of another version")
    algorithm, summed = der.expect_tags(imprint.inner(), der.SEQUENCE, der.OCTETS)
    name, hashed = _sum(algorithm)
    return _Token(der.unix_s(time), name, summed.content, b"", b"", hashed)


def _sum(algorithm: Value) -> tuple[str, HashAlgorithm]:
    found = _SUMS.get(der.expect_tags(algorithm.inner(), der.OID)[0].content)
    if found is None:
        raise DerError("an unknown hash algorithm")
    return found


def _attributes(found: Value) -> dict[bytes, tuple[int, bytes]]:
    """Return the single value of each attribute; duplicates are rejected."""
    said: dict[bytes, tuple[int, bytes]] = {}
    for one in found.inner():
        kind, many = der.expect_tags(der.expect_tags([one], der.SEQUENCE)[0].inner(), der.OID, der.SET)
        inner = many.inner()
        if kind.content in said or len(inner) != 1:
            raise DerError("an attribute occurs twice")
        said[kind.content] = (inner[0].tag, inner[0].content)
    return said
