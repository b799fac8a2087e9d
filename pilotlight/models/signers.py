"""Whose signatures of weights count: Settings `weights.signatures` -> the policy of `artifacts`, with its keys read.

Owns the bridge between the two, which know nothing of one another. Promises: with a key or root that cannot be read
there is no policy at all, so that nothing is judged by less than somebody wrote.
"""

from __future__ import annotations

from pathlib import Path

from artifacts.signatures import public_keys, trust_root
from artifacts.signatures.certificates import Identity
from artifacts.signatures.policy import Policy
from artifacts.signatures.public_keys import PEM_BYTES_MAX, BadKeyError
from artifacts.signatures.trust_root import ROOT_BYTES_MAX, BadRootError, Root
from autoscaler.spec.settings import Signatures
from pilotlight.net import certificates
from pilotlight.net.certificates import FileError


class SignersError(Exception):
    """Keys of Settings cannot be used. The text is one line that names the key path, or the file, and the fix."""


def policy(signatures: Signatures) -> Policy:
    """With its keys read. Raises SignersError."""
    keys = []
    for position, one in enumerate(signatures.keys):
        at = f"weights.signatures.keys[{position}]"
        try:
            text = certificates.read(Path(one), PEM_BYTES_MAX) if one.startswith("/") else one
            keys.append(public_keys.parse(text.encode()))
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
        return trust_root.parse(certificates.read(path, ROOT_BYTES_MAX).encode())
    except FileError as error:
        raise SignersError(f"{at}: {error}") from None
    except BadRootError as error:
        raise SignersError(f"{at}: {path}: {error}: write one with `cosign trusted-root create`") from None
