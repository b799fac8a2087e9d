"""Documents: valid ones load; an error is one line with file, document, key and expectation."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName
from autoscaler.documents.document_rules import CLAIM_WANTED, FILE_WANTED, KEYS, PRODUCT_WANTED
from autoscaler.documents.document_types import DocumentError, Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.partial_decoding import read_known_keys
from autoscaler.documents.render import to_yaml
from autoscaler.spec import yaml
from autoscaler.spec.artifact_name import IMAGE_WANTED
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.model import EngineTls
from autoscaler.spec.pod import API_VERSION
from autoscaler.spec.settings import Tls
from autoscaler.spec.yaml import YamlError, parse_yaml
from tests.support.example_budget import examples
from tests.support.harness.faults.fault_injection import DOCUMENT_POINTS, InjectedError, concerns, inject

EXAMPLE = Path(__file__).parents[4] / "examples" / "two-models.yaml"
UNFIT = "line 1: a value cannot be read: it does not match its YAML type; if it is text, put it in quotes"
OURS = "is set by Pilotlight"
HEAD = f"apiVersion: {API_VERSION}\nkind: "


def model(spec: str = "", *, name: str = "a", engine: str = "llama.cpp", artifact: str = "file:///a.gguf") -> str:
    weights = f", artifact: '{artifact}'" if artifact else ""
    rest = f", {spec}" if spec else ""
    return f"{HEAD}Model\nmetadata: {{name: {name}}}\nspec: {{engine: {engine}{weights}{rest}}}\n"


def tenant(spec: str = "", *, name: str = "acme") -> str:
    return f"{HEAD}Tenant\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n"


def config(keys: str = "") -> str:
    return f"{HEAD}Settings\n{keys}\n"


def wrong(*texts: str, environ: dict[str, str] | None = None) -> str:
    """The one-line error for these texts (a.yaml, b.yaml ...)."""
    with pytest.raises(DocumentError) as caught:
        parse_documents(
            [(f"{letter}.yaml", text) for letter, text in zip(string.ascii_lowercase, texts, strict=False)], environ
        )
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_keys_omitted_in_a_model_document_have_default_values() -> None:
    loaded = parse_documents(
        [("a.yaml", model("gpu: {memory: 20Gi}, aliases: [x], idleSeconds: 5") + "---\n" + config())]
    )
    (a,) = loaded.models
    assert (a.name, a.namespace, a.order) == ("a", "default", 0)
    assert (a.memory_bytes, a.slots) == (20 << 30, 4)
    assert (a.spec.aliases, a.spec.idle_seconds, a.spec.residency_seconds) == (("x",), 5, "auto")
    assert parse_documents([("a.yaml", model())]).models[0].memory_bytes == 0


def test_models_keep_their_order_across_files() -> None:
    loaded = parse_documents([("a.yaml", model(name="z") + "---\n" + model(name="y")), ("b.yaml", model(name="x"))])
    assert [(m.name, m.order) for m in loaded.models] == [("z", 0), ("y", 1), ("x", 2)]


def test_example_file_has_two_models_and_a_device_for_only_one() -> None:
    loaded = parse_documents([(str(EXAMPLE), EXAMPLE.read_text())])
    assert [m.name for m in loaded.models] == ["ada", "bob"]
    (device,) = loaded.settings.devices
    assert (
        max(m.memory_bytes for m in loaded.models) <= device.memory_bytes < sum(m.memory_bytes for m in loaded.models)
    )


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("gpu: {memory: 16GB}", "spec.gpu.memory: expected a size such as 16Gi or 500M, or auto"),
        ("gpu: {memory: -1}", "spec.gpu.memory: expected a size such as 16Gi or 500M, or auto"),
        ("gpu: {memory: 9000000Ti}", "spec.gpu.memory: expected a size such as 16Gi or 500M, or auto"),
        ("gpu: {memory: 0}", "spec.gpu.memory: expected a size such as 16Gi or 500M, or auto"),
        ("gpu: {memori: 1Gi}", "spec.gpu.memori: unknown key (did you mean memory?)"),
        ("gpu: 3", "spec.gpu: expected keys with values"),
        ("priority: 2000000000", "spec.priority: expected a whole number, at least -1000000000 and at most 1000000000"),
        ("gpu: {count: 65}", "spec.gpu.count: expected a whole number, at least 0 and at most 64"),
        ("gpu: {models: ['*h100*', '']}", f"spec.gpu.models[1]: {PRODUCT_WANTED}"),
        ("gpu: {models: [' ']}", f"spec.gpu.models[0]: {PRODUCT_WANTED}"),
        ("gpu: {isolation: good}", "spec.gpu.isolation: expected one of any, hardware, memory"),
        ("stallSecondsMax: 5s", "spec.stallSecondsMax: expected a number of seconds, at least 0 and at most 31536000"),
        ("drainSecondsMax: -1", "spec.drainSecondsMax: expected a number of seconds, at least 0 and at most 31536000"),
        ("idleSeconds: 5m", "spec.idleSeconds: expected a number of seconds, at least 0 and at most 31536000, or auto"),
        ("start: {secondsMax: 0}", "spec.start.secondsMax: expected a number of seconds, above 0 and at most 86400"),
        ("zzz: 1", "spec.zzz: unknown key"),
        ("aliases: x", "spec.aliases: expected a list"),
        ("aliases: [1]", "spec.aliases[0]: expected text (put it in quotes)"),
        ("env: {PORT: 80}", "spec.env.PORT: expected text (put it in quotes)"),
        (
            "env: {A: {valueFrom: {}}}",
            "spec.env.A.valueFrom: expected one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
        (
            "env: {A: {valueFrom: {secretKeyRef: {name: a}}}}",
            "spec.env.A.valueFrom.secretKeyRef.key: missing; expected text",
        ),
        (
            "resources: {limits: {nvidia.com/gpu: 1}}",
            "spec.resources.limits.nvidia.com/gpu: is set by Pilotlight: use spec.gpu.count",
        ),
        ("resources: {requests: {cpu: few}}", "spec.resources.requests.cpu: expected a quantity such as 500m or 16Gi"),
        (
            "pullSecret: Reg_Cred",
            "spec.pullSecret: expected a Kubernetes object name: lower-case letters, digits, - and .",
        ),
        ("rollout: {surge: -1}", "spec.rollout.surge: expected a whole number, at least 0 and at most 100"),
        ("pod: {restartPolicy: Always}", "spec.pod.restartPolicy: unknown key"),
        (
            "env: {CUDA_VISIBLE_DEVICES: '0'}",
            f"spec.env.CUDA_VISIBLE_DEVICES: {OURS} to the allocated devices: remove it",
        ),
        (
            "env: {PILOTLIGHT_REPLICA: x}",
            f"spec.env.PILOTLIGHT_REPLICA: {OURS} to identify the engine's processes: remove it",
        ),
        ("paused: 1", "spec.paused: expected true or false"),
        (
            "replicas: {schedule: [{cron: 0 8 * * *, min: 1}]}",
            "spec.replicas.schedule[0].seconds: missing; expected a number of seconds, at least 60 and at most 2678400",
        ),
        (
            f"replicas: {{schedule: [{', '.join(['{cron: 0 8 * * *, seconds: 60, min: 1}'] * 17)}]}}",
            "spec.replicas.schedule: expected a list of at most 16 items",
        ),
        ('args: [a, "b\\0"]', "spec.args[1]: expected text without NUL, which no program can read"),
        ("replicas: {min: 2}", "spec.replicas.min: expected at most replicas.max, which is 1"),
        ("readinessPath: health", "spec.readinessPath: expected a path such as /health"),
        ("triton: {}", "spec.triton: only engine `triton` supports it; remove it"),
        ("command: [x]", "spec.command: only engine `command` supports it; use `args` for engine llama.cpp"),
    ],
)
def test_invalid_model_key_is_rejected_with_its_path_and_reason(spec: str, line: str) -> None:
    assert wrong(model(spec)) == f"a.yaml: Model a: {line}"


def test_artifact_with_nul_is_rejected() -> None:
    text = "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\n"
    text += 'spec: {engine: llama.cpp, artifact: "file:///a\\0.gguf"}'
    assert wrong(text) == "a.yaml: Model a: spec.artifact: expected text without NUL, which no program can read"


@pytest.mark.parametrize(
    ("engine", "artifact", "line"),
    [
        ("external", "file:///a", "spec.engine: is not supported yet in this version"),
        ("vlm", "file:///a", f"spec.engine: expected one of {', '.join(sorted(ENGINES))}"),
        ("speaches", "s3://abc/a", "spec.artifact: s3:// is not supported yet in this version for engine speaches"),
        ("ollama", "oci://r.io/a:1", "spec.artifact: oci:// is not supported yet in this version for engine ollama"),
        ("llama.cpp", "oci://r.io/A:1", f"spec.artifact: {IMAGE_WANTED}"),
        ("vllm", "oci://r.io/a@sha256:1", f"spec.artifact: {IMAGE_WANTED}"),
        ("ollama", "hf://a/b", "spec.artifact: hf:// is not supported yet in this version for engine ollama"),
        (
            "llama.cpp",
            "s3://Bucket/a",
            "spec.artifact: expected s3://bucket/key or s3://bucket/prefix/, with a bucket of 3 to 63 characters",
        ),
        ("llama.cpp", "hf://a/b?exclude=c", "spec.artifact: expected hf://org/name@revision"),
        ("vllm", "hf://a/b/c", "spec.artifact: expected hf://org/name@revision"),
        ("llama.cpp", "file://models/a.gguf", f"spec.artifact: {FILE_WANTED}"),
        ("llama.cpp", "https://a/b", f"spec.artifact: {FILE_WANTED}"),
        ("vllm", "pvc://Claim/a", f"spec.artifact: {CLAIM_WANTED}"),
        ("vllm", "pvc://claim/../a", f"spec.artifact: {CLAIM_WANTED}"),
        ("ollama", "pvc://", f"spec.artifact: {CLAIM_WANTED}"),
        ("vllm", "pvc://claim//a", f"spec.artifact: {CLAIM_WANTED}"),
        ("llama.cpp", "", "spec.artifact: missing; engine llama.cpp needs one such as file:///path"),
    ],
)
def test_unsupported_engine_or_artifact_is_rejected_with_its_reason(engine: str, artifact: str, line: str) -> None:
    assert wrong(model(engine=engine, artifact=artifact)) == f"a.yaml: Model a: {line}"


def test_env_variable_that_sets_the_engine_listen_address_is_rejected() -> None:
    text = model("env: {OLLAMA_HOST: 'x:1'}", engine="ollama", artifact="")
    assert wrong(text) == (
        "a.yaml: Model a: spec.env.OLLAMA_HOST: is set by Pilotlight to the listening address: remove it"
    )
    parse_documents([("x", model("env: {OLLAMA_HOST: 'x:1'}")), ("y", model("env: {A: b}", name="b"))])


@pytest.mark.parametrize(
    ("engine", "spec", "line"),
    [
        ("vllm", "args: [--seed, '1', --port=9]", "spec.args[2]: --port is set by Pilotlight: remove it"),
        ("vllm", "args: [--model, /x]", "spec.args[0]: --model is set by Pilotlight: use spec.artifact"),
        (
            "vllm",
            "args: [--served_model_name, x]",
            "spec.args[0]: --served_model_name is set by Pilotlight: use metadata.name or spec.aliases",
        ),
        (
            "vllm",
            "contextTokens: 8, args: [--max-model-len=8]",
            "spec.args[0]: --max-model-len is set by Pilotlight: use spec.contextTokens",
        ),
        (
            "sglang",
            "args: [--max-running-requests, '8']",
            "spec.args[0]: --max-running-requests is set by Pilotlight: use spec.slots",
        ),
        (
            "tensorrt-llm",
            "args: [--max_batch_size, '8']",
            "spec.args[0]: --max_batch_size is set by Pilotlight: use spec.slots",
        ),
        ("llama.cpp", "args: [-np, '-1']", "spec.args[0]: -np is set by Pilotlight: use spec.slots"),
        ("llama.cpp", "args: [--slots, '8']", "spec.args[0]: --slots is set by Pilotlight: use spec.slots"),
        ("triton", "args: [--http-port=1]", "spec.args[0]: --http-port is set by Pilotlight: remove it"),
        ("tei", "args: [-p, '1']", "spec.args[0]: -p is set by Pilotlight: remove it"),
        ("infinity", "args: [--model-id, x]", "spec.args[0]: --model-id is set by Pilotlight: use spec.artifact"),
        ("transformers", "args: [--host=h]", "spec.args[0]: --host is set by Pilotlight: remove it"),
        ("speaches", "args: [--port, '1']", "spec.args[0]: --port is set by Pilotlight: remove it"),
        (
            "ollama",
            "env: {OLLAMA_NUM_PARALLEL: '2'}",
            "spec.env.OLLAMA_NUM_PARALLEL: is set by Pilotlight: use spec.slots",
        ),
        ("speaches", "env: {HF_HUB_CACHE: /x}", "spec.env.HF_HUB_CACHE: is set by Pilotlight: use spec.artifact"),
        (
            "tensorrt-llm",
            "gpu: {memory: auto}",
            "spec.gpu.memory: engine tensorrt-llm cannot be limited to what it needs: remove it, or set a size",
        ),
    ],
)
def test_argument_or_variable_that_pilotlight_sets_is_rejected(engine: str, spec: str, line: str) -> None:
    assert wrong(model(spec, engine=engine, artifact="file:///a")) == f"a.yaml: Model a: {line}"


@pytest.mark.parametrize(
    ("engine", "spec", "artifact"),
    [
        ("vllm", "args: [--max-model-len=8, --gpu-memory-utilization=0.5]", "file:///a"),
        ("vllm", "gpu: {count: 4}, args: [--tensor-parallel-size=2, --pipeline-parallel-size=2]", "file:///a"),
        ("llama.cpp", "args: [--slots, --mlock]", "file:///a"),
        ("llama.cpp", "args: [--mlock, --slots]", "file:///a"),
        ("llama.cpp", "args: [--ctx-checkpoints=8, --ctx-size, '512', --gpu-layers, '9']", "file:///a"),
        ("ollama", "env: {OLLAMA_MODELS: /x, OLLAMA_KEEP_ALIVE: 5m, OLLAMA_CONTEXT_LENGTH: '8'}", ""),
        ("command", "args: [--port, '1'], command: [x, '{port}']", ""),
    ],
)
def test_argument_that_pilotlight_leaves_to_the_model_is_accepted(engine: str, spec: str, artifact: str) -> None:
    parse_documents([("a", model(spec, engine=engine, artifact=artifact))])


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("[run]", "expected a list of words, one of which contains {port}, the port to listen on"),
        ("['{port}', '{model_pat}']", "unknown placeholder {model_pat} (did you mean model_path?)"),
        ("['{port}', '{model_path}']", "{model_path} needs spec.artifact"),
        ("['{port}', '{context_tokens}']", "{context_tokens} needs spec.contextTokens"),
    ],
)
def test_command_with_a_missing_or_unusable_placeholder_is_rejected(command: str, line: str) -> None:
    text = model(f"command: {command}", engine="command", artifact="")
    assert wrong(text) == f"a.yaml: Model a: spec.command: {line}"


def test_braces_that_are_no_placeholder_are_kept_in_a_command() -> None:
    text = model("command: ['{port}', '{\"a\": {HOME}}']", engine="command", artifact="")
    assert parse_documents([("a.yaml", text)]).models[0].spec.command == ("{port}", '{"a": {HOME}}')


def test_document_without_valid_kind_version_or_name_is_rejected() -> None:
    assert wrong("- a") == "a.yaml: document 1: expected a document with apiVersion and kind"
    assert "kind: expected one of Model, Tenant, Settings (did you mean Model?)" in wrong(f"{HEAD}Modell")
    assert wrong("apiVersion: v1\nkind: Settings") == f"a.yaml: Settings: apiVersion: expected {API_VERSION}"
    assert wrong(config() + "---\n" + model(name="")) == "a.yaml: document 2: metadata.name: expected text"
    assert wrong(config("spec: {}")).startswith("a.yaml: Settings: spec: unknown key")


@pytest.mark.parametrize("name", ["-a", "a-", "a b", "a\u00e4", "a" * 254, "a/"])
def test_model_name_with_invalid_characters_or_length_is_rejected(name: str) -> None:
    assert "metadata.name: expected 1 to 253 letters" in wrong(model(name=f"'{name}'"))


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "llama3.2:3b", "org/name", "a" * 253])
def test_model_name_of_up_to_253_allowed_characters_is_accepted(name: str) -> None:
    assert parse_documents([("a.yaml", model(name=f"'{name}'"))]).models[0].name == name


@pytest.mark.parametrize("alias", ["My Model", "[Q4] tiny (fast)", "lab/My Model:v1", "a b", "(a)"])
def test_alias_with_spaces_or_brackets_is_accepted(alias: str) -> None:
    documents = parse_documents([("a.yaml", model(f"aliases: ['{alias}']"))])
    assert documents.models[0].spec.aliases == (alias,)
    assert parse_documents([("b.yaml", to_yaml(documents))]) == documents


@pytest.mark.parametrize("alias", [" a", "a ", "a)b<", "{a}", "a\tb", "a%20b", "a?b", "é", "", "a" * 254])
def test_alias_with_unsupported_characters_or_length_is_rejected(alias: str) -> None:
    text = json.dumps(alias)
    assert "spec.aliases[0]: expected 1 to 253 letters, digits, spaces, brackets" in wrong(model(f"aliases: [{text}]"))


def test_duplicate_names_and_aliases_across_files_are_rejected() -> None:
    a = model("aliases: [x]")
    assert wrong(a, model()) == "b.yaml: Model a: metadata.name: `a` is already the name of a Model in a.yaml"
    assert wrong(a, model(name="x")) == "b.yaml: Model x: metadata.name: `x` is already an alias of Model a in a.yaml"
    assert "Model b: spec.aliases[0]: `a` is already the name" in wrong(a, model("aliases: [a]", name="b"))
    assert "spec.aliases[1]: `y` is already spec.aliases[0]" in wrong(model("aliases: [y, y]", name="b"))
    assert "Settings: kind: `Settings` is already defined in a.yaml" in wrong(config(), config())
    assert "Tenant acme: metadata.name: `acme` is already the name" in wrong(tenant(), tenant())


def test_name_in_the_tenants_of_a_model_is_limited_to_253_characters() -> None:
    longest = "t" * 253
    (found,) = parse_documents([("a.yaml", model(f"tenants: [{longest}]"))]).models
    assert found.spec.tenants == (longest,)
    with pytest.raises(DocumentError, match=r"spec.tenants\[0\]: expected at most 253 characters"):
        parse_documents([("a.yaml", model(f"tenants: [{longest}t]"))])


def test_api_key_of_two_tenants_is_rejected_without_its_hash_in_the_error() -> None:
    key = f"keys: [{{sha256: {'ab' * 32}}}]"
    line = wrong(tenant(key), tenant(key, name="b"))
    assert line == "b.yaml: Tenant b: spec.keys[0].sha256: this hash is already a key of Tenant acme in a.yaml"


def test_error_for_an_invalid_env_value_or_key_hash_does_not_contain_it() -> None:
    assert "hunter2" not in wrong(model("env: {PASSWORD: [hunter2]}"))
    assert "hunter2" not in wrong(tenant("keys: [{sha256: hunter2}]"))


def test_invalid_tenant_fields_are_rejected_with_their_path() -> None:
    hashed = f"sha256: {'0a' * 32}"
    (loaded,) = parse_documents(
        [("a.yaml", tenant(f"keys: [{{{hashed}, expiresAt: 2027-01-31T12:00:00+01:00}}]"))]
    ).tenants
    assert loaded.spec.keys[0].expires_at == "2027-01-31T12:00:00+01:00"
    for time in ("2027-01-31", "2027-01-31T12:00:00", "tomorrow"):
        at = "a.yaml: Tenant acme: spec.keys[0].expiresAt: expected a time such as 2027-01-31T12:00:00Z"
        assert wrong(tenant(f"keys: [{{{hashed}, expiresAt: {time}}}]")) == at
    assert "spec.keys[0].sha256: expected text that matches" in wrong(tenant("keys: [{sha256: ABC}]"))
    for weight in ("0", "1e-310", "1000001"):
        expected = "a.yaml: Tenant acme: spec.weight: expected a number, at least 1e-06 and at most 1000000"
        assert wrong(tenant(f"weight: {weight}")) == expected


def test_invalid_settings_are_rejected_with_their_path() -> None:
    assert "Settings: auth: expected one of auto, keys, none" in wrong(config("auth: maybe"))
    assert "devices[0].memory: missing; expected a size such as 16Gi" in wrong(config("devices: [{name: g}]"))
    twice = "devices: [{name: g, memory: 1Gi}, {name: g, memory: 1Gi}]"
    assert "devices[1].name: `g` occurs twice" in wrong(config(twice))


@pytest.mark.parametrize(
    "host", ["", "*", "https://llm.example", "llm.example:8080", "llm.example/v1", "a..b", "a b", "[::1]", "a" * 300]
)
def test_host_setting_that_is_not_a_plain_host_name_is_rejected(host: str) -> None:
    wanted = "expected a host name such as llm.example, without scheme, port and path"
    assert wrong(config(f"hosts: [localhost, {host!r}]")) == f"a.yaml: Settings: hosts[1]: {wanted}"


@pytest.mark.parametrize(
    "origin",
    ["", "llm.example", "https://llm.example/", "https://LLM.example", "https://", "https://a b", "https://a:x"],
)
def test_origin_in_a_form_no_browser_sends_is_rejected(origin: str) -> None:
    wanted = 'expected an origin such as https://llm.example, in lower case and without a path, or "*"'
    assert wrong(config(f"cors: {{origins: ['*', {origin!r}]}}")) == f"a.yaml: Settings: cors.origins[1]: {wanted}"


def test_cors_origin_may_be_a_url_of_any_scheme_null_or_an_asterisk() -> None:
    origins = ("*", "null", "https://llm.example", "http://[::1]:3000", "app://obsidian.md")
    made = parse_documents(
        [
            (
                "a.yaml",
                config("cors: {origins: ['*', 'null', https://llm.example, 'http://[::1]:3000', app://obsidian.md]}"),
            )
        ]
    )
    assert made.settings.cors.origins == origins


def test_hosts_setting_is_read_from_a_document_or_the_environment() -> None:
    hosts = ("llm.example", "LLM.example.", "box")
    assert parse_documents([("a.yaml", config("hosts: [llm.example, LLM.example., box]"))]).settings.hosts == hosts
    assert parse_documents([], {"PILOTLIGHT_HOSTS": "[llm.example]"}).settings.hosts == ("llm.example",)


def test_tls_requires_certificate_and_key_with_absolute_paths() -> None:
    lone = "expected an absolute path"
    assert f"Settings: tls.certFile: {lone}" in wrong(config("tls: {certFile: a.pem, keyFile: /a}"))
    assert f"Settings: tls.caFile: {lone}" in wrong(config("tls: {caFile: ''}"))
    for there, missing in (("certFile", "keyFile"), ("keyFile", "certFile")):
        line = wrong(config(f"tls: {{{there}: /a}}"))
        assert f"Settings: tls.{missing}: missing; it is required with {there}" in line
    environ = {"PILOTLIGHT_TLS_CERT_FILE": "/a.pem", "PILOTLIGHT_TLS_KEY_FILE": "/a.key"}
    assert parse_documents([], environ).settings.tls == Tls(cert_file="/a.pem", key_file="/a.key")


def test_engine_tls_accepts_only_a_host_name_or_no_server_name() -> None:
    for text, expected in (("{}", EngineTls()), ("{serverName: m-1.example}", EngineTls(server_name="m-1.example"))):
        (loaded,) = parse_documents([("a.yaml", model(f"tls: {text}"))]).models
        assert loaded.spec.tls == expected
        assert parse_documents([("b.yaml", to_yaml(Documents(models=(loaded,))))]).models == (loaded,)
        (plain,) = parse_documents([("a.yaml", model(""))]).models
        assert plain.spec_hash() != loaded.spec_hash(), "its engine must be restarted"
    for name in ("''", "a b", "http://a", "a@b", "-a", "a..b", "a" * 254):
        assert "spec.tls.serverName: expected a host name such as" in wrong(model(f"tls: {{serverName: {name}}}"))


@pytest.mark.parametrize("kind", sorted(KEYS))
def test_keys_not_yet_supported_are_rejected_with_that_reason(kind: str) -> None:
    for path in KEYS[kind]:
        value = "{}"
        for key in reversed(path.replace("*", "A").split(".")):
            value = f"{{{key}: {value}}}"
        metadata = "" if kind == "Settings" else "metadata: {name: a}\n"
        line = wrong(f"{HEAD}{kind}\n{metadata}{value[1:-1]}")
        label = kind if kind == "Settings" else f"{kind} a"
        assert line == f"a.yaml: {label}: {path.replace('*', 'A')}: is not supported yet in this version"


def aliases(form: str, count: int, times: int) -> str:
    """`count` anchors, each with `times` aliases of the previous one."""
    first = "a0: &a0 {x: 1}\n"
    return first + "".join(f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * times))}\n" for n in range(1, count))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\na: 2", "line 2: key `a` occurs twice"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "line 4: key `b` occurs twice"),
        ("a: [1", "line 1: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n1: 2", "line 2: a key must be text: put it in quotes"),
        ("a: .inf", "line 1: expected a finite number"),
        ("a: !!python/object:os.x {}", "line 1: remove the tag !!python/object:os.x"),
        ("- " * 3000, "line 1: nested too deeply"),
        ("a: \0", "line 1: character #x0000 is not allowed"),
        ("a: 1\nb: !!timestamp x", "line 2: remove the tag !!timestamp"),
        ("a: !!bool x", UNFIT),
        ("a: !!int ''", UNFIT),
        ("a: !!float ''", UNFIT),
        ("a: !!map [1, 2]", UNFIT),
        ("a: !!map x", UNFIT),
        ("a: 0b_", UNFIT),
        (f"a: {':'.join('1' * 2000)}.5", "line 1: a number has more than 100 characters"),
        (f"a: 1{':59' * 500_000}", "line 1: a number has more than 100 characters"),
        ("a: " + "9" * 101, "line 1: a number has more than 100 characters"),
        ("a: 1\nb: &x [*x]", "line 2: an alias refers to a node that contains it"),
        ("a: &x {b: {<<: *x}}", "line 1: an alias refers to a node that contains it"),
        ('a: "\\ud800"', "line 1: an unpaired surrogate is not a character"),
        ("a: \ud800", "line 1: an unpaired surrogate is not a character"),
        ("[" * 120 + "]" * 120, "line 1: nested too deeply"),
        ("[1]\n---\n" + "[" * 5_000, "line 3: nested too deeply"),
        ("a: !!binary aGk=", "line 1: remove the tag !!binary"),
        ("a: !!set {b}", "line 1: remove the tag !!set"),
        ("a: !!omap [b: 1]", "line 1: remove the tag !!omap"),
        ('{"\\x1b[31m": 1, "\\x1b[31m": 2}', "line 1: key ` [31m` occurs twice"),
        (aliases("[{}]", 300, 1), "line 100: nested too deeply"),
        (aliases("[{}]", 8, 9), "line 1: more than 100000 values after alias expansion"),
        (aliases("{{<<: [{}]}}", 8, 9), "line 1: more than 100000 values after alias expansion"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_invalid_ambiguous_or_unsafe_yaml_is_rejected_with_its_line(text: str, line: str) -> None:
    with pytest.raises(YamlError, match="^" + re.escape(line)):
        parse_yaml(text)
    assert re.match(rf"a\.yaml: document [12]: ([\w.\[\]]+: )?{re.escape(line)}", wrong(text))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a:\n  b: 1\n  b: 3", "document 1: a: line 3: key `b`"),
        ("a: {b: [1, !!bool x]}", "document 1: a.b[1]: line 1: a value"),
        ("a: b\n---\n\n---\nc: {d: .nan}", "document 2: c.d: line 5: expected a finite"),
        ("a: b\n---\nc: {d: [1, '\x07']}", "document 2: c.d[1]: line 3: character #x0007 is"),
        ("a: [1, \ud800]", "document 1: a[1]: line 1: an unpaired"),
        ("a: 1\n# \x07", "document 1: a: line 2: character"),
        ("a: b\n---\n\x07: c: d", "document 2: line 3: character"),
        ('a: "\\U99999999"\nb: \x07', "document 1: line 2: character"),
        ('a: b\n---\n"\\U00110000": \x07', "document 2: line 3: character"),
        (f"%YAML 1{'1' * 5_000}.1\n---\na: \x07", "document 1: line 3: character"),
        ('a: b\n---\nc:\n  d: "\\U99999999"', "document 2: c.d: line 4: a value cannot be read"),
        (f"%YAML 1{'1' * 5_000}.1\n---\na: b", "document 1: line 1: a value cannot be read"),
        ("a:\n" + "- " * 300 + "b", f"document 1: a{'[0]' * 9}: line 2: nested too deeply"),
        ("x:\n  y: [1, 2\n  z: 3", "document 1: x.y: line 3: expected ',' or ']'"),
        ("a: 1\nb: &x [*x]", "document 1: b: line 2: an alias"),
        ("\t", "document 1: line 1: found character"),
        (f"{'k' * 500}: {{'{'k' * 500}': .inf}}", f"document 1: {'k' * 60}.{'k' * 60}: line 1: expected a"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_yaml_error_names_file_document_and_line_and_the_path_if_known(text: str, where: str) -> None:
    assert wrong(text).startswith(f"a.yaml: {where}")


def test_yaml_value_count_is_limited_while_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "NODES_MAX", 10)
    with pytest.raises(YamlError, match=r"^line 10: more than 10 values$"):
        parse_yaml("[" + "1,\n" * 20)
    assert parse_yaml("[1,1,1,1,1,1,1,1,1]") == [[1] * 9]


def test_error_about_a_long_unprintable_name_is_printable_and_truncated() -> None:
    found = wrong(f'apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: "\\x1b[31m{"x" * 70_000}"}}')
    assert found.startswith("a.yaml: Model [31mxxx")
    assert found.isprintable()
    assert len(found) < 1_100


def test_yaml_keeps_times_as_text_and_merges_keys() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: 2027-01-31\n---\n---\n1") == [
        {"a": {"b": 1}, "c": {"b": 2}, "d": "2027-01-31"},
        1,
    ]


def test_environment_variables_override_the_settings_document() -> None:
    environ = {
        "PILOTLIGHT_AUTH": "none",
        "PILOTLIGHT_LIMITS_BODY_BYTES_MAX": "1Mi",
        "PILOTLIGHT_CORS_ORIGINS": "['https://a.example']",
        "PILOTLIGHT_REPLICA": "not a setting",
        "HOME": "/",
    }
    got = parse_documents([("a.yaml", config("auth: keys\nsilentSecondsMax: 50"))], environ).settings
    assert (got.auth, got.limits.body_bytes_max, got.cors.origins) == ("none", 1 << 20, ("https://a.example",))
    assert got.silent_seconds_max == 50


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PILOTLIGHT_AUT", "none", "PILOTLIGHT_AUT: is not a setting (did you mean PILOTLIGHT_AUTH?)"),
        ("PILOTLIGHT_AUTH", "some", "PILOTLIGHT_AUTH: expected one of auto, keys, none"),
        ("PILOTLIGHT_SILENT_SECONDS_MAX", "5s", "PILOTLIGHT_SILENT_SECONDS_MAX: expected a number of seconds"),
        ("PILOTLIGHT_LIMITS_BODY_BYTES_MAX", "", "PILOTLIGHT_LIMITS_BODY_BYTES_MAX: expected a size such as 16Gi"),
        ("PILOTLIGHT_DEVICES", "[{name: a, memory: x}]", "PILOTLIGHT_DEVICES[0].memory: expected a size"),
        ("PILOTLIGHT_CORS_ORIGINS", "[", "PILOTLIGHT_CORS_ORIGINS: line 1:"),
    ],
)
def test_invalid_environment_variable_is_rejected_with_its_name(name: str, value: str, line: str) -> None:
    assert wrong(config(), environ={name: value}).startswith(f"environment: {line}")


def test_reserved_environment_variables_are_ignored() -> None:
    assert parse_documents([], {"PILOTLIGHT_URL": "x"}, reserved={"PILOTLIGHT_URL"}) == Documents()


text_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._:/-]{0,8}[A-Za-z0-9])?", fullmatch=True)
seconds = st.floats(0, 31_536_000)
gpus = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(0, 64),
        "memory": st.integers(1, 1 << 50) | st.just("auto"),
        "models": st.lists(text_values.filter(str.strip)),
    },
)
sizes = st.sampled_from(["1Mi", "7M", 5])
queues = st.fixed_dictionaries({}, optional={"bytesMax": sizes, "waitSecondsMax": seconds})
commands = st.lists(text_values.filter(lambda text: "{" not in text), max_size=3).map(lambda words: [*words, "{port}"])
specs = st.fixed_dictionaries(
    {"engine": st.just("command"), "command": commands},
    optional={
        "args": st.lists(text_values, max_size=3),
        "env": st.dictionaries(text_values.filter(lambda text: text and "=" not in text), text_values, max_size=3),
        "idleSeconds": seconds | st.just("auto"),
        "gpu": gpus,
        "queue": queues,
        "slots": st.integers(1, 9),
        "priority": st.integers(-9, 9),
        "tenants": st.lists(names, max_size=3),
        "unlisted": st.booleans(),
    },
)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.dictionaries(names, specs, max_size=3), names, st.sampled_from(["auto", "none", "keys"]))
def test_documents_written_as_yaml_load_as_the_same_documents(
    specs: dict[str, object], namespace: str, auth: str
) -> None:
    texts = [("s", config(f"auth: {auth}\ndevices: [{{name: g, memory: 1.5Gi}}]")), ("t", tenant("weight: 2"))]
    for name, spec in specs.items():
        metadata = {"name": name, "namespace": namespace}
        document = {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": spec}
        texts.append((name, json.dumps(document)))
    loaded = parse_documents(texts)
    assert parse_documents([("again", to_yaml(loaded))]) == loaded


def test_escaped_surrogate_pair_in_yaml_is_one_character() -> None:
    assert parse_yaml('"\\ud83d\\ude00"') == ["\U0001f600"]


def test_yaml_exponent_makes_a_number_only_if_the_exponent_has_a_sign() -> None:
    assert parse_yaml("[1e-05, -2.5E+3, 1e3, 12e4567, 1e-, 01e-5]") == [
        [1e-05, -2500.0, "1e3", "12e4567", "1e-", "01e-5"]
    ]


NODES = """
nodes:
- selector: {node.kubernetes.io/instance-type: g4dn.xlarge}
  device: {model: T4, memory: 16Gi}
