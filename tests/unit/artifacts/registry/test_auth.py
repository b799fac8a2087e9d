"""A registry's base endpoint (`GET /v2/`): checks a login without a repository."""

from __future__ import annotations

import pytest

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.http.transport import Site
from artifacts.registry import manifests
from artifacts.registry.client import Client
from artifacts.registry_errors import DeniedError
from tests.support.fakes.registry import says
from tests.unit.artifacts.registry.test_manifests import with_tokens

pytestmark = pytest.mark.standard


async def test_login_check_requests_a_token_without_a_scope() -> None:
    async with with_tokens(Login("me", "pw")) as (place, client, _):
        assert await manifests.is_login_accepted(client)
        assert place.asked == [{"kept": ["1"], "service": ["reg"]}]
        place.fake.always["GET", "/token"] = says(401)
        async with Client(Site(place.fake.host), Known(place.fake.host, Login("me", "no"))) as other:
            with pytest.raises(DeniedError, match="rejects the login"):
                await manifests.is_login_accepted(other)
        place.fake.judge = lambda _: None
        async with Client(Site(place.fake.host)) as third:
            assert not await manifests.is_login_accepted(third)
