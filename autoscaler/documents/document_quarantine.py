"""Exceptions that the documents of Models raise, by the version of the document. Pure.

A Model is quarantined while its document raises an exception (`autoscaler.fold.model_quarantine`). The back-off depends
on the Model and its document: the text of the exception may differ at each attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autoscaler.contract import ModelName
from autoscaler.state.events import FaultSeen

PART = "documents"
"""Value of `FaultSeen.part` for an exception that a document raises."""


class DocumentFault(NamedTuple):
    """An exception that a document raises."""

    reason: str
    """The exception, in one line."""
    version: object = None
    """Equal for the same document. A change of it ends the quarantine and begins a new back-off."""


def list_faults_over(
    before: Mapping[ModelName, DocumentFault], now: Mapping[ModelName, DocumentFault]
) -> list[FaultSeen]:
    """List the faults that are over, as observations: the document is valid, or it is another one."""
    return [
        FaultSeen(model=name, reason=fault.reason, part=PART, is_over=True)
        for name, fault in before.items()
        if name not in now or now[name].version != fault.version
    ]
