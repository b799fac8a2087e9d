"""What goes wrong with a registry, as errors: one line each, that names the registry and the fix. Pure.

Owns the errors' names. Promises: no text of theirs holds a token, a password, a query of a URL (presigned ones are
passwords) or words of the server: those may repeat what they were sent.
"""

from __future__ import annotations


class RegistryError(Exception):
    """A registry's answer, or none, in one line without secrets."""


class AbsentError(RegistryError):
    """There is no such thing in the registry."""


class DeniedError(RegistryError):
    """The registry wants a login, or another one."""


class MismatchError(RegistryError):
    """What came is not what was asked for."""


class PolicyError(RegistryError):
    """We will not do what the registry asks of us: it would put somebody's secrets, or this machine, at risk."""


class BrokenError(RegistryError):
    """One try failed in a way that another may not; `retry_after` is the header of that name.

    `status`: of the answer; None: there was none, or it broke off.
    """

    def __init__(self, text: str, retry_after: str | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        self.status = status


class UnreachableError(RegistryError):
    """It did not answer, or was too busy, in all tries; `last` is how the last one failed."""

    def __init__(self, text: str, last: BrokenError | None = None) -> None:
        super().__init__(text)
        self.last = last
