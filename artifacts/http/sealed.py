"""TLS whose connections can be given away: our end of each is known with where its bytes go in and out. I/O.

Owns the contexts. asyncio, and uvloop, keep to themselves what they read a connection's bytes into; they begin each one
by `ssl.SSLContext.wrap_bio`, which is public: there we learn it.
"""

from __future__ import annotations

import ssl
import sys
from typing import cast


class Sealed(ssl.SSLObject):
    """Our end of one connection."""

    incoming: ssl.MemoryBIO
    """What came of it and is not unsealed yet."""
    outgoing: ssl.MemoryBIO

    def into(self, room: memoryview) -> int:
        """How much was unsealed, of one record (16 KiB) at most; 0: it ended. Raises SSLError."""
        return cast("int", self.read(len(room), room))  # typeshed knows no `room`


class Sealing(ssl.SSLContext):
    """Its connections are `Sealed`."""

    sslobject_class = Sealed

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> Sealed:
        """As in `ssl`."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if not isinstance(made, Sealed):
            raise TypeError(made)
        made.incoming, made.outgoing = incoming, outgoing
        return made


def judging() -> Sealing:
    """As `ssl.create_default_context` has it: certificates and names are judged, by the system's authorities."""
    context = Sealing(ssl.PROTOCOL_TLS_CLIENT)
    if sys.version_info >= (3, 13):
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
    context.load_default_certs()  # reads all of them: that takes as long as a small blob
    return context
