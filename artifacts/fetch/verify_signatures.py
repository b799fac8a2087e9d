"""Finds the signatures of a manifest in its registry before its content is published in the store. I/O.

Reads the manifest's referrers (sigstore bundles, cosign signatures) and cosign's tag `sha256-HEX.sig`, with limits on
number, bytes and time. Content is verified by its digest; where it was found counts for nothing, and only
`artifacts.signatures.policy` evaluates it. If a registry fails, lies or is too slow, no error is raised here. The
result is a signature marked as unread, which is never valid, so the manifest is rejected if signatures are enforced.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from artifacts.digest import Digest
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest, parse_manifest
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import format_referrers_tag, list_referrers
from artifacts.registry_errors import AbsentError, RegistryError
from artifacts.signatures.bundles import BUNDLE, BUNDLE_BYTES_MAX
from artifacts.signatures.payloads import PAYLOAD_BYTES_MAX
from artifacts.signatures.policy import Bundled, Cosign, Found, Policy, SignatureVerdict, Unread, evaluate_signatures

SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"
"""Layer annotation that holds the signature."""
KINDS = frozenset({BUNDLE, "application/vnd.dev.cosign.artifact.sig.v1+json", ""})
"""Artifact types of referrers that may be signatures; old registries drop the type."""
_BYTES_MAX = {BUNDLE: BUNDLE_BYTES_MAX, SIMPLE: PAYLOAD_BYTES_MAX}
LOOKS_MAX = 32
"""Maximum number of manifests and layers that are read for the referrers, and again for the tag."""
SECONDS_MAX = 60.0


async def verify_manifest(
    client: Client, repository: str, digest: Digest, policy: Policy, *, seconds_max: float = SECONDS_MAX
) -> SignatureVerdict:
    """Evaluate the signatures of the requested manifest, which may be an index, against the policy."""
    if policy.policy == "off":
        return evaluate_signatures(digest, (), policy)
    search = _Search(client, repository, digest)
    try:
        async with asyncio.timeout(seconds_max):
            await search.run()
    except TimeoutError:
        search.unread("the registry", f"did not return all signatures within {seconds_max:g} s")
    return evaluate_signatures(digest, search.found, policy)


class _Search:
    """Searches for the signatures of one manifest."""

    def __init__(self, client: Client, repository: str, digest: Digest) -> None:
        self._client, self._repository, self._digest = client, repository, digest
        self.found: list[Found] = []
        self._looks = 0

    def unread(self, at: str, why: str) -> None:
        """Record a signature, or possible signature, that cannot be evaluated."""
        self.found.append(Unread(at, why))

    async def run(self) -> None:
        """Collect all signatures within the limits."""
        try:
            listed = await list_referrers(self._client, self._repository, self._digest)
        except RegistryError as error:
            self.unread("the list of referrers", str(error))
            listed = []
        for one in listed:
            if one.artifact_type in KINDS:
                await self._manifest(one.digest, one.size)
        self._looks = 0
        await self._manifest(f"{format_referrers_tag(self._digest)}.sig")

    def _enough(self, at: str) -> bool:
        """Count a read and return whether the limit is exceeded; the first skipped item is recorded."""
        self._looks += 1
        if self._looks == LOOKS_MAX + 1:
            self.unread(at, f"skipped, and so is everything after it: at most {LOOKS_MAX} documents are read")
        return self._looks > LOOKS_MAX

    async def _manifest(self, asked: str, size: int | None = None) -> None:
        """Read a manifest whose layers are signatures; a missing tag is not an error."""
        if self._enough(asked):
            return
        try:
            came = await manifests.fetch_manifest(self._client, self._repository, asked, size)
            read = parse_manifest(came.body, content_type=came.media_type)
        except AbsentError as error:
            if size is not None:
                self.unread(asked, str(error))
            return
        except (RegistryError, BadManifestError) as error:
            self.unread(asked, str(error))
            return
        layers = read.layers if isinstance(read, Manifest) else ()
        for layer in layers:
            if layer.media_type in _BYTES_MAX:
                await self._layer(f"{layer.media_type.rpartition('.vnd.')[2]} {layer.digest}", layer)

    async def _layer(self, at: str, layer: Descriptor) -> None:
        if self._enough(at):
            return
        most = _BYTES_MAX[layer.media_type]
        if layer.size > most:
            self.unread(at, f"larger than {most} bytes")
            return
        blob = Blob(self._repository, layer.digest, layer.size)
        try:
            async with aclosing(blobs.stream_blob(self._client, blob)) as pieces:
                content = b"".join([piece async for piece in pieces])
        except RegistryError as error:
            self.unread(at, str(error))
            return
        if layer.media_type == BUNDLE:
            self.found.append(Bundled(at, content))
        else:
            self.found.append(Cosign(at, content, layer.annotations.get(SIGNATURE, "")))
