"""Rerank and score on the wire for engines with another form of rerank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fakes.engines.scripted_engine import ScriptedEngine, document
from tests.support.harness.gateway.gateway_rig import Rig, rig
from tests.wire.responses.test_messages_translation import sent

TEXTS = ["a", "b"]
TEI = document(b'[{"index":1,"score":0.9},{"index":0,"score":0.1}]')
JINA = document(
    b'{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.1}],"usage":{"prompt_tokens":4,'
    b'"total_tokens":4}}'
)
RESULTS = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]


async def ask(one: Rig, path: str, **members: Any) -> tuple[int, dict[str, str], Any]:
    client = await one.client()
    body = json.dumps({"model": "m", **members}).encode()
    client.send(f"POST {path} HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    status, fields, reply = await client.answer()
    return status, fields, json.loads(reply)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_rerank_of_text_embeddings_inference_gets_its_texts(path: str) -> None:
    async with ScriptedEngine((TEI,)) as engine, rig(engine.address, dialects=("openai", "tei")) as one:
        status, fields, found = await ask(one, path, query="q", documents=TEXTS, top_n=2)
        assert (status, fields["content-type"], found["results"]) == (200, "application/json", RESULTS)
        assert found["id"] == f"rerank-{fields['x-request-id']}"
        body = {"model": "served-m", "query": "q", "texts": TEXTS, "truncate": True}
        assert sent(engine) == ("/rerank", body)


async def test_rerank_list_of_sglang_gets_the_form_of_jina() -> None:
    async with ScriptedEngine((TEI,)) as engine, rig(engine.address, dialects=("openai", "sglang")) as one:
        found = (await ask(one, "/v1/rerank", query="q", documents=TEXTS))[2]
        assert (found["results"], found["model"]) == (RESULTS, "m")
        assert sent(engine) == ("/v1/rerank", {"model": "served-m", "query": "q", "documents": TEXTS})


async def test_engine_with_the_same_form_gets_the_request_unchanged() -> None:
    async with ScriptedEngine((document(b"{}"),)) as engine, rig(engine.address, dialects=("jina", "score")) as one:
        for path, members in (("/v1/rerank", {"documents": []}), ("/v1/score", {"text_1": ["a", "b"]})):
            assert (await ask(one, path, **members))[2] == {}
            assert sent(engine) == (path, {"model": "served-m", **members})


async def test_score_becomes_rerank_and_its_tokens_are_counted() -> None:
    async with ScriptedEngine((JINA,)) as engine, rig(engine.address, dialects=("jina",)) as one:
        status, _, found = await ask(one, "/v1/score", text_1="q", text_2=TEXTS)
        assert (status, [row["score"] for row in found["data"]]) == (200, [0.1, 0.9])
        assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
        assert sent(engine) == ("/v1/rerank", {"model": "served-m", "query": "q", "documents": TEXTS})
        assert one.totals()[1] == 4


@pytest.mark.parametrize(("path", "members"), [("/v1/rerank", {"query": "q"}), ("/v1/score", {"text_1": ["a", "b"]})])
async def test_invalid_request_gets_400_before_the_engine(path: str, members: dict[str, Any]) -> None:
    async with ScriptedEngine((TEI,)) as engine, rig(engine.address, dialects=("tei",)) as one:
        assert (await ask(one, path, **members))[0] == 400
        assert (await ask(one, path, api_base="x", **members))[0] == 400
        assert engine.requests == []


@pytest.mark.parametrize(
    ("reply", "status"), [(document(b"[]"), 502), (document(b'{"error":"too many"}', "413 Content Too Large"), 413)]
)
async def test_engine_failure_is_an_error_in_the_form_of_openai(reply: bytes, status: int) -> None:
    async with ScriptedEngine((reply,)) as engine, rig(engine.address, dialects=("tei",)) as one:
        found = await ask(one, "/v1/rerank", query="q", documents=TEXTS, stream=True)
        assert (found[0], set(found[2]["error"])) == (status, {"message", "type", "code", "param"})


async def test_request_for_an_engine_without_rerank_gets_400() -> None:
    async with rig(dialects=("openai", "anthropic")) as one:
        for path in ("/v1/rerank", "/v2/rerank", "/v1/score"):
            status, _, found = await ask(one, path)
            assert (status, "does not support this API" in found["error"]["message"]) == (400, True)
