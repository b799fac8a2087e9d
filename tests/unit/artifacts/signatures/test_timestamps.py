"""Signatures whose log states no time (Rekor v2, point 17): timestamped by a trusted authority, or rejected.

tests/golden/signatures/rekor2.json is from sigstore's staging instance (test data of sigstore-conformance, Apache-2.0:
bundles over `a.txt` and over a statement, checkpoints with additional signatures of others, and a late timestamp).
"""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import Certificate
from cryptography.x509.oid import ExtendedKeyUsageOID

from artifacts.digest import Digest
from artifacts.signatures import policy as signatures
from artifacts.signatures import trust_root
from artifacts.signatures.certificates import Identity
from artifacts.signatures.policy import Policy
from artifacts.signatures.timestamps import TIMESTAMPS_MAX
from tests.support.builders.artifacts.cosign_signatures import SIGNED, b64, bundled, envelope
from tests.support.builders.artifacts.sigstore import AT_S, SINCE, WHO, private
from tests.support.builders.artifacts.sigstore_rekor_v2 import SIGNED_DATA, Second, info

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "signatures" / "rekor2.json").read_text())
BEACON = Identity(
    "https://github.com/sigstore-conformance/extremely-dangerous-public-oidc-beacon/.github/workflows/"
    "extremely-dangerous-oidc-beacon.yml@refs/heads/main",
    "https://token.actions.githubusercontent.com",
)
A_TXT = Digest("sha256:a0cfc71271d6e278e57cd332ff957c3f7043fdda354c4cbb190a30d56efa01bf")
DIGEST, CONTENT = Digest(SIGNED), b"a manifest"
OURS = Second()


def rooted(trusted: dict[str, Any], who: Identity = WHO) -> Policy:
    return Policy("enforce", identities=(who,), root=trust_root.parse_trust_root(json.dumps(trusted).encode()))


ENFORCE = rooted(OURS.trusted())


def why(document: dict[str, Any], policy: Policy = ENFORCE, digest: Digest = DIGEST) -> str:
    """Return why the signature is rejected, or an empty string if it is accepted."""
    verdict = signatures.evaluate_signatures(digest, [bundled(document)], policy)
    return "" if verdict.publish else verdict.lines[1].removeprefix("bundle: ")


def stamped(*stamps: bytes) -> dict[str, Any]:
    """Return a bundle over a manifest with other timestamps."""
    document = copy.deepcopy(WHOLE)
    document["verificationMaterial"]["timestampVerificationData"] = {
        "rfc3161Timestamps": [{"signedTimestamp": b64(one)} for one in stamps]
    }
    return document


WHOLE = OURS.of_bytes(CONTENT)
SIGNATURE = base64.b64decode(WHOLE["messageSignature"]["signature"])
NOBODYS = "its timestamp is not from an authority that the trusted root lists for the time in the timestamp"


def public(name: str = "happy-path") -> tuple[dict[str, Any], Policy]:
    case = copy.deepcopy(GOLDEN["cases"][name])
    return case["bundle"], rooted(case["root"], BEACON)


def test_sigstore_staging_signature_is_accepted() -> None:
    assert why(*public(), A_TXT) == ""
    assert why(*public(), DIGEST) == "it signs another digest"
    # all checks pass, and then the statement is read: it describes a build
    assert why(*public("dsse-happy-path"), A_TXT).startswith("its statement is not of type")


@pytest.mark.parametrize("name", GOLDEN["checkpoints"])
def test_checkpoint_is_accepted_only_if_signed_by_its_own_log(name: str) -> None:
    document, policy = public()
    proof = document["verificationMaterial"]["tlogEntries"][0]["inclusionProof"]
    proof["checkpoint"]["envelope"] = GOLDEN["checkpoints"][name]
    bad = name.endswith("_fail")
    assert why(document, policy, A_TXT) == (
        "its log entry's checkpoint is for another tree, or not signed by its log" * bad
    )


def test_timestamp_after_certificate_expiry_is_rejected() -> None:
    document, policy = public()
    late = {"rfc3161Timestamps": [{"signedTimestamp": GOLDEN["late"]}]}
    document["verificationMaterial"]["timestampVerificationData"] = late
    assert "was not valid at the time of signing" in why(document, policy, A_TXT)


