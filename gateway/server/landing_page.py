"""Renders the page at `/`: HTML for people, JSON for programs. Pure.

Contains only names, states and context lengths of the models that the caller may call, never a key or the address of an
engine. Every value is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

from gateway.http.request_head import Head

ModelRow = tuple[str, str, int | None]
"""Name, state and context length of a model."""

HTML_HEADERS = (
    b"vary: accept\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'\r\n"
)
JSON_HEADERS = b"vary: accept\r\ncache-control: no-store\r\n"
_PATHS = ("/v1/models", "/v1/chat/completions", "/v1/messages", "/api/tags", "/health")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
    "pre{background:#8882;padding:1rem;overflow:auto}"
)


def accepts_html(head: Head) -> bool:
    """Return whether a person's browser sent the request."""
    return b"text/html" in head.headers.get(b"accept", b"").lower()


def render_json(rows: Sequence[ModelRow], *, has_access: bool) -> bytes:
    """Render the page for programs."""
    models = [{"id": name, "state": state, "context_length": tokens} for name, state, tokens in rows]
    needs = {} if has_access else {"note": "send an API key to list models"}
    return msgspec.json.encode({"name": "pilotlight", "status": "ok", "models": models, "paths": _PATHS, **needs})


def render_html(rows: Sequence[ModelRow], base_url: str, *, has_access: bool, keys_needed: bool) -> bytes:
    """Render the page for people. `base_url` is the address of the gateway as the client knows it."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pilotlight</title>',
        f"<style>{_STYLE}</style></head><body><h1>Pilotlight</h1>",
        "<p>This is the inference port of an LLM gateway with the APIs of OpenAI, Anthropic and Ollama.</p>",
        *(_models(rows) if has_access else ("<p>To list models, send an API key.</p>",)),
        "<h2>Example</h2>",
        f"<pre>{escape(_curl(rows[0][0] if rows else 'MODEL', base_url, keys_needed=keys_needed))}</pre>",
        "</body></html>\n",
    ]
    return "\n".join(lines).encode()


def _models(rows: Sequence[ModelRow]) -> list[str]:
    if not rows:
        return ["<p>There are no models.</p>"]
    cells = [
        f"<tr><td>{escape(name)}</td><td>{escape(state)}</td><td>{'' if tokens is None else tokens}</td></tr>"
        for name, state, tokens in rows
    ]
    return ["<h2>Models</h2><table><tr><th>name</th><th>state</th><th>context length</th></tr>", *cells, "</table>"]


def _curl(model: str, base_url: str, *, keys_needed: bool) -> str:
    """Return a command for a POSIX shell. Names of models contain no quotes and no backslashes."""
    body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "Hello"}]}).decode()
    key = '  -H "Authorization: Bearer $API_KEY" \\\n' if keys_needed else ""
    return f"curl {base_url}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n{key}  -d '{body}'"
