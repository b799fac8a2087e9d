"""`pilotlight key new`: makes an API key, prints it once, and stores or shows only its hash."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import secrets
from pathlib import Path

import yaml

from pilotlight.gathering import KEYS_FILE

KEY_BYTES = 32
API_VERSION = "pilotlight.dev/v1alpha1"


def new(role: str, name: str) -> tuple[str, dict[str, str]]:
    """(the key, its `keys:` entry). The key has 256 random bits; only its SHA-256 is ever kept."""
    key = "pl-" + secrets.token_urlsafe(KEY_BYTES)
    created = dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    return key, {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "createdAt": created,
        "role": role,
    }


def store(state: Path, tenant: str, entry: dict[str, str]) -> Path:
    """Adds the entry to the Tenant in STATE/keys.yaml (0600), replacing the file whole."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state / KEYS_FILE
    documents = list(yaml.safe_load_all(path.read_text())) if path.exists() else []
    mine = next((d for d in documents if d["metadata"]["name"] == tenant), None)
    if mine is None:
        mine = {"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": tenant}, "spec": {"keys": []}}
        documents.append(mine)
    mine["spec"].setdefault("keys", []).append(entry)
    fresh = path.with_suffix(".tmp")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        yaml.safe_dump_all(documents, file, sort_keys=False)
    fresh.replace(path)
    return path
