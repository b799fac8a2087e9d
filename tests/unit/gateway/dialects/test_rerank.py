"""Translation of rerank and score for engines with another form of rerank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import translated_request
from gateway.dialects.rerank import RerankConverter, TranslatedRerank, find_target, translate_rerank
from gateway.errors import CallError
from gateway.request.api_routes import Operation, find_operation

TEXTS = ["a", "b", "c"]


def operation(path: str) -> Operation:
    found = find_operation(b"POST", path.encode())
    assert found is not None
    return found


def translated(path: str = "/v1/rerank", dialect: str = "jina", **members: Any) -> TranslatedRerank:
    target = find_target((dialect,))
    assert target is not None
    body = {"model": "m", **({"query": "q", "documents": TEXTS} if "rerank" in path else {}), **members}
    return translate_rerank(operation(path), json.dumps(body).encode(), target)


def converted(request: TranslatedRerank, reply: object, status: int = 200) -> dict[str, Any]:
    one = RerankConverter(request, "served", "1", 7.9)
    found: dict[str, Any] = json.loads(one.convert(status, json.dumps(reply).encode()))
    assert not one.broken
    return found


def refused(**members: Any) -> CallError:
    with pytest.raises(CallError) as found:
        translated(**members)
    assert found.value.status == 400
    return found.value


JINA = {
    "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.2},
                {"index": 2, "relevance_score": 0.9}],
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}  # fmt: skip
TEI = [{"index": 0, "score": 0.2}, {"index": 2, "score": 0.9, "text": "c"}, {"index": 1, "score": 0.9}]
SGLANG = [{"score": 0.9, "document": "b", "index": 1, "meta_info": {}}, *TEI[:2]]
RESULTS = [
    {"index": 1, "relevance_score": 0.9},
    {"index": 2, "relevance_score": 0.9},
    {"index": 0, "relevance_score": 0.2},
]


def test_engine_is_asked_in_its_own_form() -> None:
    jina, sglang = translated("/v2/rerank"), translated(dialect="sglang")
    for made in (jina, sglang):
        assert json.loads(made.body) == {"model": "m", "query": "q", "documents": TEXTS}
        assert made.target.engine_path == b"/v1/rerank"
    tei = translated(dialect="tei", raw_scores=True)
    assert tei.target.engine_path == b"/rerank"
    assert json.loads(tei.body) == {"model": "m", "query": "q", "texts": TEXTS, "truncate": True, "raw_scores": True}
    assert json.loads(translated(dialect="tei", truncate=False).body)["truncate"] is False


def test_preferred_form_is_that_of_jina() -> None:
    found = find_target(("sglang", "tei", "jina", "openai"))
    assert found is not None
    assert found.dialect == "jina"
    assert find_target(("openai", "anthropic")) is None


@pytest.mark.parametrize(("dialect", "reply"), [("jina", JINA), ("tei", TEI), ("sglang", SGLANG)])
def test_results_are_sorted_by_score_and_have_the_form_of_jina_and_cohere(dialect: str, reply: Any) -> None:
    found = converted(translated(dialect=dialect), reply)
    assert found.pop("usage", None) == (JINA["usage"] if dialect == "jina" else None)
    assert found == {"id": "rerank-1", "model": "m", "results": RESULTS}


@pytest.mark.parametrize(("top_n", "count"), [(None, 3), (0, 3), (2, 2), (9, 3)])
def test_results_are_limited_to_top_n(top_n: int | None, count: int) -> None:
    assert converted(translated(top_n=top_n), JINA)["results"] == RESULTS[:count]


def test_documents_are_repeated_on_request() -> None:
    documents = [{"text": "a"}, "b", {"text": "c", "title": "x"}]
    found = converted(translated(dialect="tei", documents=documents, return_documents=True, top_n=1), TEI)
    assert found["results"] == [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": None}, None),
        ({"documents": [{"image": "canary"}]}, None),
        ({"query": {"text": "canary"}}, None),
        ({"top_n": -1}, "top_n"),
        ({"Top_N": 1}, "top_n"),
        ({"path": "/v1/score"}, "text_1"),
        ({"path": "/v1/score", "text_1": ["a", "b"], "text_2": ["a", "b"]}, "text_1"),
        ({"path": "/v1/score", "queries": ["a", "b"], "documents": ["a", "b"]}, "queries"),
        ({"path": "/v1/score", "data_1": ["a", "b"], "data_2": ["a", "b"]}, "data_1"),
        ({"path": "/v1/score", "text_1": "a"}, "text_2"),
        ({"path": "/v1/score", "text_1": "a", "text_2": []}, "text_2"),
    ],
)
def test_invalid_request_is_rejected_by_name(members: dict[str, Any], param: str | None) -> None:
    error = refused(**members)
    assert error.param == param
    assert "canary" not in error.message


@pytest.mark.parametrize(
    "members",
    [
        {"text_1": "q", "text_2": TEXTS},
        {"text_1": ["q"], "text_2": TEXTS},
        {"queries": "q", "documents": TEXTS},
        {"queries": "q", "items": TEXTS},
        {"data_1": "q", "data_2": TEXTS},
    ],
)
@pytest.mark.parametrize(("dialect", "reply"), [("jina", JINA), ("tei", TEI)])
def test_score_of_one_query_becomes_rerank_and_keeps_the_order(
    members: dict[str, Any], dialect: str, reply: Any
) -> None:
    made = translated("/v1/score", dialect, stream=True, **members)
    body = json.loads(made.body)
    assert (body["query"], body["texts" if dialect == "tei" else "documents"], "stream" in body) == ("q", TEXTS, False)
    found = converted(made, reply)
    found.pop("usage", None)
    data = [{"index": at, "object": "score", "score": score} for at, score in enumerate((0.2, 0.9, 0.9))]
    assert found == {"id": "score-1", "object": "list", "created": 7, "model": "m", "data": data}


def test_score_of_a_single_pair_has_one_row() -> None:
    found = converted(translated("/v1/score", "tei", text_1="q", text_2="a"), [{"index": 0, "score": 1}])
    assert [row["score"] for row in found["data"]] == [1]


@pytest.mark.parametrize(
    "reply",
    [
        b"x", b"{}", b"[]", b'[{"index":0,"score":1}]', b'[{"index":0,"score":null},{"index":1,"score":1},{"index":2}]',
        b'[{"index":0,"score":1},{"index":1,"score":1},{"index":3,"score":1}]',
        b'[{"index":0,"score":1},{"index":1,"score":1},{"index":1,"score":1}]',
    ],
)  # fmt: skip
def test_response_without_one_score_for_each_document_is_broken(reply: bytes) -> None:
    one = RerankConverter(translated(dialect="tei"), "served", "1", 0)
    assert (one.convert(200, reply), one.broken) == (b"", True)


def test_error_with_the_status_of_a_success_is_broken() -> None:
    one = RerankConverter(translated(), "served", "1", 0)
    assert one.convert(200, json.dumps({**JINA, "error": {"message": "no"}}).encode()) == b""
    assert one.broken


def test_engine_error_gets_the_form_of_openai() -> None:
    found = converted(translated(dialect="tei"), {"error": "batch size 40 > maximum allowed batch size 32"}, 413)
    assert found["error"]["message"] == "batch size 40 > maximum allowed batch size 32"
    assert found["error"]["type"] == "invalid_request_error"


def test_model_of_a_header_is_in_the_response() -> None:
    target = find_target(("tei",))
    assert target is not None
    made = translate_rerank(operation("/v1/rerank"), b'{"query":"q","documents":["a","b","c"]}', target)
    assert (made.model, converted(made, TEI)["model"]) == ("", "served")


def test_request_or_response_with_too_many_items_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_request, "ITEMS_MAX", 3)
    assert "more than 3 members and items" in refused().message
    monkeypatch.undo()
    request = translated(dialect="tei")
    monkeypatch.setattr("gateway.dialects.rerank.ITEMS_MAX", 3)
    one = RerankConverter(request, "served", "1", 0)
    one.convert(200, json.dumps(TEI).encode())
    assert one.broken
