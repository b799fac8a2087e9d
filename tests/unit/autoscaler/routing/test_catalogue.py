"""The part of the documents that a gateway receives."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
import pytest

from autoscaler.contract import (
    Clocks,
    FrontSettings,
    KeyEntry,
    ModelEntry,
    ModelName,
    QueueLimits,
    TenantEntry,
    TenantName,
)
from autoscaler.documents.document_rules import ADAPTED_NAMES_MAX, ADAPTERS_MAX, NAMES_BYTES_MAX, check_model
from autoscaler.routing.catalogue import front_settings, model_entry, tenant_entry
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.engines import CHAT_TEMPLATES, TRITON_BACKENDS
from autoscaler.spec.model import Adapter, ChatTemplateName, Model, ModelSpec, Queue, Triton, TritonBackend
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import Cors, ModelList, Settings, Stream
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from autoscaler.text import unix_seconds
from gateway.control.client import LINE_BYTES_MAX

ACME = Tenant(name=TenantName("acme"))


def test_catalogue_entry_of_a_model_contains_its_routing_fields() -> None:
    spec = ModelSpec(
        engine="llama.cpp", artifact="file:///a.gguf", aliases=("b",), tenants=(TenantName("acme"),),
        context_tokens=512, unlisted=True, paused=True,
        queue=Queue(calls_max=7, bytes_max=Bytes(8), wait_seconds_max=9), response_seconds_max=1,
        first_byte_seconds_max=2, stall_seconds_max=3,
    )  # fmt: skip
    assert model_entry(Model(name=ModelName("a"), spec=spec, slots=4, created_unix_s=5)) == ModelEntry(
        name=ModelName("a"), served_name="a", aliases=("b",), tenants=(TenantName("acme"),),
        dialects=("openai", "anthropic", "jina"),
        unlisted=True, paused=True, slots=4, context_tokens=512, created_unix_s=5,
        closes_after_stream=True, queue=QueueLimits(calls_max=7, bytes_max=8, wait_seconds_max=9),
        clocks=Clocks(response_seconds_max=1, first_byte_seconds_max=2, stall_seconds_max=3),
    )  # fmt: skip


@pytest.mark.parametrize(("engine", "takes"), [("vllm", True), ("sglang", True), ("llama.cpp", False)])
def test_cache_salt_is_enabled_only_for_supporting_engines(
    engine: Literal["vllm", "sglang", "llama.cpp"], takes: bool
) -> None:
    assert model_entry(Model(name=ModelName("a"), spec=ModelSpec(engine=engine))).takes_cache_salt is takes


@pytest.mark.parametrize(
    ("engine", "artifact", "served"),
    [
        ("transformers", "file:///w/m", "/w/m"), ("transformers", "pvc://claim/m", "/weights/m"),
        ("vllm", "file:///w/m", "a"),
    ],
)  # fmt: skip
def test_request_names_the_weights_if_the_engine_serves_them_by_path(
    engine: Literal["transformers", "vllm"], artifact: str, served: str
) -> None:
    spec = ModelSpec(engine=engine, artifact=artifact)
    assert model_entry(Model(name=ModelName("a"), spec=spec)).served_name == served


@pytest.mark.parametrize(
    ("engine", "command", "takes"),
    [
        ("llama.cpp", (), True), ("vllm", (), True), ("sglang", (), True), ("ollama", (), True), ("command", (), False),
        ("command", ("python", "server.py", "--port", "{port}"), False),
        ("command", ("/opt/llama-server", "--port", "{port}"), True),
        ("command", ("sh", "-c", "exec vllm serve m --port {port}"), True),
        ("command", ("python", "-m", "sglang.launch_server", "--port", "{port}"), True),
        ("command", ("docker", "run", "ghcr.io/ggml-org/llama.cpp:server"), True),
        ("command", ("docker", "run", "vllm/vllm-openai:latest"), True), ("command", ("my-vllm-proxy",), False),
    ],
)  # fmt: skip
def test_usage_is_requested_only_of_engines_known_to_accept_stream_options(
    engine: Literal["vllm", "sglang", "llama.cpp", "ollama", "command"], command: tuple[str, ...], takes: bool
) -> None:
    spec = ModelSpec(engine=engine, command=command)
    assert model_entry(Model(name=ModelName("a"), spec=spec)).takes_stream_options is takes


def test_model_of_triton_has_the_inputs_of_its_backend_and_its_template() -> None:
    spec = ModelSpec(engine="triton", artifact="file:///a")
    entry = model_entry(Model(name=ModelName("a"), spec=spec))
    assert (entry.dialects, entry.triton) == (
        (), msgspec.structs.replace(TRITON_BACKENDS["auto"], chat_template=CHAT_TEMPLATES["chatml"]),
    )  # fmt: skip
    chosen = Triton(backend="vllm", chat_template="messages", embedding_input="TEXT")
    entry = model_entry(Model(name=ModelName("a"), spec=msgspec.structs.replace(spec, triton=chosen)))
    assert entry.triton == msgspec.structs.replace(TRITON_BACKENDS["vllm"], embedding_input="TEXT")
    assert model_entry(Model(name=ModelName("a"), spec=ModelSpec(engine="vllm"))).triton is None


def test_each_backend_and_chat_template_of_a_document_is_defined() -> None:
    assert set(get_args(TritonBackend)) == TRITON_BACKENDS.keys()
    assert set(get_args(ChatTemplateName)) == CHAT_TEMPLATES.keys()


def test_tenant_entry_converts_key_expiry_to_unix_seconds() -> None:
    keys = (
        Key(sha256="ab" * 32, name="ci", expires_at="1970-01-02T01:00:00+01:00"),
        Key(sha256="cd" * 32, role="operator"),
    )
    tenant = Tenant(name=TenantName("acme"), spec=TenantSpec(keys=keys, models=("q-*",), weight=2, priority_max=3))
    assert tenant_entry(tenant) == TenantEntry(
        name=TenantName("acme"),
        keys=(
            KeyEntry(sha256="ab" * 32, name="ci", expires_unix_s=86_400),
            KeyEntry(sha256="cd" * 32, role="operator"),
        ),
        models=("q-*",),
        weight=2,
        priority_max=3,
    )


@pytest.mark.parametrize(
    ("auth", "tenants", "needed"),
    [("auto", [], False), ("auto", [ACME], True), ("keys", [], True), ("none", [ACME], False)],
)
def test_api_keys_are_required_by_auth_keys_or_by_auto_with_a_tenant(
    auth: str, tenants: list[Tenant], needed: bool
) -> None:
    settings = Settings(auth="auto") if auth == "auto" else Settings(auth="keys" if auth == "keys" else "none")
    assert front_settings(settings, tenants).keys_needed is needed


def test_gateway_settings_contain_the_stream_cors_and_host_settings() -> None:
    settings = Settings(
        stream=Stream(keepalive_seconds=5),
        silent_seconds_max=50,
        cors=Cors(origins=("https://a.example",)),
        hosts=("llm.example",),
        models=ModelList(list_aliases=True),
        default_model="m",
    )
    assert front_settings(settings, []) == FrontSettings(
        keepalive_seconds=5,
        silent_seconds_max=50,
        cors_origins=("https://a.example",),
        hosts=("llm.example",),
        lists_aliases=True,
        default_model="m",
    )


@pytest.mark.parametrize("time", ["2027-01-31", "2027-01-31T12:00:00", "2027-W01-1T12:00:00Z+", "x"])
def test_key_expiry_that_is_invalid_or_has_no_time_zone_is_rejected(time: str) -> None:
    with pytest.raises(ValueError):
        unix_seconds(time)


@pytest.mark.parametrize("key", ["tenants", "aliases"])
def test_catalogue_of_2000_models_with_maximum_names_fits_in_one_message(key: str) -> None:
    def spec(count: int) -> ModelSpec:
        names = tuple(f"{number:03}".ljust(120, "x") for number in range(count))
        adapters_max = min(ADAPTERS_MAX, ADAPTED_NAMES_MAX // (1 + count)) if key == "aliases" else ADAPTERS_MAX
        adapters = tuple(
            Adapter(name=f"{number}".ljust(63, "a"), artifact="s3://bucket/a") for number in range(adapters_max)
        )
        bare = ModelSpec(engine="vllm", artifact="s3://bucket/m", image="v", adapters=adapters)
        return msgspec.structs.replace(bare, **{key: names})

    most = (NAMES_BYTES_MAX - 10) // 123
    check_model(spec(most))
    with pytest.raises(WrongKeyError, match="at most 16 KiB for all aliases and tenants together") as caught:
        check_model(spec(most + 1))
    assert caught.value.path == ("spec", key)
    entry = model_entry(Model(name=ModelName("m" * 180), spec=spec(most)))
    assert 2000 * len(msgspec.json.encode(entry)) < 2 * LINE_BYTES_MAX, "aiohttp reads lines of twice the limit"
