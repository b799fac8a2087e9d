"""Exceptions as values: what computing something returned, or its exception, in one line for people. Pure.

MemoryError is never contained, and neither are cancellation and the other exceptions that are no Exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

REASON_MAX: Final = 300
"""Characters of the message of an exception."""

T = TypeVar("T")


class Failure(NamedTuple):
    """What `attempt` returns instead of a result."""

    error: Exception


def attempt(compute: Callable[[], T]) -> T | Failure:
    """What `compute` returns, or its exception. MemoryError passes through, and so does cancellation."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
        reraise_memory_error(error)
        return Failure(error)


def reraise_memory_error(error: Exception) -> None:
    """Raises `error` again if it is a MemoryError or a group with one, which is not contained."""
    if isinstance(error, MemoryError) or (isinstance(error, ExceptionGroup) and error.subgroup(MemoryError)):
        raise error


def can_complete(compute: Callable[[], object]) -> bool:
    """Whether `compute` raises nothing."""
    return not isinstance(attempt(compute), Failure)


def describe_error(error: BaseException) -> str:
    """The exception in one line: its type, the function that raised it, and its message. Of a group: its first."""
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
    text = " ".join(ascii(str(error))[1:-1].split())[:REASON_MAX]
    return f"{type(error).__name__}{where}" + (f": {text}" if text else "")
