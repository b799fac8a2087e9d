"""Keyless signatures get the same verdict as by the `sigstore` library, which is an independent implementation.

docs/decisions/0029-sigstore-verification.md states the differences, which are tested here, and why the library is used
only in tests.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sigstore.hashes import Hashed
from sigstore.models import Bundle, TrustedRoot
from sigstore.verify import Verifier
from sigstore.verify.policy import Identity
from sigstore_models.common.v1 import HashAlgorithm

from artifacts import digest
from artifacts.signatures import policy as signatures
from artifacts.signatures import trust_root
from artifacts.signatures.policy import Policy
from tests.support.builders.artifacts.cosign_signatures import bundled, set_value
from tests.unit.artifacts.signatures.test_timestamps import A_TXT, BEACON, GOLDEN

Json = dict[str, Any]
SIGNATURES = Path(__file__).parents[3] / "golden" / "signatures"
COSIGN, REKOR, KEYS = (json.loads((SIGNATURES / f"{name}.json").read_text()) for name in ("cosign", "rekor", "keys"))
GOOD, ROOT = (GOLDEN["cases"]["happy-path"][name] for name in ("bundle", "root"))
UNSIGNED = {("logIndex",), ("kindVersion", "kind"), ("kindVersion", "version")}
"""Values of a log entry that are not signed. We do not read them: the signed body states the kind."""


def own_verdict(document: Json, root: Json) -> bool:
    policy = Policy("enforce", identities=(BEACON,), root=trust_root.parse_trust_root(json.dumps(root).encode()))
    verdict = signatures.evaluate_signatures(A_TXT, [bundled(document)], policy)
    # a statement is read after all checks of its signature; this one describes a build
    return verdict.publish or "its statement is not of type" in verdict.lines[1]


def library_verdict(document: Json, root: Json, folder: Path) -> bool:
    path = folder / "trusted_root.json"
    path.write_text(json.dumps(root | {"mediaType": str(TrustedRoot.TrustedRootType.TRUSTED_ROOT_0_1)}))
    who = Identity(identity=BEACON.subject, issuer=BEACON.issuer)
    try:
        verifier = Verifier(trusted_root=TrustedRoot.from_file(str(path)))
        bundle = Bundle.from_json(json.dumps(document))
        if "dsseEnvelope" in document:
            verifier.verify_dsse(bundle, who)
        else:
            content = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=bytes.fromhex(digest.get_hex(A_TXT)))
            verifier.verify_artifact(content, bundle, who)
    except Exception:  # noqa: BLE001 -- sigstore documents no complete list; every exception is a rejection
        return False
    return True


def changed(document: Json, *at: str | int, to: object) -> Json:
    """Return a copy with one value changed; None removes it."""
    document = copy.deepcopy(document)
    set_value(document, *at, to=to)
    return document


def golden() -> Iterator[tuple[str, Json, bool]]:
    """Yield the name of each bundle in tests/golden, the bundle, and whether it is valid."""
    entry = ("verificationMaterial", "tlogEntries", 0)
    for name, case in GOLDEN["cases"].items():
        yield name, case["bundle"], True
        for kind, text in GOLDEN["checkpoints"].items():
            document = changed(case["bundle"], *entry, "inclusionProof", "checkpoint", "envelope", to=text)
            yield f"{name} {kind}", document, name == "happy-path" and not kind.endswith("_fail")
        stamps = {"rfc3161Timestamps": [{"signedTimestamp": GOLDEN["late"]}]}
        yield f"{name} late", changed(case["bundle"], *entry[:1], "timestampVerificationData", to=stamps), False
    for name, document in REKOR.items():
        yield f"rekor {name}", document, False  # of an authority whose root is unknown
    for text in COSIGN["bundle"]["blobs"]:
        if "mediaType" in (document := json.loads(text)) and "verificationMaterial" in document:
            yield "cosign", document, False  # with a key, and the policy has none
    for name, made in KEYS.items():
        if name != "digest":
            yield f"key {name}", made["dsse"], False


@pytest.mark.parametrize(("name", "document", "valid"), [pytest.param(*one, id=one[0]) for one in golden()])
def test_own_and_sigstore_library_verdicts_agree_for_each_golden_bundle(
    tmp_path: Path, name: str, document: Json, valid: bool
) -> None:
    case = GOLDEN["cases"].get(name.partition(" ")[0], GOLDEN["cases"]["happy-path"])
    assert (own_verdict(document, case["root"]), library_verdict(document, case["root"], tmp_path)) == (valid, valid)


def leaves(of: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each text in a document."""
    inner = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    for name, value in inner:
        yield from leaves(value, (*at, name))
    if isinstance(of, str):
        yield at


@pytest.mark.deep
@pytest.mark.parametrize("at", tuple(leaves(GOOD)), ids=lambda at: ".".join(map(str, at)))
def test_changed_bundle_is_accepted_only_if_sigstore_accepts_it(tmp_path: Path, at: tuple[str | int, ...]) -> None:
    """Changes are in the first part of a value, which is signed: the certificate at the end of a timestamp is not."""
    value: Any = GOOD
    for name in at:
        value = value[name]
    texts = [value[:one] + ("B" if value[one] == "A" else "A") + value[one + 1 :] for one in (0, len(value) // 8)]
    for to in (None, "", "AAAA", "7", *texts):
        document = changed(GOOD, *at, to=to)
        if own_verdict(document, ROOT) and at[3:] not in UNSIGNED:
            assert library_verdict(document, ROOT, tmp_path), to


@pytest.mark.parametrize("kind", ["tlogs", "ctlogs", "certificateAuthorities"])
def test_expired_log_or_authority_is_accepted_only_by_sigstore_library(tmp_path: Path, kind: str) -> None:
    """If this fails after an update of the library, the decision can be reconsidered."""
    root = copy.deepcopy(ROOT)
    for one in root[kind]:
        valid = one.get("publicKey", one)["validFor"]
        valid |= {"start": "2021-01-01T00:00:00Z", "end": "2022-01-01T00:00:00Z"}
    assert (own_verdict(GOOD, root), library_verdict(GOOD, root, tmp_path)) == (False, True)