@pytest.mark.parametrize(
    "document", [OURS.of_bytes(CONTENT), OURS.signed(), OURS.as_dsse()], ids=["bytes", "statement", "dsse"]
)
def test_each_log_entry_kind_is_accepted_only_for_its_own_bundle(document: dict[str, Any]) -> None:
    assert why(document) == ""
    assert "is not in the trusted root" in why(document, rooted(Second().trusted()))
    body = document["verificationMaterial"]["tlogEntries"][0]["canonicalizedBody"]
    for other in (OURS.signed(), OURS.of_bytes(CONTENT), OURS.as_dsse()):
        entry = other["verificationMaterial"]["tlogEntries"][0]
        assert entry["canonicalizedBody"] != body
        material = document["verificationMaterial"] | {"tlogEntries": [entry]}
        message = why(document | {"verificationMaterial": material})
        assert message in {"its log entry is for another signature", "its log entry is of an unsupported kind"}


@pytest.mark.point("17")
def test_signature_without_a_trusted_timestamp_is_rejected() -> None:
    bare = copy.deepcopy(WHOLE)
    del bare["verificationMaterial"]["timestampVerificationData"]
    assert "has no timestampVerificationData" in why(bare)
    assert "does not have 1 to 8 timestamps" in why(stamped())
    assert "does not have 1 to 8 timestamps" in why(stamped(*[OURS.stamp(SIGNATURE)] * (TIMESTAMPS_MAX + 1)))
    assert why(stamped(OURS.stamp(SIGNATURE, by=private()))) == NOBODYS
    assert why(stamped(Second().stamp(SIGNATURE))) == NOBODYS
    assert why(stamped(Second().stamp(SIGNATURE), OURS.stamp(SIGNATURE))) == "", (
        "timestamps of other authorities are no evidence"
    )
    trusted = OURS.trusted()
    del trusted["timestampAuthorities"]
    assert why(WHOLE, rooted(trusted)) == NOBODYS


@pytest.mark.point("17")
def test_timestamp_of_other_content_or_outside_validity_is_rejected() -> None:
    assert why(stamped(OURS.stamp(b"another signature"))) == "its timestamp is for other content"
    assert why(stamped(OURS.stamp(SIGNATURE), OURS.stamp(b"x"))) == "its timestamp is for other content"
    late = OURS.stamp(SIGNATURE, AT_S + 3600)
    assert "was not valid at the time of signing" in why(stamped(late))
    assert "was not valid at the time of signing" in why(stamped(OURS.stamp(SIGNATURE), late))
    assert why(stamped(OURS.stamp(SIGNATURE, SINCE.timestamp() - 3 * 86400))) == NOBODYS


@pytest.mark.point("17")
def test_signature_by_expired_timestamp_authority_or_log_is_rejected() -> None:
    for end, expected in (("2026-01-01T00:01:00Z", True), ("2026-01-01T00:03:00Z", False)):
        trusted = OURS.trusted()
        trusted["timestampAuthorities"][0]["validFor"]["end"] = end
        assert why(WHOLE, rooted(trusted)) == NOBODYS * expected
        trusted = OURS.trusted()
        trusted["tlogs"][1]["publicKey"]["validFor"]["end"] = end
        assert ("the log was not in use" in why(WHOLE, rooted(trusted))) is expected
    trusted = OURS.trusted()
    del trusted["timestampAuthorities"][0]["validFor"]["start"]
    assert why(WHOLE, rooted(trusted)) == NOBODYS


@pytest.mark.point("17")
@pytest.mark.parametrize(
    "stamper",
    [
        OURS.stamps(ExtendedKeyUsageOID.CODE_SIGNING),
        OURS.stamps(ExtendedKeyUsageOID.TIME_STAMPING, ExtendedKeyUsageOID.CODE_SIGNING),
        OURS.stamps(ExtendedKeyUsageOID.TIME_STAMPING, critical=False),
        Second().stamper,
        OURS.stamps(ExtendedKeyUsageOID.TIME_STAMPING, by=private()),
        OURS.leaf(OURS.clock),
    ],
    ids=["for-code", "for-both", "not-critical", "another", "by-another", "no-stamper"],
)
def test_certificate_not_valid_for_timestamping_is_rejected(stamper: Certificate) -> None:
    trusted = OURS.trusted()
    raw = b64(stamper.public_bytes(Encoding.DER))
    trusted["timestampAuthorities"][0]["certChain"]["certificates"][0]["rawBytes"] = raw
    assert why(WHOLE, rooted(trusted)) == NOBODYS


