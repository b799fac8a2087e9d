"""A private sigstore for tests: an authority, a certificate log, a signature log, and bundles that they vouch for.

Everything follows the specifications and uses keys of this process, so that each test can break one thing. sigstore-go
v1.2.2 accepts what `signed` returns (with all of its checks enabled, and ids and addresses added to `trusted`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from artifacts.signatures.bundles import BUNDLE
from artifacts.signatures.certificates import ISSUER, Identity
from tests.support.builders.artifacts.cosign_signatures import b64, envelope, message, sign

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
AT_S = int(SINCE.timestamp()) + 120
WHO = Identity("https://ci.example/acme/.workflows/release@main", "https://login.example")
_CT = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def private() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(of: ec.EllipticCurvePrivateKey) -> bytes:
    return of.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def id_of(of: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(der(of)).digest()


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def usage(*, ca: bool) -> x509.KeyUsage:
    rest = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False, **rest
    )


def tree(leaves: Sequence[bytes]) -> bytes:
    """The root of the Merkle tree (RFC 6962, 2.1), computed from its definition."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + tree(leaves[:half]) + tree(leaves[half:])).digest()


def path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """The inclusion proof of one leaf (RFC 6962, 2.1.1), computed from its definition."""
    if len(leaves) == 1:
        return []
    half = 1 << (len(leaves) - 1).bit_length() - 1
    if index < half:
        return [*path(index, leaves[:half]), tree(leaves[half:])]
    return [*path(index - half, leaves[half:]), tree(leaves[:half])]


def octets(content: bytes) -> bytes:
    """An OCTET STRING in DER: with the shortest form of the length."""
    size = len(content)
    assert size < 256
    return (bytes([4, size]) if size < 128 else bytes([4, 0x81, size])) + content


