"""`pilotlight import`: converts the configuration of other programs to Pilotlight's documents.

Reads files, folders and standard input; `autoscaler.importers` interprets them. Documents with comments go to standard
output. Settings that were not converted are also reported on standard error, so that they are visible if the documents
go to a file. Changes no files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from autoscaler.documents.document_types import DocumentError
from autoscaler.importers import knative, lingo, ollama, ollama_operator, triton_inference
from autoscaler.importers.kubeai import models
from autoscaler.importers.llama_swap import config
from autoscaler.importers.result import ConversionResult, refuse_duplicate_names, to_json, to_yaml
from pilotlight import bounded_files as reading
from pilotlight.options import PathType
from pilotlight.safe_output import write_document

FILE_BYTES_MAX = 16 << 20
"""Maximum size of a configuration, and of each file read from Ollama's store except weights."""
MODELS_MAX = 10_000
"""Maximum number of models in one store."""
STDIN = Path("-")
MODELFILE = "Modelfile"
KINDS = ("knative", "kubeai", "lingo", "llama-swap", "ollama", "ollama-operator", "triton-inference")
EXAMPLE = "pilotlight import kubeai models.yaml"


class Store(NamedTuple):
    """Ollama's folder `models`, and its manifests by name."""

    folder: Path
    manifests: dict[str, Path]


@click.command("import", epilog=f"Example: {EXAMPLE}")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("files", nargs=-1, required=True, type=PathType(path_type=Path, allow_dash=True), metavar="FILE...")
@click.option(
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="The output format: yaml prints documents, json prints the complete result.",
)
@click.option(
    "--name", default="", help="The name of the model. Only for one Modelfile, which does not contain a name."
)
def import_(kind: str, files: tuple[Path, ...], output: str, name: str) -> None:
    """Convert other programs' configuration to Pilotlight's documents, and print them.

    FILE: manifests of KubeAI's Models (and its chart's values), of Knative's Services, of ollama-operator's Models, of
    Inferences that run Triton, or of Deployments with Lingo's annotations, llama-swap's config.yaml, a Modelfile or
    Ollama's folder; `-` reads standard input. The exit status is 1 if a model was not converted.
    """
    if name and (kind != "ollama" or len(files) != 1):
        raise click.UsageError("--name requires exactly one Modelfile")
    try:
        takens = refuse_duplicate_names(_converted(kind, files, name))
    except DocumentError as error:
        raise click.UsageError(str(error)) from None
    write_document(to_json(takens) if output == "json" else to_yaml(takens))
    if not takens:
        click.echo(f"pilotlight: {', '.join(map(_shown, files))}: no Model found", err=True)
    for taken in takens:
        for key, why in taken.notes:
            click.echo(f"pilotlight: {taken.what}: not converted: {key}: {why}", err=True)
        if taken.refused:
            click.echo(f"pilotlight: {taken.what} is not converted: {taken.refused}", err=True)
    if any(taken.refused for taken in takens):
        raise SystemExit(1)


def _converted(kind: str, files: Sequence[Path], name: str) -> list[ConversionResult]:
    """Convert the files. Raises DocumentError, click.UsageError."""
    if kind == "ollama":
        return _ollama(files, name)
    sources = [(_shown(path), _text(path)) for path in files]
    if kind == "llama-swap":
        here = str(Path.cwd())
        return [taken for source, text in sources for taken in config.convert_config(source, text, os.environ, here)]
    convert: Callable[[Sequence[tuple[str, str]]], list[ConversionResult]] = {
        "kubeai": models.convert_models,
        "knative": knative.convert_services,
        "lingo": lingo.convert_workloads,
        "ollama-operator": ollama_operator.convert_models,
        "triton-inference": triton_inference.convert_inferences,
    }[kind]
    return convert(sources)


def _ollama(files: Sequence[Path], name: str) -> list[ConversionResult]:
    """Convert Modelfiles, folders with one, and stores. A Modelfile may build on a model of a store given with it."""
    stores = [store for path in files if (store := _store(path)) is not None]
    found = [one for store in stores for one in _stored(store)]
    known = {
        each: str(taken.model.spec.artifact).removeprefix("file://")
        for taken in found
        if taken.model is not None
        for each in taken.model.names()
    }
    out = []
    for path in files:
        if path == STDIN or not path.is_dir():
            out.append(_modelfile(path, name, known))
        elif _store(path) is None:
            if not (path / MODELFILE).is_file():
                raise click.UsageError(f"{path}: expected Ollama's folder, with models/manifests in it, or a Modelfile")
            out.append(_modelfile(path / MODELFILE, name, known))
    return [*found, *out]


def _modelfile(path: Path, name: str, known: dict[str, str]) -> ConversionResult:
    text = _text(path)
    called = name or ollama.parse_name_comment(text) or _name_of(path)
    if not called:
        raise click.UsageError(f"{_shown(path)}: a Modelfile does not contain the name of its model: add --name")
    folder = Path.cwd() if path == STDIN else path.absolute().parent
    return ollama.convert_modelfile(_shown(path), text, called, str(folder), known)


def _name_of(path: Path) -> str:
    """Return `mario` for `mario.Modelfile`, `Modelfile.mario` and `mario/Modelfile`."""
    if path == STDIN:
        return ""
    if path.name == MODELFILE:
        return path.absolute().parent.name
    before, _, after = path.name.partition(".")
    return after if before == MODELFILE else path.stem


def _store(path: Path) -> Store | None:
    """Return the store in Ollama's folder or in its folder of models, or None."""
    for folder in (path, path / "models"):
        manifests = folder / "manifests"
        if path != STDIN and manifests.is_dir():
            return Store(folder.absolute(), dict(_manifests(manifests)))
    return None


def _manifests(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of every manifest: HOST/NAMESPACE/NAME/TAG."""
    for number, path in enumerate(sorted(folder.glob("*/*/*/*")), 1):
        if number > MODELS_MAX:
            raise click.UsageError(f"{folder}: more than {MODELS_MAX} models")
        if path.is_file() and not path.name.startswith("."):
            yield ollama.model_name(path.relative_to(folder).parts), path


def _stored(store: Store) -> Iterator[ConversionResult]:
    blobs = store.folder / "blobs"
    for name, path in store.manifests.items():
        found = ollama.parse_manifest(str(path), _text(path))
        small = {} if found is None else found.small
        texts = {kind: _text(Path(ollama.blob_path(str(blobs), digest))) for kind, digest in small.items()}
        yield ollama.convert_stored_model(name, found, str(blobs), texts)


def _text(path: Path) -> str:
    """Return the file's text. Raises click.UsageError with a one-line message."""
    try:
        if path != STDIN:
            return reading.read_text(path, FILE_BYTES_MAX)
        return reading.decode_text(sys.stdin.buffer.read(FILE_BYTES_MAX + 1), FILE_BYTES_MAX)
    except reading.TooLargeError as error:
        raise click.UsageError(f"{_shown(path)}: {error}: not a configuration file") from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{_shown(path)}: {reading.describe_error(error)}") from None


def _shown(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)
