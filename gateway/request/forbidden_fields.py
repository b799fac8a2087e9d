"""Members of a body that would send a Call, or a part of it, somewhere else than to its Model's Replica, or have it
served from what an engine keeps for others. Pure.

Owns their names. Where a Call goes is the gateway's own decision, and what an engine talks to is its operator's; so
a body that names such a place is refused as a whole, and not silently stripped: whoever sent it meant something by it.
Only top-level members and parts of forms are meant: everything below them is content, which nobody here reads.
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.errors import CallError, invalid_request

PLACES = frozenset(
    {
        # Where a proxy shall send the call (LiteLLM; CVE-2024-6587).
        "api_base", "base_url",
        # Which files an engine shall load as adapters (SGLang; vLLM-Omni), or which it shall apply (llama.cpp).
        "lora_path", "lora",
        # Whom an engine shall fetch a prefill, or what was read of an image, from (SGLang; vLLM: remote_host in them).
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "ec_transfer_params",
        # Which of an engine's ranks shall serve it, or did its prefill: each has a cache of its own (SGLang).
        "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
        # Which of an engine's slots, with the prompt that it still holds, however busy (llama.cpp, now and once).
        "id_slot", "slot_id",
        # Whose cached prefixes it may use: appended to cache_salt, or an open session to go on with (SGLang).
        "extra_key", "session_params",
        # Under which name the engine keeps it: one that is in use breaks the call that has it (SGLang).
        "rid",
    }
)  # fmt: skip

READ = frozenset({"model", "stream", "stream_options", "cache_salt"})
"""The top-level members, and parts of forms, that a gateway reads or changes."""
_KNOWN = PLACES | READ

USUAL = frozenset(
    {
        "model", "messages", "prompt", "input", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p",
        "n", "max_tokens", "max_completion_tokens", "stop", "seed", "presence_penalty", "frequency_penalty",
        "logit_bias", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls",
        "user", "metadata", "store", "reasoning_effort", "service_tier", "encoding_format", "dimensions", "echo",
        "best_of", "suffix", "instructions", "max_output_tokens", "text", "reasoning", "system", "stop_sequences",
        "thinking",
    }
)  # fmt: skip
"""Names of the OpenAI and Anthropic APIs that need no check: a body with no other names takes one test of sets."""
_ADAPTER, _CACHE = "an adapter is called as model:adapter", "whose cache a call may use is decided here"
_FIXES = {
    "lora": _ADAPTER, "lora_path": _ADAPTER, "cache_salt": _CACHE, "extra_key": _CACHE, "session_params": _CACHE,
    "rid": "header x-request-id names a call",
}  # fmt: skip


def check_members(names: Collection[str]) -> None:
    """Raises CallError 400 when one of these names is a place. The message names it: it is ours, from `PLACES`."""
    if USUAL.issuperset(names):
        return
    if not PLACES.isdisjoint(names):
        raise _refusal(min(PLACES.intersection(names)))
    check_case(names, _KNOWN)


def check_case(names: Collection[str], known: frozenset[str]) -> None:
    """Raises CallError 400 if a name differs from a known one only in case.

    Engines whose JSON decoder ignores case (Go's encoding/json, and so Ollama) take such a member for the known one,
    and of two the last. Case folding covers U+017F and U+212A, which Go folds to s and k.
    """
    text = "".join(names)
    if text.isascii() and text == text.lower():
        return
    for name in names:
        folded = name.casefold()
        if folded in known and name not in known:
            message = f"a member differs from {folded} only in the case of its letters: write {folded}, or leave it out"
            raise invalid_request(message, param=folded)


def check_part(name: str) -> None:
    """The same for a part of a form. A `cache_salt` is refused there: of a form nothing is taken out."""
    if name in PLACES or name == "cache_salt":
        raise _refusal(name)
    check_case((name,), _KNOWN)


def _refusal(name: str) -> CallError:
    fix = _FIXES.get(name, "where a call goes is decided here")
    return invalid_request(f"{name} is not taken: {fix}; leave it out", param=name)
