"""Where a login may be sent: point 8 of the fault list (realms)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from aiohttp import web
from yarl import URL

from artifacts.http.transport import Site
from artifacts.registry import challenge, manifests
from artifacts.registry.client import Client
from artifacts.registry_errors import PolicyError, RegistryError
from tests.support.fakes.registry import FakeRegistry, StillClock, keychain, reply

NAME = "team/model"
HUB = URL("https://registry-1.docker.io/v2/")


@pytest.mark.point("8")
@pytest.mark.parametrize(
    ("registry_url", "realm"),
    [
        ("https://registry-1.docker.io/", "https://auth.docker.io/token"),
        ("https://ghcr.io/", "https://ghcr.io/token"),
        ("https://registry.gitlab.com/", "https://gitlab.com/jwt/auth"),
        ("https://harbor.example.co.uk/", "https://sso.example.co.uk/token"),
        ("https://registry.example:5000/", "https://registry.example/token"),
        ("https://10.1.2.3:5000/", "https://10.1.2.3:5000/token"),
        ("http://127.0.0.1:5000/", "http://127.0.0.1:5000/token"),
    ],
)
def test_token_realm_related_to_the_registry_host_is_accepted(registry_url: str, realm: str) -> None:
    assert str(challenge.parse_realm(realm, URL(registry_url))) == realm


@pytest.mark.point("8")
@pytest.mark.parametrize(
    ("realm", "registry_url"),
    [
        ("https://evil.example/token", ""),
        ("https://docker.io.evil.example/token", ""),
        ("https://evildocker.io/token", ""),
        ("http://auth.docker.io/token", ""),
        ("https://auth.docker.io:8443/token", ""),
        ("https://8.8.8.8/token", ""),
        ("https://169.254.169.254/latest/meta-data", ""),
        ("https://[fd00:ec2::254]/latest", ""),
        ("https://[::ffff:169.254.169.254]/latest", ""),
        ("https://[64:ff9b::a9fe:a9fe]/latest", ""),
        ("https://2852039166/latest", ""),
        ("https://0xa9fea9fe/latest", ""),
        ("https://169.254.43518/latest", ""),
        ("https://metadata.google.internal./v1", ""),
        ("file:///etc/passwd", ""),
        ("gopher://auth.docker.io/", ""),
        ("https://me:secret@auth.docker.io/token", ""),
        ("https://@auth.docker.io/token", ""),
        ("https://auth.d\u043ecker.io/token", ""),
        ("https://auth.docker.io/token\r\nHost: evil", ""),
        ("https://auth.docker.io\\@evil.example/", ""),
        ("https://auth.docker.io:99999/token", ""),
        ("https:///token", ""),
        ("token", ""),
        ("", ""),
        ("https://auth.docker.io/" + "x" * 9000, ""),
        ("https://evil.azurecr.io/token", "https://team.azurecr.io/"),
        ("https://evil.co.uk/token", "https://team.co.uk/"),
        ("https://evil.com/token", "https://team.com/"),
        ("https://other.svc.cluster.local/", "https://registry.svc.cluster.local/"),
        ("http://127.0.0.1:5001/token", "http://127.0.0.1:5000/"),
        ("http://registry:5000/token", "https://registry:5000/"),
        ("https://10.1.2.4/token", "https://10.1.2.3/"),
    ],
)
def test_unrelated_unsafe_or_malformed_token_realm_is_rejected(realm: str, registry_url: str) -> None:
    with pytest.raises(PolicyError) as refused:
        challenge.parse_realm(realm, URL(registry_url) if registry_url else HUB)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.point("8")
@pytest.mark.parametrize(
    "shared",
    [
        "westeurope.cloudapp.azure.com", "us-central1.run.app", "a.run.app", "blob.core.windows.net",
        "z6.web.core.windows.net", "core.windows.net", "northeurope.azurecontainerapps.io", "azurecontainerapps.io",
        "westus2.azurecontainer.io", "eastus.data.azurecr.io", "azurecr.io", "uc.r.appspot.com", "r.appspot.com",
        "trycloudflare.com", "lhr.life", "eu.ngrok.io", "a.free.pinggy.link", "sfo3.digitaloceanspaces.com",
        "eu-west-1.elasticbeanstalk.com", "us-east-1.awsapprunner.com", "dkr.ecr.us-east-1.amazonaws.com",
        "lambda-url.us-east-1.on.aws", "2.3.4.nip.io", "us-south.codeengine.appdomain.cloud", "github.io", "fly.dev",
        "hf.space", "duckdns.org", "svc.cluster.local", "cluster.local", "ts.net", "co.uk", "com",
    ],
)  # fmt: skip
def test_token_realm_that_shares_only_a_provider_suffix_is_rejected(shared: str) -> None:
    """Neither two customers nor a customer and the suffix itself are related."""
    with pytest.raises(PolicyError):
        challenge.parse_realm(f"https://evil.{shared}/token", URL(f"https://team.{shared}/"))
    assert not challenge.is_related_host(f"team.{shared}", shared)
    assert not challenge.is_related_host(f"team.{shared}", f"a.evil.{shared}")


@pytest.mark.point("8")
@pytest.mark.parametrize(
    ("registry_host", "realm_host"),
    [
        ("registry.team.westeurope.cloudapp.azure.com", "auth.team.westeurope.cloudapp.azure.com"),
        ("registry.team.svc.cluster.local", "auth.team.svc.cluster.local"),
        ("registry.team.ts.net", "auth.team.ts.net"),
        ("registry.env-1.northeurope.azurecontainerapps.io", "auth.env-1.northeurope.azurecontainerapps.io"),
        ("registry.example.app", "auth.registry.example.app"),
        ("registry.windows.example", "auth.windows.example"),
    ],
)
def test_registry_and_realm_of_one_cloud_customer_are_related_hosts(registry_host: str, realm_host: str) -> None:
    assert challenge.is_related_host(registry_host, realm_host)


@pytest.mark.point("8")
def test_configured_realm_is_allowed_only_at_its_host_scheme_and_port() -> None:
    assert challenge.parse_realm("https://sso.example/token", HUB, ["SSO.example"]).host == "sso.example"
    plain = URL("http://127.0.0.1:5000/")
    assert challenge.parse_realm("http://127.0.0.1:5001/token", plain, ["127.0.0.1:5001"]).port == 5001
    for refused in ("http://sso.example/token", "https://sso.example:444/token", "https://169.254.169.254/"):
        with pytest.raises(PolicyError):
            challenge.parse_realm(refused, HUB, ["sso.example", "169.254.169.254"])


@pytest.mark.parametrize(
    ("allowed", "realm"),
    [
        ("[2001:db8::1]:5001", "https://[2001:db8::1]:5001/token"),
        ("[2001:db8::1]", "https://[2001:db8::1]/token"),
        ("[2001:db8::1]:443", "https://[2001:db8::1]/token"),
    ],
)
def test_ipv6_token_realm_is_allowed_only_by_a_bracketed_entry(allowed: str, realm: str) -> None:
    assert str(challenge.parse_realm(realm, HUB, [allowed])) == realm
    for other in ("2001:db8::1:5001", "[2001:db8::1]:5002", "[2001:db8::1:5001]"):
        with pytest.raises(PolicyError):
            challenge.parse_realm(realm, HUB, [other])


def asks(challenge: str) -> Callable[[web.Request], web.StreamResponse | None]:
    """Return a judge that rejects every request with this challenge."""
    return lambda _: web.Response(status=401, headers={"WWW-Authenticate": challenge})


@pytest.mark.point("8")
async def test_foreign_realm_or_redirect_target_of_a_realm_receives_no_request() -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as thief:
        fake.judge = asks(f'Bearer realm="{thief.url}/token",service="x"')
        async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
            with pytest.raises(PolicyError, match="realm"):
                await manifests.fetch_manifest(client, NAME, "v1")
        fake.judge = asks(f'Bearer realm="{fake.url}/token",service="x"')
        fake.always["GET", "/token"] = reply(307, Location=f"{thief.url}/token")
        async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
            with pytest.raises(PolicyError, match="its realm redirects"):
                await manifests.fetch_manifest(client, NAME, "v1")
        assert not thief.seen


@pytest.mark.point("8")
async def test_registry_token_that_contains_crlf_is_rejected() -> None:
    async with FakeRegistry().serving() as fake:
        fake.judge = asks(f'Bearer realm="{fake.url}/token"')
        fake.always["GET", "/token"] = reply(200, json.dumps({"token": "a\r\nX-Evil: 1"}).encode())
        async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
            with pytest.raises(RegistryError, match="has characters that are invalid in a header"):
                await manifests.fetch_manifest(client, NAME, "v1")
        assert "x-evil" not in fake.seen[-1].headers
