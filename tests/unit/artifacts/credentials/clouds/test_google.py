"""Google Cloud registries: the metadata server's token is used only for their hosts."""

from __future__ import annotations

import pytest

from artifacts.credentials.clouds.google import PATH, Google
from artifacts.credentials.docker_config import Login
from artifacts.registry_errors import DeniedError, UnreachableError
from tests.support.fakes.cloud_services import Services
from tests.support.fakes.registry import StillClock

pytestmark = pytest.mark.standard

HOST = "europe-west4-docker.pkg.dev"
TOKEN = "ya29.c.s3cret..."


@pytest.mark.parametrize(
    ("host", "applies"),
    [
        *((host, True) for host in (HOST, "gcr.io", "eu.gcr.io")),
        *((host, False) for host in ("evilgcr.io", "gcr.io.evil.example", "a.b.gcr.io", "pkg.dev", "gcr.io:5000")),
        *((host, False) for host in ("ghcr.io", "x-docker.pkg.dev.evil.example")),
    ],
)
def test_google_provider_applies_only_to_google_registry_hosts(host: str, *, applies: bool) -> None:
    assert Google().applies(host) is applies


async def test_google_metadata_server_token_is_used_as_the_registry_password() -> None:
    async with Services().serving() as there:
        there.headers = {"Metadata-Flavor": "Google"}
        there.replies[PATH] = (200, {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"})
        login, lasts_s = await Google(there.host, StillClock()).fetch(HOST)
        assert (login.user, login.password, lasts_s) == ("oauth2accesstoken", TOKEN, 3599)
        assert there.asked[0].headers["metadata-flavor"] == "Google"
        assert [(one.method, one.path) for one in there.asked] == [("GET", PATH)]


async def test_login_is_anonymous_without_a_google_metadata_server() -> None:
    login, _ = await Google("127.0.0.1:1", StillClock()).fetch(HOST)
    assert login.anonymous
    assert "Google Cloud: no metadata server was found; run as a service account" in login.note
    async with Services().serving() as there:  # another cloud's service at the same address
        there.replies[PATH] = (200, {"access_token": TOKEN, "expires_in": 3599})
        login, _ = await Google(there.host, StillClock()).fetch(HOST)
        assert login == Login(note=login.note)


async def test_missing_service_account_error_names_the_required_role() -> None:
    async with Services().serving() as there:
        there.headers = {"Metadata-Flavor": "Google"}
        google = Google(there.host, StillClock())
        with pytest.raises(DeniedError, match=rf"{HOST}: Google Cloud: .* \(404\): .*Artifact Registry Reader"):
            await google.fetch(HOST)
        there.replies[PATH] = (200, TOKEN.encode())
        with pytest.raises(DeniedError, match="is not a token") as refused:
            await google.fetch(HOST)
        assert TOKEN not in str(refused.value)


async def test_login_fails_after_6_tries_if_the_metadata_server_returns_503() -> None:
    clock = StillClock()
    async with Services().serving() as there:
        there.replies[PATH] = (503, b"")
        with pytest.raises(UnreachableError, match=r"the metadata server: answered 503; given up after 6 tries; run"):
            await Google(there.host, clock).fetch(HOST)
        assert len(there.asked) == 6


async def test_redirect_of_the_google_metadata_server_is_not_followed() -> None:
    async with Services().serving() as there:
        there.headers = {"Metadata-Flavor": "Google", "Location": "/other"}
        there.replies[PATH] = (302, b"")
        with pytest.raises(DeniedError, match="302"):
            await Google(there.host, StillClock()).fetch(HOST)
        assert [one.path for one in there.asked] == [PATH]
