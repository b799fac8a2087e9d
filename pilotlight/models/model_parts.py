"""The weights that a Model consists of, its own and its adapters', and which file of each an engine loads. Pure.

Decides which parts the store fetches, and which file or folder of an adapter is loaded; `autoscaler.weights.desired`
decides the latter for the Model's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from artifacts import file_kinds
from artifacts.formats import gguf
from autoscaler.documents.document_rules import ADAPTER_PATH
from autoscaler.engines import EngineError
from autoscaler.spec.artifact_name import STORED, normalize_artifact
from autoscaler.spec.model import Model
from autoscaler.weights.replica_weights import choose_adapter, choose_gguf

FILE = "file://"

REMOTE_CODE = "--trust-remote-code"
"""Option of vLLM and SGLang."""


class Part(NamedTuple):
    """Weights that the store fetches."""

    artifact: str
    unsafe: bool = False
    """Whether its Model allows code and pickles."""


def get_own_part(model: Model) -> Part:
    """Return the Model's own weights, wherever they are."""
    return Part(normalize_artifact(model.spec.artifact or ""), model.spec.allow_unsafe)


def list_adapter_parts(model: Model) -> dict[str, Part]:
    """Return the adapters that the store fetches, by name."""
    found = ((one.name, one.artifact) for one in model.spec.adapters)
    return {
        name: Part(normalize_artifact(text), model.spec.allow_unsafe)
        for name, text in found
        if not text.startswith(FILE)
    }


def list_parts(model: Model) -> tuple[Part, ...]:
    """Return all parts that the store fetches, each once."""
    return tuple(
        dict.fromkeys(
            [*([get_own_part(model)] if is_fetched_by_store(model) else []), *list_adapter_parts(model).values()]
        )
    )


def use_local_files(model: Model, where: Mapping[Part, tuple[Path, list[str]]]) -> Model:
    """Return the Model with the parts in `where` (folder, paths below it) as `file://`. Raises EngineError."""
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
    """Return the Model with `path` in place of adapters not fetched yet, to check its start."""
    coming = list_adapter_parts(model)
    there = tuple(replace(one, artifact=FILE + path) if one.name in coming else one for one in model.spec.adapters)
    return replace(model, spec=replace(model.spec, adapters=there)) if coming else model


def select_load_path(folder: Path, paths: list[str], model: Model) -> Path:
    """Return the one GGUF file or its first part, or the folder if it contains safetensors. Raises EngineError."""
    return folder / choose_gguf(gguf.list_base_files(paths), model)


def _laid_over(folder: Path, paths: list[str], name: str) -> Path:
    """Return the file or folder of the adapter. Raises EngineError."""
    found = folder / choose_adapter(file_kinds.list_adapters(paths), name)
    if not ADAPTER_PATH.fullmatch(FILE + str(found)):
        raise EngineError(
            f'adapter {name}: {found} contains a character that engines interpret (, : = or "); rename it'
        )
    return found


def local_path(model: Model) -> Path | None:
    """Return the file of a `file://` artifact, or None."""
    artifact = model.spec.artifact
    return Path(artifact.removeprefix("file://")) if artifact is not None and artifact.startswith("file://") else None


def is_fetched_by_store(model: Model) -> bool:
    """Return whether the store fetches the weights. Exception: the store refuses code of a Hub repository, so an engine
    with `--trust-remote-code` fetches its weights from the Hub itself, unless the Model sets `allowUnsafe`.
    """
    artifact = model.spec.artifact or ""
    scheme = artifact.partition("://")[0]
    taken = model.spec.allow_unsafe or REMOTE_CODE not in model.spec.args or "?" in artifact
    return scheme in STORED and (scheme != "hf" or taken)


def adapter_paths(model: Model) -> list[Path]:
    """Return the files or folders of its local adapters."""
    files = [one.artifact for one in model.spec.adapters if one.artifact.startswith(FILE)]
    return [Path(one.removeprefix(FILE)) for one in files]
