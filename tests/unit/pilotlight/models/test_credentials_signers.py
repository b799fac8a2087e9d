"""Settings `weights.signatures`: the resulting keys, or one line that locates the error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from artifacts.signatures import trust_root
from artifacts.signatures.certificates import Identity
from artifacts.signatures.policy import Policy
from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.settings import Signatures
from pilotlight.models import registry_access
from pilotlight.models.registry_access import SignersError
from tests.support.builders.artifacts.cosign_signatures import key, pem
from tests.support.builders.artifacts.sigstore import Sigstore

OURS, OTHERS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())


def loaded(weights: str) -> Signatures:
    text = f"apiVersion: {API_VERSION}\nkind: Settings\nweights: {weights}\n"
    return parse_documents([("a.yaml", text)]).settings.weights.signatures


def test_signature_keys_given_inline_or_as_files_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "ours.pub").write_bytes(pem(OURS))
    inline = pem(OTHERS).decode().replace("\n", "\\n")
    written = loaded(f'{{signatures: {{policy: enforce, keys: [{tmp_path}/ours.pub, "{inline}"]}}}}')
    assert registry_access.load_signature_policy(written) == Policy("enforce", (key(OURS), key(OTHERS)))
    assert registry_access.load_signature_policy(loaded("{}")) == Policy("off", ())


def test_signer_identities_without_a_valid_trusted_root_are_rejected(tmp_path: Path) -> None:
    root = tmp_path / "root.json"
    root.write_text(json.dumps(Sigstore().trusted()))
    whom = f"identities: [{{subject: me@acme.example, issuer: https://login.example}}], trustedRoot: {root}"
    found = registry_access.load_signature_policy(loaded(f"{{signatures: {{policy: warn, {whom}}}}}"))
    assert found.identities == (Identity("me@acme.example", "https://login.example"),)
    assert found.root == trust_root.parse_trust_root(root.read_bytes())
    root.write_text("{}")
    with pytest.raises(SignersError, match=r"^weights.signatures.trustedRoot: /\S+: the trusted root lacks a"):
        registry_access.load_signature_policy(loaded(f"{{signatures: {{{whom}}}}}"))
    root.unlink()
    with pytest.raises(SignersError, match=r"^weights.signatures.trustedRoot: .*: No such file or directory"):
        registry_access.load_signature_policy(loaded(f"{{signatures: {{{whom}}}}}"))


@pytest.mark.parametrize(
    ("signatures", "line"),
    [
        ("policy: on", "policy: expected one of enforce, off, warn"),
        ("policy: enforce", "keys: missing; policy enforce requires keys or identities"),
        ("policy: warn, keys: []", "keys: missing; policy warn requires keys or identities"),
        ("keys: x", "keys: expected a list"),
        ("keys: [a.pub]", "keys[0]: expected a public key in PEM, which begins with -----BEGIN PUBLIC KEY-----, or an"),
        ("keys: [/a, '-----BEGIN PRIVATE KEY-----']", "keys[1]: this is a private key, which only the signer may have"),
        ("trustedRoot: /a", "trustedRoot: identities and trustedRoot must be set together"),
        ("identities: [{subject: a, issuer: b}]", "trustedRoot: identities and trustedRoot must be"),
        ("identities: [{subject: a, issuer: b}], trustedRoot: a", "trustedRoot: expected an absolute path"),
        ("identities: [{subject: a}]", "identities[0].issuer: missing"),
        ("identities: [{subject: '', issuer: b}]", "identities[0].subject: expected"),
        ("policies: off", "policies: unknown key"),
    ],
)
def test_invalid_signature_settings_error_names_the_key(signatures: str, line: str) -> None:
    with pytest.raises(DocumentError) as caught:
        loaded(f"{{signatures: {{{signatures}}}}}")
    assert str(caught.value).startswith(f"a.yaml: Settings: weights.signatures.{line}")


def test_unreadable_signature_key_is_an_error(tmp_path: Path) -> None:
    private = OURS.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "private").write_bytes(private)
    (tmp_path / "huge").write_bytes(b"x" * (1 << 20))
    (tmp_path / "text").write_text("no key")
    for name, line in {
        "none": "No such file or directory",
        "private": "this is a private key",
        "huge": "larger than 16 KiB",
        "text": "expected one public key in PEM",
    }.items():
        path = f"{tmp_path}/{name}"
        with pytest.raises(SignersError, match=line) as caught:
            registry_access.load_signature_policy(Signatures(policy="enforce", keys=(pem(OTHERS).decode(), path)))
        assert str(caught.value).startswith(f"weights.signatures.keys[1]: {path}: ")
        assert "\n" not in str(caught.value)
    with pytest.raises(SignersError, match=r"^weights.signatures.keys\[0\]: expected one public key"):
        registry_access.load_signature_policy(Signatures(policy="enforce", keys=("-----BEGIN PUBLIC KEY-----\n",)))
