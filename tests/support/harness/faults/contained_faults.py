"""Makes a contained exception that no test injected a failure. Imports nothing of the product: all tests use it."""

from __future__ import annotations


class ContainedFaultError(BaseException):
    """An exception that no test injected was contained. Not an Exception, so that it is not contained in turn."""


def raised(model: str | None, what: str, error: Exception | str) -> None:
    """Replaces `autoscaler.controller.loop.report_fault`, and `fault` of a loop, where no fault is expected."""
    reason = f"{what}: {error} (model {model})"
    raise ContainedFaultError(reason) from (error if isinstance(error, Exception) else None)
