"""Gathers the inputs of `serve` (GGUF files, folders, documents, stored keys) into one set of Documents.

Turns files into Models and fills in their artifacts' memory needs. `autoscaler.documents.parse` checks documents, and
`artifacts.formats.gguf` reads GGUF headers.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from artifacts.formats import gguf
from autoscaler import engines
from autoscaler.contract import ModelName
from autoscaler.documents.document_quarantine import PART
from autoscaler.documents.document_rules import NAME_CHARS_MAX
from autoscaler.documents.document_types import DocumentError, Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.render import to_yaml
from autoscaler.documents.variable_and_file_references import hide_values
from autoscaler.drivers.driver import Launcher
from autoscaler.engines.programs.installed import find_installed_programs
from autoscaler.exception_handling import Failure, attempt, can_complete, describe_error
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.spec import yaml
from autoscaler.spec.artifact_name import STORED
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.settings import Settings
from autoscaler.state.events import FaultSeen
from pilotlight import bounded_files as files
from pilotlight.models import model_files
from pilotlight.models.gguf_check import check_file
from pilotlight.models.model_files import ModelFile, UnusableFile
from pilotlight.models.model_memory import Known, estimate_cache, estimate_memory, has_fixed_memory
from pilotlight.models.model_parts import adapter_paths, is_fetched_by_store, local_path, use_placeholder_adapters
from pilotlight.safe_output import write_stderr

DEFAULT_CONTEXT_TOKENS = 4096
"""Context length of a GGUF file given on the command line, or the model's maximum if that is less."""
KEYS_FILE = "keys.yaml"
TEXT_BYTES_MAX = 4 * yaml.TEXT_CHARS_MAX
"""Maximum size of a file of documents."""
VALUE_BYTES_MAX = 128 << 10
"""Maximum size of a file that a value refers to. Linux limits an environment variable to the same size."""
NONE_KNOWN: Mapping[ModelName, Model] = {}
_COMES = "/weights"
"""Placeholder path for weights that are fetched before a start, used to check the start."""
RENAME = "the file name contains no letters or digits for the name of a Model: rename it, or write a document"


def gather_documents(
    paths: Sequence[Path], configs: Sequence[Path], state: Path, *, contain: bool = False,
    in_force: Documents | None = None,
) -> Documents:  # fmt: skip
    """Return all documents, checked. Raises click.UsageError (exit 2) with a one-line message.

    Unusable files in a folder are skipped with a line on standard error. An unusable file or folder in `paths` is an
    error; at a reload it is skipped, too, unless no Model remains. `contain`: as in `parse_documents`. `in_force`: at a
    reload, the previous documents; a file that raises an unexpected exception keeps its Model of them.
    """
    texts = _texts(configs)
    documents = with_stored_keys(_check(texts, contain=contain, references=True), state / KEYS_FILE)
    _check_is_local(paths)
    found = model_files.find_models(paths, contain=contain)
    models, unusable = _models_of(found.models, documents, texts, contain=contain)
    unusable = [*found.unusable, *unusable]
    kept = _kept_models(unusable, models, () if in_force is None else in_force.models)
    models += kept
    errors = [one for one in unusable if one.is_named and (in_force is None or not models)]
    artifacts = {model.spec.artifact for model in kept}
    for one in (one for one in unusable if one not in errors):
        what = "keeps its Model" if one.is_fault and _artifact_of(one.path) in artifacts else "left out"
        write_stderr(f"{one.path}: {what}: {one.reason}")
    if errors:
        raise click.UsageError(f"{errors[0].path}: {errors[0].reason}")
    _check_default_model(documents, models)
    if documents.settings.capacity:
        from pilotlight.models import capacity_providers  # imports every capacity provider

        capacity_providers.check_provider_modes(documents.settings, "machine")
    return msgspec.structs.replace(documents, models=tuple(models))


def _check_is_local(paths: Sequence[Path]) -> None:
    """Raise click.UsageError for a name of weights that is not a path."""
    for path in paths:
        scheme, colon, rest = str(path).partition(":/")  # Path collapses two slashes into one
        if colon and scheme in STORED:
            artifact = f"{scheme}://{rest.removeprefix('/')}"
            raise click.UsageError(f"{artifact}: not a file: set it as spec.artifact of a Model in a document (`-c`)")


