"""Signatures of a manifest, as its registry has them, found before anything of it is published. I/O.

Owns the finding: what refers to the manifest (sigstore's bundles, cosign's signatures), and cosign's own tag
`sha256-HEX.sig`; bounded in number, bytes and time. Promises: what comes was checked by its digest, but where it came
from counts for nothing, and `signatures` alone judges it. A registry that fails, lies or takes too long raises nothing
here: it could not say, which is a no where signatures are enforced.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from artifacts.digest import Digest
from artifacts.errors import AbsentError, RegistryError
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Descriptor
from artifacts.oci.manifest import Manifest
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import format_referrers_tag, list_referrers
from artifacts.signatures import policy as signatures
from artifacts.signatures.bundles import BUNDLE, BUNDLE_BYTES_MAX
from artifacts.signatures.payloads import PAYLOAD_BYTES_MAX
from artifacts.signatures.policy import Bundled, Cosign, Found, Policy, SignatureVerdict, Unread

SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"
"""The annotation of such a layer."""
KINDS = frozenset({BUNDLE, "application/vnd.dev.cosign.artifact.sig.v1+json", ""})
"""Types of what refers to a manifest and may be a signature; old registries drop the type."""
_BYTES_MAX = {BUNDLE: BUNDLE_BYTES_MAX, SIMPLE: PAYLOAD_BYTES_MAX}
LOOKS_MAX = 32
"""At manifests and layers, of what refers to one and of its tag each."""
SECONDS_MAX = 60.0


async def verify_manifest(
    client: Client, repository: str, digest: Digest, policy: Policy, *, seconds_max: float = SECONDS_MAX
) -> SignatureVerdict:
    """Whether what has this digest may be published: the one that was asked for, an index where it is one."""
    if policy.policy == "off":
        return signatures.evaluate_signatures(digest, (), policy)
    search = _Search(client, repository, digest)
    try:
        async with asyncio.timeout(seconds_max):
            await search.run()
    except TimeoutError:
        search.unread("the registry", f"did not give all that it has within {seconds_max:g} s")
    return signatures.evaluate_signatures(digest, search.found, policy)


class _Search:
    """For the signatures of one manifest."""

    def __init__(self, client: Client, repository: str, digest: Digest) -> None:
        self._client, self._repository, self._digest = client, repository, digest
        self.found: list[Found] = []
        self._looks = 0

    def unread(self, at: str, why: str) -> None:
        """There is, or may be, one that cannot be judged."""
        self.found.append(Unread(at, why))

    async def run(self) -> None:
        """All of them, as far as the bounds go."""
        try:
            listed = await list_referrers(self._client, self._repository, self._digest)
        except RegistryError as error:
            self.unread("what refers to it", str(error))
            listed = []
        for one in listed:
            if one.artifact_type in KINDS:
                await self._manifest(one.digest, one.size)
        self._looks = 0
        await self._manifest(f"{format_referrers_tag(self._digest)}.sig")

    def _enough(self, at: str) -> bool:
        """So many were looked at that this one is left out; the first such is told."""
        self._looks += 1
        if self._looks == LOOKS_MAX + 1:
            self.unread(at, f"left out, as all after it: {LOOKS_MAX} were looked at before")
        return self._looks > LOOKS_MAX

    async def _manifest(self, asked: str, size: int | None = None) -> None:
        """One that has signatures as its layers; that there is none under the tag is no news."""
        if self._enough(asked):
            return
        try:
            came = await manifests.fetch_manifest(self._client, self._repository, asked, size)
            read = manifest.parse_manifest(came.body, content_type=came.media_type)
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
