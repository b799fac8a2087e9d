"""Which signatures of a manifest are accepted (point 17): by which key, over which digest, in which form.

tests/golden/signatures/keys.json was made by sigstore's own Go libraries (sigstore-go v1.2.2 `sign.Bundle`, sigstore
v1.10.8 `payload.Cosign`), with keys that were discarded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from artifacts.digest import Digest
from artifacts.signatures import policy as signatures
from artifacts.signatures import public_keys
from artifacts.signatures.payloads import PAYLOAD_BYTES_MAX, SIGNED
from artifacts.signatures.policy import Bundled, Cosign, Found, Policy, Unread
from tests.support.builders.artifacts.cosign_signatures import (
    OTHER,
    b64,
    bundled,
    cosign,
    envelope,
    key,
    message,
    payload,
    pem,
    set_value,
    sign,
    statement,
)
from tests.support.builders.artifacts.cosign_signatures import SIGNED as DIGEST_TEXT

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "signatures" / "keys.json").read_text())
OURS, THEIRS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
DIGEST = Digest(DIGEST_TEXT)
ENFORCE = Policy("enforce", (key(OURS),))
HOLDS = "no valid signature that weights.signatures requires"


def why(found: Found, policy: Policy = ENFORCE) -> str:
    """Return why the signature is rejected."""
    verdict = signatures.evaluate_signatures(DIGEST, [found], policy)
    assert (verdict.publish, verdict.signed_by) == (False, "")
    assert verdict.lines[0] == f"{DIGEST}: refused: {HOLDS}"
    return verdict.lines[1].partition(": ")[2]


def changed(*path: str | int, to: object = None) -> Bundled:
    """Return a valid bundle with one value changed or removed."""
    document = envelope(OURS)
    set_value(document, *path, to=to)
    return bundled(document)


@pytest.mark.parametrize("kind", ["p256", "rsa", "ed25519"])
def test_signatures_of_sigstore_tools_are_accepted(kind: str) -> None:
    made, digest = GOLDEN[kind], Digest(GOLDEN["digest"])
    own = public_keys.parse_public_key(made["key"].encode())
    by_cosign = Cosign("simplesigning", made["payload"].encode(), made["signature"])
    for found in (Bundled("bundle", json.dumps(made["dsse"]).encode()), by_cosign):
        verdict = signatures.evaluate_signatures(digest, [found], Policy("enforce", (key(OURS), own)))
        assert verdict == (True, f"key {own.id}", (f"{digest}: signed by key {own.id} ({found.at})",))
        assert not signatures.evaluate_signatures(digest, [found], ENFORCE).publish
        assert not signatures.evaluate_signatures(DIGEST, [found], Policy("enforce", (own,))).publish


@pytest.mark.parametrize("found", [cosign(OURS), bundled(envelope(OURS)), bundled(message(OURS))])
def test_model_with_one_valid_signature_among_invalid_ones_is_accepted(found: Found) -> None:
    beside: list[Found] = [Unread("x", "gone"), cosign(THEIRS), Bundled("x", b"{"), Cosign("x", b"", "")]
    verdict = signatures.evaluate_signatures(DIGEST, [*beside, found], ENFORCE)
    assert verdict == (True, f"key {key(OURS).id}", (f"{DIGEST}: signed by key {key(OURS).id} ({found.at})",))


def test_unsigned_model_is_rejected_only_by_the_enforce_policy() -> None:
    keys = (key(OURS),)
    off, warn = (signatures.evaluate_signatures(DIGEST, [], Policy(policy, keys)) for policy in ("off", "warn"))
    assert off == (True, "", (f"{DIGEST}: signatures are not required",))
    none = "the registry has no signature of it"
    assert warn == (True, "", (f"{DIGEST}: {HOLDS}; it is used anyway (warn)", none))
    enforce = signatures.evaluate_signatures(DIGEST, [], Policy("enforce", keys))
    assert enforce == (False, "", (f"{DIGEST}: refused: {HOLDS}", none))


@pytest.mark.point("17")
def test_signature_by_an_unknown_key_is_rejected() -> None:
    for found in (cosign(THEIRS), bundled(envelope(THEIRS)), bundled(message(THEIRS))):
        assert why(found) == "it is signed by none of the keys"
        assert why(found, Policy("enforce")) == "it is signed by none of the keys"
    ed = ed25519.Ed25519PrivateKey.generate()
    assert signatures.evaluate_signatures(DIGEST, [bundled(envelope(ed))], Policy("enforce", (key(ed),))).publish


@pytest.mark.point("17")
def test_signature_over_another_digest_is_rejected() -> None:
    for found in (
        cosign(OURS, payload(OTHER)),
        bundled(envelope(OURS, statement(OTHER))),
        bundled(message(OURS, b"another manifest")),
        cosign(OURS, payload(DIGEST.upper())),
        cosign(OURS, payload(image={"docker-manifest-digest": DIGEST, "x": 1})),
        bundled(envelope(OURS, statement(subject=[{"digest": {"sha512": DIGEST[7:]}}, {"digest": 1}, 1]))),
    ):
        assert why(found) == "it signs another digest"
    moved = message(OURS, b"another manifest")  # the signature of another manifest with our digest
    moved["messageSignature"]["messageDigest"] = message(OURS)["messageSignature"]["messageDigest"]
    assert why(bundled(moved)) == "it is signed by none of the keys"


@pytest.mark.point("17")
def test_signature_over_a_statement_of_another_type_is_rejected() -> None:
    sbom = statement(predicateType="https://spdx.dev/Document")
    assert why(bundled(envelope(OURS, sbom))) == f"its statement is not of type {SIGNED}, so it is not a signature"
    assert "of type" in why(cosign(OURS, payload(type="atomic container signature")))
    assert "critical member: 'until'" in why(cosign(OURS, payload(until="tomorrow")))
    assert "not an in-toto statement" in why(
        bundled(envelope(OURS, statement(_type="https://in-toto.io/Statement/v2")))
    )
    # the bare statement signed without an envelope, and the envelope's text as a cosign payload
    text = statement()
    document = envelope(OURS)
    document["dsseEnvelope"]["signatures"][0]["sig"] = b64(sign(OURS, text))
    assert why(bundled(document)) == "it is signed by none of the keys"
    assert why(cosign(OURS, text)) == "its payload has no critical"


@pytest.mark.point("17")
def test_signature_with_a_duplicate_json_key_is_rejected() -> None:
    twice = payload(OTHER).replace(
        b'"image":', b'"image": {"docker-manifest-digest": "%s"}, "image":' % DIGEST.encode()
    )
    assert "with the key 'image' twice" in why(cosign(OURS, twice))
    subject = statement(OTHER).replace(b'"subject":', b'"subject": [{"digest": {"sha256": "%s"}}], "subject":' % b"a")
    assert "with the key 'subject' twice" in why(bundled(envelope(OURS, subject)))
    whole = json.dumps(envelope(OURS)).encode()
    assert "with the key 'mediaType' twice" in why(Bundled("x", whole[:-1] + b', "mediaType": ""}'))


@pytest.mark.point("17")
def test_oversized_deeply_nested_or_malformed_signature_is_rejected() -> None:
    huge = payload(identity={"docker-reference": "x" * PAYLOAD_BYTES_MAX})
    assert why(cosign(OURS, huge)) == f"its payload is larger than {PAYLOAD_BYTES_MAX} bytes"
    assert "payload is missing or larger" in why(bundled(envelope(OURS, statement(predicate="x" * PAYLOAD_BYTES_MAX))))
    assert "larger than" in why(Bundled("x", b" " * (2 << 20)))
    assert "nested deeper" in why(cosign(OURS, b"[" * 20_000))
    for text in (b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"critical": 1}', b'{"critical": {"image": []}}'):
        assert why(cosign(OURS, text))
        assert why(bundled(envelope(OURS, text or b"x")))
        assert why(Bundled("x", text))
    assert "not have 1 to" in why(bundled(envelope(OURS, statement(subject=[{}] * 65))))
    for signature in ("", "=", "AAAA", "A", "AA==AA==", "QUJD\n", "-_-_", "A" * 4000):
        assert why(Cosign("x", payload(), signature))


@pytest.mark.point("17")
def test_malformed_or_ambiguous_bundles_are_rejected() -> None:
    content, material, one = ("dsseEnvelope",), ("verificationMaterial",), ("dsseEnvelope", "signatures", 0)
    signature = envelope(OURS)["dsseEnvelope"]["signatures"][0]
    for found in (
        changed("mediaType", to="application/vnd.dev.sigstore.bundle+json;version=0.1"),
        changed("mediaType"),
        changed(*content),
        changed("messageSignature", to=message(OURS)["messageSignature"]),
        changed(*material),
        changed(*material, "publicKey"),
        changed(*material, "certificate", to={"rawBytes": "AAAA"}),
        changed(*content, "payloadType", to="application/json"),
        changed(*content, "signatures", to=[]),
        changed(*content, "signatures", to=[signature, signature]),
        changed(*content, "signatures", to=[1]),
        changed(*one, "sig"),
        changed(*content, "payload", to="%%%"),
    ):
        assert why(found)


@pytest.mark.point("17")
def test_certificate_is_rejected_when_no_identity_is_configured() -> None:
    found = changed("verificationMaterial", to={"certificate": {"rawBytes": b64(b"x" * 100)}, "tlogEntries": []})
    message = "it was made with a certificate (keyless), and weights.signatures.identities is empty"
    assert why(found) == message


def test_rejection_lists_a_limited_number_of_printable_reasons() -> None:
    verdict = signatures.evaluate_signatures(DIGEST, [Unread(f"a\n{n}", "\x1b[31mgone") for n in range(9)], ENFORCE)
    assert verdict.lines[1] == "a?0: ?[31mgone"
    assert verdict.lines[-1] == "and 4 more"
    assert len(verdict.lines) == 1 + signatures.REASONS_MAX + 1


def test_public_key_is_printed_as_its_id_only() -> None:
    assert str(key(OURS)) == f"PublicKey(id='{key(OURS).id}')"
    assert public_keys.parse_public_key(pem(OURS)) == key(OURS)
