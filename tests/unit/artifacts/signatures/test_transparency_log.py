"""Keyless signatures (point 17): complete, or rejected. Each test breaks one link of the chain of trust.

tests/golden/signatures/public-good.json is from the public sigstore instance (test data of sigstore-go v1.2.2,
Apache-2.0: the provenance of npm's sigstore 2.0.0, and the trusted root). Only the entry bodies of rekor.json are used.
Rekor's own code made them: `dsse` by sigstore-go's `VirtualSigstore`, `hashedrekord` from its test data.
"""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.digest import Digest
from artifacts.signatures import certificates, transparency_log, trust_root
from artifacts.signatures import policy as signatures
from artifacts.signatures.bundles import Envelope, Message
from artifacts.signatures.certificates import Identity
from artifacts.signatures.payloads import BadClaimError
from artifacts.signatures.policy import Policy
from artifacts.signatures.trust_root import BadRootError
from tests.support.builders.artifacts.cosign_signatures import (
    OTHER,
    SIGNED,
    b64,
    bundled,
    envelope,
    key,
    set_value,
    sign,
    statement,
)
from tests.support.builders.artifacts.sigstore import AT_S, SINCE, WHO, Sigstore, id_of, path, private, tree, usage
from tests.support.example_budget import examples

GOLDEN = Path(__file__).parents[3] / "golden" / "signatures"
PUBLIC, REKOR = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("public-good", "rekor"))
DIGEST = Digest(SIGNED)
OURS = Sigstore()
ENFORCE = Policy("enforce", identities=(WHO,), root=trust_root.parse_trust_root(json.dumps(OURS.trusted()).encode()))


def rooted(trusted: dict[str, Any]) -> Policy:
    """Return the policy with another trusted root."""
    return ENFORCE._replace(root=trust_root.parse_trust_root(json.dumps(trusted).encode()))


def why(document: dict[str, Any], policy: Policy = ENFORCE) -> str:
    """Return why the signature is rejected."""
    verdict = signatures.evaluate_signatures(DIGEST, [bundled(document)], policy)
    assert (verdict.publish, verdict.signed_by) == (False, "")
    return verdict.lines[1].removeprefix("bundle: ")


def changed(*at: str | int, to: object) -> dict[str, Any]:
    """Return a complete bundle with one value of its log entry changed; None removes the value."""
    document = OURS.signed()
    set_value(document, "verificationMaterial", "tlogEntries", 0, *at, to=to)
    return document


def test_public_sigstore_entry_and_certificate_are_accepted() -> None:
    root = trust_root.parse_trust_root(json.dumps(PUBLIC["root"]).encode())
    entry = transparency_log.check_log_entry(PUBLIC["entry"], root.logs)
    assert entry.unix_s is not None
    leaf = certificates.check_certificate(base64.b64decode(PUBLIC["certificate"]), entry.unix_s, root)
    assert entry.unix_s == 1692374735
    assert leaf.identity == Identity(
        "https://github.com/sigstore/sigstore-js/.github/workflows/release.yml@refs/heads/main",
        "https://token.actions.githubusercontent.com",
    )
    assert root.authorities
    assert ENFORCE.root is not None
    with pytest.raises(BadClaimError, match="a log that is not in the trusted root"):
        transparency_log.check_log_entry(PUBLIC["entry"], ENFORCE.root.logs)
    with pytest.raises(BadClaimError, match="not from an authority"):
        certificates.check_certificate(base64.b64decode(PUBLIC["certificate"]), entry.unix_s, ENFORCE.root)


@pytest.mark.parametrize("kind", ["dsse", "hashedrekord"])
def test_rekor_entry_body_yields_the_signing_certificate(kind: str) -> None:
    bundle = REKOR[kind]
    body = json.loads(base64.b64decode(bundle["verificationMaterial"]["tlogEntries"][0]["canonicalizedBody"]))
    content: Envelope | Message
    if kind == "dsse":
        signature = base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"])
        content = Envelope(base64.b64decode(bundle["dsseEnvelope"]["payload"]), signature)
    else:
        signature = base64.b64decode(bundle["messageSignature"]["signature"])
        content = Message(base64.b64decode(bundle["messageSignature"]["messageDigest"]["digest"]), signature)
    named = transparency_log.check_body(body, content)
    pem = x509.load_pem_x509_certificate(named)
    der = base64.b64decode(bundle["verificationMaterial"]["certificate"]["rawBytes"])
    assert pem.public_bytes(Encoding.DER) == der
    with pytest.raises(BadClaimError, match="for another signature"):
        transparency_log.check_body(body, content._replace(signature=b"another"))


