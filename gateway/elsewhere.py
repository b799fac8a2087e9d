"""Members of a body that would send a Call, or a part of it, somewhere else than to its Model's Replica. Pure.

Owns their names. Where a Call goes is the gateway's own decision, and what an engine talks to is its operator's; so
a body that names such a place is refused as a whole, and not silently stripped: whoever sent it meant something by it.
Only top-level members and parts of forms are meant: everything below them is content, which nobody here reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import invalid_request

PLACES = frozenset(
    {
        # Where a proxy shall send the call (LiteLLM; CVE-2024-6587).
        "api_base", "base_url",
        # Which files an engine shall load as an adapter (SGLang).
        "lora_path",
        # Whom an engine shall fetch a prefill from (SGLang; vLLM: remote_host and remote_port in it).
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params",
    }
)  # fmt: skip


def check(names: Iterable[str]) -> None:
    """Raises CallError 400 when one of these names is a place. The message names it: it is ours, from `PLACES`."""
    if PLACES.isdisjoint(names):
        return
    name = min(PLACES.intersection(names))
    raise invalid_request(f"{name} is not taken: where a call goes is decided here; leave it out", param=name)
