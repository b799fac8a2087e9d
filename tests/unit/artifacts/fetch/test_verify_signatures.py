"""Required signatures are verified before any fetch, and for stored Copies, too."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from artifacts.fetch.registry import Registries
from artifacts.fetch.verify_signatures import SIGNATURE, SIMPLE
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry.referrers import format_referrers_tag
from artifacts.registry_errors import PolicyError
from artifacts.signatures.policy import Policy
from tests.support.builders.artifacts.cosign_signatures import cosign, key, payload
from tests.support.builders.artifacts.packed_models import FILES, NAME, read_files
from tests.support.fakes.registry import StillClock, digest_of
from tests.unit.artifacts.fetch.test_registry import Node, node

pytestmark = pytest.mark.standard

OURS, THEIRS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
ENFORCE = Policy("enforce", (key(OURS),))


def asking(policy: Policy) -> Registries:
    return Registries(pace=StillClock(), signatures=policy)


def sign(one: Node, private: ec.EllipticCurvePrivateKey) -> None:
    """Sign the artifact as cosign does, under its tag."""
    signed = cosign(private, payload(one.digest))
    layer = {"mediaType": SIMPLE, "digest": one.fake.blob(signed.payload), "size": len(signed.payload)}
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
    body = {
        "schemaVersion": 2, "mediaType": MANIFEST, "config": empty,
        "layers": [layer | {"annotations": {SIGNATURE: signed.signature}}],
    }  # fmt: skip
    one.fake.manifest(NAME, f"{format_referrers_tag(one.digest)}.sig", json.dumps(body).encode())


@pytest.mark.point("17")
async def test_untrusted_signature_is_rejected_before_the_pull(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        sign(one, THEIRS)
        one.ways = asking(ENFORCE)
        with pytest.raises(PolicyError, match=r"refused: no valid signature that weights\.signatures requires"):
            await one.obtain()
        assert one.store.rows() == []
        sign(one, OURS)
        with await one.obtain() as copy:
            assert read_files(copy.folder) == FILES


async def test_signature_of_a_stored_copy_is_verified_on_first_use_only(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        (await one.obtain()).close()
        one.ways = asking(ENFORCE)
        with pytest.raises(PolicyError, match="the registry has no signature of it"):
            await one.kept()
        sign(one, OURS)
        for again in (False, True):
            one.fake.seen.clear()
            assert await one.kept() == FILES
            assert (one.fake.seen == []) == again, "what was seen signed is not asked for again"


async def test_warn_policy_logs_and_uses_an_unsigned_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with node(tmp_path) as one:
        one.ways = asking(ENFORCE._replace(policy="warn"))
        with caplog.at_level(logging.WARNING), await one.obtain() as copy:
            assert read_files(copy.folder) == FILES
        assert "no valid signature that weights.signatures requires; it is used anyway" in caplog.text
