"""How many tokens a response says it took. Pure.

Owns the names of the counts in the dialects: OpenAI's `prompt_tokens` and `completion_tokens`; `input_tokens` and
`output_tokens` of Anthropic and of OpenAI's Responses. Read from a few kilobytes at the ends of a body, never from all
of it. Text that a model writes cannot look like a count: inside a JSON string its quotes are escaped.
"""

from __future__ import annotations

import re

_WINDOW_BYTES = 1024
_BOTH = re.compile(rb'"usage":\{"prompt_tokens":(\d{1,15}),"(?:total_tokens":\d{1,15},")?completion_tokens":(\d{1,15})')
"""As most engines write it; the rest are read member by member."""
_IN = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,15})')
_OUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,15})')


def parse_token_usage(tail: bytes) -> tuple[int, int]:
    """(tokens in, tokens out), each 0 where it is not told.

    The last usage object counts. One that tells only what went out (Anthropic's last event) is completed by the first.
    """
    at = tail.rfind(b'"usage"')
    if at < 0:
        return 0, 0
    both = _BOTH.match(tail, at)
    if both is not None:
        return int(both[1]), int(both[2])
    end = at + _WINDOW_BYTES
    inward, outward = _IN.search(tail, at, end), _OUT.search(tail, at, end)
    if inward is None:
        at = tail.find(b'"usage"')
        inward = _IN.search(tail, at, at + _WINDOW_BYTES)
    return int(inward[1]) if inward is not None else 0, int(outward[1]) if outward is not None else 0
