"""Conversion of llama-swap configurations: macros, ports, llama-server and other commands, keys, names."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.engines.programs import xllamacpp_server
from autoscaler.importers.llama_swap import config
from autoscaler.importers.llama_swap.commands import EXTRA_FLAGS
from autoscaler.importers.result import ConversionResult, refuse_duplicate_names, to_yaml
from autoscaler.spec.document_names import simplify_name
from tests.support.builders.converted_documents import spec_of
from tests.support.example_budget import examples

WHOLE = """
healthCheckTimeout: 300
logLevel: debug
globalTTL: 900
startPort: 10001
macros:
  bin: llama-server
  server: "${bin} --port ${PORT} --host 127.0.0.1"
  context: 8192
  common: >
    --ctx-size ${context}
    --flash-attn on
apiKeys: ["sk-one", "${env.SECOND}", "sk-one"]
groups:
  small: {swap: false, members: [coder]}
models:
  "coder:32b":
    macros: {context: 32768}
    name: A coder
    aliases: [coder, gpt-4o]
    cmd: |
      # the draft runs on the same device ${undefined}
      ${server} \\
      --model "${env.MODELS}/coder 32b.gguf" -np 4 -ngl 99
      ${common}
    ttl: 60
    concurrencyLimit: 20
    env: ["CUDA_VISIBLE_DEVICES=0,1", "LLAMA_LOG=1"]
    filters:
      stripParams: temperature
      setParamsByID: {"${MODEL_ID}:slow": {reasoning_effort: high}}
    timeouts: {responseHeader: 120, connect: 5}
    metadata: {port: "${PORT}"}
  pooled:
    cmd: /opt/engine --listen 127.0.0.1:9001 --served-model-name acme/pooled --extra '{"deep":{"a":1}}'
    proxy: http://127.0.0.1:9001/
    useModelName: acme/pooled
    checkEndpoint: /ready
    concurrencyLimit: 3
    ttl: 0
    unlisted: true
