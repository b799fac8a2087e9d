"""Verifies chains of X.509 certificates, and the certificates of keyless signatures.

`is_issuer_chain` checks that each certificate of a chain was issued by the next one, `is_valid_at` that all were valid
at a time. The caller decides whether it trusts the last one.

`check_certificate` follows Fulcio's specification (github.com/sigstore/fulcio, docs/certificate-specification and
docs/oid-info). It makes each check that cosign makes, without network access: the chain at the time of signing, the key
usage, and the signed certificate timestamp (RFC 6962, 3.2). The subject (a mail address or URL) and the OIDC
issuer that the certificate names must equal the configured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from itertools import pairwise
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import BasicConstraints, Certificate
from cryptography.x509.certificate_transparency import LogEntryType, SignedCertificateTimestamp
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from artifacts.signatures.payloads import BadClaimError
from artifacts.signatures.public_keys import BadKeyError, PublicKey, hash_public_key, read_public_key
from artifacts.signatures.trust_root import Authority, Log, Root


def is_issuer_chain(path: Sequence[Certificate]) -> bool:
    """Whether each certificate was issued by the next one, which must be a CA. Raises x509.ExtensionNotFound without
    basic constraints.
    """
    return all(_is_by(child, parent) for child, parent in pairwise(path))


def is_valid_at(path: Sequence[Certificate], unix_s: float) -> bool:
    """Whether all certificates were valid at that time."""
    return all(one.not_valid_before_utc.timestamp() <= unix_s <= one.not_valid_after_utc.timestamp() for one in path)


def _is_by(child: Certificate, parent: Certificate) -> bool:
    try:
        child.verify_directly_issued_by(parent)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return parent.extensions.get_extension_for_class(BasicConstraints).value.ca


ISSUER_RAW = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_CRITICAL = frozenset(
    {
        *(ExtensionOID.KEY_USAGE, ExtensionOID.EXTENDED_KEY_USAGE, ExtensionOID.BASIC_CONSTRAINTS),
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
    }
)
_UNREADABLE = (x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)
_UTF8, _SHORT_MAX = 0x0C, 0x7F


class Identity(NamedTuple):
    """A signer as known to an identity provider."""

    subject: str
    """An e-mail address, or the URL of a workflow."""
    issuer: str
    """URL of the identity provider."""

    def __str__(self) -> str:
        return f"{self.subject} (by {self.issuer})"


class Leaf(NamedTuple):
    """A verified certificate."""

    certificate: x509.Certificate
    key: PublicKey
    identity: Identity


def check_certificate(der: bytes, unix_s: float, root: Root) -> Leaf:
    """Verify a certificate that was used at that time. Raises BadClaimError."""
    try:
        leaf = x509.load_der_x509_certificate(der)
        _check_use(leaf)
        issuer = _issuer(leaf, unix_s, root.authorities)
        _check_logged(leaf, issuer, root.certificate_logs)
        return Leaf(leaf, read_public_key(leaf.public_key()), _identity(leaf))
    except BadKeyError as error:
        raise BadClaimError(f"its certificate: {error}") from None
    except x509.ExtensionNotFound:
        raise BadClaimError(
            "its certificate lacks its key usage, its subject, or timestamps of a certificate transparency log (SCTs)"
        ) from None
    except BadClaimError:
        raise
    except (ValueError, TypeError, UnsupportedAlgorithm, *_UNREADABLE):
        raise BadClaimError("its certificate cannot be read") from None


def is_same(leaf: Leaf, named: bytes) -> bool:
    """Whether the certificate is the one in a log entry, `named`: PEM (Rekor v1) or DER."""
    try:
        read = x509.load_pem_x509_certificate if named.startswith(b"-") else x509.load_der_x509_certificate
        other = read(named)
    except ValueError:
        return False
    return other.public_bytes(Encoding.DER) == leaf.certificate.public_bytes(Encoding.DER)


def _check_use(leaf: x509.Certificate) -> None:
    if any(one.critical and one.oid not in _CRITICAL for one in leaf.extensions):
        raise BadClaimError("its certificate has an unknown critical extension")
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    uses = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if not usage.digital_signature or usage.key_cert_sign or ExtendedKeyUsageOID.CODE_SIGNING not in uses:
        raise BadClaimError("its certificate is not for signing code")


def _issuer(leaf: x509.Certificate, unix_s: float, authorities: Sequence[Authority]) -> x509.Certificate:
    """Return the issuer, if its chain was valid at that time. Raises BadClaimError."""
    for one in authorities:
        if not one.since_s <= unix_s <= one.until_s:
            continue
        path = (leaf, *one.chain)
        if is_issuer_chain(path):
            if is_valid_at(path, unix_s):
                return one.chain[0]
            raise BadClaimError("its certificate or the issuer was not valid at the time of signing")
    raise BadClaimError("its certificate is not from an authority that the trusted root lists for the time of signing")


def _check_logged(leaf: x509.Certificate, issuer: x509.Certificate, logs: Sequence[Log]) -> None:
    found = leaf.extensions.get_extension_for_class(x509.PrecertificateSignedCertificateTimestamps).value
    public = hash_public_key(issuer.public_key())
    if not any(_is_logged(leaf, public, timestamp, log) for timestamp in found for log in logs):
        raise BadClaimError(
            "its certificate has no valid timestamp (SCT) of a certificate transparency log that the trusted root lists"
        )


def _is_logged(leaf: x509.Certificate, issuer: bytes, timestamp: SignedCertificateTimestamp, log: Log) -> bool:
    when = timestamp.timestamp.replace(tzinfo=UTC)
    if timestamp.log_id != log.id or not log.at(when.timestamp()):
        return False
    if timestamp.entry_type is not LogEntryType.PRE_CERTIFICATE:
        return False
    if not isinstance(timestamp.signature_hash_algorithm, SHA256):
        return False
    text, more = leaf.tbs_precertificate_bytes, timestamp.extension_bytes
    unix_ms = int(when.replace(microsecond=0).timestamp()) * 1000 + when.microsecond // 1000
    said = b"".join(
        [
            *(b"\x00\x00", unix_ms.to_bytes(8, "big"), b"\x00\x01", issuer),
            *(len(text).to_bytes(3, "big"), text, len(more).to_bytes(2, "big"), more),
        ]
    )
    return log.key.signed(timestamp.signature, said)


def _identity(leaf: x509.Certificate) -> Identity:
    names = list(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    if len(names) != 1 or not isinstance(names[0], x509.RFC822Name | x509.UniformResourceIdentifier):
        raise BadClaimError("its certificate does not have exactly one subject that is a mail address or a URL")
    issuers = {_text(one) for one in leaf.extensions if one.oid in {ISSUER, ISSUER_RAW}}
    if len(issuers) != 1:
        raise BadClaimError("its certificate does not name exactly one OIDC issuer")
    return Identity(names[0].value, issuers.pop())


def _text(extension: x509.Extension[x509.ExtensionType]) -> str:
    value = extension.value
    if not isinstance(value, x509.UnrecognizedExtension):
        raise BadClaimError("its certificate cannot be read")
    raw = value.value
    if extension.oid == ISSUER:
        if len(raw) < 2 or raw[0] != _UTF8 or raw[1] > _SHORT_MAX or raw[1] != len(raw) - 2:
            raise BadClaimError(f"the OIDC issuer in its certificate is not a text of at most {_SHORT_MAX} bytes")
        raw = raw[2:]
    return raw.decode()
