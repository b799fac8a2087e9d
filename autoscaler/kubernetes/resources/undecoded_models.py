"""Model objects whose decoding raises an unexpected exception, and what is in force instead of their document. Pure.

Their Models are quarantined (`autoscaler.fold.model_quarantine`). The last valid document stays in force. If the object
never had one, a stand-in with its names is in force: requests reach replicas that are already ready; without any, they
are rejected, as for every quarantined Model. A stand-in is never started: when its quarantine ends, the object is
decoded again before the next plan, so every plan sees either a valid document or a quarantined Model.

A stand-in of our own kind has what `autoscaler.documents.partial_decoding` reads. Those of other kinds have only the
name of the object, because their spec has other keys.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.documents.partial_decoding import NO_SPEC, read_known_keys
from autoscaler.exception_handling import describe_error
from autoscaler.kubernetes.safe_decoding import Object
from autoscaler.kubernetes.watch_set import created_unix_s
from autoscaler.spec.model import Model, ModelSpec


class Undecoded(NamedTuple):
    """An object whose decoding raised an exception. It is decoded again when the quarantine of its Model ends."""

    found: Object
    reason: str
    """The exception, in one line."""
    stand_in: Model
    """The Model that is in force if the object never had a valid document."""


def describe_undecoded(found: Object, error: Exception) -> Undecoded:
    """Describe an object of our own kind whose decoding raised `error`. Its metadata must be valid."""
    metadata = found["metadata"]
    return Undecoded(found, describe_error(error), _stand_in(found, read_known_keys(found), metadata["uid"]))


def describe_unconverted(found: Object, error: Exception) -> Undecoded:
    """Describe an object of another kind whose conversion raised `error`. Its metadata must be valid."""
    return Undecoded(found, describe_error(error), _stand_in(found, NO_SPEC))


def _stand_in(found: Object, spec: ModelSpec, uid: str = "") -> Model:
    metadata = found["metadata"]
    return Model(
        name=ModelName(metadata["name"]), spec=spec, namespace=metadata["namespace"], uid=uid,
        created_unix_s=created_unix_s(metadata),
    )  # fmt: skip