class Sigstore:
    """One complete installation."""

    def __init__(self, *, ca: bool = True) -> None:
        """`ca`: whether the authority that issues certificates is marked as a CA."""
        self.top, self.authority, self.log, self.ct = private(), private(), private(), private()
        self.root = self._authority(self.top, self.top, "root", "root", ca=True)
        self.intermediate = self._authority(self.authority, self.top, "intermediate", "root", ca=ca)

    def _authority(
        self, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, subject: str, issuer: str, *, ca: bool
    ) -> x509.Certificate:
        return (
            x509.CertificateBuilder(name(issuer), name(subject), key.public_key(), x509.random_serial_number())
            .not_valid_before(SINCE - timedelta(days=1))
            .not_valid_after(SINCE + timedelta(days=1000))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(usage(ca=ca), critical=True)
            .sign(by, hashes.SHA256())
        )

    def trusted(self) -> dict[str, Any]:
        """The content of `trusted_root.json`."""

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            return {"publicKey": {"rawBytes": b64(der(key)), "validFor": {"start": "2025-12-01T00:00:00.000Z"}}}

        chain = [{"rawBytes": b64(one.public_bytes(Encoding.DER))} for one in (self.intermediate, self.root)]
        authority = {"certChain": {"certificates": chain}, "validFor": {"start": "2025-12-01T00:00:00Z"}}
        return {"tlogs": [log(self.log)], "certificateAuthorities": [authority], "ctlogs": [log(self.ct)]}

    def leaf(
        self,
        key: ec.EllipticCurvePrivateKey,
        who: Identity = WHO,
        *,
        purpose: x509.ObjectIdentifier = ExtendedKeyUsageOID.CODE_SIGNING,
        subjects: Sequence[str] = (),
        issuer: bytes | None = None,
        use: x509.KeyUsage | None = None,
        ct: ec.EllipticCurvePrivateKey | None = None,
        ct_signs: ec.EllipticCurvePrivateKey | None = None,
        more: Sequence[x509.Extension[Any]] = (),
    ) -> x509.Certificate:
        login = who.issuer.encode()
        names = [x509.UniformResourceIdentifier(one) for one in (who.subject, *subjects)]
        text = x509.UnrecognizedExtension(ISSUER, issuer or bytes([0x0C, len(login)]) + login)
        builder = (
            x509.CertificateBuilder(self.intermediate.subject, x509.Name([]), key.public_key(), 7)
            .not_valid_before(SINCE)
            .not_valid_after(SINCE + timedelta(minutes=10))
            .add_extension(use or usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(text, critical=False)
        )
        for one in more:
            builder = builder.add_extension(one.value, one.critical)
        bare = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        timestamps = octets(self._timestamp(bare, ct or self.ct, ct_signs))
        return builder.add_extension(x509.UnrecognizedExtension(_CT, timestamps), critical=False).sign(
            self.authority, hashes.SHA256()
        )

    def _timestamp(
        self, bare: bytes, ct: ec.EllipticCurvePrivateKey, signs: ec.EllipticCurvePrivateKey | None
    ) -> bytes:
        """A list with one SCT (RFC 6962, 3.2 and 3.3)."""
        unix_ms = (AT_S * 1000 + 123).to_bytes(8, "big")
        length = len(bare).to_bytes(3, "big")
        content = b"\x00\x00" + unix_ms + b"\x00\x01" + id_of(self.authority) + length + bare + b"\x00\x00"
        signature = sign(signs or ct, content)
        one = b"\x00" + id_of(ct) + unix_ms + b"\x00\x00\x04\x03" + len(signature).to_bytes(2, "big") + signature
        one = len(one).to_bytes(2, "big") + one
        return len(one).to_bytes(2, "big") + one

    def entry(self, body: bytes, unix_s: int = AT_S, *, kind: str = "dsse") -> dict[str, Any]:
        """An element of `tlogEntries`."""
        beside, index = 4, 2
        leaves = [b"entry %d" % n for n in range(beside)]
        leaves.insert(index, body)
        fields = {"body": b64(body), "integratedTime": unix_s, "logID": id_of(self.log).hex(), "logIndex": 9000 + index}
        head = f"log.example - 42\n{len(leaves)}\n{b64(tree(leaves))}\n"
        checkpoint = b64(id_of(self.log)[:4] + sign(self.log, head.encode()))
        return {
            "logIndex": str(9000 + index),
            "logId": {"keyId": b64(id_of(self.log))},
            "kindVersion": {"kind": kind, "version": "0.0.1"},
            "integratedTime": str(unix_s),
            "inclusionPromise": {
                "signedEntryTimestamp": b64(sign(self.log, json.dumps(fields, separators=(",", ":")).encode()))
            },
            "inclusionProof": {
                "logIndex": str(index),
                "rootHash": b64(tree(leaves)),
                "treeSize": str(len(leaves)),
                "hashes": [b64(one) for one in path(index, leaves)],
                "checkpoint": {"envelope": f"{head}\n\u2014 log.example {checkpoint}\n"},
            },
            "canonicalizedBody": b64(body),
        }

    def vouched(self, document: dict[str, Any], leaf: x509.Certificate, unix_s: int = AT_S) -> dict[str, Any]:
        """A bundle signed with a key, converted to one signed with that key's certificate."""
        pem = b64(leaf.public_bytes(Encoding.PEM))
        if "dsseEnvelope" in document:
            inner = document["dsseEnvelope"]
            summed = hashlib.sha256(base64.b64decode(inner["payload"])).hexdigest()
            signatures = [{"signature": inner["signatures"][0]["sig"], "verifier": pem}]
            whole = hashlib.sha256(json.dumps(inner).encode()).hexdigest()
            spec: dict[str, Any] = {
                "envelopeHash": {"algorithm": "sha256", "value": whole},
                "payloadHash": {"algorithm": "sha256", "value": summed},
                "signatures": signatures,
            }
            kind = "dsse"
        else:
            inner = document["messageSignature"]
            value = base64.b64decode(inner["messageDigest"]["digest"]).hex()
            spec = {
                "data": {"hash": {"algorithm": "sha256", "value": value}},
                "signature": {"content": inner["signature"], "publicKey": {"content": pem}},
            }
            kind = "hashedrekord"
        body = {"apiVersion": "0.0.1", "kind": kind, "spec": spec}
        material = {
            "certificate": {"rawBytes": b64(leaf.public_bytes(Encoding.DER))},
            "tlogEntries": [self.entry(json.dumps(body).encode(), unix_s, kind=kind)],
        }
        return document | {"mediaType": BUNDLE, "verificationMaterial": material}

    def signed(self, digest: bytes | None = None, **leaf: Any) -> dict[str, Any]:
        """A complete bundle: over these bytes if `digest` is given, else over a statement."""
        key = private()
        document = envelope(key) if digest is None else message(key, digest)
        return self.vouched(document, self.leaf(key, **leaf))
