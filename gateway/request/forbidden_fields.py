"""Forbidden body fields: those that would redirect a request, or let it use cached data of other requests. Pure.

The gateway decides where a request is sent, and the operator which hosts an engine contacts. A body with such a field
is rejected, not silently stripped, because the client meant something by it. Only top-level members and form parts are
checked: everything below is content, which the gateway does not read.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from gateway.errors import CallError, invalid_request

PLACES: Final = frozenset(
    {
        # Where a proxy sends the request (LiteLLM; CVE-2024-6587).
        "api_base", "base_url",
        # Files that an engine loads as adapters (SGLang; vLLM-Omni), or adapters that it applies (llama.cpp).
        "lora_path", "lora",
        # Hosts from which an engine fetches a prefill or an encoded image (SGLang; vLLM: remote_host in the last two).
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "ec_transfer_params",
        # The rank of an engine that serves the request or did its prefill; each rank has its own cache (SGLang).
        "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
        # The slot of an engine, even a busy one, with the prompt that it still holds (llama.cpp, new and old name).
        "id_slot", "slot_id",
        # Selects cached prefixes: appended to cache_salt, or an open session to continue (SGLang).
        "extra_key", "session_params",
        # The engine's id of the request: reusing an active one breaks the request that has it (SGLang).
        "rid",
    }
)  # fmt: skip

SLOTS: Final = frozenset({"id_slot", "slot_id"})
"""Accepted with the value -1, which means any slot."""
READ: Final = frozenset({"model", "stream", "stream_options", "cache_salt"})
"""Top-level members and form parts that a gateway reads or changes."""
STATE: Final = frozenset({"previous_response_id", "conversation", "store", "background"})
"""Members of the Responses API that need stored responses; other APIs may use these names for something else."""
_KNOWN: Final = PLACES | READ
_NO_VALUES: Final[dict[str, Any]] = {}
_LETTERS: Final = frozenset(name.replace("_", "") for name in _KNOWN)
_ENCODED_WORD: Final = re.compile(rb"=\?[^?]*+\?(?:b\?([^?]*+)|q\?([^?]*+))\?=", re.IGNORECASE)
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})")

USUAL: Final = frozenset(
    {
        "model", "messages", "prompt", "input", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p",
        "n", "max_tokens", "max_completion_tokens", "stop", "seed", "presence_penalty", "frequency_penalty",
        "logit_bias", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls",
        "user", "metadata", "store", "reasoning_effort", "service_tier", "encoding_format", "dimensions", "echo",
        "best_of", "suffix", "instructions", "max_output_tokens", "text", "reasoning", "system", "stop_sequences",
        "thinking",
    }
)  # fmt: skip
"""Common fields of the OpenAI and Anthropic APIs that need no check; one set comparison finds bodies of only these."""
_ADAPTER, _CACHE = "request an adapter as model:adapter", "the gateway selects the cache"
_FIXES = {
    "lora": _ADAPTER, "lora_path": _ADAPTER, "cache_salt": _CACHE, "extra_key": _CACHE, "session_params": _CACHE,
    "rid": "set the id with header x-request-id",
}  # fmt: skip


def check_members(names: Collection[str], values: Mapping[str, Any] = _NO_VALUES) -> None:
    """Raise CallError 400 if one of these names is forbidden. The message contains the name from `PLACES`.
    `values` (bytes or Raw) has at least the members of SLOTS, some of whose values are accepted.
    """
    if USUAL.issuperset(names):
        return
    if not PLACES.isdisjoint(names):
        forbidden = PLACES.intersection(names)
        forbidden -= {name for name in SLOTS & forbidden if bytes(values.get(name, b"")) == b"-1"}
        if forbidden:
            raise _refusal(min(forbidden))
    check_case(names, _KNOWN)


def check_case(names: Collection[str], known: frozenset[str]) -> None:
    """Raise CallError 400 if a name differs from a known one only in case.

    Engines whose JSON decoder ignores case (Go's encoding/json, and so Ollama) treat such a member as the known one,
    and use the last of two. Case folding covers U+017F and U+212A, which Go folds to s and k.
    """
    text = "".join(names)
    if text.isascii() and text == text.lower():
        return
    for name in names:
        folded = name.casefold()
        if folded in known and name not in known:
            message = f"a member differs from {folded} only in the case of its letters: write {folded}, or remove it"
            raise invalid_request(message, param=folded)


def check_part(name: str) -> None:
    """Do the same for a form part. A `cache_salt` is rejected there, because nothing is removed from a form."""
    if name in PLACES or name == "cache_salt":
        raise _refusal(name)
    check_case((name,), _KNOWN)


def resembles_known(text: bytes) -> bool:
    """Return whether some parser could read one of the known names from this text in a part's head."""
    return reduce_to_letters(text) in _LETTERS


def reduce_to_letters(text: bytes) -> str:
    """Return the letters and digits of a name in a part's head, decoded and in lower case. They are equal for all names
    that some parser could read from the text: by decoding, trimming or unquoting it, or by ignoring its case.
    """
    plain = unescape(text)
    if b"=?" in text:  # as .NET writes a name that is not ASCII
        plain = _ENCODED_WORD.sub(_decode_word, plain)
    return "".join(filter(str.isalnum, plain.decode("utf-8", "replace").casefold()))


def unescape(text: bytes) -> bytes:
    """Return the text without percent-encoding."""
    return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), text) if b"%" in text else text


def _decode_word(found: re.Match[bytes]) -> bytes:
    """Return an encoded word (RFC 2047) decoded; unchanged if it is malformed."""
    base64, quoted, word = found[1], found[2], found[0]
    if quoted is not None:
        return unescape(quoted.replace(b"_", b" ").replace(b"=", b"%"))
    try:
        return binascii.a2b_base64(base64)
    except binascii.Error:
        return word


def _refusal(name: str) -> CallError:
    fix = _FIXES.get(name, "the gateway selects the engine")
    return invalid_request(f"{name} is not accepted: {fix}; remove it", param=name)
