"""What makes a contained fault that no test injected a failure. Imports nothing of the product: all tests use it."""

from __future__ import annotations


class ContainedFaultError(BaseException):
    """An exception was contained that no test injected. Not an Exception, so that nothing contains it again."""


def raised(model: str | None, what: str, error: Exception | str) -> None:
    """Stands for `autoscaler.controller.loop.report_fault`, and for `fault` of a loop, where no fault is expected."""
    reason = f"{what}: {error} (model {model})"
    raise ContainedFaultError(reason) from (error if isinstance(error, Exception) else None)
