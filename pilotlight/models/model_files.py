"""Finds the models among the GGUF files and folders on the command line of `serve`. I/O: reads folders and headers.

Searches folders and the folders in them (`publisher/repo/x.gguf`, the cache of the Hugging Face Hub), but no hidden
ones. A folder can also contain files that are no models; each is returned with its reason. Files that are no models are
recognized by their headers, not by their names. Vision projectors are attached to the models of their folder.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from artifacts import file_kinds
from artifacts.formats import gguf
from autoscaler.exception_handling import Failure, attempt, describe_error
from pilotlight.models.gguf_check import load_gguf_header

DEPTH_MAX = 8
"""Of folders below a folder on the command line. The cache of the Hugging Face Hub has four, without subfolders."""
ENTRIES_MAX = 20_000
"""Files and folders that are searched below a folder on the command line."""
SUFFIX = ".gguf"
DOCUMENT_SUFFIXES = frozenset({".yaml", ".yml", ".json"})

_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud[-_.])?(?:i?q\d(?:_[a-z0-9]{1,3})*|tq\d_\d|mxfp4(?:_moe)?|b?f16|fp16|f32)(?![a-z0-9])"
)
_WORD = re.compile(r"[a-z0-9]+")
_GENERIC = frozenset({"mmproj", "model", "text", "vision", "ggml", "gguf", "projector"})
_PRECISIONS = ("f16", "bf16", "q8_0", "f32")
"""Of projectors, best first."""


class ModelFile(NamedTuple):
    """A GGUF file that can be served: a whole model, or the first part of a split model."""

    path: Path
    info: gguf.GgufInfo
    is_named: bool
    """Whether the command line contains the file itself, not a folder."""
    projector: Path | None = None
    """The vision projector of the model."""


class UnusableFile(NamedTuple):
    """A file or folder that cannot be served."""

    path: Path
    reason: str
    is_named: bool = False
    is_fault: bool = False
    """Whether an unexpected exception is the reason."""


class Found(NamedTuple):
    """Files by usability, in the order of the command line and then of their names."""

    models: list[ModelFile]
    unusable: list[UnusableFile]


def find_models(paths: Iterable[Path], *, contain: bool = False) -> Found:
    """Return all models of these files and folders, with their projectors, and the other files. `contain`: an
    unexpected exception affects only the file that raises it.
    """
    models, unusable, projectors = list[ModelFile](), list[UnusableFile](), list[tuple[Path, bool]]()
    for path in paths:
        count = len(models)
        try:
            is_folder = path.is_dir()
        except OSError as error:
            unusable.append(UnusableFile(path, error.strerror or str(error), is_named=True))
            continue
        files, skipped = _search(path) if is_folder else ([path], [])
        unusable += skipped
        for file in files:
            loaded = attempt(partial(_load, file))
            if not isinstance(loaded, Failure):
                models.append(ModelFile(file, loaded, not is_folder))
            elif isinstance(loaded.error, gguf.NotAModelError) and loaded.error.kind == gguf.PROJECTOR:
                projectors.append((file, not is_folder))
            elif contain or isinstance(loaded.error, gguf.GgufError | OSError):
                is_fault = not isinstance(loaded.error, gguf.GgufError | OSError)
                unusable.append(UnusableFile(file, _reason(loaded.error, file), not is_folder, is_fault))
            else:
                raise loaded.error
        if is_folder and len(models) == count:
            reason = (
                "no .gguf file in this folder can be served" if files or skipped else "no .gguf file in this folder"
            )
            own = next((one for one in skipped if one.path == path), UnusableFile(path, reason))
            unusable = [*(one for one in unusable if one != own), own._replace(is_named=True)]
    return Found(*_attach(models, unusable, projectors))


# --- folders ----------------------------------------------------------------------------------------------------------


def _search(root: Path) -> tuple[list[Path], list[UnusableFile]]:
    """Return the GGUF files below a folder in the order of their names, of split models only first parts, and what is
    skipped.
    """
    search = _Search()
    folders = deque([(root, 0)])
    search.is_new(root)
    while folders:
        folder, depth = folders.popleft()
        for one in search.list_folder(folder):
            if depth == DEPTH_MAX:
                search.skip(one, f"more than {DEPTH_MAX} folders deep: pass this folder to serve its files")
            elif search.is_new(one):
                folders.append((one, depth + 1))
            else:
                search.skip(one, "this folder is searched already, under another name")
    if search.left == 0:
        search.skip(root, f"all but {ENTRIES_MAX} files and folders: pass smaller folders")
    for one in search.named_like_files:
        if not any(one in file.parents for file in (*search.files, *(each.path for each in search.skipped))):
            search.skip(one, "a folder without .gguf files")
    firsts = [one for one in search.files if gguf.is_first_part(one)]
    return sorted(firsts), sorted([*search.skipped, *_orphans(search.files, firsts)])


def _orphans(files: Iterable[Path], firsts: Iterable[Path]) -> Iterator[UnusableFile]:
    """Yield the first present part of each split model whose part 1 is missing."""
    known = {(one.parent, gguf.get_model_stem(one)) for one in firsts}
    for file in sorted(files):
        split = file_kinds.PART.fullmatch(file.name)
        if split is not None and (key := (file.parent, split[1])) not in known:
            known.add(key)
            yield UnusableFile(file, f"part 1 of {int(split[3])} is missing")


class _Search:
    """The results of a search so far."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.skipped: list[UnusableFile] = []
        self.named_like_files: list[Path] = []
        """Folders whose names end in `.gguf`."""
        self.left = ENTRIES_MAX
        self._seen: set[tuple[int, int]] = set()

    def skip(self, path: Path, reason: str) -> None:
        """Note that this file or folder is skipped."""
        self.skipped.append(UnusableFile(path, reason))

    def is_new(self, folder: Path) -> bool:
        """Whether the folder is not searched yet under another name, as with links in a loop."""
        try:
            status = folder.stat()
        except OSError:  # it was removed; listing it reports the reason
            return True
        key = (status.st_dev, status.st_ino)
        known = key in self._seen
        self._seen.add(key)
        return not known

    def list_folder(self, folder: Path) -> list[Path]:
        """Add the files in a folder, and return the folders in it."""
        try:
            with os.scandir(folder) as listing:
                entries = sorted(islice(listing, self.left), key=lambda entry: entry.name)
        except OSError as error:
            self.skip(folder, error.strerror or str(error))
            return []
        self.left -= len(entries)
        folders = []
        for entry in entries:
            path, is_file, is_folder = folder / entry.name, entry.name.endswith(SUFFIX), _is_folder(entry)
            if is_folder and not entry.name.startswith("."):
                folders.append(path)
                self.named_like_files += [path] if is_file else []
            elif is_file and not is_folder and entry.name.startswith("._"):
                self.skip(path, "it contains metadata of macOS, not a model")
            elif is_file and not is_folder:
                self.files.append(path)
        return folders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself. For a file, reading it reports the reason
        return False


