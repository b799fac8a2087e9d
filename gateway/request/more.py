"""Paths beside the two big dialects: Jina's and Cohere's rerank and score, vLLM's tokenizer (interfaces, section 3)."""

from __future__ import annotations

from gateway.request.operation import Kind, Operation

POST = {
    **{path: Operation(Kind.INFER, path, dialect="jina") for path in (b"/v1/rerank", b"/v2/rerank", b"/v1/score")},
    **{path: Operation(Kind.INFER, path, dialect="vllm") for path in (b"/tokenize", b"/detokenize")},
}
