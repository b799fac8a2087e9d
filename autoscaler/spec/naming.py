"""What a name may be that clients send as `model`: fit for logs, URLs and metric labels. Pure.

Owns that rule alone, so that whoever reads names need not know of engines, as `autoscaler.spec.rules` does. Whose a
name is stands in `autoscaler.spec.names`.
"""

from __future__ import annotations

import re

from autoscaler.spec.decode import Path, WrongKeyError

NAME_CHARS_MAX = 253
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")


def check_name(name: str, at: Path) -> None:
    """A name that clients may send as `model`. Raises WrongKeyError."""
    if len(name) > NAME_CHARS_MAX or not NAME.fullmatch(name):
        wanted = f"1 to {NAME_CHARS_MAX} letters, digits or ._:/- that begin and end with a letter or digit"
        raise WrongKeyError(at, f"expected {wanted}")
