"""Whether the pod of a silent gateway exists."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from autoscaler.contract import GatewayId
from autoscaler.kubernetes.api import Api, Object, UnreachableError
from autoscaler.kubernetes.gateway_pods import GatewayPods
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import Unreadable

POD: Object = {"metadata": {"name": "g1"}}
DAMAGED = Unreadable("Pod", "n", "g1", "1", "its values are nested more than 100 levels deep")


class Pods:
    """An API client that lists the pods with the name of a gateway."""

    def __init__(self, page: ListPage | None) -> None:
        self._page = page

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        """As `Api.pages`."""
        assert (path, dict(query)) == ("/api/v1/namespaces/n/pods", {"fieldSelector": "metadata.name=g1"})
        if self._page is None:
            raise UnreachableError("no answer")
        yield self._page


@pytest.mark.parametrize(
    ("page", "exists"),
    [
        (ListPage("1", "", [POD], []), True),
        (ListPage("1", "", [], [DAMAGED]), True),
        (None, True),
        (ListPage("1", "", [], []), False),
    ],
)
async def test_gateway_is_gone_only_if_a_successful_list_contains_no_pod_of_it(
    page: ListPage | None, exists: bool
) -> None:
    pods = GatewayPods(cast("Api", Pods(page)), "n", lambda _: None)
    assert await pods._exists(GatewayId("g1")) is exists
