"""Trusted public keys: parses PEM, and verifies signatures. Pure.

Accepts ECDSA on P-256 and RSA of 2048 bits and more, both with SHA-256, and Ed25519 (what cosign generates and accepts:
docs.sigstore.dev/cosign/key_management/overview). Untrusted signatures never raise. OpenSSL ensures that the DER of a
signature is canonical, which a test checks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

PEM_BYTES_MAX = 16 << 10
RSA_BITS_LEAST, RSA_BITS_MAX = 2048, 8192
SIGNATURE_BYTES_MAX = RSA_BITS_MAX // 8
BEGIN = "-----BEGIN PUBLIC KEY-----"
_ID_CHARS = 16

Kind = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class BadKeyError(ValueError):
    """The key is rejected; the message is a lowercase clause that says what is expected."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key."""

    id: str
    """Key id: the first 16 hexadecimal digits of the SHA-256 of its DER."""
    public: Kind = field(repr=False, compare=False)

    def signed(self, signature: bytes, message: bytes) -> bool:
        """Whether this is the key's signature over the message."""
        if isinstance(self.public, ed25519.Ed25519PublicKey):
            try:
                self.public.verify(signature, message)
            except InvalidSignature:
                return False
            return True
        return self.signed_sum(signature, hashlib.sha256(message).digest())

    def signed_sum(self, signature: bytes, sha256: bytes) -> bool:
        """As `signed`, given only the message's hash; always false for Ed25519, which needs the message."""
        sums = Prehashed(SHA256())
        try:
            if isinstance(self.public, rsa.RSAPublicKey):
                self.public.verify(signature, sha256, padding.PKCS1v15(), sums)
            elif isinstance(self.public, ec.EllipticCurvePublicKey):
                self.public.verify(signature, sha256, ec.ECDSA(sums))
            else:
                return False
        except (InvalidSignature, ValueError):
            return False
        return True


def parse_public_key(pem: bytes) -> PublicKey:
    """Parse a PEM text with exactly one public key. Raises BadKeyError."""
    if len(pem) > PEM_BYTES_MAX:
        raise BadKeyError(f"expected one public key, but this has more than {PEM_BYTES_MAX} bytes")
    if b"PRIVATE KEY" in pem:
        raise BadKeyError("this is a private key, which only the signer should have: use its public key")
    if pem.count(b"-----BEGIN ") != 1:
        raise BadKeyError(f"expected one public key in PEM, which begins with {BEGIN}")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadKeyError(f"expected one public key in PEM, which begins with {BEGIN}") from None
    return read_public_key(public)


def read_public_key(public: object) -> PublicKey:
    """Validate a key that was loaded from PEM or a certificate. Raises BadKeyError."""
    if isinstance(public, ec.EllipticCurvePublicKey):
        taken = isinstance(public.curve, ec.SECP256R1)
    elif isinstance(public, rsa.RSAPublicKey):
        taken = RSA_BITS_LEAST <= public.key_size <= RSA_BITS_MAX
    else:
        taken = isinstance(public, ed25519.Ed25519PublicKey)
    if not taken or not isinstance(public, Kind):
        raise BadKeyError(f"expected a key of ECDSA on P-256, of RSA with {RSA_BITS_LEAST} bits or more, or of Ed25519")
    return PublicKey(hash_public_key(public).hex()[:_ID_CHARS], public)


def hash_public_key(public: PublicKeyTypes) -> bytes:
    """Return the SHA-256 of the key's DER (SubjectPublicKeyInfo), which identifies logs (RFC 6962, 3.2)."""
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
