"""A private sigstore for tests, as of Rekor v2: a log without timestamps, and an authority that timestamps signatures.

Follows the specifications with keys of this process, so that each test can break one thing. sigstore-python 4.5.1
accepts the results of `signed` and `of_bytes`, given ids, addresses and kinds of keys in `trusted` (except for its
check of the certificate chain, which requires key identifiers).
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from artifacts.signatures import payloads
from tests.support.builders.artifacts.cosign_signatures import b64, envelope, message
from tests.support.builders.artifacts.sigstore import AT_S, SINCE, Sigstore, name, path, private, tree, usage

SHA256 = bytes.fromhex("608648016503040201")
SIGNED_DATA, TST_INFO = bytes.fromhex("2a864886f70d010702"), bytes.fromhex("2a864886f70d0109100104")
CONTENT_TYPE, MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010903"), bytes.fromhex("2a864886f70d010904")
ECDSA = bytes.fromhex("2a8648ce3d040302")
LOG = "log2.example"


def tlv(tag: int, *parts: bytes) -> bytes:
    """One DER value."""
    content = b"".join(parts)
    size = len(content)
    long = b"" if size < 128 else size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(long) if long else size]) + long + content


def sequence(*parts: bytes) -> bytes:
    return tlv(0x30, *parts)


def number(value: int) -> bytes:
    return tlv(0x02, bytes([value]))


def oid(value: bytes) -> bytes:
    return tlv(0x06, value)


def info(of: bytes, unix_s: float, *, version: int = 1, time: str = "") -> bytes:
    """A TSTInfo: the content existed at that time."""
    reported = time or datetime.fromtimestamp(unix_s, UTC).strftime("%Y%m%d%H%M%SZ")
    imprint = sequence(sequence(oid(SHA256)), tlv(0x04, hashlib.sha256(of).digest()))
    return sequence(number(version), oid(b"\x2a\x03"), imprint, number(7), tlv(0x18, reported.encode()))


class Second(Sigstore):
    """One complete installation."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.clock, self.clocks = ed25519.Ed25519PrivateKey.generate(), private(), private()
        self.clock_root = self._authority(self.clocks, self.clocks, "clocks", "clocks", ca=True)
        self.stamper = self.stamps(ExtendedKeyUsageOID.TIME_STAMPING)

    def stamps(
        self, *purposes: x509.ObjectIdentifier, critical: bool = True, by: ec.EllipticCurvePrivateKey | None = None
    ) -> x509.Certificate:
        """Creates the certificate of the timestamping authority."""
        return (
            x509.CertificateBuilder(name("clocks"), name("clock"), self.clock.public_key(), 9)
            .not_valid_before(SINCE - timedelta(days=1))
            .not_valid_after(SINCE + timedelta(days=1000))
            .add_extension(usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=critical)
            .sign(by or self.clocks, hashes.SHA256())
        )

    @property
    def log_id(self) -> bytes:
        """The id of an Ed25519 log in checkpoints (C2SP signed notes)."""
        raw = self.second.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return hashlib.sha256(f"{LOG}\n".encode() + b"\x01" + raw).digest()

    def trusted(self) -> dict[str, Any]:
        """See Sigstore."""
        found, start = super().trusted(), "2025-12-01T00:00:00Z"
        public = self.second.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        log = {
            "publicKey": {"rawBytes": b64(public), "validFor": {"start": start}},
            "logId": {"keyId": b64(self.log_id)},
        }
        chain = [{"rawBytes": b64(one.public_bytes(Encoding.DER))} for one in (self.stamper, self.clock_root)]
        found["tlogs"].append(log)
        return found | {"timestampAuthorities": [{"certChain": {"certificates": chain}, "validFor": {"start": start}}]}

    def stamp(
        self, of: bytes, unix_s: float = AT_S, *, by: ec.EllipticCurvePrivateKey | None = None, status: int = 0,
        content: bytes | None = None, summed: bytes | None = None, kind: bytes = TST_INFO, signers: int = 1,
    ) -> bytes:  # fmt: skip
        """A TimeStampResp."""
        content = info(of, unix_s) if content is None else content
        digest = hashlib.sha256(content if summed is None else summed).digest()
        attributes = [
            sequence(oid(CONTENT_TYPE), tlv(0x31, oid(kind))),
            sequence(oid(MESSAGE_DIGEST), tlv(0x31, tlv(0x04, digest))),
        ]
        signature = (by or self.clock).sign(tlv(0x31, *attributes), ec.ECDSA(hashes.SHA256()))
        issuer = sequence(self.stamper.issuer.public_bytes(), number(9))
        signer = sequence(
            number(1), issuer, sequence(oid(SHA256)), tlv(0xA0, *attributes), sequence(oid(ECDSA)), tlv(0x04, signature)
        )
        inside = sequence(oid(TST_INFO), tlv(0xA0, tlv(0x04, content)))
        signed = sequence(number(3), tlv(0x31, sequence(oid(SHA256))), inside, tlv(0x31, *[signer] * signers))
        return sequence(sequence(number(status)), sequence(oid(SIGNED_DATA), tlv(0xA0, signed)))

    def second_entry(self, body: bytes) -> dict[str, Any]:
        """An element of `tlogEntries` as of Rekor v2."""
        leaves = [b"before", body, b"after"]
        head = f"{LOG}\n{len(leaves)}\n{b64(tree(leaves))}\n"
        checkpoint = b64(self.log_id[:4] + self.second.sign(head.encode()))
        return {
            "logIndex": "1",
            "logId": {"keyId": b64(self.log_id)},
            "kindVersion": {"kind": json.loads(body)["kind"], "version": "0.0.2"},
            "inclusionProof": {
                "logIndex": "1", "rootHash": b64(tree(leaves)), "treeSize": str(len(leaves)),
                "hashes": [b64(one) for one in path(1, leaves)],
                "checkpoint": {"envelope": f"{head}\n\u2014 {LOG} {checkpoint}\n"},
            },
            "canonicalizedBody": b64(body),
        }  # fmt: skip

    def vouched(self, document: dict[str, Any], leaf: x509.Certificate, unix_s: int = AT_S) -> dict[str, Any]:
        """See Sigstore."""
        return self.entered(document, leaf, "hashedrekord", unix_s)

    def entered(self, document: dict[str, Any], leaf: x509.Certificate, kind: str, unix_s: int) -> dict[str, Any]:
        """`kind`: the kind of the entry; an envelope may be logged as either."""
        der = b64(leaf.public_bytes(Encoding.DER))
        if "dsseEnvelope" in document:
            inner = document["dsseEnvelope"]
            signature, payload = inner["signatures"][0]["sig"], base64.b64decode(inner["payload"])
            content = payload if kind == "dsse" else payloads.encode_pae(payloads.IN_TOTO, payload)
            summed = b64(hashlib.sha256(content).digest())
        else:
            inner = document["messageSignature"]
            signature, summed = inner["signature"], inner["messageDigest"]["digest"]
        of = {"algorithm": "SHA2_256", "digest": summed}
        verifier = {"keyDetails": "PKIX_ECDSA_P256_SHA_256", "x509Certificate": {"rawBytes": der}}
        one = {"content": signature, "verifier": verifier}
        spec: dict[str, Any] = {"hashedRekordV002": {"data": of, "signature": one}}
        if kind == "dsse":
            spec = {"dsseV002": {"payloadHash": of, "signatures": [one]}}
        body = json.dumps({"apiVersion": "0.0.2", "kind": kind, "spec": spec}).encode()
        stamp = self.stamp(base64.b64decode(signature), unix_s)
        material = {
            "certificate": {"rawBytes": der},
            "tlogEntries": [self.second_entry(body)],
            "timestampVerificationData": {"rfc3161Timestamps": [{"signedTimestamp": b64(stamp)}]},
        }
        return document | {"verificationMaterial": material}

    def as_dsse(self) -> dict[str, Any]:
        """A complete bundle over a statement that is logged as `dsse`."""
        key = private()
        return self.entered(envelope(key), self.leaf(key), "dsse", AT_S)

    def of_bytes(self, content: bytes, unix_s: int = AT_S) -> dict[str, Any]:
        """A complete bundle over bytes, stamped at that time."""
        key = private()
        return self.vouched(message(key, content), self.leaf(key), unix_s)