- selector: {}
  device: {model: A100, memory: 80Gi, count: 8}
"""


def test_settings_nodes_are_loaded_with_selector_and_device() -> None:
    first, second = parse_documents([("a.yaml", f"{HEAD}Settings{NODES}")]).settings.nodes
    assert (first.selector, first.device.model, first.device.count) == (
        {"node.kubernetes.io/instance-type": "g4dn.xlarge"}, "T4", 1,
    )  # fmt: skip
    assert (second.selector, second.device.memory_bytes, second.device.count) == ({}, 80 << 30, 8)


# --- unexpected exceptions --------------------------------------------------------------------------------------------


def test_only_the_model_whose_parsing_raises_is_replaced_by_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = inject(monkeypatch, DOCUMENT_POINTS[0], concerns("b"))
    text = "---\n".join([model(), model("aliases: [also-b], slots: 7", name="b"), model(name="c"), tenant()])
    loaded = parse_documents([("a.yaml", text)], contain=True)
    assert [(one.name, one.order, one.spec.aliases) for one in loaded.models] == [
        ("a", 0, ()), ("b", 1, ("also-b",)), ("c", 2, ()),
    ]  # fmt: skip
    assert [*loaded.undecoded] == ["b"]
    assert "InjectedError" in loaded.undecoded[ModelName("b")].reason
    fault.stop()
    again = parse_documents([("a.yaml", to_yaml(loaded))], contain=True)
    assert again == parse_documents([("a.yaml", text)]), "the document is passed on unchanged"


def test_model_that_cannot_be_rendered_is_written_as_its_original_document(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = inject(monkeypatch, "autoscaler.documents.render:_model_document", concerns("b"))
    text = "---\n".join([model(), model("aliases: [also-b], slots: 7", name="b"), model(name="c"), tenant()])
    loaded = parse_documents([("a.yaml", text)], contain=True)
    assert [*loaded.undecoded] == ["b"]
    rendered = to_yaml(loaded)
    fault.stop()
    assert parse_documents([("a.yaml", rendered)]) == parse_documents([("a.yaml", text)])


@pytest.mark.parametrize("secret", ["pässwörd", "Zq9" * 150, "Zq9'x"])
def test_exception_reason_shows_references_instead_of_their_values(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ValueError(f"cannot use {secret} here")

    monkeypatch.setattr("autoscaler.documents.parse._model", fail)
    text = model("env: {A: '${S}'}")
    loaded = parse_documents([("a.yaml", text)], {"S": secret}, contain=True, read_file=str)
    assert loaded.undecoded[ModelName("a")].reason.endswith("cannot use ${S} here")


@pytest.mark.parametrize("name", ["''", "[b]", "-b"])
def test_parse_exception_propagates_unless_contained_with_a_valid_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, DOCUMENT_POINTS[0], lambda value: value["metadata"]["name"] != "a")
    with pytest.raises(InjectedError):
        parse_documents([("a.yaml", model() + "---\n" + model(name=name))], contain=True)
    with pytest.raises(InjectedError):
        parse_documents([("a.yaml", model(name="b"))])


@pytest.mark.parametrize(
    ("keys", "aliases", "tenants"),
    [
        ({"tenants": ["t"], "aliases": ["a"]}, ("a",), ("t",)),
        ({"tenants": ["t" * 254]}, (), ()),
        ({"tenants": ["\ud800"]}, (), ()),
        ({"tenants": [f"t{n}" for n in range(5000)], "aliases": ["a"]}, ("a",), ()),
        ({"tenants": ["t"], "aliases": [f"a{n}" for n in range(5000)]}, (), ("t",)),
    ],
)
def test_stand_in_keeps_aliases_and_tenants_only_if_the_list_is_valid(
    keys: dict[str, object], aliases: tuple[str, ...], tenants: tuple[str, ...]
) -> None:
    spec = read_known_keys({"metadata": {"name": "b"}, "spec": {"engine": "vllm", **keys}})
    assert (spec.aliases, spec.tenants) == (aliases, tenants)


def test_alias_equal_to_the_name_of_a_stand_in_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, DOCUMENT_POINTS[0], concerns("b"))
    texts = [("a.yaml", model(name="b")), ("b.yaml", model("aliases: [b]", name="c"))]
    for order in (texts, texts[::-1]):
        with pytest.raises(DocumentError, match="`b` is already"):
            parse_documents(order, contain=True)
