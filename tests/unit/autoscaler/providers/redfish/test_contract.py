"""The provider contract for direct Redfish composition, over real HTTP, for each kind of service behavior."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contracts.provider import ProviderContract
from tests.support.fakes.redfish import FakeFabric
from tests.support.harness.providers.redfish_rig import FabricRig

pytestmark = pytest.mark.standard

MANNERS: dict[str, Callable[[], FabricRig]] = {
    "session over TLS, ETags, tasks": lambda: FabricRig(FakeFabric(hold=True), tls=True),
    "basic, answers when it is done": lambda: FabricRig(FakeFabric(hold=True, login="basic", tasks=False)),
    "as CDIM: no ETags, no Client, no pages": lambda: FabricRig(
        FakeFabric(hold=True, login="none", tasks=False, etags=False, keeps=False, expands=False), notes=True
    ),
}


class TestRedfishFabric(ProviderContract):
    @pytest.fixture(params=MANNERS)
    def rig(self, request: pytest.FixtureRequest) -> FabricRig:
        return MANNERS[request.param]()