@pytest.mark.parametrize("content", [None, b"a manifest"])
def test_keyless_signature_by_a_configured_identity_is_accepted(content: bytes | None) -> None:
    verdict = signatures.evaluate_signatures(DIGEST, [bundled(OURS.signed(content))], ENFORCE)
    assert (verdict.publish, verdict.signed_by) == (True, str(WHO))


@pytest.mark.point("17")
def test_keyless_signature_by_an_unlisted_identity_is_rejected() -> None:
    for who in (
        Identity(WHO.subject, "https://login.example.evil"),
        Identity("https://ci.example/acme/.workflows/release@main2", WHO.issuer),
        Identity(WHO.subject.upper(), WHO.issuer),
    ):
        assert why(OURS.signed(who=who)) == f"it is signed by {who}, which is not in weights.signatures.identities"
    assert "is empty" in why(OURS.signed(), ENFORCE._replace(identities=()))
    assert "is empty" in why(OURS.signed(), ENFORCE._replace(root=None))
    raw = x509.Extension(
        certificates.ISSUER_RAW, False, x509.UnrecognizedExtension(certificates.ISSUER_RAW, b"https://x")
    )
    assert why(OURS.signed(more=[raw])) == "its certificate does not name exactly one OIDC issuer"


@pytest.mark.point("17")
def test_signature_outside_certificate_validity_is_rejected() -> None:
    signer = private()
    for unix_s in (AT_S - 121, AT_S + 481, AT_S + int(timedelta(days=2000).total_seconds())):
        document = OURS.vouched(envelope(signer), OURS.leaf(signer), unix_s)
        assert why(document) == "its certificate or the issuer was not valid at the time of signing"
    document = OURS.vouched(envelope(signer), OURS.leaf(signer), AT_S + 480)
    assert signatures.evaluate_signatures(DIGEST, [bundled(document)], ENFORCE).publish
    early = OURS.vouched(envelope(signer), OURS.leaf(signer), AT_S - 90 * 86400)
    assert why(early) == "its log entry has a time at which the log was not in use"


@pytest.mark.point("17")
def test_certificate_of_another_authority_or_purpose_is_rejected() -> None:
    signer, others = private(), Sigstore()
    assert "not from an authority" in why(OURS.vouched(envelope(signer), others.leaf(signer)))
    assert "not for signing code" in why(OURS.signed(purpose=ExtendedKeyUsageOID.SERVER_AUTH))
    assert "no valid timestamp (SCT) of a certificate transparency log" in why(OURS.signed(ct=others.ct))
    strange = x509.ObjectIdentifier("1.2.3.4")
    critical = x509.Extension(strange, True, x509.UnrecognizedExtension(strange, b"x"))
    assert "critical extension" in why(OURS.signed(more=[critical]))
    named = x509.Extension(strange, False, x509.UnrecognizedExtension(strange, b"x"))
    assert signatures.evaluate_signatures(DIGEST, [bundled(OURS.signed(more=[named]))], ENFORCE).publish
    other = OURS.leaf(private())
    assert why(OURS.vouched(envelope(signer), other)) == "it is signed by none of the keys"


@pytest.mark.point("17")
def test_certificate_with_invalid_fields_is_rejected() -> None:
    others = Sigstore()
    assert "not for signing code" in why(OURS.signed(use=usage(ca=True)))
    assert "not have exactly one subject" in why(OURS.signed(subjects=["https://other.example"]))
    assert "no valid timestamp (SCT) of a certificate transparency log" in why(OURS.signed(ct_signs=others.ct))
    for text in (b"\x0c\x01ab", b"\x0c\x03ab", b"\x04\x02ab", b"\x0c", b"\x0c\x82\x00\x02ab"):
        assert "the OIDC issuer in its certificate is not a text of at most 127 bytes" in why(OURS.signed(issuer=text))
    upstart = Sigstore(ca=False)
    assert "not from an authority" in why(upstart.signed(), rooted(upstart.trusted()))


