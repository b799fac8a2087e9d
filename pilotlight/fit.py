"""What `pilotlight explain fit` knows of a Model's artifact, in the words of `autoscaler.fit`. I/O: reads it."""

from __future__ import annotations

from artifacts.gguf import GgufError
from artifacts.hfconfig import ConfigError
from autoscaler.fit import Needs, Part
from autoscaler.model import Model
from pilotlight.needs import estimate, local_path, pages, serving, shape_of, share


def needs(model: Model) -> Needs:
    """What is found there, or why nothing is."""
    if local_path(model) is None:
        return Needs(problem="its artifact is not a file here, so that nothing more is known")
    try:
        made, found = estimate(model), shape_of(model)
    except (GgufError, ConfigError, OSError, ValueError) as error:
        return Needs(problem=f"its artifact cannot be read: {error}")
    if made is None or found is None:
        return Needs(problem="its artifact is of no kind that says more")
    source, shape = found
    return Needs(
        source=source,
        parts=tuple(Part(name=i.name, bytes=i.bytes, words=i.words, host=i.host) for i in made.items),
        slot_bytes=made.slot_bytes,
        token_bytes=made.token_bytes,
        context_tokens=serving(model).context_tokens or shape.context_tokens,
        share=share(model) if pages(model) else 0.0,
    )
