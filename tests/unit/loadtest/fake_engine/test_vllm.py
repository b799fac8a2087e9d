"""Invalid requests to a fake vLLM. The contract of engines has the valid ones."""

from __future__ import annotations

import json

import pytest

from loadtest.fake_engine.api_dialects import BadRequestError, parse_head
from loadtest.fake_engine.vllm import Vllm


def request(engine: Vllm, target: str, body: object = None) -> tuple[int, object]:
    """Send a POST without a connection."""
    return engine.respond(parse_head(f"POST {target} HTTP/1.1".encode()), json.dumps(body).encode())


@pytest.fixture
def engine() -> Vllm:
    """An engine on a machine without adapters."""
    return Vllm("ada", lambda _path: False)


@pytest.mark.parametrize("target", ["/sleep?level=3", "/sleep?level=one", "/v1/load_lora_adapter"])
def test_invalid_request_is_rejected_and_changes_nothing(engine: Vllm, target: str) -> None:
    with pytest.raises(BadRequestError):
        request(engine, target)
    assert (engine.level, engine.models) == (None, ["ada"])


def test_unload_of_an_unknown_adapter_is_404(engine: Vllm) -> None:
    assert request(engine, "/v1/unload_lora_adapter", {"lora_name": "missing"})[0] == 404


def test_engine_without_a_level_sleeps_at_level_1(engine: Vllm) -> None:
    assert request(engine, "/sleep") == (200, {"status": "sleeping", "level": 1})
    assert request(engine, "/is_sleeping") == (200, {"is_sleeping": True})
