"""Translates rerank (Jina, Cohere) and score (vLLM) for engines that offer another form of rerank. Pure.

Engines have three forms: that of Jina (`/v1/rerank`; Infinity, llama.cpp), the list of SGLang (`/v1/rerank`), and that
of Text Embeddings Inference (`/rerank` with `texts`). Score becomes rerank of the texts by one query. The gateway sorts
and shortens the results itself, because engines differ in it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.chat_responses import ChatConverter, is_error, openai_error
from gateway.dialects.decoded_structs import Rank, RerankReply, RerankRequest, RerankUsage, ScoreRequest
from gateway.dialects.translated_request import (
    ITEMS_MAX,
    UNREADABLE,
    TranslatedRequest,
    check_items,
    count_items,
    plain_json,
    unreadable_body,
)
from gateway.errors import invalid_request
from gateway.request.api_routes import RERANK, Dialect, Kind, Operation
from gateway.request.forbidden_fields import check_case

TRANSLATED: Final = frozenset({"jina", "cohere", "score"})
"""The dialects of the paths that can be translated."""
_TARGETS: Final[dict[Dialect, Operation]] = {
    "jina": RERANK,
    "tei": Operation(Kind.INFER, b"/rerank", dialect="tei"),
    "sglang": RERANK._replace(dialect="sglang"),
}
"""The operations of engines by their dialect, in order of preference."""
_STREAM: Final = frozenset({"stream", "stream_options"})
"""Ignored: these responses are not streamed."""
_RERANK: Final = frozenset(RerankRequest.__struct_fields__) | _STREAM
_SCORE: Final = frozenset(ScoreRequest.__struct_fields__) | _STREAM

_members = msgspec.json.Decoder(dict[str, Raw])
_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)
_reply = msgspec.json.Decoder(RerankReply)
_ranks = msgspec.json.Decoder(list[Rank])

Json = dict[str, object]


class TranslatedRerank(TranslatedRequest):
    """A translated request. `shown`: the documents to repeat in the response; `is_score`: the client sent a score."""

    __slots__ = ("count", "is_score", "shown", "top_n")

    def __init__(  # noqa: PLR0917  two callers pass them in this order
        self, target: Operation, model: str, query: str, documents: list[str], members: Json, is_score: bool
    ) -> None:
        texts = "texts" if target.dialect == "tei" else "documents"
        if target.dialect == "tei":  # without it a text that is too long is an error, unlike in the other forms
            members.setdefault("truncate", True)
        super().__init__(model, False, target, {**members, "query": query, texts: documents})
        self.count = len(documents)
        self.is_score = is_score
        self.shown: list[str] = []
        self.top_n = self.count


def find_target(dialects: Collection[str]) -> Operation | None:
    """Return the rerank operation of an engine with these dialects; None if it has none."""
    return next((target for dialect, target in _TARGETS.items() if dialect in dialects), None)


def translate_rerank(operation: Operation, body: bytes, target: Operation) -> TranslatedRerank:
    """Translate the body of a request. Raises CallError 400."""
    check_items(body)
    body = plain_json(body)
    try:
        given = _members.decode(body)
        known = _SCORE if operation.dialect == "score" else _RERANK
        check_case(given, known)
        members: Json = {name: value for name, value in given.items() if name not in known}
        if operation.dialect == "score":
            return _translate_score(_score.decode(body), target, members)
        return _translate_rerank(_rerank.decode(body), target, members)
    except UNREADABLE as error:
        raise unreadable_body(error) from None


def _translate_rerank(request: RerankRequest, target: Operation, members: Json) -> TranslatedRerank:
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    if not documents:
        raise invalid_request("documents must not be empty", param="documents")
    if request.top_n is not None and request.top_n < 0:
        raise invalid_request("top_n must not be negative", param="top_n")
    found = TranslatedRerank(target, request.model or "", request.query, documents, members, False)
    found.top_n = request.top_n or found.count
    if request.return_documents:
        found.shown = documents
    return found


def _translate_score(request: ScoreRequest, target: Operation, members: Json) -> TranslatedRerank:
    names = ("text_1", "text_2") if request.queries is None and request.data_1 is None else ("data_1", "data_2")
    first, second = request.text_1, request.text_2
    if request.queries is not None:
        names = ("queries", "documents")
        first, second = request.queries, request.documents if request.items is None else request.items
    elif request.data_1 is not None:
        first, second = request.data_1, request.data_2
    if isinstance(first, list) and len(first) == 1:
        first = first[0]
    if not isinstance(first, str):
        raise invalid_request(
            f"{names[0]} must be one text: the engine of this model scores texts by one query; send a request for each",
            param=names[0],
        )
    if not second:
        raise invalid_request(f"{names[1]} must be a text or a list of texts", param=names[1])
    texts = [second] if isinstance(second, str) else second
    return TranslatedRerank(target, request.model or "", first, texts, members, True)


class RerankConverter(ChatConverter):
    """Converts one response, which is never a stream. `id`: of the request; `created_s`: the Unix time."""

    __slots__ = ("_created_s", "_id", "_model", "_request")

    def __init__(self, request: TranslatedRerank, model: str, id: str, created_s: float) -> None:
        super().__init__(stream=False)
        self._request = request
        self._model = request.model or model
        self._id = id
        self._created_s = int(created_s)

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:  # noqa: ARG002  never late
        """Return the response for an engine's whole response; empty and `broken` if it is unusable."""
        if status >= 400:
            return msgspec.json.encode({"error": openai_error(status, body)})
        try:
            if count_items(body) > ITEMS_MAX:
                raise msgspec.DecodeError("too many items")
            ranks, usage = self._read(body)
            scores = self._scores(ranks)
        except UNREADABLE:
            self.broken = True
            return b""
        render = self._score_response if self._request.is_score else self._rerank_response
        document = render(scores)
        if usage is not None and usage.total_tokens is not None:
            document["usage"] = {"prompt_tokens": usage.prompt_tokens or 0, "total_tokens": usage.total_tokens}
        return msgspec.json.encode(document)

    def _read(self, body: bytes) -> tuple[list[Rank], RerankUsage | None]:
        if self._request.target.dialect != "jina":
            return _ranks.decode(body), None
        reply = _reply.decode(body)
        if is_error(reply.error):
            raise msgspec.DecodeError("an error with the status of a success")
        return reply.results, reply.usage

    def _scores(self, ranks: list[Rank]) -> dict[int, float]:
        """Return the score of each document by its index. Raises an exception of UNREADABLE if one is missing."""
        scores: dict[int, float] = {}
        for rank in ranks:
            score = rank.score if rank.relevance_score is None else rank.relevance_score
            if score is not None and 0 <= rank.index < self._request.count:
                scores[rank.index] = score
        if len(scores) < self._request.count or len(ranks) != self._request.count:
            raise msgspec.DecodeError("not one score for each document")
        return scores

    def _rerank_response(self, scores: dict[int, float]) -> Json:
        request, results = self._request, list[Json]()
        for index in sorted(scores, key=lambda index: (-scores[index], index))[: request.top_n]:
            result: Json = {"index": index, "relevance_score": scores[index]}
            if request.shown:
                result["document"] = {"text": request.shown[index]}
            results.append(result)
        return {"id": f"rerank-{self._id}", "model": self._model, "results": results}

    def _score_response(self, scores: dict[int, float]) -> Json:
        data = [{"index": index, "object": "score", "score": scores[index]} for index in range(len(scores))]
        return {
            "id": f"score-{self._id}", "object": "list", "created": self._created_s, "model": self._model, "data": data,
        }  # fmt: skip
