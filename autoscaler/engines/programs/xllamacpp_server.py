"""A llama.cpp server from the `xllamacpp` wheel, as a standalone script: started by path, it imports nothing of ours.

    python -I -u xllamacpp_server.py --model FILE.gguf --host 127.0.0.1 --port 8000 --slots 4

Flags have llama-server's names if it has them. The cold start includes this script, so it parses its flags itself
(argparse costs 6 ms) and leaves everything else to the library. The port answers 503 on /health while the model loads,
then 200. Until it prints that it is listening, SIGTERM ends it at once, as any process; afterwards it exits with status
0, even during a stream: the caller has drained it. `parse_flags` is pure, so that an invalid flag is found before a
start.
"""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType

TEXTS = (
    *("--model", "--host", "--alias"),
    "--mmproj",  # GGUF file of the vision projector
    "--lora-scaled",  # PATH:SCALE of each adapter, separated by commas
)
NUMBERS = (
    "--port",
    "--slots",
    "--context-tokens",  # of each slot; absent: the model's own context, shared by all slots
    "--shared-context-tokens",  # shared by all slots; replaces the model's own context
    "--threads",
    "--gpu-layers",
    "--batch-size",
    "--ubatch-size",
    "--ctx-checkpoints",  # number of checkpoints of each slot, in host memory
    "--cache-ram",  # MiB of host memory for prompts of earlier requests; 0 here, since no memory is planned for it
)
SWITCHES = ("--embeddings", "--reranking", "--warmup")
FLAGS = (*TEXTS, *NUMBERS, *SWITCHES)
NEEDED = ("--model", "--host", "--port", "--slots")


def parse_flags(argv: list[str]) -> dict[str, str]:
    """Parse `--flag value` and `--flag=value`: {flag: value}, "" for switches. Raises `ValueError`, one line."""
    options: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            raise ValueError(f"{flag} is not a flag of the xllamacpp server, which supports {' '.join(FLAGS)}")
        if flag in SWITCHES and equals:
            raise ValueError(f"{flag} takes no value")
        if flag not in SWITCHES and not equals:
            value = next(rest, "")
        if flag not in SWITCHES and not value:
            raise ValueError(f"{flag} needs a value")
        if flag in NUMBERS and not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise ValueError(f"{flag} needs a whole number")
        options[flag] = value
    for path, scale in parse_adapters(options.get("--lora-scaled", "")):
        if not path or not (scale.isascii() and scale.isdigit()):
            raise ValueError("--lora-scaled needs PATH:SCALE of each adapter, separated by commas")
    missing = [flag for flag in NEEDED if flag not in options]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return options


def parse_adapters(adapters: str) -> list[tuple[str, str]]:
    """Return path and scale of each adapter."""
    parts = (adapter.rpartition(":") for adapter in adapters.split(",")) if adapters else ()
    return [(path, scale) for path, _, scale in parts]


def serve(options: dict[str, str]) -> None:
    """Load the model and serve it until a signal ends the process. Raises what the library raises."""
    unused = ModuleType(
        "xllamacpp.memory"
    )  # estimates layers with the `gguf` package: 9 of 48 ms to ready, for nothing
    unused.estimate_gpu_layers = None  # type: ignore[attr-defined]  # the one name that the package takes from it
    sys.modules[unused.__name__] = unused
    from xllamacpp import CommonParams, Server

    number = {flag: int(options[flag]) for flag in NUMBERS if flag in options}
    p = CommonParams()
    p.model.path = options["--model"]
    p.mmproj.path = options.get("--mmproj", "")
    p.model_alias = {options.get("--alias", "")} - {""}
    p.hostnames, p.port = [options["--host"]], number["--port"]
    p.n_parallel = number["--slots"]
    p.kv_unified = "--context-tokens" not in number
    # 0: the model's own context.
    p.n_ctx = number.get("--context-tokens", 0) * p.n_parallel or number.get("--shared-context-tokens", 0)
    p.fit_params = False  # the plan already ensures that the model fits; checking again would load the model twice
    p.n_gpu_layers = number.get("--gpu-layers", p.n_gpu_layers)
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = number.get("--threads", p.cpuparams.n_threads)
    p.n_batch = number.get("--batch-size", p.n_batch)
    p.n_ubatch = number.get("--ubatch-size", p.n_ubatch)
    p.n_ctx_checkpoints = number.get("--ctx-checkpoints", p.n_ctx_checkpoints)
    if "--lora-scaled" in options:
        from xllamacpp import CommonAdapterLoraInfo

        p.lora_adapters = [
            CommonAdapterLoraInfo(path, float(s)) for path, s in parse_adapters(options["--lora-scaled"])
        ]
    p.cache_ram_mib = number.get("--cache-ram", 0)
    p.cache_idle_slots = p.cache_ram_mib > 0  # else it logs a warning at every start
    p.embedding = "--embeddings" in options or "--reranking" in options
    if "--reranking" in options:
        from xllamacpp import llama_pooling_type

        p.pooling_type = llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    p.warmup = "--warmup" in options  # else the first request warms it up: the same work, without an extra wait
    p.endpoint_metrics = p.endpoint_slots = p.offline = True
    p.ui, p.cors_origins = False, ""  # no browser uses the server
    p.verbosity = 2  # logs warnings and errors; the next level logs several lines per request
    server = Server(p)  # returns when the model is loaded and the port answers 200
    os.write(1, f"listening on {server.listening_address}\n".encode())  # one write: the library writes concurrently
    wait_for_signal()
    os._exit(0)  # at once: the library would wait for running streams


def wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT, through a pipe: pause() would miss a signal that arrives just before it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: None)
    os.read(reading, 1)


def main(argv: list[str]) -> str | None:
    """Serve; on failure return the reason in one line."""
    try:
        serve(parse_flags(argv))
    except ValueError as error:
        return f"xllamacpp server: {error}"
    except Exception as error:  # noqa: BLE001  any exception of the library ends this process with one line
        return f"xllamacpp server: the model could not be served (see its log above): {error}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
