"""The engines that Pilotlight can start, as data, and lookups in them. Pure.

The flags are those that the engines document. Every engine serves the model under the Model's own name, so that request
bodies need no change; `named_by_path` marks the exception. The default slots are what an engine handles without tuning;
`slots` of a Model overrides them. `behavior.sources` names where the facts of an entry come from.
"""

from __future__ import annotations

import re

from autoscaler.contract import ChatTemplate, TritonEntry, TurnFrame
from autoscaler.spec.engine_definition import Adapters, Behavior, Engine, EngineMetrics, Platform, Program, Sleep

CHECKPOINTS = 3
"""The number of context checkpoints that llama.cpp keeps per slot in host memory, to restore what sliding windows and
recurrent states discard. Its own default is 32, which can be several times the memory of the model; its first default
was 3.
"""

LLAMA_CPP = Engine(
    name="llama.cpp",
    programs=(
        Program(
            found="xllamacpp",  # {launcher} is Pilotlight's script for it
            package=True,
            argv=(
                *("{program}", "-I", "-u", "{launcher}", "--model", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--slots", "{slots}", "--alias", "{name}"),
                *("--ctx-checkpoints", str(CHECKPOINTS)),
                ("--context-tokens", "{context_tokens}"),
                ("--shared-context-tokens", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            for_gpus="put a llama-server that was built with CUDA on the PATH, or `pip install --force-reinstall "
            # from its README; cu132 for CUDA 13
            "xllamacpp --index-url https://xorbitsai.github.io/xllamacpp/whl/cu128`",
        ),
        Program(
            found="llama-server",
            argv=(
                *("{program}", "--model", "{model_path}", "--host", "{host}", "--port", "{port}", "--alias", "{name}"),
                *("--parallel", "{slots}", "--offline", "--metrics"),
                ("--ctx-size", "{all_context_tokens}"),  # for all slots together
                ("--ctx-size", "{shared_context_tokens}"),
                ("--gpu-layers", "{cpu_only}"),
            ),
            # By default cached prompts use up to 8 GiB of host memory, which the plan does not account for.
            env={"LLAMA_ARG_CTX_CHECKPOINTS": str(CHECKPOINTS), "LLAMA_ARG_CACHE_RAM": "0"},
        ),
    ),
    install="pip install xllamacpp, or put llama-server on the PATH",
    synonyms={"-m": "model_path", "-a": "name", "-np": "slots", "-c": "context_tokens"},
    readiness_path="/health",  # 503 while it loads, then 200
    artifacts="file",
    slots=4,
    dialects=("openai", "anthropic", "jina"),  # not responses: see the notes
    sized_by=(
        *("--context-tokens", "--shared-context-tokens", "--ctx-size", "-c", "--slots", "--parallel", "-np"),
        *("LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_N_PARALLEL"),
    ),
    adapters=Adapters(
        # Adapters are loaded at scale 0, so that only `lora` in a body applies one: --lora-init-without-apply leaves
        # them at 1 (ggml-org/llama.cpp#28674). The prompt cache in host memory does not record the adapter, so a prompt
        # computed with one adapter would be reused for another (#26207, #30129).
        words=("--cache-ram", "0", "--lora-scaled"),
        each="{adapter_path}:0",
        joint=",",
        by_lora=True,
        excludes=("--cache-ram", "-cram", "--lora", "--lora-scaled"),
    ),
    closes_after_stream=True,  # although it answers Keep-Alive: timeout=5, max=100
    behavior=Behavior(
        ready_when="the model is loaded; 503 before",
        cancellation="stops when the connection is closed. For a request without a stream it checks that only "
        "after a second in which no other request, not even for metrics, had a result",
        stop="the server of the extra `llama` ends at once, also during a stream. llama-server ends at once without "
        "requests. During a stream, its tokens stop, and the connection stays open until the next ping of the stream: "
        "30 s, and longer with `--sse-ping-interval -1`",
        memory="`--ctx-size` and `--parallel` (`--context-tokens` and `--slots` of the extra `llama`)",
        adapter_loading="none; `POST /lora-adapters` changes the scales of loaded ones",
        metrics=EngineMetrics(
            needs="`--metrics`, which Pilotlight sets",
            waiting=("llamacpp:requests_deferred",),
            running=("llamacpp:requests_processing",),
            tokens=("llamacpp:tokens_predicted_total",),
        ),
        sleep=Sleep(
            needs="`--sleep-idle-seconds`",
            sleep="by itself, after that time",
            wake="by the next request",
            state="`GET /props`, `is_sleeping`",
        ),
        native_paths=(
            *("/props", "/slots", "/slots/{id}", "/lora-adapters", "/completion", "/infill", "/apply-template"),
        ),
        notes="closes the connection after each stream, although it announces keep-alive. It answers requests for an "
        "unknown model. The gateway translates `/v1/responses`, because its own streams lack `sequence_number`, "
        "`output_index` and `content_index`, and a response that reaches the token limit is not incomplete. "
        "`/v1/rerank` needs `--reranking`",
        tests="run",
        sources=(
            "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
            "observed with xllamacpp and llama-server 11434",
        ),
    ),
)

EVERY_DIALECT = ("openai", "responses", "anthropic", "jina", "cohere", "score", "vllm")

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
                # a fraction of the device's whole memory, including what other processes use
                ("--gpu-memory-utilization", "{memory_fraction}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install vllm",
    image="vllm/vllm-openai",
    platforms=(
        Platform(
            name="Ascend",
            image="quay.io/ascend/vllm-ascend",
            source="https://docs.vllm.ai/projects/ascend/en/latest/getting_started/quick_start.html",
        ),
        Platform(
            name="ROCm",
            image="rocm/vllm",
            env={"VLLM_ROCM_USE_AITER": "1"},
            source="https://rocm.docs.amd.com/projects/ai-ecosystem/en/latest/optimization/vllm-v1-optimization.html",
        ),
        Platform(
            name="Gaudi",
            image="built from the Dockerfile of vllm-gaudi",
            env={"OMPI_MCA_btl_vader_single_copy_mechanism": "none"},
            source="https://docs.vllm.ai/projects/gaudi/en/latest/getting_started/installation.html",
        ),
    ),
    synonyms={"--model": "model_path"},
    artifacts="file-or-hf",
    slots=64,
    dialects=EVERY_DIALECT,
    adapters=Adapters(words=("--enable-lora", "--lora-modules"), each="{name}:{adapter}={adapter_path}"),
    pages=True,
    sized_by=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"),
    takes_cache_salt=True,
    behavior=Behavior(
        ready_when="the model is loaded. It stays 200 while the engine sleeps",
        cancellation="stops when the connection is closed; observed after 0.04 s of a stream",
        stop="ends after 2.5 s without requests. During a stream, tokens stop, and the connection stays open: the "
        "process was still there after 60 s, and ended 1 s after the client had closed the connection. Some "
        "streams ended with an error and `[DONE]` instead",
        memory="`--gpu-memory-utilization`, a fraction of the device's whole memory",
        adapter_loading="`POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter`, with "
        "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`",
        metrics=EngineMetrics(
            waiting=("vllm:num_requests_waiting",),
            running=("vllm:num_requests_running",),
            cache_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            tokens=("vllm:generation_tokens_total",),
        ),
        sleep=Sleep(
            needs="`--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`",
            sleep="`POST /sleep?level=1` (weights in host memory) or `level=2` (no weights)",
            wake="`POST /wake_up`",
            state="`GET /is_sleeping`",
        ),
        native_paths=(
            *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/collective_rpc"),
            *("/update_weights", "/init_weight_transfer_engine", "/release_kv_cache_memory", "/reset_prefix_cache"),
            *("/scale_elastic_ep", "/abort_requests", "/server_info", "/load", "/invocations", "/adapters/{id}"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions/batch"),
            *("/v1/responses/{id}", "/v1/responses/{id}/cancel"),
        ),
        notes="a request to a sleeping engine waits, without an error, until the engine wakes. On a CPU it has the "
        "endpoints of sleep without `--enable-sleep-mode`, which it rejects there",
        tests="engines",
        sources=("https://docs.vllm.ai/en/latest/", "observed with vLLM 0.32.0 on a CPU"),
    ),
)

SGLANG = Engine(
    name="sglang",
    programs=(
        Program(
            found="sglang",
            package=True,
            argv=(
                *("{program}", "-m", "sglang.launch_server", "--model-path", "{model_path}", "--host", "{host}"),
                *("--port", "{port}", "--served-model-name", "{name}", "--max-running-requests", "{slots}"),
                ("--context-length", "{context_tokens}"),
                ("--tp-size", "{gpus}"),
                # a fraction of the memory that is free at the start, at most
                ("--mem-fraction-static", "{memory_fraction}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install sglang",
    image="lmsysorg/sglang",
    # Otherwise /health generates a token, and waits a second for it, which is as long as a probe may take.
    env={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
    synonyms={"--model": "model_path"},
    artifacts="file-or-hf",
    slots=64,
    dialects=("openai", "responses", "anthropic", "sglang"),
    adapters=Adapters(words=("--enable-lora", "--lora-paths"), each="{adapter}={adapter_path}"),
    colon_in_name=False,  # it interprets the text after `:` as an adapter
    pages=True,
    sized_by=("--mem-fraction-static", "--max-total-tokens"),
    takes_cache_salt=True,
    behavior=Behavior(
        ready_when="the server has started and answered its own first request; 503 before",
        cancellation="stops when the connection is closed",
        stop="completes running requests, and answers `/health` with 503 meanwhile",
        memory="`--mem-fraction-static`, a fraction of the memory that is free at the start",
        adapter_loading="`POST /load_lora_adapter`, `POST /unload_lora_adapter`",
        metrics=EngineMetrics(
            needs="`--enable-metrics`",
            flag="--enable-metrics",
            waiting=("sglang:num_queue_reqs",),
            running=("sglang:num_running_reqs",),
            cache_use=("sglang:token_usage",),
            tokens=("sglang:generation_tokens_total",),
        ),
        sleep=Sleep(
            needs="`--enable-memory-saver`",
            sleep="`POST /release_memory_occupation`",
            wake="`POST /resume_memory_occupation`",
        ),
        native_paths=(
            *("/generate", "/encode", "/classify", "/flush_cache", "/release_memory_occupation"),
            *("/resume_memory_occupation", "/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"),
            *("/update_weights_from_tensor", "/update_weights_from_distributed", "/get_weights_by_name"),
            *("/set_internal_state", "/start_profile", "/stop_profile", "/open_session", "/close_session"),
            *("/configure_logging", "/abort_request", "/pause_generation", "/continue_generation", "/server_info"),
            *("/health_generate", "/vertex_generate", "/v1/responses/{id}", "/v1/responses/{id}/cancel"),
        ),
        sources=(
            "https://docs.sglang.io/advanced_features/server_arguments.html",
            "`sglang/srt/entrypoints/http_server.py` of SGLang 0.5.23",
        ),
    ),
)

TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    programs=(
        Program(
            found="trtllm-serve",
            argv=(
                *("{program}", "serve", "{model_path}", "--host", "{host}", "--port", "{port}"),
                *("--max_batch_size", "{slots}"),
                ("--max_seq_len", "{context_tokens}"),
                ("--tp_size", "{gpus}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install tensorrt-llm",
    image="nvcr.io/nvidia/tensorrt-llm/release",
    env={"TRTLLM_RESPONSES_API_DISABLE_STORE": "1"},  # a stored response is known to one replica only
    artifacts="file-or-hf",
    dialects=("openai", "responses"),
    slots=64,
    pages=True,
    sizes_itself=True,  # its flag is a fraction of what the weights leave free
    behavior=Behavior(
        ready_when="the model is loaded and its executor is alive: the server listens after the load",
        cancellation="stops when the connection is closed; it looks once a second",
        stop="stops serving, then shuts the executor down",
        memory="whole devices or MIG slices: `--kv_cache_free_gpu_memory_fraction` is a fraction of what the weights "
        "leave free",
        metrics=EngineMetrics(
            path="/prometheus/metrics",
            needs="`return_perf_metrics: true` in the file of `--config`",
            waiting=("trtllm_num_requests_waiting",),
            running=("trtllm_num_requests_running",),
            cache_use=("trtllm_kv_cache_utilization",),
        ),
        sleep=Sleep(sleep="`POST /release_memory`", wake="`POST /resume_memory`"),
        native_paths=(
            *("/release_memory", "/resume_memory", "/update_weights", "/server_info", "/perf_metrics"),
            *("/kv_cache_events", "/v1/kv_cache_hints", "/steady_clock_offset", "/health_generate"),
            "/v1/responses/{id}",
        ),
        notes="listens on IPv4 only; serves the model under the name of its folder",
        sources=(
            "https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/commands/serve.py",
            "https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/serve/openai_server.py",
        ),
    ),
)

TRITON = Engine(
    name="triton",
    programs=(
        Program(
            found="tritonserver",
            argv=(
                *("{program}", "--model-repository={model_path}", "--model-control-mode=explicit"),
                *("--load-model={name}", "--http-address={host}", "--http-port={port}"),
                # Both would listen on ports of their own, which other replicas on the node need, too.
                *("--allow-grpc=false", "--allow-metrics=false"),
            ),
        ),
    ),
    install="put tritonserver on the PATH",
    image="nvcr.io/nvidia/tritonserver",
    repeated_flags=("--load-model",),  # models that it calls; those of an ensemble are loaded with it
    readiness_path="/v2/models/{name}/ready",
    artifacts="file",
    dialects=(),
    slots=8,
    sizes_itself=True,
    behavior=Behavior(
        ready_when="the model is loaded; 400 otherwise. `/v2/health/ready` is no readiness: 200 with nothing loaded, "
        "400 after a failed load or an unload",
        cancellation="cancels the request when the connection is closed. The backend decides when it stops: a Python "
        "model must call `is_cancelled`",
        stop="waits for running requests, at most `--exit-timeout-secs` (30 s by default); 1.9 s without requests. It "
        "had not ended after 60 s when a load hung",
        memory="the model's own configuration in the repository",
        metrics=EngineMetrics(
            on_request_port=False,
            needs="`--allow-metrics=true` and a port of its own, `--metrics-port`",
            waiting=("nv_inference_pending_request_count", 'nv_trt_llm_request_metrics{request_type="waiting"}'),
            running=('nv_trt_llm_request_metrics{request_type="scheduled"}',),
            cache_use=('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',),
            queue_time_path="/v2/models/{name}/stats",
        ),
        sleep=Sleep(
            sleep="`POST /v2/repository/models/M/unload`",
            wake="`POST /v2/repository/models/M/load`",
            state="`GET /v2/models/M/ready`",
        ),
        native_paths=(
            *("/v2", "/v2/health/ready", "/v2/repository/index", "/v2/repository/models/{id}/load"),
            *("/v2/repository/models/{id}/unload", "/v2/models/{id}", "/v2/models/{id}/infer"),
            *("/v2/models/{id}/generate", "/v2/models/{id}/generate_stream", "/v2/models/{id}/stats"),
            *("/v2/models/{id}/config", "/v2/trace/setting", "/v2/logging"),
            *("/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status"),
        ),
        notes="[requests are translated](triton-api.md). If the model cannot be loaded, it exits with status 1. "
        "A load can hang in LOADING, and so does an unload then. `GET /v2/models/M/stats` has times in the queue on "
        "the port of the requests",
        tests="run",
        sources=(
            "https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/",
            "https://github.com/triton-inference-server/vllm_backend/blob/main/src/model.py",
            "https://github.com/NVIDIA/TensorRT-LLM/tree/main/triton_backend/all_models",
            "observed with tritonserver 2.51.0 on a CPU",
        ),
    ),
)

_SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
_TENSORRT_LLM_INPUTS = {name: name for name in _SAMPLING} | {
    "stop": "stop_words",
    "stream": "stream",
    "exclude_prompt": "exclude_input_in_output",
}
TRITON_BACKENDS = {
    # Triton takes a member that is no input of the model for a parameter of the request, which these backends ignore.
    # Only a list is then an error.
    "auto": TritonEntry(inputs=_TENSORRT_LLM_INPUTS, json_input="sampling_parameters", one_stop=True),
    # `ensemble` and `tensorrt_llm_bls` of triton_backend/all_models/inflight_batcher_llm in TensorRT-LLM
    "tensorrt-llm": TritonEntry(inputs=_TENSORRT_LLM_INPUTS),
    # `tensorrt_llm` of triton_backend/all_models/llmapi in TensorRT-LLM
    "tensorrt-llm-api": TritonEntry(
        inputs={
            name: f"sampling_param_{name}"
            for name in (*_SAMPLING, "stop")
            if name not in {"min_tokens", "repetition_penalty"}
        }
        | {"stream": "streaming", "exclude_prompt": "sampling_param_exclude_input_from_output"}
    ),
    # `src/model.py` of triton-inference-server/vllm_backend
    "vllm": TritonEntry(
        inputs={"stream": "stream", "exclude_prompt": "exclude_input_in_output"}, json_input="sampling_parameters"
    ),
}
"""The inputs of models of Triton by `spec.triton.backend`."""

CHAT_TEMPLATES: dict[str, ChatTemplate | None] = {
    "chatml": ChatTemplate(
        roles={
            role: TurnFrame(before=f"<|im_start|>{role}\n", after="<|im_end|>\n")
            for role in ("system", "user", "assistant")
        },
        answer="<|im_start|>assistant\n",
    ),
    "gemma": ChatTemplate(
        roles={
            "user": TurnFrame(before="<start_of_turn>user\n", after="<end_of_turn>\n"),
            "assistant": TurnFrame(before="<start_of_turn>model\n", after="<end_of_turn>\n"),
        },
        answer="<start_of_turn>model\n",
    ),
    "llama3": ChatTemplate(
        roles={
            role: TurnFrame(before=f"<|start_header_id|>{role}<|end_header_id|>\n\n", after="<|eot_id|>")
            for role in ("system", "user", "assistant")
        },
        answer="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "messages": None,
    "mistral": ChatTemplate(
        roles={"user": TurnFrame(before="[INST] ", after=" [/INST]"), "assistant": TurnFrame(before=" ", after="</s>")},
        answer="",
    ),
    "phi": ChatTemplate(
        roles={role: TurnFrame(before=f"<|{role}|>\n", after="<|end|>\n") for role in ("system", "user", "assistant")},
        answer="<|assistant|>\n",
    ),
    "plain": ChatTemplate(
        roles={
            "system": TurnFrame(before="", after="\n\n"),
            "user": TurnFrame(before="User: ", after="\n"),
            "assistant": TurnFrame(before="Assistant: ", after="\n"),
        },
        answer="Assistant:",
    ),
}
"""Templates by `spec.triton.chatTemplate`, without the token that begins a text, which tokenizers add."""

OLLAMA = Engine(
    name="ollama",
    programs=(Program(found="ollama", argv=("{program}", "serve")),),
    install="install it from https://ollama.com/download",
    image="ollama/ollama",
    env={
        "OLLAMA_HOST": "[{host}]:{port}",  # a pod's address may be IPv6; Go accepts both in brackets
        "OLLAMA_NUM_PARALLEL": "{slots}",
        "OLLAMA_KEEP_ALIVE": "-1",  # the autoscaler decides when it stops, not its own timer
        "OLLAMA_CONTEXT_LENGTH": ("{context_tokens}",),
        "OLLAMA_MODELS": ("{model_path}",),  # a file:// artifact is the models folder of Ollama
    },
    readiness_path="/",  # the server; the model itself is loaded by the first request
    artifacts="optional-file",
    file_only=True,
    slots=4,
    dialects=("openai", "responses", "anthropic"),
    sizes_itself=True,
    behavior=Behavior(
        ready_when="the server listens. Ollama has no health endpoint (`/health` is 404), and the first request loads "
        "the model",
        cancellation="stops when the connection is closed",
        stop="ends after 2.0 s, with its runner, also during a stream",
        memory="decided by Ollama; `OLLAMA_CONTEXT_LENGTH` and `OLLAMA_NUM_PARALLEL` change it",
        sleep=Sleep(
            sleep='`POST /api/generate` with `"keep_alive": 0`',
            wake="`POST /api/generate` with the model only",
            state="`GET /api/ps`, which still lists a model right after it was unloaded",
        ),
        native_paths=("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{id}"),
        notes="its JSON ignores case in the names of members; it ignores the chat template of a GGUF file",
        tests="engines",
        sources=("https://github.com/ollama/ollama/blob/main/docs/api.md", "observed with Ollama 0.17.4 on a CPU"),
    ),
)

TEI = Engine(
    name="tei",
    programs=(
        Program(
            found="text-embeddings-router",
            argv=(
                *("{program}", "--model-id", "{model_path}", "--hostname", "{host}", "--port", "{port}"),
                *("--served-model-name", "{name}", "--max-concurrent-requests", "{slots}"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="put text-embeddings-router on the PATH",
    image="ghcr.io/huggingface/text-embeddings-inference",
    synonyms={"-p": "port"},
    artifacts="file-or-hf",
    dialects=("openai", "tei"),
    slots=512,
    sizes_itself=True,
    takes_stream_options=False,
    behavior=Behavior(
        ready_when="the model is loaded and its backend is healthy; 503 otherwise",
        cancellation="unknown",
        stop="completes running requests",
        memory="decided by the engine; `--max-batch-tokens` changes it",
        metrics=EngineMetrics(waiting=("te_queue_size",)),
        native_paths=(
            *("/info", "/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/decode"),
            "/vertex",
        ),
        notes="embeddings only through `/v1/embeddings`, and rerank. A request has at most `--max-client-batch-size` "
        "texts (32 by default); requests above `--max-concurrent-requests` get 429",
        sources=(
            "https://huggingface.co/docs/text-embeddings-inference/cli_arguments",
            "https://github.com/huggingface/text-embeddings-inference/blob/main/router/src/http/server.rs",
        ),
    ),
)

INFINITY = Engine(
    name="infinity",
    programs=(
        Program(
            found="infinity_emb",
            argv=(
                *("{program}", "v2", "--model-id", "{model_path}", "--served-model-name", "{name}"),
                *("--host", "{host}", "--port", "{port}", "--url-prefix", "/v1"),
                ("--revision", "{revision}"),
            ),
        ),
    ),
    install="pip install 'infinity-emb[torch,server]'",
    image="michaelf34/infinity",
    env={"DO_NOT_TRACK": "1"},
    artifacts="file-or-hf",
    dialects=("openai", "jina"),
    slots=32,
    sizes_itself=True,
    takes_stream_options=False,
    behavior=Behavior(
        ready_when="the model is loaded: the server listens after the load",
        cancellation="unknown",
        stop="ends after 2.1 s",
        memory="decided by the engine; `--batch-size` changes it",
        native_paths=("/v1/classify", "/v1/embeddings_image", "/v1/embeddings_audio", "/v1/docs", "/v1/openapi.json"),
        notes="embeddings and `/v1/rerank`. It answers requests for an unknown model. The length of its queue is in "
        "`GET /v1/models`, `stats.queue_absolute`, and in no metric",
        tests="engines",
        sources=("`infinity_emb/cli.py` and `infinity_server.py` of infinity-emb 0.0.78", "observed on a CPU"),
    ),
)

TRANSFORMERS = Engine(
    name="transformers",
    programs=(
        Program(
            found="transformers",
            argv=("{program}", "serve", "{model_path}", "--host", "{host}", "--port", "{port}"),
        ),
    ),
    install="pip install 'transformers[serving]'",
    artifacts="file",
    file_only=True,
    named_by_path=True,  # a request with another name is rejected
    dialects=("openai",),
    slots=4,
    sizes_itself=True,
    takes_stream_options=False,
    behavior=Behavior(
        ready_when="the model is loaded: the server listens after the load",
        cancellation="stops when the connection of a stream is closed",
        stop="completes running requests; 2.3 s without requests",
        memory="decided by the engine; `--cb-max-memory-percent` limits the cache of continuous batching",
        native_paths=("/load_model", "/reset", "/v1/systemone"),
        notes="the gateway translates `/v1/responses`, because the engine streams it by default. `model` in a response "
        "is the path of the weights, in version 5.19 with `@main`. A stream of chat ends without `[DONE]`; its last "
        "event has the usage. An unknown model is rejected with 400. Continuous batching without `--cb-num-blocks` "
        "used 14 GB of host memory",
        tests="engines",
        sources=("`transformers/cli/serve.py` of transformers 5.24", "observed with it on a CPU"),
    ),
)

SPEACHES = Engine(
    name="speaches",
    programs=(
        Program(
            found="speaches",
            package=True,
            argv=(
                *("{program}", "-m", "uvicorn", "--factory", "speaches.main:create_app"),
                *("--host", "{host}", "--port", "{port}"),
            ),
        ),
    ),
    install="install it from https://github.com/speaches-ai/speaches",
    image="ghcr.io/speaches-ai/speaches",
    env={
        "WHISPER__NUM_WORKERS": "{slots}",
        "STT_MODEL_TTL": "-1",  # the autoscaler decides when it stops, not its own timer
        "TTS_MODEL_TTL": "-1",
        "WHISPER__TTL": "-1",  # the name in older versions
        "ENABLE_UI": "false",
        "HF_HUB_CACHE": ("{model_path}",),  # a file:// artifact is a cache folder of the Hub
    },
    readiness_path="/v1/models/{name}",
    artifacts="optional-file",
    file_only=True,
    dialects=("openai",),
    slots=1,
    sizes_itself=True,
    takes_stream_options=False,
    behavior=Behavior(
        ready_when="the model is in its cache; 404 otherwise. `/health` is 200 without any model. The first request "
        "loads the model",
        cancellation="unknown",
        stop="unknown",
        memory="decided by the engine; `WHISPER__COMPUTE_TYPE` changes it",
        native_paths=("/api/pull/{id}", "/api/ps/{id}", "/v1/registry", "/v1/realtime", "/v1/audio/voices"),
        notes="transcription with faster-whisper, and speech. Clients name the model by its repository at the Hub. It "
        "forwards chat completions to `CHAT_COMPLETION_BASE_URL`",
        sources=("https://speaches.ai/configuration/", "`src/speaches/routers/` of the repository"),
    ),
)

_KNOWN = [
    engine.behavior.metrics
    for engine in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, TEI)
    if engine.behavior.metrics is not None
]

COMMAND = Engine(
    name="command",
    artifacts="optional-file",
    slots=4,
    dialects=EVERY_DIALECT,
    takes_stream_options=False,
    adapters=Adapters(served_name="{adapter}"),
    behavior=Behavior(
        ready_when="defined by the program",
        cancellation="the connection is closed",
        stop="SIGTERM, after 10 s SIGKILL",
        memory="`{memory_bytes}` in the command",
        metrics=EngineMetrics(
            needs="a program that has them",
            waiting=tuple(name for one in _KNOWN for name in one.waiting),
            running=tuple(name for one in _KNOWN for name in one.running),
            cache_use=(*(name for one in _KNOWN for name in one.cache_use), "llamacpp:kv_cache_usage_ratio"),
            tokens=tuple(name for one in _KNOWN for name in one.tokens),
        ),
        tests="run",
        sources=("[Use any program as an engine](../how-to/engines-command.md)",),
    ),
)
"""The program that the Model's `command` starts. Its API dialects are unknown, so all are allowed. It loads its
adapters itself and serves them under their own names.
"""
_TAKES_STREAM_OPTIONS = re.compile(
    r"(?:^|[\s/.])(?:llama-server|llama\.cpp|xllamacpp|vllm|sglang|ollama|lmdeploy|text-generation-launcher|fake_engine)\b"
)
"""A program, module or image in a command line that is known to accept `stream_options`."""

_ALL = (
    LLAMA_CPP, VLLM, SGLANG, TENSORRT_LLM, TRITON, OLLAMA, TEI, INFINITY, TRANSFORMERS, SPEACHES, COMMAND,
)  # fmt: skip
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}


def takes_stream_options(engine: Engine, command: tuple[str, ...]) -> bool:
    """Return whether the engine accepts `stream_options`. `command` is the command line of engine `command`."""
    return engine.takes_stream_options or any(map(_TAKES_STREAM_OPTIONS.search, command))


def is_fetched_by_engine(artifact: str, engine: Engine) -> bool:
    """Return whether the engine fetches the weights itself, by this name."""
    return artifact.startswith("hf://") and "?" not in artifact and engine.artifacts == "file-or-hf"


def default_slots(engine: str) -> int:
    """Return the concurrent requests per replica of a Model that does not set `slots`."""
    return ENGINES[engine].slots
