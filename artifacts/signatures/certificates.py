"""Chains of certificates: each given by the next, and when all of them held. Pure.

Owns no trust: who stands at the end is believed by whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cryptography.exceptions import InvalidSignature
from cryptography.x509 import BasicConstraints, Certificate


def follows(path: Sequence[Certificate]) -> bool:
    """Each was given by the next, which may. Raises x509.ExtensionNotFound where one does not say whether it may."""
    return all(_is_by(child, parent) for child, parent in pairwise(path))


def valid(path: Sequence[Certificate], unix_s: float) -> bool:
    """All of them held then."""
    return all(one.not_valid_before_utc.timestamp() <= unix_s <= one.not_valid_after_utc.timestamp() for one in path)


def _is_by(child: Certificate, parent: Certificate) -> bool:
    try:
        child.verify_directly_issued_by(parent)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return parent.extensions.get_extension_for_class(BasicConstraints).value.ca