def _models_of(
    files: Sequence[ModelFile], documents: Documents, texts: Sequence[tuple[str, str]], *, contain: bool
) -> tuple[list[Model], list[UnusableFile]]:
    """Return the Models of the documents and files, and the files that cannot be served as a Model."""
    models, unusable = list(documents.models), list[UnusableFile]()
    taken = {str(model.name): "in the documents" for model in models}
    further = {name for model in models for name in _further_names(model)}
    for file in files:
        made = attempt(partial(_model_of, file, len(models)))
        if isinstance(made, Failure):
            if not contain and not isinstance(made.error, _UnusableError):
                raise made.error
            internal = f"internal error ({describe_error(made.error)}); please report it"
            reason = str(made.error) if isinstance(made.error, _UnusableError) else internal
        elif made.name in taken:
            reason = f"a Model named {made.name} is already {taken[made.name]}: rename one"
        elif made.name in further:
            reason = _find_error([*texts, (str(file.path), _render(made))])
        else:
            taken[made.name] = f"created from {file.path}"
            models.append(made)
            continue
        is_fault = isinstance(made, Failure) and not isinstance(made.error, _UnusableError)
        unusable.append(UnusableFile(file.path, reason.removeprefix(f"{file.path}: "), file.is_named, is_fault))
    return models, unusable


def _kept_models(unusable: Sequence[UnusableFile], models: Sequence[Model], in_force: Sequence[Model]) -> list[Model]:
    """Return the Models in force of files that raised an unexpected exception, so that their replicas go on serving.
    A removed document with the same artifact is not among them.
    """
    taken = {name for model in models for name in (model.name, *_further_names(model))}
    faulty = [one.path for one in unusable if one.is_fault]
    kept = [one for one in in_force if one.name not in taken and any(_is_of_file(one, path) for path in faulty)]
    kept = [one for one in kept if can_complete(partial(_render, one))]
    return [msgspec.structs.replace(one, order=order) for order, one in enumerate(kept, len(models))]


def _is_of_file(model: Model, file: Path) -> bool:
    """Return whether `_model_of` may have created this Model from the file."""
    spec, default = model.spec, ModelSpec(engine="llama.cpp", artifact=_artifact_of(file))
    derived = msgspec.structs.replace(default, args=spec.args, context_tokens=spec.context_tokens)
    return model.name == model_name(file) and spec == derived and spec.args[::2] in {(), ("--mmproj",)}


def _find_error(texts: Sequence[tuple[str, str]]) -> str:
    """Return why these documents are not valid; empty if they are."""
    try:
        _check(texts, references=True)
    except click.UsageError as error:
        return error.message
    return ""


def _render(model: Model) -> str:
    """Return the document of a Model whose texts are no references."""
    return to_yaml(Documents(models=(model,)), with_references=True)


def _check_default_model(documents: Documents, models: Sequence[Model]) -> None:
    """Check that `defaultModel` names a Model. Raises click.UsageError."""
    name = documents.settings.default_model
    if name is not None and not any(name in (*model.names(), *model.adapter_names()) for model in models):
        shown = hide_values(f"`{name}`", documents.values)
        raise click.UsageError(
            f"Settings: defaultModel: no Model has the name or alias {shown}; name an existing Model or remove the key"
        )


def model_name(file: Path) -> str:
    """Return the Model name for a GGUF file, or an empty string: `my model (v2).gguf` becomes `my-model-v2`.

    The name omits `.gguf` and the part number of a split model. Characters other than letters, digits and `._:-` become
    `-`; leading and trailing punctuation is stripped, and the name truncated to its maximum length.
    """
    plain = re.sub(r"[^A-Za-z0-9._:-]+", "-", gguf.get_model_stem(file))
    return plain.strip("._:-")[:NAME_CHARS_MAX].rstrip("._:-")


def with_stored_keys(documents: Documents, path: Path) -> Documents:
    """Add each key that `key new --state` stored to the Tenant that it belongs to. Missing Tenants are created."""
    try:
        path.lstat()
    except FileNotFoundError:
        return documents
    except OSError as error:
        raise click.UsageError(f"--state {path.parent}: {error.strerror}") from None
    tenants = {tenant.name: tenant for tenant in documents.tenants}
    owners = {key.sha256: tenant.name for tenant in documents.tenants for key in tenant.spec.keys}
    for stored in load_files([path]).tenants:
        known = tenants.get(stored.name)
        keys = tuple(key for key in stored.spec.keys if owners.get(key.sha256) != stored.name)
        taken = next((owners[key.sha256] for key in keys if key.sha256 in owners), None)
        if taken is not None:
            owner = hide_values(taken, documents.values)
            raise click.UsageError(f"{path}: Tenant {stored.name}: a key already belongs to Tenant {owner}")
        if known is None:
            tenants[stored.name] = stored
        else:
            spec = msgspec.structs.replace(known.spec, keys=known.spec.keys + keys)
            tenants[stored.name] = msgspec.structs.replace(known, spec=spec)
    return msgspec.structs.replace(documents, tenants=tuple(tenants.values()))


def keep_artifact_location(model: Model) -> Model:
    """Return the Model unchanged, for weights at the location in its document."""
    return model


