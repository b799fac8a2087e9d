"""Builds the command line, environment and readiness path of an engine from a model and a port. Pure.

Fills in the data of an engine. The installed programs are an argument; nothing is looked up or started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from autoscaler.engines.programs import xllamacpp_server
from autoscaler.queries.granted_memory import AS_ASKED, Given
from autoscaler.spec.artifact_name import STORED
from autoscaler.spec.engine_definition import Adapters, Engine, EngineError, Program, fill_template
from autoscaler.spec.engines import ENGINES, is_fetched_by_engine
from autoscaler.spec.model import Model

LAUNCHER = xllamacpp_server.__file__
FILE = "file://"


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The process that a driver starts. `env` is added to the driver's environment, without values that a kubelet must
    resolve (`valueFrom`). GET on `readiness_path` returns 200 when the engine is ready.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    readiness_path: str


def build_launch_command(
    model: Model, model_path: str | None, host: str, port: int, available: Mapping[str, str], *, gpus: bool = False,
    given: Given = AS_ASKED, ipv6: bool = False,
) -> LaunchCommand:  # fmt: skip
    """Return how to start one replica listening on (host, port). `ipv6`: `host` stands for an IPv6 address.

    `model_path`: path of the weights on this node; None: as in the artifact. `available`: name -> path of this node's
    programs (`llama-server`, `vllm`, `ollama`; for `xllamacpp` and `sglang` a Python that can import it). `gpus`: its
    devices are GPUs. `given`: the resources granted to it. Raises `EngineError`, one line with the
    model and the fix.
    """
    engine = ENGINES[model.spec.engine]
    values, env = _values(model, model_path, host, port, given), dict[str, str]()
    try:
        if model_path is None:
            _check_reachable(model.spec.artifact or "", engine)
        if engine.programs:
            program = select_program(engine, available, gpus=gpus and model.spec.gpu.count > 0)
            if program is None:
                raise EngineError(f"{engine.name} is not installed here: {engine.install}")  # noqa: TRY301  one boundary
            values["program"] = available[program.found]
            env |= program.env
            argv = (*fill_template(program.argv, values), *_adapters(model, engine.adapters), *model.spec.args)
            _check(program, argv)
            if program.found == "xllamacpp" and model.spec.tls is not None:
                raise EngineError("spec.tls: the llama extra's server has no TLS: use llama-server")  # noqa: TRY301  one boundary
        else:
            command = _bracketed(model.spec.command) if ipv6 or ":" in host else model.spec.command
            argv = (*fill_template(command, values), *model.spec.args)
        env |= {key: text for key, word in engine.env.items() for text in fill_template((word,), values)}
    except EngineError as error:
        raise EngineError(f"Model {model.name}: {error}") from None
    plain = {name: value for name, value in model.spec.env.items() if isinstance(value, str)}
    (ready,) = fill_template((engine.readiness_path,), values)
    return LaunchCommand(argv=argv, env=env | plain, readiness_path=model.spec.readiness_path or ready)


def _bracketed(words: Iterable[str]) -> tuple[str, ...]:
    """Add the brackets around an IPv6 address before a port (RFC 3986, section 3.2.2)."""
    return tuple(word.replace("[{host}]", "{host}").replace("{host}:{port}", "[{host}]:{port}") for word in words)


def _check_reachable(artifact: str, engine: Engine) -> None:
    """Raise `EngineError` for weights that neither this node has nor the engine can fetch."""
    scheme = artifact.partition("://")[0]
    if scheme == "pvc":
        raise EngineError("pvc:// is a claim of a cluster: on one machine use file:///path")
    if scheme in STORED and not is_fetched_by_engine(artifact, engine):
        hub = "the Hub with ?include=" if engine.artifacts == "file-or-hf" else "the Hub"
        place = {"oci": "a registry", "s3": "a bucket"}.get(scheme, hub)
        raise EngineError(
            f"weights from {place} are not fetched for this start: mount them, and name them as file:///path"
        )


def select_program(engine: Engine, available: Mapping[str, str], *, gpus: bool) -> Program | None:
    """Return the program to start: the first available one, with GPUs preferably one built for them."""
    found = [program for program in engine.programs if program.found in available]
    return min(found, key=lambda program: gpus and bool(program.for_gpus), default=None)


def artifact_path(artifact: str | None) -> str | None:
    """Return what the engine loads: the path of `file:///path` as written, `org/name` of `hf://org/name@rev`."""
    if artifact is None:
        return None
    scheme, _, rest = artifact.partition("://")
    return rest if scheme == "file" else rest.partition("?")[0].partition("@")[0]


def _adapters(model: Model, support: Adapters | None) -> tuple[str, ...]:
    """Return the arguments for the model's adapters, in order."""
    if support is None or not model.spec.adapters:
        return ()
    scheme = next((a.artifact.partition("://")[0] for a in model.spec.adapters if not a.artifact.startswith(FILE)), "")
    if scheme:
        raise EngineError(
            f"adapters: {scheme}:// is not fetched for this start: mount the adapters, and name them as file:///path"
        )
    values = (
        {"name": model.served(), "adapter": a.name, "adapter_path": artifact_path(a.artifact)}
        for a in model.spec.adapters
    )
    rows = [word for row in values for word in fill_template((support.each,), row)]
    return (*support.words, support.joint.join(rows)) if support.joint else (*support.words, *rows)


def _values(model: Model, model_path: str | None, host: str, port: int, given: Given) -> dict[str, str | None]:
    spec = model.spec
    context, slots = spec.context_tokens, given.slots or model.slots
    memory_bytes, shared = given.memory_bytes or model.memory_bytes, given.shared_context_tokens
    revision = (
        (spec.artifact or "").partition("?")[0].partition("@")[2] if (spec.artifact or "").startswith("hf://") else ""
    )
    return {
        "host": host,
        "port": str(port),
        "model_path": model_path or artifact_path(spec.artifact),
        "name": model.served(),
        "memory_bytes": str(memory_bytes) if memory_bytes else None,
        "memory_fraction": None if given.memory_fraction is None else f"{given.memory_fraction:.3f}",
        "slots": str(slots),
        "context_tokens": str(context) if context else None,
        "all_context_tokens": str(context * slots) if context else None,
        "shared_context_tokens": str(shared) if shared else None,
        "revision": revision or None,
        "gpus": str(spec.gpu.count) if spec.gpu.count > 1 else None,
        "cpu_only": "0" if spec.gpu.count == 0 else None,
        "launcher": LAUNCHER,
    }


def _check(program: Program, argv: tuple[str, ...]) -> None:
    """Check the flags of our own launcher, which supports few: an error here avoids a failed start."""
    if program.found == "xllamacpp":
        try:
            xllamacpp_server.parse_flags(list(argv[argv.index(LAUNCHER) + 1 :]))
        except ValueError as error:
            raise EngineError(str(error)) from None
