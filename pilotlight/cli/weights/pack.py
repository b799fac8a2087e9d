"""`pilotlight weights pack`: finds the files of a model and writes them as an artifact to a folder.

Resolves FROM, ADAPTER and patterns on this disk. Files in a folder may be symbolic links (Hugging Face's cache consists
of them), folders may not. `artifacts.pack.pack` decides what is packed, and as what.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import click

from artifacts import file_kinds
from artifacts.pack import modelfile as packfile
from artifacts.pack import oci_layout
from artifacts.pack.pack import About, Form, Offered, PackError, Plan, build_plan
from autoscaler.documents.document_types import DocumentError
from autoscaler.importers import ollama
from autoscaler.importers.decode import DocumentErrorContext
from pilotlight.cli.import_ import FILE_BYTES_MAX, MODELFILE
from pilotlight.options import FILE, output_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_progress_bar

FILES_MAX = 100_000
"""Maximum number of files below a folder: more than any model has, so that a mistaken / is reported early."""
EXAMPLE = "pilotlight weights pack ./llama --to ./llama-oci --tag v1"
KNOWN = (*ollama.KNOWN, *packfile.MODCTL)


@click.command("pack", epilog=f"Example: {EXAMPLE}")
@click.argument("source", type=FILE, metavar="MODELFILE|FOLDER|FILE")
@click.option("--to", type=FILE, required=True, help="The folder to create: an OCI image layout.")
@click.option("--tag", default="latest", show_default=True, help="The tag of the artifact in the layout.")
@click.option(
    "--format", "form", type=click.Choice(["modelpack", "modelpack-raw"]), default="modelpack", show_default=True,
    help="The format. modelpack: also an image, which can be mounted as an image volume. modelpack-raw: the "
    "unchanged files.",
)  # fmt: skip
@click.option("--allow-unsafe", is_flag=True, help="Also pack code and pickled weights.")
@output_option
def pack(source: Path, to: Path, tag: str, form: Form, allow_unsafe: bool, output: str) -> None:  # noqa: PLR0917  click passes by keyword
    """Pack a model as an OCI artifact into a folder.

    The source is a Modelfile (Ollama's or modctl's), a folder with safetensors or GGUF files, or one such file. A
    Modelfile in the folder determines the files. The same files always produce the same digest.
    """
    try:
        plan = plan_artifact(source, allow_unsafe=allow_unsafe)
        written = _written(to, plan, form, tag, quiet=output == "json")
    except (PackError, DocumentError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or to}: {error.strerror}") from None
    _say(to, plan, written, output)


def plan_artifact(source: Path, *, allow_unsafe: bool = False) -> Plan:
    """Return the plan of what is packed. Raises PackError, DocumentError, OSError."""
    inner = source / MODELFILE
    if source.is_dir():
        if not inner.is_file():
            return build_plan(_below(source), About(), allow_unsafe=allow_unsafe)
        source = inner
    if not source.is_file():
        raise PackError(f"{source}: no such file or folder")
    if file_kinds.classify_file(source.name) not in {None, file_kinds.Kind("config")}:
        return build_plan([_file(source, source.name)], About(), allow_unsafe=allow_unsafe)
    with DocumentErrorContext(str(source) if source.name == MODELFILE else f"{source}, read as a Modelfile"):
        instructions = packfile.read_instructions(ollama.parse_modelfile(_text(source), KNOWN))
    folder = source.absolute().parent
    offered = list(instructions.texts)
    for one in instructions.models:
        offered += _named(folder, one, "FROM")
    for one in instructions.adapters:
        offered += [_as_adapter(each) for each in _named(folder, one, "ADAPTER")]
    candidates = list(_below(folder)) if instructions.patterns else []
    for kind, pattern in instructions.patterns:
        found = [one._replace(kind=kind) for one in candidates if _fits(one.path, pattern)]
        if not found:
            raise PackError(f"{source}: {pattern!r} matches no file below {folder}")
        offered += found
    plan = build_plan(offered, instructions.about, allow_unsafe=allow_unsafe)
    return plan._replace(left=(*plan.left, *instructions.left))


def _named(folder: Path, value: str, instruction: str) -> list[Offered]:
    """Return the files that FROM or ADAPTER names."""
    path = folder / value
    if path.is_dir():
        return [one for one in _below(path) if one.path != MODELFILE]
    if not path.is_file():
        raise PackError(f"{instruction} {value}: no such file or folder; give the path of the weights")
    return [_file(path, path.name)._replace(kind="weight")]


def _as_adapter(one: Offered) -> Offered:
    """Rename the file so that its name classifies it as an adapter."""
    kind = file_kinds.classify_file(one.path)
    if one.kind is None or kind is None or kind.role == "adapter":
        return one
    return one._replace(path=f"adapter-{one.path}")


def _below(folder: Path) -> Iterator[Offered]:
    """Yield the files below a folder, except hidden ones. Raises PackError, OSError."""
    found, count = [folder], 0
    while found:
        at = found.pop()
        for entry in sorted(os.scandir(at), key=lambda one: one.name):
            if entry.name.startswith("."):
                continue
            count += 1
            if count > FILES_MAX:
                raise PackError(f"{folder}: more than {FILES_MAX} files; name the folder of one model")
            if entry.is_dir(follow_symlinks=False):
                found.append(Path(entry.path))
            elif entry.is_file():
                path = Path(entry.path)
                yield _file(path, path.relative_to(folder).as_posix())


def _file(path: Path, name: str) -> Offered:
    return Offered(name, path.stat().st_size, str(path.absolute()))


def _fits(path: str, pattern: str) -> bool:
    plain = pattern.removeprefix("./").rstrip("/")
    return plain in {"", "."} or fnmatchcase(path, plain) or path.startswith(f"{plain}/")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    try:
        if len(content) <= FILE_BYTES_MAX:
            return content.decode()
    except UnicodeDecodeError:
        pass
    raise PackError(f"{path} is neither a Modelfile nor a weights file (.safetensors, .gguf)")


def _written(to: Path, plan: Plan, form: Form, tag: str, *, quiet: bool) -> oci_layout.Written:
    """Write the artifact, with a progress bar on a terminal."""
    with build_progress_bar("packing", quiet=quiet) as progress:
        task = progress.add_task("packing", total=sum(piece.size for piece in plan.pieces))
        return oci_layout.write_layout(to, plan, form, tag, lambda count: progress.advance(task, count))


def _say(to: Path, plan: Plan, written: oci_layout.Written, output: str) -> None:
    digest = written.top.blob.digest
    rows = [
        {"path": piece.path, "kind": piece.kind, "bytes": piece.size, "digest": blob.digest}
        for piece, blob in zip(plan.pieces, written.blobs, strict=True)
    ]
    left = [{"path": path, "reason": why} for path, why in plan.left]
    if output == "json":
        summary = {
            "layout": str(to),
            "digest": digest,
            "mediaType": written.top.media_type,
            "files": rows,
            "left": left,
        }
        write_json(summary)
        return
    for path, why in plan.left:
        click.echo(f"pilotlight: left out: {path}: {why}", err=True)
    for row in rows:
        click.echo(f"{row['digest']}  {row['kind']:<13}  {row['bytes']:>14}  {row['path']}")
    click.echo(f"packed {to}: {digest}")
