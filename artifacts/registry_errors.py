"""Registry errors, each one line that names the registry and the fix. Pure.

No message contains a token, a password, a URL query (presigned URLs are credentials) or text from the server, which may
echo what it was sent.
"""

from __future__ import annotations


class RegistryError(Exception):
    """A registry request failed; the message is one line without secrets."""


class AbsentError(RegistryError):
    """The registry does not have the requested object."""


class DeniedError(RegistryError):
    """The registry requires credentials, or other credentials."""


class MismatchError(RegistryError):
    """The received content does not match what was requested."""


class PolicyError(RegistryError):
    """The registry's demand was rejected because it would put credentials or this machine at risk."""


class BrokenError(RegistryError):
    """One attempt failed in a way that may succeed on retry; `retry_after` is the Retry-After header.

    `status`: HTTP status of the response; None if there was no complete response.
    """

    def __init__(self, text: str, retry_after: str | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        self.status = status


class UnreachableError(RegistryError):
    """The registry did not respond, or was too busy, in all attempts; `last` is the last failure."""

    def __init__(self, text: str, last: BrokenError | None = None) -> None:
        super().__init__(text)
        self.last = last
