"""The engines that Pilotlight can start, one entry each.

Owns the facts and nothing else: flags as the engines document them, dialects and connection manners as seen. Every
engine is told to serve the model under the Model's own name, so bodies keep it. Default slots are what an engine bears
without tuning; a Model's `slots` says better.
"""

from __future__ import annotations

from autoscaler.engines.base import Adapters, Engine, Program

LLAMA_CPP = Engine(
    name="llama.cpp",
    programs=(
        Program(
            found="xllamacpp",  # a Python that can import it; {launcher} is our script beside this file
            argv=(
                *("{program}", "-I", "-u", "{launcher}", "--model", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--slots", "{slots}", "--alias", "{name}"),
                ("--context-tokens", "{context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            for_gpus="put a llama-server that was built with CUDA on the PATH, or `pip install --force-reinstall "
            "xllamacpp --index-url https://xorbitsai.github.io/xllamacpp/whl/cu128`",  # its README; cu132 for CUDA 13
        ),
        Program(
            found="llama-server",
            argv=(
                *("{program}", "--model", "{model_path}", "--host", "{host}", "--port", "{port}", "--alias", "{name}"),
                *("--parallel", "{slots}", "--offline", "--metrics"),
                ("--ctx-size", "{all_context_tokens}"),  # of all slots together
                ("--gpu-layers", "{cpu_only}"),
            ),
        ),
    ),
    install="pip install 'pilotlight[llama]', or put llama-server on the PATH",
    readiness_path="/health",  # 503 while it loads, 200 after
    artifacts="file",
    slots=4,
    adapters=Adapters(
        # At scale 0, so that only a body's `lora` applies one: --lora-init-without-apply leaves them at 1
        # (ggml-org/llama.cpp#28674). Prompts kept in host memory are kept without their adapter: what was computed
        # with one would answer for another (#26207, #30129).
        words=("--cache-ram", "0", "--lora-scaled"),
        each="{adapter_path}:0",
        joint=",",
        by_lora=True,
        excludes=("--cache-ram", "-cram", "--lora", "--lora-scaled"),
    ),
    closes_after_stream=True,  # although it answers Keep-Alive: timeout=5, max=100
)

EVERY_DIALECT = ("openai", "anthropic", "jina", "vllm")

VLLM = Engine(
    name="vllm",
    programs=(
        Program(
            found="vllm",
            argv=(
                *("{program}", "serve", "{model_path}", "--host", "{host}", "--port", "{port}"),
                *("--served-model-name", "{name}", "--max-num-seqs", "{slots}"),
                ("--max-model-len", "{context_tokens}"),
                ("--tensor-parallel-size", "{gpus}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install vllm",
    artifacts="file-or-hf",
    slots=64,
    dialects=EVERY_DIALECT,  # rerank, score and tokenize, too
    adapters=Adapters(words=("--enable-lora", "--lora-modules"), each="{name}:{adapter}={adapter_path}"),
    takes_cache_salt=True,
)

SGLANG = Engine(
    name="sglang",
    programs=(
        Program(
            found="sglang",  # a Python that can import it
            argv=(
                *("{program}", "-m", "sglang.launch_server", "--model-path", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--served-model-name", "{name}", "--max-running-requests", "{slots}"),
                ("--context-length", "{context_tokens}"),
                ("--tp-size", "{gpus}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install sglang",
    artifacts="file-or-hf",
    slots=64,
    adapters=Adapters(words=("--enable-lora", "--lora-paths"), each="{adapter}={adapter_path}"),
    colon_in_name=False,  # it takes what follows one for an adapter
    takes_cache_salt=True,
)

OLLAMA = Engine(
    name="ollama",
    programs=(Program(found="ollama", argv=("{program}", "serve")),),
    install="install it from https://ollama.com/download",
    env={
        "OLLAMA_HOST": "{host}:{port}",
        "OLLAMA_NUM_PARALLEL": "{slots}",
        "OLLAMA_KEEP_ALIVE": "-1",  # when it ends is decided here, not by its own clock
        "OLLAMA_CONTEXT_LENGTH": ("{context_tokens}",),
        "OLLAMA_MODELS": ("{model_path}",),  # a file:// artifact is the folder of its store
    },
    readiness_path="/",  # the server; the model itself is read at the first Call
    artifacts="optional-file",
    slots=4,
)

COMMAND = Engine(
    name="command",
    artifacts="optional-file",
    slots=4,
    dialects=EVERY_DIALECT,
    adapters=Adapters(served_name="{adapter}"),
)
"""Whatever the Model's `command` starts. Its dialects are not known, so none is ruled out; it loads its adapters
itself, and knows them by their own names."""

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LLAMA_CPP, VLLM, SGLANG, OLLAMA, COMMAND)}


def default_slots(engine: str) -> int:
    """Calls at once on one Replica of a Model that does not say."""
    return ENGINES[engine].slots
