"""What a request's head alone decides, before its body is read: nobody's memory goes into what is refused anyway.

Owns the order of these refusals, which is that of a whole request. What is whole at once does not come here: it is
judged with its body (`gateway.exchange.admit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway import errors, rewrite
from gateway.admission import asked
from gateway.dialects import Kind, Operation
from gateway.head import Head
from gateway.pressure import Pressure

if TYPE_CHECKING:
    from gateway.front import Front

DROP_BYTES_MAX = 64 << 10
"""Of a body that was answered early: so much is read and dropped, and the connection lives on. With more it ends. A
path that takes no body takes so much of one, too."""


def judge(front: Front, head: Head, operation: Operation | None, length: int | None) -> None:
    """Raises CallError where no body of so many bytes (None: who knows) could make it a Call."""
    if operation is None:
        raise errors.path_not_found()
    if front.closing:
        raise errors.shutting_down()
    if front.dispatch.pressure is Pressure.NO_CALLS:
        raise errors.out_of_memory()  # bodies are what memory goes into
    if operation.kind is not Kind.INFER:
        if length is None or length > DROP_BYTES_MAX:
            raise errors.too_large(DROP_BYTES_MAX)
        return
    tenant, wish = front.tenant(head), asked(head)
    if wish.error is not None:
        raise wish.error.with_traceback(None)
    rewrite.check_media(operation, wish.content_type)
    name = operation.model or wish.model
    if name and operation.dialect not in front.directory.resolve(tenant, name).dialects:
        raise errors.other_dialect()