def read_documents(
    path: Path, known: Mapping[ModelName, Model] = NONE_KNOWN, gpus: Callable[[Settings], bool] = lambda _: False,
    located: Callable[[Model], Model] = keep_artifact_location, fault: Callable[[FaultSeen], None] | None = None,
) -> Documents:  # fmt: skip
    """Return the documents of a file (as the supervisor writes it) or folder, with each Model's memory need.

    A `known` Model keeps its creation time. `gpus`: whether devices have memory separate from the host's under these
    Settings. `located` returns a Model with the local path of its weights, if they are stored here. `fault` receives
    the exception of a Model whose document cannot be decoded (a stand-in replaces the Model) or whose memory need
    cannot be computed (it stays unset). Without `fault` these exceptions are raised.
    """
    paths = sorted(path.glob("*.yaml")) if _is_folder(path) else [path]
    documents = load_files(paths, contain=fault is not None)
    now_unix_s = int(time.time())
    models, apart = [], gpus(documents.settings)
    for model in documents.models:
        before = known.get(model.name)
        created_unix_s = now_unix_s if before is None else before.created_unix_s
        undecoded = documents.undecoded.get(model.name)
        done = model if undecoded is not None else attempt(partial(_sized, model, located, gpus=apart))
        reason = "" if undecoded is None else undecoded.reason
        if isinstance(done, Failure):
            if fault is None:
                raise done.error
            reason, done = describe_error(done.error), model
        if reason and fault is not None:
            fault(FaultSeen(model=model.name, reason=reason, part=PART))
        models.append(msgspec.structs.replace(done, spec=model.spec, created_unix_s=created_unix_s))
    return msgspec.structs.replace(documents, models=tuple(models))


def keep_valid_versions(documents: Documents, valid: Mapping[ModelName, Model]) -> Documents:
    """Replace stand-ins by the last valid versions of their Models. Such a version is used without its
    aliases and adapters if another Model has one of their names now.
    """
    kept = {name: valid[name] for name in documents.undecoded if name in valid}
    taken = {str(model.name) for model in documents.models}
    taken.update(name for model in documents.models if model.name not in kept for name in _further_names(model))
    models = []
    for model in documents.models:
        version = kept.get(model.name, model)
        if version is not model:
            if not taken.isdisjoint(_further_names(version)):
                bare = msgspec.structs.replace(version.spec, aliases=(), adapters=())
                version = msgspec.structs.replace(version, spec=bare)
            taken.update(_further_names(version))
            version = msgspec.structs.replace(version, order=model.order)
        models.append(version)
    return msgspec.structs.replace(documents, models=tuple(models))


def _further_names(model: Model) -> list[str]:
    return [*model.spec.aliases, *model.adapter_names()]


def _sized(model: Model, located: Callable[[Model], Model], *, gpus: bool) -> Model:
    return fill_memory_estimate(located(model), gpus=gpus)


def fill_memory_estimate(model: Model, known: Known | None = None, *, gpus: bool = False) -> Model:
    """Return the Model with the memory need and adapters of its artifact if the document states none. The need
    stays unset if the artifact is unreadable or the engine takes a share of the device (except with `auto`); the Model
    then needs the whole device.
    `gpus`: devices have memory separate from the host's. `known`: facts of the artifact; None: read local files.
    """
    gpu = model.spec.gpu
    sized = model.spec.engine == "llama.cpp" and not (gpu.elastic_percent is None and gpu.growth_percent is None)
    if (model.memory_bytes and not sized) or gpu.count == 0 or has_fixed_memory(model):
        return model
    try:
        needed = estimate_memory(model, known)
    except (gguf.GgufError, OSError, ValueError):
        return model  # only this Model's start fails, with the reason
    if needed is None:
        return model
    total_bytes = needed.total_bytes(gpus=gpus)
    cache = estimate_cache(model, needed, known, gpus=gpus) if sized else None
    if model.memory_bytes:
        return msgspec.structs.replace(model, cache=cache)
    return msgspec.structs.replace(model, memory_bytes=total_bytes, estimated_bytes=total_bytes, cache=cache)


