"""Public keys: which are accepted, and which signatures match (point 17: wrong keys, malleated and garbage DER)."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.signatures import public_keys
from artifacts.signatures.public_keys import BadKeyError
from tests.support.builders.artifacts.cosign_signatures import Private, key, pem, sign
from tests.support.example_budget import examples

P256 = ec.generate_private_key(ec.SECP256R1())
KEYS: dict[str, Private] = {
    "P-256": P256,
    "RSA": rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
}
TEXT = b"text that is signed"


@pytest.mark.parametrize("kind", KEYS)
def test_signature_verifies_only_with_its_key_and_text(kind: str) -> None:
    private = KEYS[kind]
    signature = sign(private, TEXT)
    assert key(private).signed(signature, TEXT)
    assert not key(private).signed(signature, TEXT + b".")
    assert not any(key(other).signed(signature, TEXT) for name, other in KEYS.items() if name != kind)
    assert key(private).signed_sum(signature, hashlib.sha256(TEXT).digest()) == (kind != "Ed25519")
    assert key(private).id == hashlib.sha256(key(private).public.public_bytes(*DER)).hexdigest()[:16]


DER = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def number(value: int, pad: bytes = b"") -> bytes:
    raw = pad + value.to_bytes((value.bit_length() + 8) // 8, "big")
    return bytes([2, len(raw)]) + raw


@pytest.mark.point("17")
def test_signature_that_is_not_strict_der_is_rejected() -> None:
    signature = sign(P256, TEXT)
    r, s = decode_dss_signature(signature)

    def sequence(body: bytes) -> bytes:
        return bytes([0x30, len(body)]) + body

    assert sequence(number(r) + number(s)) == signature
    long_form = bytes([0x30, 0x81, len(signature) - 2]) + signature[2:]
    raw = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    broken = [
        *(b"", b"\x30", b"\x30\x00", b"\xff" * 72, b"garbage", raw, long_form, signature[:-1]),
        *(signature + b"\x00", signature + signature, sequence(number(r, b"\x00") + number(s))),
        *(sequence(number(r) + number(s) + number(1)), sequence(number(r) + number(0))),
    ]
    assert [each for each in broken if key(P256).signed(each, TEXT)] == []


@pytest.mark.point("17")
@settings(deadline=None, max_examples=examples(200), derandomize=True)
@given(kind=st.sampled_from(sorted(KEYS)), at=st.integers(0, 2047), signature=st.binary(max_size=300))
def test_signature_with_an_inverted_bit_or_random_bytes_is_rejected(kind: str, at: int, signature: bytes) -> None:
    own = bytearray(sign(KEYS[kind], TEXT))
    own[at // 8 % len(own)] ^= 1 << at % 8
    assert not key(KEYS[kind]).signed(bytes(own), TEXT)
    assert not key(KEYS[kind]).signed(signature, TEXT)


def public_pem(public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey) -> bytes:
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_malformed_weak_or_unsupported_keys_are_rejected_with_the_reason() -> None:
    begins = "expected one public key in PEM, which begins with -----BEGIN PUBLIC KEY-----"
    expected = "expected a key of ECDSA on P-256, of RSA with 2048 bits or more, or of Ed25519"
    private = P256.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    content = {
        b"": begins,
        b"AAAA": begins,
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n": begins,
        b"-----BEGIN PUBLIC KEY-----\n\xff\n-----END PUBLIC KEY-----\n": begins,
        pem(P256) * 2: begins,
        private: "this is a private key, which only the signer should have: use its public key",
        pem(P256) + b" " * public_keys.PEM_BYTES_MAX: "expected one public key, but this has more than 16384 bytes",
        public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()): expected,
        public_pem(ec.generate_private_key(ec.SECP256K1()).public_key()): expected,
        public_pem(rsa.RSAPublicNumbers(65537, (1 << 1023) + 1).public_key()): expected,
    }
    for text, refusal in content.items():
        with pytest.raises(BadKeyError) as caught:
            public_keys.parse_public_key(text)
        assert str(caught.value) == refusal
