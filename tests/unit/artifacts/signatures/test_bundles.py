"""Signatures in a registry (point 17): found in both places, bounded, and rejected in case of doubt.

tests/golden/signatures/cosign.json contains what cosign v3.1.3 (`sign --key`) stored in a registry: as bundles, under
its tag, and as its older referrers. The key was discarded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from artifacts.digest import Digest
from artifacts.fetch import verify_signatures
from artifacts.fetch.verify_signatures import SIGNATURE, SIMPLE
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_INDEX as INDEX
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import format_referrers_tag
from artifacts.signatures import public_keys
from artifacts.signatures.bundles import BUNDLE, BUNDLE_BYTES_MAX
from artifacts.signatures.policy import Bundled, Cosign, Policy, SignatureVerdict
from tests.support.builders.artifacts.cosign_signatures import OTHER, bundled, cosign, envelope, key, payload, statement
from tests.support.fakes.registry import FakeRegistry, StillClock, digest_of, index, reply

pytestmark = pytest.mark.standard

NAME = "team/model"
BODY = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}).encode()
OURS, THEIRS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
ENFORCE = Policy("enforce", (key(OURS),))
COSIGN = json.loads((Path(__file__).parents[3] / "golden" / "signatures" / "cosign.json").read_text())
NONE = "the registry has no signature of it"


class Place:
    """A registry with one manifest, and the checks of its signatures."""

    def __init__(self, fake: FakeRegistry, client: Client) -> None:
        self.fake, self.client = fake, client
        self.digest = Digest(fake.manifest(NAME, "v1", BODY))
        self.tag = f"{format_referrers_tag(self.digest)}.sig"

    async def judge(self, policy: Policy = ENFORCE, seconds_max: float = 60) -> SignatureVerdict:
        return await verify_signatures.verify_manifest(self.client, NAME, self.digest, policy, seconds_max=seconds_max)

    async def refusal(self) -> str:
        """Return the first reason for the rejection, without the kind of the signature."""
        verdict = await self.judge()
        assert not verdict.publish
        assert await self.judge(ENFORCE._replace(policy="warn")) == verdict._replace(
            publish=True, lines=(verdict.lines[0].replace(" refused:", "") + WARNED, *verdict.lines[1:])
        )
        return verdict.lines[1].partition(": ")[2] or verdict.lines[1]

    def layer(self, content: bytes, media_type: str, **annotations: str) -> dict[str, Any]:
        digest = self.fake.blob(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content), "annotations": annotations}

    def manifest(self, *layers: dict[str, Any], artifact_type: str = BUNDLE) -> bytes:
        config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
        subject = {"mediaType": MANIFEST, "digest": self.digest, "size": len(BODY)}
        of = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers, "subject": subject}
        return json.dumps(of | {"artifactType": artifact_type}).encode()

    def by_cosign(self, *signatures: Cosign) -> bytes:
        return self.manifest(*(self.layer(one.payload, SIMPLE, **{SIGNATURE: one.signature}) for one in signatures))

    def by_bundle(self, one: Bundled) -> bytes:
        return self.manifest(self.layer(one.content, BUNDLE))

    async def refer(self, body: bytes) -> None:
        """Attach the manifest as cosign does: the registry, or the tag, lists it."""
        await push.push_manifest(self.client, NAME, digest_of(body), body, MANIFEST)

    def list(self, *bodies: bytes, **changed: object) -> None:
        """List these manifests in the referrers API."""
        for body in bodies:
            self.fake.manifest(NAME, digest_of(body), body)
        of = [
            {"mediaType": MANIFEST, "digest": digest_of(one), "size": len(one), "artifactType": BUNDLE}
            for one in bodies
        ]
        listed = json.dumps(index(*(one | changed for one in of))).encode()
        self.fake.always["GET", f"/v2/{NAME}/referrers/{self.digest}"] = reply(200, listed, Content_Type=INDEX)


WARNED = "; it is used anyway (warn)"


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Place]:
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        yield Place(fake, client)


def good(at: Place) -> Bundled:
    return bundled(envelope(OURS, statement(at.digest)))


async def test_signature_policy_off_sends_no_registry_request() -> None:
    async with place() as one:
        assert (await one.judge(Policy())).publish
        assert one.fake.seen == []


@pytest.mark.parametrize("way", ["api", "stripped type", "list under the tag", "cosign's tag"])
async def test_signature_attached_by_any_method_of_cosign_is_found(way: str) -> None:
    async with place() as one:
        if way == "cosign's tag":
            text = payload(one.digest)
            one.fake.manifest(NAME, one.tag, one.by_cosign(cosign(THEIRS, text), cosign(OURS, text)))
        elif way == "list under the tag":
            await one.refer(one.by_bundle(good(one)))
            assert (NAME, format_referrers_tag(one.digest)) in one.fake.manifests
        else:
            one.list(one.by_bundle(good(one)), artifactType="" if way == "stripped type" else BUNDLE)
        verdict = await one.judge()
        assert (verdict.publish, verdict.signed_by) == (True, f"key {key(OURS).id}")


@pytest.mark.parametrize("way", ["bundle", "tag", "referrer"])
async def test_signatures_made_by_cosign_are_accepted(way: str) -> None:
    async with place() as one:
        one.digest = Digest(one.fake.manifest(NAME, "v1", COSIGN["manifest"].encode()))
        for name, (media_type, body) in COSIGN[way]["manifests"].items():
            one.fake.manifests[NAME, name] = (media_type, body.encode())
        for blob in COSIGN[way]["blobs"]:
            one.fake.blob(blob.encode())
        own = public_keys.parse_public_key(COSIGN["key"].encode())
        assert (await one.judge(Policy("enforce", (key(OURS), own)))).signed_by == f"key {own.id}"
        assert await one.refusal() == "it is signed by none of the keys"


@pytest.mark.point("17")
async def test_model_that_needs_a_signature_is_rejected_without_referrers() -> None:
    async with place() as one:
        assert await one.refusal() == NONE
        await one.refer(one.by_bundle(good(one)))
        assert (await one.judge()).publish
        one.list()  # the registry reports no referrers
        assert await one.refusal() == NONE
        one.list(one.by_bundle(good(one)), artifactType="application/vnd.other")
        assert await one.refusal() == NONE
        one.list(one.manifest())  # listed, but empty
        assert await one.refusal() == NONE


@pytest.mark.point("17")
async def test_signature_of_another_digest_or_a_bad_referrers_tag_is_rejected() -> None:
    async with place() as one:
        other = bundled(envelope(OURS, statement(OTHER)))
        await one.refer(one.by_bundle(other))  # our own signature of another model
        assert await one.refusal() == "it signs another digest"
        one.fake.manifest(NAME, one.tag, one.by_cosign(cosign(OURS, payload(OTHER))))
        assert (await one.judge()).lines[2].endswith("it signs another digest")
        one.fake.manifest(NAME, one.tag, BODY)
        one.fake.manifest(NAME, format_referrers_tag(one.digest), b'{"manifests": [{"digest": "x"}]}', INDEX)
        assert "is not a digest" in await one.refusal() or "cannot be read" in await one.refusal()
        one.fake.manifest(NAME, format_referrers_tag(one.digest), b"{", INDEX)
        assert not (await one.judge()).publish


@pytest.mark.point("17")
async def test_signature_blob_that_does_not_match_its_digest_is_rejected() -> None:
    async with place() as one:
        body = one.by_bundle(good(one))
        one.list(body)
        assert (await one.judge()).publish
        (blob,) = one.fake.blobs
        whole = one.fake.blobs[blob]
        for wrong in (b"x" * len(whole), whole[:-1], whole + b" "):
            one.fake.blobs[blob] = wrong
            assert not (await one.judge()).publish
        del one.fake.blobs[blob]
        assert f"there is no {Blob(NAME, Digest(blob), len(whole))}" in await one.refusal()
        one.fake.blobs[blob] = whole
        one.list(body, size=len(body) + 1)
        assert "expected" in await one.refusal()
        one.fake.manifests[NAME, digest_of(body)] = (MANIFEST, body + b" ")
        one.list(size=1)
        del one.fake.manifests[NAME, digest_of(body)]
        assert await one.refusal() == NONE


@pytest.mark.point("17")
@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_registry_error_rejects_the_model_unless_a_signature_is_found(status: int) -> None:
    async with place() as one:
        one.fake.always["GET", f"/v2/{NAME}/referrers/{one.digest}"] = reply(status)
        assert not (await one.judge()).publish
        assert (await one.judge(ENFORCE._replace(policy="warn"))).publish
        one.fake.manifest(NAME, one.tag, one.by_cosign(cosign(OURS, payload(one.digest))))
        assert (await one.judge()).publish  # the signature that was found is enough


@pytest.mark.point("17")
async def test_registry_timeout_during_verification_rejects_the_model() -> None:
    async with place() as one:

        async def hang(request: object) -> Any:
            await one.fake.hang()

        one.fake.always["GET", f"/v2/{NAME}/referrers/{one.digest}"] = hang
        verdict = await one.judge(seconds_max=0.05)
        assert not verdict.publish
        assert verdict.lines[1] == "the registry: did not return all signatures within 0.05 s"


@pytest.mark.point("17")
async def test_signatures_above_the_size_or_number_limit_are_not_verified() -> None:
    async with place() as one:
        huge = one.layer(b"{}", BUNDLE) | {"size": BUNDLE_BYTES_MAX + 1}
        one.list(one.manifest(huge))
        assert await one.refusal() == f"larger than {BUNDLE_BYTES_MAX} bytes"
        text = payload(one.digest)
        junk = [cosign(THEIRS, text + b" " * n) for n in range(verify_signatures.LOOKS_MAX)]
        one.list(one.by_cosign(*junk, cosign(OURS, text)))
        verdict = await one.judge()
        assert not verdict.publish
        one.fake.seen.clear()
        await one.judge()
        assert len(one.fake.asked("GET", "/blobs/")) == verify_signatures.LOOKS_MAX - 1
        one.fake.manifest(NAME, one.tag, one.by_cosign(cosign(OURS, text)))
        assert (await one.judge()).publish  # signatures crowded out in one place are found in the other


async def test_rejected_signature_is_reported_in_printable_lines_without_a_key() -> None:
    async with place() as one:
        one.list(one.by_bundle(bundled(envelope(THEIRS, statement(one.digest)))))
        verdict = await one.judge()
        assert all(line.isprintable() for line in verdict.lines)
        assert "PUBLIC KEY" not in " ".join(verdict.lines)
