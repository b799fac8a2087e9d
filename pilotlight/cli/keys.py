"""`pilotlight key new`: creates an API key, prints it once, and stores or shows only its hash.

STATE/keys.yaml is changed under a lock, so that no key is lost when two are created at the same time.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import secrets
from pathlib import Path

import click
import msgspec

from artifacts.disk.locks import wait_for_lock
from autoscaler.contract import TenantName
from autoscaler.documents.document_rules import MESSAGE, check_name
from autoscaler.documents.document_types import Documents
from autoscaler.documents.render import to_yaml
from autoscaler.drivers.local.state_directory import replace_file
from autoscaler.spec.decode import WrongKeyError
from autoscaler.spec.tenant import Key, Tenant, TenantSpec
from pilotlight.models.document_loading import KEYS_FILE, load_files

KEY_BYTES = 32
KEYS_MAX = 10_000
"""Maximum number of keys in the file; beyond it, keys belong in documents."""
NAME_CHARACTERS_MAX = 100
LOCK_FILE = "keys.lock"
LOCK_S_MAX = 10.0
"""How long it waits for the lock of another `key new`."""


def generate_key(role: str, name: str) -> tuple[str, Key]:
    """Return the key and its `keys:` entry. The key has 256 random bits; only its SHA-256 is stored."""
    key = "pl-" + secrets.token_urlsafe(KEY_BYTES)
    created = dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    entry = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "createdAt": created, "role": role}
    return key, msgspec.convert(entry, Key)


def entry_yaml(entry: Key) -> str:
    """Return the entry as a line to paste under `keys:`."""
    written = {"name": entry.name, "sha256": entry.sha256, "createdAt": entry.created_at, "role": entry.role}
    return "- {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in written.items()) + "}"


def check_names(tenant: str, name: str) -> None:
    """Raise click's usage error for an invalid name of a Tenant or key."""
    try:
        check_name(tenant, ())
    except WrongKeyError as error:
        raise click.UsageError(f"--tenant: {error.message}") from None
    if not name.isprintable() or len(name) > NAME_CHARACTERS_MAX:
        raise click.UsageError(f"--name: expected printable characters, at most {NAME_CHARACTERS_MAX}")


def check_role(role: str) -> None:
    """Raise click's usage error for a role that is not used yet: such a key would grant nothing."""
    if role not in {"tenant", "operator"}:
        raise click.UsageError(
            f"--role {role}: {MESSAGE}; use tenant (requests to models) or operator (also orders, such as drain)"
        )


def store_key(state: Path, tenant: str, entry: Key) -> Path:
    """Add the entry to the Tenant in STATE/keys.yaml (0600), replacing the file atomically. Raises click's errors."""
    path = state / KEYS_FILE
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with wait_for_lock(state / LOCK_FILE, LOCK_S_MAX, make=True):
            _add(path, tenant, entry)
    except TimeoutError:
        raise click.ClickException(
            f"another process has locked {state / LOCK_FILE} for {LOCK_S_MAX:g} s: stop it, and try again"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    return path


def _add(path: Path, tenant: str, entry: Key) -> None:
    tenants = {known.name: known for known in (load_files([path]).tenants if path.exists() else ())}
    if sum(len(known.spec.keys) for known in tenants.values()) >= KEYS_MAX:
        raise click.ClickException(f"{path} contains the maximum of {KEYS_MAX} keys: move them to Tenant documents")
    known = tenants.get(TenantName(tenant), Tenant(name=TenantName(tenant), spec=TenantSpec()))
    spec = msgspec.structs.replace(known.spec, keys=(*known.spec.keys, entry))
    tenants[known.name] = msgspec.structs.replace(known, spec=spec)
    replace_file(path, to_yaml(Documents(tenants=tuple(tenants.values()))).encode(), durable=True)  # shown only once
