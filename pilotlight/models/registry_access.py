"""Registry logins of this machine, and the signature policy of the Settings with its keys. I/O.

Logins are tried in this order: the user's files and the credential helpers that they name, then the registry's cloud.
A pod's pull secrets come before these (`artifacts.credentials.keychain.try_each_login`). If a key or root of
`weights.signatures` cannot be read, there is no policy, so that no artifact is verified with less than was configured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from artifacts.credentials.clouds.amazon_ecr import Amazon
from artifacts.credentials.clouds.azure import Azure
from artifacts.credentials.clouds.cloud import Clouds
from artifacts.credentials.clouds.google import METADATA, Google
from artifacts.credentials.keychain import Chain, ConfigFiles, Keychain, list_config_paths
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import MirrorSite, Registries
from artifacts.peers.client import Peering
from artifacts.reference import DOCKER, DOCKER_HOST
from artifacts.signatures import public_keys, trust_root
from artifacts.signatures.certificates import Identity
from artifacts.signatures.policy import Policy
from artifacts.signatures.public_keys import PEM_BYTES_MAX, BadKeyError
from artifacts.signatures.trust_root import ROOT_BYTES_MAX, BadRootError, Root
from autoscaler.spec.settings import Signatures
from autoscaler.spec.settings import Weights as WeightsSettings
from pilotlight.net.certificates import FileError, load_text


def list_login_files() -> list[Path]:
    """Return the paths of the user's login files."""
    return list_config_paths(os.environ, Path.home())


def build_keychain(*, plain_http: bool = False) -> Keychain:
    """Return this process's keychain. With `plain_http` it excludes cloud logins, which would be sent in the clear."""
    people = ConfigFiles(list_login_files())
    return people if plain_http else Chain([people, build_cloud_keychain(os.environ, Path.home())])


def build_cloud_keychain(env: Mapping[str, str], home: Path) -> Clouds:
    """Return the logins of all supported clouds."""
    return Clouds([Amazon(env, home), Google(env.get("GCE_METADATA_HOST") or METADATA), Azure(env)])


class SignersError(Exception):
    """Signature keys in Settings cannot be used. The text is one line with the key path or file, and the fix."""


def load_signature_policy(signatures: Signatures) -> Policy:
    """Return the policy with its keys loaded. Raises SignersError."""
    keys = []
    for position, one in enumerate(signatures.keys):
        at = f"weights.signatures.keys[{position}]"
        try:
            text = load_text(Path(one), PEM_BYTES_MAX) if one.startswith("/") else one
            keys.append(public_keys.parse_public_key(text.encode()))
        except FileError as error:
            raise SignersError(f"{at}: {error}") from None
        except BadKeyError as error:
            named = f"{one}: " if one.startswith("/") else ""
            raise SignersError(f"{at}: {named}{error}") from None
    return Policy(
        signatures.policy,
        tuple(keys),
        identities=tuple(Identity(one.subject, one.issuer) for one in signatures.identities),
        root=None if signatures.trusted_root is None else _root(Path(signatures.trusted_root)),
    )


def _root(path: Path) -> Root:
    at = "weights.signatures.trustedRoot"
    try:
        return trust_root.parse_trust_root(load_text(path, ROOT_BYTES_MAX).encode())
    except FileError as error:
        raise SignersError(f"{at}: {error}") from None
    except BadRootError as error:
        raise SignersError(f"{at}: {path}: {error}: write one with `cosign trusted-root create`") from None


def build_fetch_access(plain_http: bool, ca_file: Path | None, among: Peering | None = None) -> Ways:
    """Return access with this machine's logins, the environment's for the Hub and buckets, and peers."""
    http = True if plain_http else None
    registries = Registries(build_keychain(plain_http=plain_http), plain_http=http, ca=ca_file, peering=among)
    return Ways(registries, os.environ, Path.home())


def build_registries(settings: WeightsSettings) -> Registries:
    """Return the registries in Settings, with this machine's logins. An unreadable CA file fails each pull. Raises
    SignersError.
    """
    mirrors: dict[str, list[MirrorSite]] = {}
    for one in settings.mirrors:
        host, _, prefix = one.host.partition("/")
        registry = DOCKER_HOST if one.registry == DOCKER else one.registry
        mirrors.setdefault(registry, []).append(MirrorSite(host, f"{prefix}/" if prefix else ""))
    ca = Path(settings.ca_file) if settings.ca_file else None
    signed = load_signature_policy(settings.signatures)
    return Registries(build_keychain(), ca=ca, mirrors=mirrors, signatures=signed)