def build_launcher(gpus: Callable[[], bool] = lambda: False) -> Launcher:
    """Return the launcher for engines on this machine; it raises engines.EngineError for a start that cannot work.
    `gpus`: whether its devices are GPUs.
    """
    found = find_installed_programs()

    def launch(model: Model, host: str, port: int, given: Given = AS_ASKED) -> engines.LaunchCommand:
        nonlocal found
        path = local_path(model)
        if path is not None:
            check_file(model, path)
        missing = next((path for path in adapter_paths(model) if not os.path.exists(path)), None)  # noqa: PTH110  Path's raises
        if missing is not None and model.spec.engine != "command":
            raise engines.EngineError(f"Model {model.name}: adapter {missing} does not exist; fix spec.adapters")
        sourced = next((name for name, value in model.spec.env.items() if not isinstance(value, str)), None)
        if sourced is not None:
            raise engines.EngineError(
                f"Model {model.name}: spec.env.{sourced}.valueFrom: supported only in pods; set a value"
            )
        model = use_placeholder_adapters(model, _COMES)
        weights = _COMES if path is None and is_fetched_by_store(model) else None if path is None else str(path)
        try:
            return engines.build_launch_command(model, weights, host, port, found, gpus=gpus(), given=given)
        except engines.EngineError:
            found = find_installed_programs()  # a program may have been installed meanwhile
            return engines.build_launch_command(model, weights, host, port, found, gpus=gpus(), given=given)

    return launch


def load_files(paths: Sequence[Path], *, contain: bool = False, references: bool = False) -> Documents:
    """Return the documents in these files. Raises click.UsageError with a one-line message. `contain`: as in
    `parse_documents`. `references`: users wrote the files, and values can refer to variables and files.
    """
    return _check(_texts(paths), contain=contain, references=references)


def load_settings(path: Path) -> Settings:
    """Return the Settings in a document. The document may lack its header, like `settings` in the chart's values, and
    may be those values as a whole. Raises click.UsageError with a one-line message.
    """
    ((file, text),) = _texts([path])
    try:
        whole = yaml.parse_yaml(text)
    except yaml.YamlError:
        whole = []  # reported below
    match whole:
        case [dict() as bare] if not bare.keys() & {"apiVersion", "kind"}:
            bare_settings = bare.get("settings", bare)
            head = {"apiVersion": API_VERSION, "kind": "Settings"}
            text = msgspec.json.encode({**head, **bare_settings}).decode() if isinstance(bare_settings, dict) else text
            return _check([(file, text)]).settings
    return _check([(file, text)], references=True).settings


def _texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (file, its text) for each path."""
    texts = []
    for path in paths:
        try:
            texts.append((str(path), files.read_text(path, TEXT_BYTES_MAX)))
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{path}: {files.describe_error(error)}") from None
    return texts


def _check(texts: Sequence[tuple[str, str]], *, contain: bool = False, references: bool = False) -> Documents:
    try:
        return parse_documents(texts, os.environ, contain=contain, read_file=_read_value if references else None)
    except DocumentError as error:
        raise click.UsageError(str(error)) from None


def _read_value(path: str) -> str:
    """Return the content of a file that a value refers to. Raises ValueError with the reason."""
    try:
        return files.read_text(Path(path), VALUE_BYTES_MAX)
    except files.TooLargeError:
        raise ValueError(f"more than {VALUE_BYTES_MAX >> 10} KiB") from None
    except (OSError, ValueError) as error:
        raise ValueError(files.describe_error(error)) from None


def _is_folder(path: Path) -> bool:
    """Return whether the path is a folder. Raises click.UsageError if it cannot be read or its name is too long."""
    try:
        return path.is_dir()
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from None


class _UnusableError(Exception):
    """A GGUF file cannot be served; the message is the reason."""


def _model_of(file: ModelFile, order: int) -> Model:
    """Return the Model of a GGUF file. Raises _UnusableError."""
    name = model_name(file.path)
    if not name:
        raise _UnusableError(RENAME)
    spec = ModelSpec(
        engine="llama.cpp",
        artifact=_artifact_of(file.path),
        args=("--mmproj", str(_stable_path(file.projector))) if file.projector else (),
        context_tokens=min(file.info.shape.context_tokens, DEFAULT_CONTEXT_TOKENS),
    )
    model = Model(name=ModelName(name), spec=spec, slots=engines.default_slots("llama.cpp"), order=order)
    if reason := _find_error([(str(file.path), _render(model))]):
        raise _UnusableError(reason)  # its path is not UTF-8
    done = attempt(partial(fill_memory_estimate, model))
    # After a failure the autoscaler computes the estimate again and reports the fault.
    return model if isinstance(done, Failure) else done


def _artifact_of(file: Path) -> str:
    return f"file://{_stable_path(file)}"


def _stable_path(file: Path) -> Path:
    """Return the absolute path of a file without links, so that another target of a link changes the Model. The parts
    of a split model keep their names, because the engine derives the names of later parts from the first.
    """
    whole = gguf.get_model_stem(file) == file.stem
    return file.resolve() if whole else file.parent.resolve() / file.name


def problem_file(documents: Path) -> Path:
    """Return where `serve` stores the reason of a failed reload: next to the documents that it wrote."""
    return documents.with_suffix(".problem")
