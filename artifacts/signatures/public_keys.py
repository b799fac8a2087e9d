"""Public keys that people trust: texts in PEM -> keys, and whether a signature over bytes is by one of them. Pure.

Owns which kinds of keys and signatures count: ECDSA on P-256 and RSA of 2048 bits and more, both over SHA-256, and
Ed25519 (what cosign makes and takes: docs.sigstore.dev/cosign/key_management/overview). Nothing here raises for a
signature that a stranger wrote. That DER has one form to the last bit OpenSSL sees to; a test holds it to that.
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
    """No key that is taken; the text is a clause, without a capital, that says what is expected."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key."""

    id: str
    """The first 16 digits of the SHA-256 of its DER: what people call it by."""
    public: Kind = field(repr=False, compare=False)

    def signed(self, signature: bytes, message: bytes) -> bool:
        """Whether this is its signature over the message."""
        if isinstance(self.public, ed25519.Ed25519PublicKey):
            try:
                self.public.verify(signature, message)
            except InvalidSignature:
                return False
            return True
        return self.signed_sum(signature, hashlib.sha256(message).digest())

    def signed_sum(self, signature: bytes, sha256: bytes) -> bool:
        """The same, of a message of which only the sum is known; Ed25519 cannot tell, and never says yes."""
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
    """The one key of a text. Raises BadKeyError."""
    if len(pem) > PEM_BYTES_MAX:
        raise BadKeyError(f"expected one public key, and this has more than {PEM_BYTES_MAX} bytes")
    if b"PRIVATE KEY" in pem:
        raise BadKeyError("this holds a private key, which belongs to who signs alone: give its public key")
    if pem.count(b"-----BEGIN ") != 1:
        raise BadKeyError(f"expected one public key in PEM, which begins with {BEGIN}")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadKeyError(f"expected one public key in PEM, which begins with {BEGIN}") from None
    return read_public_key(public)


def read_public_key(public: object) -> PublicKey:
    """Of what was read, from PEM or a certificate. Raises BadKeyError."""
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
    """The SHA-256 of a key's DER (SubjectPublicKeyInfo): what logs are known by (RFC 6962, 3.2)."""
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
