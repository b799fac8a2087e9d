"""Exceptions as values: call a function, return its result or its exception, and describe it in one line. Pure.

MemoryError, cancellation and other exceptions that are not an `Exception` always propagate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from autoscaler.contract import ModelName

REASON_MAX: Final = 300
"""Maximum length of an exception's message, in characters."""

T = TypeVar("T")


class Failure(NamedTuple):
    """Returned by `attempt` in place of a result."""

    error: Exception


def attempt(compute: Callable[[], T]) -> T | Failure:
    """Return the result of `compute`, or its exception as a Failure. MemoryError and cancellation propagate."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - any exception is contained
        reraise_memory_error(error)
        return Failure(error)


def reraise_memory_error(error: Exception) -> None:
    """Re-raise `error` if it is a MemoryError or a group that contains one."""
    if isinstance(error, MemoryError) or (isinstance(error, ExceptionGroup) and error.subgroup(MemoryError)):
        raise error


FaultReport = Callable[[ModelName, str, Exception], None]
"""Receives a Model, the operation, and the exception that the Model caused (`Loop.fault`)."""


def raise_fault(name: ModelName, what: str, error: Exception) -> None:
    """A `FaultReport` where no fault is contained."""
    del name, what
    raise error


def attempt_for(name: ModelName, what: str, fault: FaultReport, compute: Callable[[], T]) -> T | None:
    """Return the result of `compute`. If it raises, report that the Model is at fault and return None."""
    done = attempt(compute)
    if isinstance(done, Failure):
        fault(name, what, done.error)
        return None
    return done


def can_complete(compute: Callable[[], object]) -> bool:
    """Whether `compute` returns without an exception."""
    return not isinstance(attempt(compute), Failure)


def describe_error(error: BaseException, hide: Callable[[str], str] = str) -> str:
    """One line with the type, the raising function and the message; for a group, of its first exception.
    `hide` replaces secret values in the message, before it is escaped and truncated.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        file = code.co_filename.rpartition("/")[2]
        where = f" in {file}:{trace.tb_lineno} {code.co_name}"
    text = " ".join(ascii(hide(str(error)))[1:-1].split())[:REASON_MAX]
    return f"{type(error).__name__}{where}" + (f": {text}" if text else "")
