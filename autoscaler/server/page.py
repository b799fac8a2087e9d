"""The page for people at `/` of the operations port: one file without outside resources.

Owns the file `pages/operator.html` and its Content-Security-Policy, in which the one script and the one style are named
by their hash (CSP level 3, section 2.3.1): nothing else runs, nothing is loaded, and the page asks its own port only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import NamedTuple


class Page(NamedTuple):
    """The bytes, and the headers to send with them."""

    body: bytes
    headers: dict[str, str]


@cache
def operator() -> Page:
    """The Operator's page."""
    text = resources.files("autoscaler").joinpath("pages/operator.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(text.encode(), headers)


def _hash(text: str, tag: str) -> str:
    """`'sha256-...'` of what stands between the one pair of tags. Raises ValueError when there is not exactly one."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
