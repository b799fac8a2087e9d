"""Converts llama-swap's configuration to documents for `pilotlight serve`. Pure.

A model whose command is a llama-server with a weights file gets engine `llama.cpp`; any other gets engine `command`,
with placeholders for values that Pilotlight chooses (`commands`). Model ids and aliases stay the same for clients. API
keys become a Tenant with their hashes. Every key is converted or reported.

Macros are `${NAME}` in any value of a configuration and `${env.NAME}` anywhere in its text, where they are expanded
first. A model's macros take precedence over global ones, and a macro may use earlier ones. `${PORT}` becomes
Pilotlight's placeholder for the port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, field

from autoscaler.documents.document_rules import is_alias
from autoscaler.importers.decode import (
    UNKNOWN,
    DocumentErrorContext,
    parse_yaml_documents,
    read_mapping,
    read_part,
    simplify_number,
)
from autoscaler.importers.llama_swap.commands import PORT, Command, report_comments, strip_comments, write_engine_spec
from autoscaler.importers.result import (
    ConversionError,
    ConversionNote,
    ConversionResult,
    Document,
    Sketch,
    finalize_document,
)
from autoscaler.spec.decode import Part, Path, WrongKeyError
from autoscaler.spec.document_names import simplify_name
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.policy import RequestPolicy, check_policy

RUN_TIME = frozenset({"PORT", "PID"})

_ENV = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")

_MACRO = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")

Macros = Mapping[str, object]


P = TypeVar("P", bound=Part)

TENANT = "llama-swap"
NEVER_S = 31_536_000
"""Value for `ttl: 0` (never): a year, the maximum of `idleSeconds`."""
START_S_MIN = 15
READY_PATH = "/health"

Seconds = Annotated[float, Meta(ge=0)]

LOGS = "logs and pages of llama-swap: use `pilotlight status` and the operations port"
FITS = "Models that fit run concurrently, and idle ones are evicted: see spec.residencySeconds and spec.priority"
WHOLE: dict[str, str] = {
    **dict.fromkeys(("logLevel", "logTimeFormat", "logToStdout", "logRequests", "store", "ui"), LOGS),
    **dict.fromkeys(("metricsMaxInMemory", "captureBuffer", "performance"), LOGS),
    **dict.fromkeys(("groups", "matrix", "routing"), FITS),
    "startPort": "Pilotlight chooses free ports",
    "sendLoadingState": "waiting streams receive SSE comments with their position and the expected time",
    "includeAliasesInList": "set models.listAliases in Settings to this value",
    "unloadTimeout": "engines have 10 s after SIGTERM",
    "hooks": "set spec.replicas.min: 1 for a Model that should always run",
    "profiles": "a name belongs to one Model: to change its target, move it to spec.aliases of the other Model",
    "selectors": "a name belongs to one Model: choose one of the targets and set the alias there",
    "peers": "engines on other hosts are not supported yet",
    "upstream": "only inference paths are forwarded to engines",
}
"""Global keys that are not converted, and why."""
MODEL: dict[str, str] = {
    "cmdStop": "an engine's processes get SIGTERM, then SIGKILL",
    "unloadTimeout": WHOLE["unloadTimeout"],
    "sendLoadingState": WHOLE["sendLoadingState"],
    "name": "/v1/models contains only names",
    "description": "/v1/models contains only names",
    "metadata": "/v1/models contains only names",
    "capabilities": "/v1/models contains only names",
    "compat": "websockets are not served",
}
"""Keys of a model that are not converted, and why."""


class Timeouts(Part, frozen=True):
    """Timeouts of requests to an engine."""

    response_header: Seconds = 0


_CAMEL = {"strip_params": "stripParams", "set_params": "setParams"}
"""Earlier names of keys of the filters."""


class Filters(Part, frozen=True):
    """Changes that llama-swap makes to request bodies."""

    strip_params: str = ""
    set_params: dict[str, object] = {}
    set_params_by_id: dict[str, dict[str, object]] = field(name="setParamsByID", default_factory=dict)


class LlamaSwapModel(Part, frozen=True):
    """A model of llama-swap."""

    cmd: str
    proxy: str = f"http://localhost:{PORT}"
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    check_endpoint: str = READY_PATH
    ttl: Annotated[float, Meta(ge=-1)] = -1
    unlisted: bool = False
    use_model_name: str = ""
    concurrency_limit: Annotated[int, Meta(ge=0)] = 0
    filters: dict[str, object] = {}
    timeouts: dict[str, object] = {}


class LlamaSwapConfig(Part, frozen=True):
    """The global configuration."""

    models: dict[str, object]
    macros: dict[str, object] = {}
    global_ttl: Annotated[float, Meta(ge=0)] = field(name="globalTTL", default=0)
    health_check_timeout: Seconds = 120
    api_keys: tuple[str, ...] = ()


def convert_config(source: str, text: str, environ: Mapping[str, str], folder: str) -> list[ConversionResult]:
    """Convert a file: first the global configuration, then each model. Raises a one-line DocumentError.
    `folder`: absolute working folder of llama-swap, for relative paths.
    """
    with DocumentErrorContext(source):
        values = parse_yaml_documents(source, expand_environment(text, environ))
        if len(values) != 1:
            raise WrongKeyError((), "expected one document: the configuration of llama-swap")
        return _converted(read_mapping(values[0], ()), folder)


def _converted(value: Document, folder: str) -> list[ConversionResult]:
    macros = read_mapping(value.get("macros"), ("macros",))
    plain = {key: one for key, one in value.items() if key not in ("macros", "models")}
    notes: list[ConversionNote] = []
    given = read_mapping(expand_macros(plain, macros, ()), ()) | {"models": value.get("models")}
    whole = _typed(given, LlamaSwapConfig, WHOLE, (), notes)
    models = [_model(name, one, macros, whole, folder) for name, one in whole.models.items()]
    about = [ConversionResult("llama-swap's configuration", None, tuple(notes))] if notes else []
    return [*about, *([_tenant(whole.api_keys)] if whole.api_keys else []), *models]


def _model(name: str, value: object, macros: Macros, whole: LlamaSwapConfig, folder: str) -> ConversionResult:
    at: Path = ("models", name)
    given = dict(read_mapping(value, at))
    own = read_mapping(given.pop("macros", None), (*at, "macros"))
    sketch = Sketch(simplify_name(name) or name)
    if isinstance(given.get("cmd"), str):  # first, so that macros in comments are not expanded
        given["cmd"], comments = strip_comments(str(given["cmd"]))
        report_comments(comments, sketch)
    scope = merge_macros(macros, own, name)
    entry = _typed(read_mapping(expand_macros(given, scope, at), at), LlamaSwapModel, MODEL, at, sketch.notes)
    try:
        write_engine_spec(
            Command(entry.cmd, entry.proxy, entry.env, entry.use_model_name, entry.concurrency_limit), folder, sketch
        )
    except ConversionError as error:
        return sketch.refused(str(error))
    except ValueError as error:
        raise WrongKeyError((*at, "cmd"), f"expected a valid shell command: {error}") from None
    _timing(entry, whole, at, sketch)
    filters = _filters(entry, scope, at, sketch)
    _names(name, entry, filters, sketch)
    sketch.spec["policy"] = _policy(filters, sketch)
    if entry.unlisted:
        sketch.spec["unlisted"] = True
    return sketch.taken()


def _timing(entry: LlamaSwapModel, whole: LlamaSwapConfig, at: Path, sketch: Sketch) -> None:
    idle_s = whole.global_ttl if entry.ttl < 0 else entry.ttl
    sketch.spec["idleSeconds"] = simplify_number(idle_s or NEVER_S)
    sketch.spec["start"] = {"secondsMax": simplify_number(max(whole.health_check_timeout, START_S_MIN))}
    if entry.check_endpoint == "none":
        sketch.tell(
            "checkEndpoint",
            f"the engine is ready when GET {READY_PATH} returns 200; set spec.readinessPath for another path",
        )
    elif entry.check_endpoint != READY_PATH:
        sketch.spec["readinessPath"] = "/" + entry.check_endpoint.lstrip("/")
    bounds = read_part(
        entry.timeouts, Timeouts, (*at, "timeouts"),
        lambda key, _: sketch.tell(f"timeouts.{key.rpartition('.')[2]}", "gateways have their own timeouts"),
    )  # fmt: skip
    if bounds.response_header:
        sketch.spec |= dict.fromkeys(
            ("firstByteSecondsMax", "responseSecondsMax"), simplify_number(bounds.response_header)
        )


def _filters(entry: LlamaSwapModel, macros: Macros, at: Path, sketch: Sketch) -> Filters:
    """Read the filters of request bodies, with the macros in names of models."""
    given = {_CAMEL.get(key, key): value for key, value in entry.filters.items()}
    filters = read_part(given, Filters, (*at, "filters"), sketch.tell)
    where = (*at, "filters", "setParamsByID")
    by_id = {str(expand_macros(key, macros, where)): params for key, params in filters.set_params_by_id.items()}
    return msgspec.structs.replace(filters, set_params_by_id=by_id)


def _policy(filters: Filters, sketch: Sketch) -> Document:
    """Convert filters of request bodies to a request policy."""
    removed = dict.fromkeys(name.strip() for name in filters.strip_params.split(","))
    by_name = {
        alias if is_alias(alias) else simplify_name(alias): _members(params, f"setParamsByID.{alias}", sketch)
        for alias, params in filters.set_params_by_id.items()
    }
    policy: Document = {
        "forced": _members(filters.set_params, "setParams", sketch),
        "removed": [*_members(removed, "stripParams", sketch)],
        "forcedByName": {name: members for name, members in by_name.items() if name and members},
    }
    return {key: value for key, value in policy.items() if value}


def _members(params: Mapping[str, object], key: str, sketch: Sketch) -> Document:
    """Return the members that a policy may change; report the others. llama-swap itself ignores `model`."""
    kept: Document = {}
    for name, value in params.items():
        if name in {"", "model"}:
            continue
        try:
            check_policy(RequestPolicy(forced={**kept, name: value}), ())
        except WrongKeyError as error:
            sketch.tell(f"filters.{key}: {name}", error.message)
        else:
            kept[name] = value
    return kept


def _names(name: str, entry: LlamaSwapModel, filters: Filters, sketch: Sketch) -> None:
    """Write aliases, including ids of `setParamsByID`, and the original of a simplified name."""
    aliases = dict[str, None]()
    for alias in (name, *entry.aliases, *filters.set_params_by_id):
        kept = alias if is_alias(alias) else simplify_name(alias)
        if kept != alias:
            key = "name" if alias == name else "aliases"
            sketch.tell(f"{key}: {alias}", f"clients must request {kept}" if kept else "it has no letters or digits")
        aliases |= {kept: None} if kept and kept != sketch.name else {}
    sketch.spec["aliases"] = list(aliases)


def _typed(value: Document, kind: type[P], without: Mapping[str, str], at: Path, notes: list[ConversionNote]) -> P:
    """Decode `value` as `kind`; report keys that have no equivalent and are not empty."""
    notes += [
        ConversionNote(key, without[key])
        for key, one in value.items()
        if key in without and one not in (None, [], {}, "")
    ]
    supported = {key: one for key, one in value.items() if key not in without}
    return read_part(supported, kind, at, lambda key, _: notes.append(ConversionNote(key.rpartition(".")[2], UNKNOWN)))


def _tenant(keys: tuple[str, ...]) -> ConversionResult:
    """Convert API keys to a Tenant. The keys remain valid; only their hashes are written."""
    hashes = dict.fromkeys(sha256(key.encode()).hexdigest() for key in keys)
    entries = [{"name": f"key-{number}", "sha256": one} for number, one in enumerate(hashes, 1)]
    spec: Document = {"keys": entries}
    document: Document = {"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": TENANT}, "spec": spec}
    return finalize_document(f"Tenant {TENANT}", document)


def expand_environment(text: str, environ: Mapping[str, str]) -> str:
    """Expand environment variables in a text. Raises WrongKeyError, whose message never contains a value."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environ:
            raise WrongKeyError((), f"${{env.{name}}}: this environment variable is not set: set it as for llama-swap")
        return environ[name]

    lines = (line if line.lstrip().startswith("#") else _ENV.sub(value, line) for line in text.splitlines())
    return "\n".join(lines) + "\n"


def expand_macros(value: object, macros: Macros, at: Path) -> object:
    """Expand all macros in a value; a value that is a single macro gets the macro's type. Raises WrongKeyError."""
    if isinstance(value, dict):
        return {key: expand_macros(one, macros, (*at, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [expand_macros(one, macros, (*at, position)) for position, one in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name in reversed(list(macros)):  # a macro may use earlier ones
        if value == f"${{{name}}}":
            return expand_macros(macros[name], macros, at)
        value = value.replace(f"${{{name}}}", _text(macros[name]))
    unknown = next((name for name in _MACRO.findall(value) if name not in RUN_TIME), None)
    if unknown is not None:
        raise WrongKeyError(at, f"unknown macro ${{{unknown}}}")
    return value.replace("${PORT}", PORT)


def merge_macros(every: Macros, own: Macros, model: str) -> Macros:
    """Return the macros of one model."""
    return {"MODEL_ID": model, **every, **own}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
