"""The documents of the benchmarks: Models of the tiny real engine and of the fake one, Tenants, Settings. Pure.

A document is a dict. It is written as JSON, which is valid YAML.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAKE_ENGINE = ROOT / "loadtest" / "fake_engine"
API = "pilotlight.dev/v1alpha1"
SENTENCE = "Eight words say that this engine is awake."

Document = dict[str, object]


def text(documents: Sequence[Document]) -> str:
    """Return all documents as one YAML text."""
    return "---\n".join(json.dumps({"apiVersion": API, **document}) + "\n" for document in documents)


def settings(**spec: object) -> Document:
    """Return Settings with one declared device that fits everything, unless `devices` is given."""
    return {"kind": "Settings", "devices": [{"name": "gpu0", "model": "bench", "memory": "100Gi"}], **spec}


def model(name: str, **spec: object) -> Document:
    """Return a Model."""
    return {"kind": "Model", "metadata": {"name": name}, "spec": {"gpu": {"memory": "64Mi"}, "slots": 4, **spec}}


def real(name: str, weights: Path, **spec: object) -> Document:
    """Return a Model of the tiny real engine."""
    return model(name, engine="llama.cpp", artifact=f"file://{weights}", args=["--threads=1"], **spec)


def fake(name: str, *knobs: str, **spec: object) -> Document:
    """Return a Model of the fake engine with the options `knobs`. It runs without site-packages to start fast."""
    slots = str(spec.get("slots", 4))
    command = [sys.executable, "-S", "-E", str(FAKE_ENGINE), "--port", "{port}", "--name", name, "--slots", slots]
    return model(name, engine="command", command=[*command, *knobs], **spec)


def tenant(name: str) -> Document:
    """Return a Tenant whose key is `key(name)`."""
    digest = hashlib.sha256(key(name).encode()).hexdigest()
    return {"kind": "Tenant", "metadata": {"name": name}, "spec": {"keys": [{"name": "bench", "sha256": digest}]}}


def key(tenant: str) -> str:
    """Return the API key of a Tenant of a benchmark."""
    return f"bench-key-of-{tenant}"


def body(model: str, *, tokens: int = 8, stream: bool = True, bytes_min: int = 0) -> bytes:
    """Return a chat completion of at least this size, without spaces, as the official client writes it."""
    ask: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": "wake"}], "max_tokens": tokens}
    if stream:
        ask["stream"] = True
    missing = bytes_min - len(_compact(ask))
    if missing > 0:
        ask["messages"] = [{"role": "user", "content": "wake" + " wake" * (missing // 5 + 1)}]
    return _compact(ask).encode()


def _compact(ask: Document) -> str:
    return json.dumps(ask, separators=(",", ":"))