@pytest.mark.point("17")
@pytest.mark.parametrize(
    ("stamp", "message"),
    [
        (OURS.stamp(SIGNATURE, status=2), "the timestamp authority did not grant it"),
        (OURS.stamp(SIGNATURE, summed=b"x"), "the digest in its signed attributes does not match its content"),
        (
            OURS.stamp(SIGNATURE, kind=SIGNED_DATA),
            "the content type in its signed attributes is not that of a timestamp",
        ),
        (OURS.stamp(SIGNATURE, signers=2), "not one signer"),
        (OURS.stamp(SIGNATURE, content=info(SIGNATURE, AT_S, version=2)), "of another version"),
        (OURS.stamp(SIGNATURE, content=info(SIGNATURE, AT_S, time="20260101000200")), "an invalid time"),
        (OURS.stamp(SIGNATURE, content=info(SIGNATURE, AT_S, time="20261301000200Z")), "an invalid time"),
        (OURS.stamp(SIGNATURE)[:-1], "a value is longer than the rest of the input"),
        (OURS.stamp(SIGNATURE) + b"\x05\x00", "not one value"),
        (b"\x30\x80\x00\x00", "a length is invalid, or not in its shortest encoding"),
    ],
    ids=["status", "content", "type", "signers", "version", "short-time", "month", "cut", "longer", "length"],
)
def test_signature_with_a_malformed_timestamp_is_rejected(stamp: bytes, message: str) -> None:
    assert message in why(stamped(stamp))


@pytest.mark.point("17")
def test_timestamp_with_any_changed_content_byte_is_rejected() -> None:
    """Except for the serial, the signer's name and the digest algorithms, whose content is checked in other ways."""
    good = OURS.stamp(SIGNATURE)
    held = []
    for at in range(len(good)):
        other = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        if not why(stamped(other)):
            held.append(at)
    content_at = good.index(info(SIGNATURE, AT_S))
    signature_at = len(good) - 72
    assert not [at for at in held if content_at <= at < content_at + len(info(SIGNATURE, AT_S))]
    assert not [at for at in held if at >= signature_at]


def test_version_0_0_1_log_entry_without_inclusion_promise_is_rejected() -> None:
    key = private()
    document = OURS.entered(envelope(key), OURS.leaf(key), "dsse", AT_S)
    entry = document["verificationMaterial"]["tlogEntries"][0]
    body = json.loads(base64.b64decode(entry["canonicalizedBody"]))
    material = document["verificationMaterial"] | {
        "tlogEntries": [OURS.second_entry(json.dumps(body | {"apiVersion": "0.0.1"}).encode())]
    }
    assert "no inclusion promise of its log" in why(document | {"verificationMaterial": material})


@pytest.mark.point("17")
@pytest.mark.parametrize("kind", ["hashedrekord", "dsse"])
def test_log_entry_of_another_digest_or_certificate_is_rejected(kind: str) -> None:
    key = private()
    leaf = OURS.leaf(key)
    document = OURS.entered(envelope(key), leaf, kind, AT_S)
    body = json.loads(base64.b64decode(document["verificationMaterial"]["tlogEntries"][0]["canonicalizedBody"]))

    def entered() -> str:
        entries = {"tlogEntries": [OURS.second_entry(json.dumps(body).encode())]}
        return why(document | {"verificationMaterial": document["verificationMaterial"] | entries})

    assert entered() == ""
    inner = next(iter(body["spec"].values()))
    named = inner["signatures"][0] if kind == "dsse" else inner["signature"]
    named["verifier"]["x509Certificate"]["rawBytes"] = b64(OURS.leaf(private()).public_bytes(Encoding.DER))
    assert entered() == "its log entry is for another certificate"
    inner["payloadHash" if kind == "dsse" else "data"]["digest"] = b64(bytes(32))
    assert entered() == "its log entry is for another signature"
