"""The engines that Pilotlight can start, one entry each.

Owns the facts and nothing else: flags as the engines document them, dialects and connection manners as seen. Every
engine is told to serve the model under the Model's own name, so bodies keep it. Default slots are what an engine bears
without tuning; a Model's `slots` says better.
"""

from __future__ import annotations

from autoscaler.spec.engines import Adapters, Engine, Program

CHECKPOINTS = 3
"""Of each slot llama.cpp keeps so many copies of what windows and recurrent states have forgotten, to go back to, in
the host's memory; by itself 32, which can be several times the memory of the model. Three were its first default."""

LLAMA_CPP = Engine(
    name="llama.cpp",
    programs=(
        Program(
            found="xllamacpp",  # a Python that can import it; {launcher} is our script beside this file
            argv=(
                *("{program}", "-I", "-u", "{launcher}", "--model", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--slots", "{slots}", "--alias", "{name}"),
                *("--ctx-checkpoints", str(CHECKPOINTS)),
                ("--context-tokens", "{context_tokens}"),
                ("--shared-context-tokens", "{shared_context_tokens}"),
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
                ("--ctx-size", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            # Prompts of earlier Calls would take up to 8 GiB of the host's memory, for which nobody planned.
            env={"LLAMA_ARG_CTX_CHECKPOINTS": str(CHECKPOINTS), "LLAMA_ARG_CACHE_RAM": "0"},
        ),
    ),
    install="pip install 'pilotlight[llama]', or put llama-server on the PATH",
    readiness_path="/health",  # 503 while it loads, 200 after
    artifacts="file",
    slots=4,
    sized_by=(
        *("--context-tokens", "--shared-context-tokens", "--ctx-size", "-c", "--slots", "--parallel", "-np"),
        *("LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL"),
    ),
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
                ("--gpu-memory-utilization", "{memory_fraction}"),  # of all the device's memory, whoever else is there
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install vllm",
    artifacts="file-or-hf",
    slots=64,
    dialects=EVERY_DIALECT,  # rerank, score and tokenize, too
    adapters=Adapters(words=("--enable-lora", "--lora-modules"), each="{name}:{adapter}={adapter_path}"),
    pages=True,
    sized_by=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"),
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
                ("--mem-fraction-static", "{memory_fraction}"),  # of what is free when it starts: never more
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install sglang",
    artifacts="file-or-hf",
    slots=64,
    adapters=Adapters(words=("--enable-lora", "--lora-paths"), each="{adapter}={adapter_path}"),
    colon_in_name=False,  # it takes what follows one for an adapter
    pages=True,
    sized_by=("--mem-fraction-static", "--max-total-tokens"),
    takes_cache_salt=True,
)

OLLAMA = Engine(
    name="ollama",
    programs=(Program(found="ollama", argv=("{program}", "serve")),),
    install="install it from https://ollama.com/download",
    env={
        "OLLAMA_HOST": "[{host}]:{port}",  # in a pod the address may be IPv6; Go takes both in brackets
        "OLLAMA_NUM_PARALLEL": "{slots}",
        "OLLAMA_KEEP_ALIVE": "-1",  # when it ends is decided here, not by its own clock
        "OLLAMA_CONTEXT_LENGTH": ("{context_tokens}",),
        "OLLAMA_MODELS": ("{model_path}",),  # a file:// artifact is the folder of its store
    },
    readiness_path="/",  # the server; the model itself is read at the first Call
    artifacts="optional-file",
    slots=4,
    sizes_itself=True,
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