# --- files ------------------------------------------------------------------------------------------------------------


def _load(file: Path) -> gguf.GgufInfo:
    """Return the header. Raises GgufError and OSError for a file that cannot be served, such as an incomplete one."""
    if file.stat().st_size == 0 and file.is_file():
        raise gguf.GgufError(f"{file}: the file is empty")
    info = load_gguf_header(file)
    gguf.check_parts(file)
    return info


def _reason(error: Exception, file: Path) -> str:
    """Return why a file cannot be served, without its path."""
    if isinstance(error, gguf.GgufError):
        hint = f"; documents are given with `-c {file}`" if file.suffix in DOCUMENT_SUFFIXES else ""
        return str(error).removeprefix(f"{file}: ") + hint
    if not isinstance(error, OSError):
        return f"internal error ({describe_error(error)}); please report it"
    at = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else file
    what = "" if at == file else f"{at.name}: "
    if isinstance(error, FileNotFoundError) and at.is_symlink():
        return f"{what}a link to {at.readlink()}, which does not exist"
    return what + (error.strerror or str(error))


# --- projectors -------------------------------------------------------------------------------------------------------


def _attach(
    models: list[ModelFile], unusable: list[UnusableFile], projectors: Sequence[tuple[Path, bool]]
) -> tuple[list[ModelFile], list[UnusableFile]]:
    """Attach each projector to the models of its folder that it belongs to. The projectors that remain are unusable."""
    attached, used = list[ModelFile](), set[Path]()
    for model in models:
        folder_models = [one.path for one in models if one.path.parent == model.path.parent]
        matching = [
            path
            for path, _ in projectors
            if path.parent == model.path.parent and _matches_model(path, model, folder_models)
        ]
        best = min(matching, key=_rank, default=None)
        used.update(matching)
        attached.append(model._replace(projector=best))
    reason = (
        "a vision projector whose name matches no model in its folder: rename it to mmproj-MODEL.gguf, or pass it "
        "with --mmproj in spec.args of a Model"
    )
    left = [UnusableFile(path, reason, is_named) for path, is_named in projectors if path not in used]
    chosen = {model.projector for model in attached}
    left += [
        UnusableFile(path, "its models use another vision projector of this folder")
        for path, _ in projectors
        if path in used and path not in chosen
    ]
    return attached, [*unusable, *left]


def _matches_model(projector: Path, model: ModelFile, folder_models: Sequence[Path]) -> bool:
    """Whether a projector belongs to a model in its folder: the model's name begins with the projector's name, both
    without quantization. A projector without a name of its own (`mmproj-F16.gguf`) matches if the folder has one model,
    in any number of quantizations.
    """
    words, own = _words(projector), _words(model.path)
    return own[: len(words)] == words if words else all(_words(path) == own for path in folder_models)


def _words(file: Path) -> list[str]:
    """Return the words of a file name that identify a model, in lower case."""
    stem = gguf.get_model_stem(file).casefold()
    return [word for word in _WORD.findall(_QUANTIZATION.sub("", stem)) if word not in _GENERIC]


def _rank(projector: Path) -> tuple[int, int, str]:
    """Return a key that sorts projectors, best first: by how much of the name matches, then by precision."""
    found = _QUANTIZATION.search(projector.stem.casefold())
    precision = _PRECISIONS.index(found[0]) if found and found[0] in _PRECISIONS else len(_PRECISIONS)
    return -len(_words(projector)), precision, projector.name