@pytest.mark.point("17")
def test_signature_by_an_expired_authority_or_log_is_rejected() -> None:
    document = OURS.signed()
    for part, expected in {
        "certificateAuthorities": "not from an authority that the trusted root lists for the time of signing",
        "ctlogs": "no valid timestamp (SCT) of a certificate transparency log",
        "tlogs": "a time at which the log was not in use",
    }.items():
        root = OURS.trusted()
        of = root[part][0].get("publicKey", root[part][0])
        of["validFor"]["end"] = (SINCE - timedelta(seconds=1)).isoformat()
        assert expected in why(document, rooted(root))
        of["validFor"]["end"] = (SINCE + timedelta(days=1)).isoformat()
        assert signatures.evaluate_signatures(DIGEST, [bundled(document)], rooted(root)).publish


@pytest.mark.point("17")
def test_changed_certificate_bytes_are_rejected() -> None:
    document = OURS.signed()
    of = document["verificationMaterial"]["certificate"]
    whole = base64.b64decode(of["rawBytes"])
    for at in range(0, len(whole), 7):
        of["rawBytes"] = b64(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert why(document)
    for junk in (b"x", whole[:-1], whole + b"x", whole * 2):
        of["rawBytes"] = b64(junk)
        assert why(document)


@pytest.mark.point("17")
def test_log_entry_or_payload_of_another_manifest_is_rejected() -> None:
    signer = private()
    leaf = OURS.leaf(signer)
    assert why(OURS.vouched(envelope(signer, statement(OTHER)), leaf)) == "it signs another digest"
    assert why(OURS.signed(b"another manifest")) == "it signs another digest"
    sbom = statement(predicateType="https://spdx.dev/Document")
    assert "it is not a signature" in why(OURS.vouched(envelope(signer, sbom), leaf))
    other = OURS.vouched(envelope(signer, statement(predicate={"n": 1})), leaf)["verificationMaterial"]["tlogEntries"]
    document = OURS.vouched(envelope(signer), leaf)
    document["verificationMaterial"]["tlogEntries"] = other
    assert why(document) == "its log entry is for another signature"
    again = OURS.vouched(document, OURS.leaf(signer))["verificationMaterial"]["tlogEntries"]
    document["verificationMaterial"]["tlogEntries"] = again
    assert why(document) == "its log entry is for another certificate"
    mixed = OURS.signed(b"a manifest")
    mixed["verificationMaterial"]["tlogEntries"] = again
    assert why(mixed) == "its log entry is of an unsupported kind"


@pytest.mark.point("17")
def test_log_entry_with_a_missing_or_invalid_proof_is_rejected() -> None:
    others = Sigstore()
    stranger = others.entry(b"{}")
    assert "no inclusion promise of its log; Rekor v1 requires one" in why(changed("inclusionPromise", to=None))
    message = "its log entry's promise is not signed by its log"
    assert why(changed("inclusionPromise", to=stranger["inclusionPromise"])) == message
    assert why(changed("integratedTime", to=str(AT_S + 1))) == message
    assert why(changed("logIndex", to="1")) == message
    assert why(changed("canonicalizedBody", to=b64(b"{}"))) == message
    assert why(changed("inclusionProof", to=None)) == "its log entry has no inclusionProof"
    assert "not in the tree" in why(changed("inclusionProof", "logIndex", to="1"))
    assert "not in the tree" in why(changed("inclusionProof", "logIndex", to="5"))
    assert "not in the tree" in why(changed("inclusionProof", "hashes", to=[]))
    assert "an invalid hash" in why(changed("inclusionProof", "hashes", 0, to=b64(b"x")))
    assert "more than 64 hashes" in why(changed("inclusionProof", "hashes", to=[b64(b"x" * 32)] * 65))
    assert "not in the tree" in why(changed("inclusionProof", to=stranger["inclusionProof"]))
    for checkpoint in (others.entry(b"{}"), OURS.entry(b"another")):
        to = checkpoint["inclusionProof"]["checkpoint"]
        assert "checkpoint is for another tree" in why(changed("inclusionProof", "checkpoint", to=to))
    forged = OURS.signed()
    proof = forged["verificationMaterial"]["tlogEntries"][0]["inclusionProof"]["checkpoint"]
    head = proof["envelope"].partition("\n\n")[0] + "\n"
    signed = b64(id_of(OURS.log)[:4] + sign(others.log, head.encode()))
    proof["envelope"] = f"{head}\n\u2014 log.example {signed}\n"
    assert "not signed by its log" in why(forged)
    for text in ("", "\n\n", "a\n5\n\n\u2014 a AAAA", "x" * 9000):
        assert "checkpoint is for another tree" in why(changed("inclusionProof", "checkpoint", "envelope", to=text))
    for number in (7, "-1", "x", "\u0663", "1" * 30, True):
        assert "is a whole number" in why(changed("integratedTime", to=number))
    for entries in (None, [], [1], [OURS.entry(b"{}")] * 2):
        document = OURS.signed()
        document["verificationMaterial"]["tlogEntries"] = entries
        assert "but does not have exactly one log entry" in why(document)


@settings(deadline=None, max_examples=examples(150), derandomize=True)
@given(size=st.integers(1, 40), at=st.integers(0, 39), data=st.data())
def test_inclusion_proof_verifies_only_for_its_leaf_and_index(size: int, at: int, data: st.DataObject) -> None:
    index, leaves = at % size, [b"%d" % n for n in range(size)]
    proof, root = path(index, leaves), tree(leaves)
    assert transparency_log.compute_tree_root(leaves[index], index, size, proof) == root
    assert transparency_log.compute_tree_root(b"x", index, size, proof) != root
    assert transparency_log.compute_tree_root(leaves[index], index, 2 * size, proof) != root
    assert transparency_log.compute_tree_root(leaves[index], index, size, [*proof, b"x" * 32]) != root
    if proof:
        assert transparency_log.compute_tree_root(leaves[index], index, size, proof[:-1]) != root
        other = data.draw(st.integers(0, size - 1).filter(lambda one: one != index))
        assert transparency_log.compute_tree_root(leaves[index], other, size, proof) != root


def test_incomplete_trusted_root_is_rejected() -> None:
    whole = OURS.trusted()
    for part, value in {
        "tlogs": [],
        "ctlogs": [{"publicKey": {"rawBytes": "AAAA", "validFor": {}}}],
        "certificateAuthorities": [{"certChain": {"certificates": []}, "validFor": {}}],
    }.items():
        with pytest.raises(BadRootError):
            trust_root.parse_trust_root(json.dumps(whole | {part: value}).encode())
    for text in (b"", b"[]", b"{}", b'{"tlogs": 1}', b" " * (2 << 20)):
        with pytest.raises(BadRootError):
            trust_root.parse_trust_root(text)
    naive = json.dumps(whole).replace("2025-12-01T00:00:00Z", "2025-12-01T00:00:00").encode()
    with pytest.raises(BadRootError, match="a time of the trusted root is invalid"):
        trust_root.parse_trust_root(naive)
    assert len(trust_root.parse_trust_root(json.dumps(whole).encode()).authorities) == 1


def test_key_and_keyless_signatures_are_accepted_if_both_are_configured() -> None:
    signer = private()
    both = ENFORCE._replace(keys=(key(signer),))
    assert (
        signatures.evaluate_signatures(DIGEST, [bundled(envelope(signer))], both).signed_by == f"key {key(signer).id}"
    )
    assert signatures.evaluate_signatures(DIGEST, [bundled(OURS.signed())], both).signed_by == str(WHO)
    # a certificate's signature does not count as the key's own, even if both keys are the same
    assert "which is not in" in why(
        OURS.vouched(envelope(signer), OURS.leaf(signer, Identity("https://x", "https://y"))), both
    )
