"""Signatures in the formats of cosign: keys, payloads and bundles of the test, valid or broken in chosen ways."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from artifacts.signatures import payloads, public_keys
from artifacts.signatures.bundles import BUNDLE
from artifacts.signatures.policy import Bundled, Cosign
from artifacts.signatures.public_keys import PublicKey

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey

SIGNED = "sha256:" + hashlib.sha256(b"a manifest").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"another manifest").hexdigest()


def set_value(document: Any, *at: str | int, to: object) -> None:
    """Sets the value at this path of a JSON document; None removes it."""
    *parents, last = at
    for name in parents:
        document = document[name]
    document[last] = to
    if to is None:
        del document[last]


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def pem(private: Private) -> bytes:
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key(private: Private) -> PublicKey:
    return public_keys.parse_public_key(pem(private))


def sign(private: Private, message: bytes) -> bytes:
    if isinstance(private, ed25519.Ed25519PrivateKey):
        return private.sign(message)
    if isinstance(private, rsa.RSAPrivateKey):
        return private.sign(message, padding.PKCS1v15(), hashes.SHA256())
    return private.sign(message, ec.ECDSA(hashes.SHA256()))


def payload(digest: str = SIGNED, **critical: object) -> bytes:
    of = {
        "identity": {"docker-reference": "registry.example/team/model"},
        "image": {"docker-manifest-digest": digest},
        "type": payloads.COSIGN_TYPE,
    }
    return json.dumps({"critical": of | critical, "optional": None}).encode()


def cosign(private: Private, text: bytes | None = None) -> Cosign:
    text = payload() if text is None else text
    return Cosign("simplesigning", text, b64(sign(private, text)))


def statement(digest: str = SIGNED, **more: object) -> bytes:
    algorithm, _, digits = digest.partition(":")
    of = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {algorithm: digits}}],
        "predicateType": payloads.SIGNED,
        "predicate": {},
    }
    return json.dumps(of | more).encode()


def envelope(private: Private, text: bytes | None = None) -> dict[str, Any]:
    text = statement() if text is None else text
    signature = sign(private, payloads.encode_pae(payloads.IN_TOTO, text))
    return {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": "aGludA=="}},
        "dsseEnvelope": {
            "payload": b64(text),
            "payloadType": payloads.IN_TOTO,
            "signatures": [{"sig": b64(signature)}],
        },
    }


def message(private: Private, content: bytes = b"a manifest") -> dict[str, Any]:
    return {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": ""}},
        "messageSignature": {
            "messageDigest": {"algorithm": "SHA2_256", "digest": b64(hashlib.sha256(content).digest())},
            "signature": b64(sign(private, content)),
        },
    }


def bundled(document: dict[str, Any]) -> Bundled:
    return Bundled("bundle", json.dumps(document).encode())
