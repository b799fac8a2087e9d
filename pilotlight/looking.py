"""What an artifact is, looked at in its registry before anything of it is pulled, as an agent tells it. I/O.

Owns what is asked of a registry for that. Promises: nothing is said of an artifact that a pull would refuse; a digest
is that of the very image that a container runtime would take on this machine.
"""

from __future__ import annotations

from msgspec.structs import replace

from artifacts import gguf, inside, kinds, resolve
from artifacts.contents import RefusedError
from artifacts.dialects import images
from artifacts.obtain import Registries
from artifacts.reference import Reference
from artifacts.tar import BadArchiveError
from autoscaler.contract import WeightsReport

TOLD_MAX = 5
"""Of what could be loaded: of more than one nobody loads any."""
NOT_WHOLE = (
    "of its compressed layers not all names are known before they are pulled, and any may be code: push them "
    "uncompressed, as `pilotlight weights push` does, or say allowUnsafe"
)


async def look(said: WeightsReport, of: Reference, by: Registries) -> WeightsReport:
    """`said`: the wish. Raises RegistryError, BadManifestError."""
    async with by.opened(of.host) as source:
        found = await resolve.resolve(source, of, resolve.here(), allow_unsafe=said.allow_unsafe, images=True)
        report = replace(said, digest=found.chosen)
        if not images.DIALECT.knows(found.manifest):
            return replace(report, no_image=f"it is no image ({found.contents.dialect})")
        try:
            found.contents.files()
            seen = await inside.look(found.contents, of.repository, source, allow_unsafe=said.allow_unsafe)
        except (BadArchiveError, RefusedError) as error:
            return replace(report, no_image=str(error))
    if not (seen.whole or said.allow_unsafe):
        return replace(report, no_image=NOT_WHOLE)
    return replace(report, image=seen.root, **told(seen.paths))


def told(paths: tuple[str, ...] | list[str]) -> dict[str, tuple[str, ...]]:
    """What of an artifact's files an engine could be given to load, or to lay over other weights."""
    return {"ggufs": tuple(gguf.bases(paths)[:TOLD_MAX]), "adapters": tuple(kinds.adapters(paths)[:TOLD_MAX])}