"""
ENVIRON = {"SECOND": "sk-two", "MODELS": "/models"}


def convert(text: str) -> list[ConversionResult]:
    return config.convert_config("config.yaml", text, ENVIRON, "/srv/swap")


def model(cmd: str, keys: dict[str, object] | None = None, name: str = "m") -> ConversionResult:
    """The conversion result of one Model."""
    (taken,) = convert(yaml.safe_dump({"models": {name: {"cmd": cmd} | (keys or {})}}))
    return taken


def test_llama_swap_configuration_is_converted_to_models_and_a_tenant() -> None:
    about, tenant, coder, pooled = convert(WHOLE)
    assert about.document is None
    assert not about.refused
    assert dict(about.notes).keys() == {"logLevel", "startPort", "groups"}
    hashes = [sha256(key.encode()).hexdigest() for key in ("sk-one", "sk-two")]
    assert tenant.document is not None
    assert tenant.document["spec"] == {
        "keys": [{"name": "key-1", "sha256": hashes[0]}, {"name": "key-2", "sha256": hashes[1]}]
    }
    assert spec_of(coder) == {
        "engine": "llama.cpp", "artifact": "file:///models/coder 32b.gguf",
        "aliases": ["coder", "gpt-4o", "coder:32b:slow"], "args": ["--flash-attn", "on", "--gpu-layers", "99"],
        "env": {"LLAMA_LOG": "1"}, "contextTokens": 8192, "gpu": {"count": 2}, "slots": 4, "idleSeconds": 60,
        "start": {"secondsMax": 300}, "responseSecondsMax": 120, "firstByteSecondsMax": 120,
        "policy": {"removed": ["temperature"], "forcedByName": {"coder:32b:slow": {"reasoning_effort": "high"}}},
    }  # fmt: skip
    assert dict(coder.notes).keys() == {
        "name", "metadata", "env CUDA_VISIBLE_DEVICES", "cmd", "timeouts.connect", "concurrencyLimit",
    }  # fmt: skip
    assert spec_of(pooled) == {
        "engine": "command",
        "command": ["/opt/engine", "--listen", "127.0.0.1:{port}", "--served-model-name", "{name}"],
        "args": ["--extra", '{"deep":{"a":1}}'], "readinessPath": "/ready", "slots": 3,
        "idleSeconds": config.NEVER_S, "start": {"secondsMax": 300}, "unlisted": True,
    }  # fmt: skip


def test_converted_documents_are_accepted_by_the_document_parser() -> None:
    documents = parse_documents([("printed", to_yaml(refuse_duplicate_names(convert(WHOLE))))])
    assert [one.name for one in documents.models] == ["coder:32b", "pooled"]
    assert [one.name for one in documents.tenants] == ["llama-swap"]


def test_llama_swap_api_key_is_converted_only_as_its_hash() -> None:
    text = to_yaml(convert(WHOLE))
    assert "sk-one" not in text
    assert "sk-two" not in text


def test_every_key_of_a_llama_swap_model_is_converted_or_noted() -> None:
    every: dict[str, object] = {
        "cmd": "engine --at={port}", "proxy": "http://localhost:80", "aliases": ["b"], "env": ["A=b"],
        "checkEndpoint": "/x", "ttl": 5, "unlisted": True, "useModelName": "n", "concurrencyLimit": 2,
        "filters": {"setParams": {"a": 1}}, "timeouts": {"responseHeader": 3}, **dict.fromkeys(config.MODEL, "x"),
        "unknown": 1,
    }  # fmt: skip
    before = model("engine ${PORT} 80")
    for key, value in every.items():
        after = model("engine ${PORT} 80", {key: value})
        assert (after.document, after.notes, after.refused) != (before.document, before.notes, before.refused), key
    known = {field.encode_name for field in msgspec.structs.fields(config.LlamaSwapModel)}
    assert known <= every.keys()


def test_note_about_listed_aliases_names_the_setting() -> None:
    about, _ = convert("models: {m: {cmd: 'engine ${PORT}'}}\nincludeAliasesInList: true")
    assert dict(about.notes) == {"includeAliasesInList": "set models.listAliases in Settings to this value"}


def test_every_unsupported_global_key_is_noted() -> None:
    models = {"m": {"cmd": "engine ${PORT}"}}
    for key in (*config.WHOLE, "unknown"):
        about, _ = convert(yaml.safe_dump({"models": models, key: {"a": 1}}))
        assert [note.key for note in about.notes] == [key]


@pytest.mark.parametrize(
    ("cmd", "keys", "command"),
    [
        ("engine --port ${PORT}", {}, ["engine", "--port", "{port}"]),
        ("engine --port=9000 -x", {"proxy": "http://localhost:9000"}, ["engine", "--port={port}"]),
        (
            "docker run -p 9000:80 img", {"proxy": "http://127.0.0.1:9000"},
            ["docker", "run", "-p", "127.0.0.1:{port}:80"],
        ),
        (
            "docker --context gpu container run -p9000:9000 img --port 9000", {"proxy": "http://127.0.0.1:9000"},
            ["docker", "--context", "gpu", "container", "run", "-p127.0.0.1:{port}:{port}", "img", "--port", "{port}"],
        ),
        ("podman run --publish=${PORT}:80/tcp img", {}, ["podman", "run", "--publish=127.0.0.1:{port}:80/tcp"]),
        ("docker run -p 0.0.0.0:${PORT}:80 img", {}, ["docker", "run", "-p", "0.0.0.0:{port}:80"]),
        ("engine 90001 9000", {"proxy": "http://[::1]:9000"}, ["engine", "90001", "{port}"]),
        ("engine serve", {"env": ["PORT=${PORT}"]}, ["env", "PORT={port}"]),
    ],
)  # fmt: skip
def test_port_in_a_llama_swap_command_is_replaced_by_a_placeholder(
    cmd: str, keys: dict[str, object], command: list[str]
) -> None:
    found = spec_of(model(cmd, keys))
    assert found["engine"] == "command"
    assert found["command"] == command


@pytest.mark.parametrize(
    ("cmd", "keys", "message"),
    [
        ("engine", {}, "cmd: the port was not found"),
        ("engine ${PORT}", {"proxy": "http://gpu-box:9000"}, "proxy: expected http://127.0.0.1:${PORT}"),
        ("engine ${PORT}", {"proxy": "http://127.0.0.1:${PORT}/v2"}, "proxy: a path is not supported"),
        ("", {}, "cmd: expected the command"),
        ("engine ${PORT} --pid ${PID}", {}, "cmd: ${PID} is known only in cmdStop"),
        *(
            (
                f"llama-server --port ${{PORT}} -m /a.gguf {flag} {'9' * 5000}",
                {},
                f"cmd {key}: expected a whole number of at most 15 digits, got 5000 digits",
            )
            for flag, key in (("-c", "--ctx-size"), ("--parallel", "--parallel"))
        ),
    ],
)
def test_llama_swap_model_with_an_invalid_command_or_proxy_is_rejected(
    cmd: str, keys: dict[str, object], message: str
) -> None:
    taken = model(cmd, keys)
    assert taken.document is None
    assert message in taken.refused


def test_model_name_without_letters_and_digits_is_rejected() -> None:
    assert "metadata.name: expected" in model("engine ${PORT}", name="??").refused


def test_names_with_unsupported_characters_are_simplified_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "is_alias", lambda text: simplify_name(text) == text)
    taken = model("engine ${PORT}", {"aliases": ["nomic embed", "a", "[x] y", "!!"]}, name="Small 3 30B (a3b)")
    assert taken.document is not None
    assert taken.document["metadata"] == {"name": "Small-3-30B-a3b"}
    assert spec_of(taken)["aliases"] == ["nomic-embed", "a", "x-y"]
    notes = dict(taken.notes)
    assert notes["name: Small 3 30B (a3b)"] == "clients must request Small-3-30B-a3b"
    assert notes["aliases: nomic embed"] == "clients must request nomic-embed"
    assert notes["aliases: [x] y"] == "clients must request x-y"
    assert notes["aliases: !!"] == "it has no letters or digits"


def test_command_comments_up_to_the_line_end_are_dropped_and_reported() -> None:
    cmd = """llama-server --port ${PORT} -m /a.gguf -np 1 # --temp=1 -c 4096
      # --cache-reuse 256 ${undefined}
      --jinja --x 'a # b' --y a#b --z \\# "two
      # lines" \\
      --last
    """
    taken = model(cmd)
    args = ["--jinja", "--x", "a # b", "--y", "a#b", "--z", "#", "two # lines", "--last"]
    assert spec_of(taken)["args"] == args
    assert [why for key, why in taken.notes if "comment" in why] == [
        "the text from # to the end of its line is a comment and left out, with --temp, -c, --cache-reuse"
    ]


def test_comment_in_a_one_line_command_reports_the_flags_that_it_drops() -> None:
    taken = model("llama-server --port ${PORT} -m /a.gguf -np 1 --jinja # off -ngl 99 --mlock")
    assert spec_of(taken)["args"] == ["--jinja"]
    assert any(why.endswith("left out, with -ngl, --mlock") for _, why in taken.notes)


@pytest.mark.parametrize("key", ["stripParams", "strip_params"])
def test_strip_params_filter_in_both_spellings_becomes_removed_parameters(key: str) -> None:
    taken = model("engine ${PORT}", {"filters": {key: "temperature, top_p,,model, temperature"}})
    assert spec_of(taken)["policy"] == {"removed": ["temperature", "top_p"]}
    assert not [note.key for note in taken.notes if "filters" in note.key]


def test_set_params_filters_become_forced_request_parameters() -> None:
    params = {"temperature": 0.7, "provider": {"zdr": True}, "model": "x"}
    by_id = {"${MODEL_ID}": {"top_k": 1}, "m:high": {"reasoning_effort": "high"}, "a b|": {"seed": 1}}
    taken = model("engine ${PORT}", {"filters": {"setParams": params, "setParamsByID": by_id}})
    assert spec_of(taken)["policy"] == {
        "forced": {"temperature": 0.7, "provider": {"zdr": True}},
        "forcedByName": {"m": {"top_k": 1}, "m:high": {"reasoning_effort": "high"}, "a-b": {"seed": 1}},
    }
    assert spec_of(taken)["aliases"] == ["a-b", "m:high"]
    assert not [note.key for note in taken.notes if "filters" in note.key]


@pytest.mark.parametrize(
    ("filters", "note"),
    [
        ({"stripParams": "messages"}, "filters.stripParams: messages"),
        ({"setParams": {"stream": True}}, "filters.setParams: stream"),
        ({"setParams": {"chat_template_kwargs.enable_thinking": False}},
         "filters.setParams: chat_template_kwargs.enable_thinking"),
        ({"setParams": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}}, "filters.setParams: a"),
        ({"setParamsByID": {"n": {"prompt": "x"}}}, "filters.setParamsByID.n: prompt"),
    ],
)  # fmt: skip
def test_filter_on_a_parameter_that_policies_cannot_change_is_reported(filters: dict[str, object], note: str) -> None:
    taken = model("engine ${PORT}", {"filters": filters})
    assert "policy" not in spec_of(taken)
    assert [one.key for one in taken.notes if "filters" in one.key] == [note]


def test_max_tokens_beside_max_completion_tokens_is_dropped_and_reported() -> None:
    taken = model("engine ${PORT}", {"filters": {"setParams": {"max_tokens": 1, "max_completion_tokens": 2}}})
    assert spec_of(taken)["policy"] == {"forced": {"max_completion_tokens": 2}}
    assert "filters.setParams: max_tokens" in dict(taken.notes)


def test_devices_of_an_imported_docker_command_become_the_gpu_count() -> None:
    taken = model("docker run --gpus '\"device=0,2\"' -p ${PORT}:80 img")
    spec = spec_of(taken)
    assert spec["gpu"] == {"count": 2}
    assert spec["command"] == ["docker", "run", "--gpus", "all", "-p", "127.0.0.1:{port}:80"]
    assert dict(taken.notes)["cmd --gpus"] == "Pilotlight chooses the devices; spec.gpu.count is 2"
    taken = model("docker run --gpus '\"device=0,capabilities=utility\"' -p ${PORT}:80 img")
    assert spec_of(taken)["gpu"] == {"count": 1}


DOCKER = "docker run --rm -p ${PORT}:8080 -v /m:/models"
IMAGE = "ghcr.io/ggml-org/llama.cpp:server-cuda"


@pytest.mark.parametrize(
    ("cmd", "keys", "note"),
    [
        (f"{DOCKER} {IMAGE} --api-key s3cr3t -m /models/a.gguf", {}, "cmd --api-key"),
        (f"{DOCKER} {IMAGE} --api-key=s3cr3t -m /models/a.gguf", {}, "cmd --api-key"),
        (f"{DOCKER} {IMAGE} --api-key-file /s3cr3t -m /models/a.gguf", {}, "cmd --api-key"),
        (f"{DOCKER} -e LLAMA_API_KEY=s3cr3t {IMAGE} -m /models/a.gguf", {}, "cmd LLAMA_API_KEY"),
        (f"{DOCKER} --env=LLAMA_API_KEY=s3cr3t {IMAGE} -m /models/a.gguf", {}, "cmd LLAMA_API_KEY"),
        (f"podman {DOCKER[7:]} -e VLLM_API_KEY=s3cr3t vllm/vllm-openai --model a", {}, "cmd VLLM_API_KEY"),
        ("vllm serve a --port ${PORT} --api-key s3cr3t", {}, "cmd --api-key"),
        ("llama-server -m /a.gguf --port ${PORT} --api-key s3cr3t", {}, "cmd --api-key"),
        ("llama-server -m /a.gguf --port ${PORT}", {"env": ["LLAMA_API_KEY=s3cr3t"]}, "env LLAMA_API_KEY"),
    ],
)
def test_api_keys_of_known_engines_are_removed_and_reported(cmd: str, keys: dict[str, object], note: str) -> None:
    taken = model(cmd, keys)
    assert taken.document is not None
    assert dict(taken.notes)[note].startswith("removed: clients' keys are not passed to engines")
    text = to_yaml([taken])
    assert "s3cr3t" not in text
    assert not {"--api-key", "--api-key-file", "-e", "--env"} & set(text.split())


def test_api_key_flag_of_an_unknown_program_is_kept_and_reported() -> None:
    taken = model("engine ${PORT} --api-key x")
    assert spec_of(taken)["args"] == ["--api-key", "x"]
    assert dict(taken.notes)["cmd --api-key"].startswith("it is kept")


def test_llama_server_without_parallel_flag_gets_one_slot() -> None:
    taken = model("llama-server -m /a.gguf -c 4096 --port ${PORT} --api-key x --metrics --slots -a b --threads 2")
    assert spec_of(taken)["slots"] == 1
    assert spec_of(taken)["contextTokens"] == 4096
    assert spec_of(taken)["args"] == ["--threads", "2"]
    assert dict(taken.notes).keys() == {"cmd", "cmd --api-key"}


def test_llama_server_cpu_flags_and_relative_path_are_converted() -> None:
    taken = model("/opt/llama-server-b5000 -m models/a.gguf --port ${PORT} -np 1 -ngl 0 -t 4 --embedding --rerank")
    assert spec_of(taken)["artifact"] == "file:///srv/swap/models/a.gguf"
    assert spec_of(taken)["gpu"] == {"count": 0}
    assert spec_of(taken)["args"] == ["--threads", "4", "--embeddings", "--reranking"]
    assert dict(taken.notes).keys() == {"cmd --model", "cmd /opt/llama-server-b5000"}


def test_llama_server_without_a_model_file_stays_a_command() -> None:
    found = spec_of(model("llama-server -hf acme/tiny:Q4 --port ${PORT}"))
    assert found["command"] == ["llama-server", "-hf", "acme/tiny:Q4", "--port", "{port}"]


def test_converted_llama_server_flags_exist_in_the_xllamacpp_server() -> None:
    assert set(xllamacpp_server.FLAGS) >= EXTRA_FLAGS


def test_value_that_is_only_a_macro_keeps_the_type_of_the_macro() -> None:
    (taken,) = convert("macros: {idle: 30}\nmodels: {m: {cmd: 'engine ${PORT}', ttl: '${idle}'}}")
    assert spec_of(taken)["idleSeconds"] == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {m: {cmd: 'e ${nope}'}}", "config.yaml: models.m.cmd: unknown macro ${nope}"),
        ("models: {m: {cmd: 'e ${env.NOPE}'}}", "config.yaml: ${env.NOPE}: this environment variable is not set"),
        ("models: {m: {cmd: 7}}", "config.yaml: models.m.cmd: expected text"),
        ("models: {m: {ttl: 7}}", "config.yaml: models.m.cmd: missing; expected text"),
        ("models: {m: {cmd: 'e \"${PORT}'}}", "config.yaml: models.m.cmd: expected a valid shell command"),
        ("models: {m: {cmd: e, ttl: -2}}", "config.yaml: models.m.ttl: expected a number, at least -1"),
        ("models: [m]", "config.yaml: models: expected keys with values"),
        ("globalTTL: 5", "config.yaml: models: missing"),
        ("models: {a: 1, a: 2}", "config.yaml: document 1: models: line 1: key `a` occurs twice"),
        ("", "config.yaml: expected one document"),
    ],
)
def test_invalid_llama_swap_config_is_rejected_with_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        convert(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_llama_swap_model_with_the_alias_of_another_is_rejected() -> None:
    text = "models: {a: {cmd: 'e ${PORT}'}, b: {cmd: 'e ${PORT}', aliases: [a]}}"
    assert [taken.refused.partition(":")[0] for taken in refuse_duplicate_names(convert(text))] == [
        "",
        "`a` is already a name of Model a",
    ]


WORD = st.sampled_from(
    ["llama-server", "-m", "/a.gguf", "${PORT}", "--port", "-c", "-np", "4096", "-ngl", "{x}", "'a b'", "--x=${PORT}"]
)
EXTRA = st.dictionaries(
    st.sampled_from(["proxy", "aliases", "env", "ttl", "filters", "timeouts", "checkEndpoint", "useModelName", "odd"]),
    st.one_of(st.sampled_from(["", "a", "http://localhost:4096"]), st.integers(-1, 3), st.lists(WORD, max_size=2)),
    max_size=3,
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(words=st.lists(WORD, min_size=1, max_size=8), keys=EXTRA)
def test_any_llama_swap_command_yields_a_valid_document_or_a_rejection(
    words: list[str], keys: dict[str, object]
) -> None:
    try:
        (taken,) = convert(yaml.safe_dump({"models": {"m": {"cmd": " ".join(words)} | keys}}))
    except DocumentError:
        return  # named by its key; see the tests above
    assert (taken.document is None) == bool(taken.refused)
    documents = parse_documents([("printed", to_yaml([taken]))])
    assert [one.name for one in documents.models] == ([] if taken.refused else ["m"])
