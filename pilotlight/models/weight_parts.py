"""The weights that a Model is made of: its own and its adapters', each from where it lies, and what of each is loaded.

Pure. Owns which of them the store brings, and which file or folder of an adapter an engine is given; of the Model's own
weights `autoscaler.weights.desired` decides that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from artifacts import files
from artifacts.formats import gguf
from autoscaler.engines import EngineError
from autoscaler.spec.artifact import normalize_artifact
from autoscaler.spec.model import Model
from autoscaler.spec.validation import ADAPTER_PATH
from autoscaler.weights.desired import choose_adapter, choose_gguf
from pilotlight.models.memory import FILE, is_fetched_by_store


class Part(NamedTuple):
    """Weights that the store is to bring."""

    artifact: str
    unsafe: bool = False
    """Its Model allows code and pickles."""


def get_own_part(model: Model) -> Part:
    """The Model's own weights, wherever they lie."""
    return Part(normalize_artifact(model.spec.artifact or ""), model.spec.allow_unsafe)


def list_adapter_parts(model: Model) -> dict[str, Part]:
    """Of each adapter that the store brings, by its name."""
    found = ((one.name, one.artifact) for one in model.spec.adapters)
    return {
        name: Part(normalize_artifact(text), model.spec.allow_unsafe)
        for name, text in found
        if not text.startswith(FILE)
    }


def list_parts(model: Model) -> tuple[Part, ...]:
    """All that the store brings, each once."""
    return tuple(
        dict.fromkeys(
            [*([get_own_part(model)] if is_fetched_by_store(model) else []), *list_adapter_parts(model).values()]
        )
    )


def use_local_files(model: Model, where: Mapping[Part, tuple[Path, list[str]]]) -> Model:
    """The Model with what is in `where` (folder, paths below it) as `file://`. Raises EngineError."""
    spec = model.spec
    if is_fetched_by_store(model) and get_own_part(model) in where:
        folder, paths = where[get_own_part(model)]
        spec = replace(spec, artifact=f"{FILE}{select_load_path(folder, paths, model)}")
    brought = {name: where[one] for name, one in list_adapter_parts(model).items() if one in where}
    if brought:
        there = (
            replace(one, artifact=f"{FILE}{_laid_over(*brought[one.name], one.name)}") if one.name in brought else one
            for one in spec.adapters
        )
        spec = replace(spec, adapters=tuple(there))
    return model if spec is model.spec else replace(model, spec=spec)


def use_placeholder_adapters(model: Model, path: str) -> Model:
    """The Model with `path` where adapters will be that are yet to be brought: for a look at its start."""
    coming = list_adapter_parts(model)
    there = tuple(replace(one, artifact=FILE + path) if one.name in coming else one for one in model.spec.adapters)
    return replace(model, spec=replace(model.spec, adapters=there)) if coming else model


def select_load_path(folder: Path, paths: list[str], model: Model) -> Path:
    """The one GGUF file, or its first part; else the folder, which has safetensors. Raises EngineError."""
    return folder / choose_gguf(gguf.list_base_files(paths), model)


def _laid_over(folder: Path, paths: list[str], name: str) -> Path:
    """What of these files is the adapter. Raises EngineError."""
    found = folder / choose_adapter(files.list_adapters(paths), name)
    if not ADAPTER_PATH.fullmatch(FILE + str(found)):
        raise EngineError(f"adapter {name}: {found} has one of , : = in it, which engines read as something else")
    return found
