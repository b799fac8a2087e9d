"""Takes over capacity orders that an earlier version created without the label of an installation. I/O.

Such an order belongs to the installation that serves its Model. If another installation serves the Model, it has time
to label the order (`ApiServer.is_foreign`); after that, the order belongs to any installation with a provider of that
name. The owner's leader writes the label with its next list.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from autoscaler.contract import ModelName
from autoscaler.exception_handling import reraise_memory_error
from autoscaler.providers.kubernetes_access import CONFLICT, AnswerError, ApiServer, Object
from autoscaler.providers.order_annotations import OWNER

_log = logging.getLogger("pilotlight.autoscaler.providers")


def is_own_order(server: ApiServer, found: Object) -> bool:
    """Whether an object of an order belongs to this installation, with or without its label."""
    if server.owner.has_label(found):
        return True
    annotations = found["metadata"].get("annotations") or {}
    return server.owner.owns(found) and not server.is_foreign(ModelName(annotations.get(OWNER, "")))


async def label_orders(server: ApiServer, path: str, own: Iterable[Object]) -> None:
    """Label the objects of this installation's orders in the collection `path` that have no label.

    A write fails if this process does not lead or the object has changed. It is retried when the orders are listed
    next.
    """
    for one in own:
        if server.owner.has_label(one):
            continue
        same = {"resourceVersion": one["metadata"]["resourceVersion"]}
        try:
            await server.patch(
                f"{path}/{one['metadata']['name']}", {"metadata": {**same, "labels": server.owner.labels}}
            )
        except Exception as error:  # noqa: BLE001  providers do not know the client's errors (fenced, unreachable); logged, retried
            reraise_memory_error(error)
            _log.debug("event=order_takeover_failed order=%s error=%s", one["metadata"]["name"], type(error).__name__)
            if not isinstance(error, AnswerError) or error.status == CONFLICT:
                # Without a response, no other write can succeed; on a conflict, another installation labels all objects
                # of this order.
                return
