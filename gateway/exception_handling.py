"""Exceptions as values in a gateway: one line of text, and the exceptions that always propagate. Pure."""

from __future__ import annotations

from typing import Final

REASON_MAX: Final = 300
"""Maximum length of an exception's message in the log, in characters."""


def reraise_memory_error(error: Exception) -> None:
    """Re-raise `error` if it is a MemoryError or a group that contains one."""
    if isinstance(error, MemoryError) or (isinstance(error, ExceptionGroup) and error.subgroup(MemoryError)):
        raise error


def describe_error(error: BaseException) -> str:
    """One line with the type, the raising function and the message; for a group, of its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" in {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
    text = " ".join(ascii(str(error))[1:-1].split())[:REASON_MAX]
    return f"{type(error).__name__}{where}" + (f": {text}" if text else "")
