"""Azure registries: the identity of a workload or machine is exchanged for an identity token of the registry."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from artifacts.credentials.clouds.azure import LASTS_S, LASTS_S_MAX, Azure
from artifacts.credentials.docker_config import Login
from artifacts.registry_errors import DeniedError, PolicyError
from tests.support.fakes.cloud_services import Services
from tests.support.fakes.registry import StillClock

pytestmark = pytest.mark.standard

HOST = "acmereg.azurecr.io"
TENANT, CLIENT = "72f988bf-0000", "app-1"
ENTRA, IMDS, EXCHANGE = f"/{TENANT}/oauth2/v2.0/token", "/metadata/identity/oauth2/token", "/oauth2/exchange"
PROOF, ACCESS = "mounted-s3cret", "access-s3cret"


def web_token(exp: float) -> str:
    middle = base64.urlsafe_b64encode(json.dumps({"exp": exp, "jti": "x"}).encode()).decode().rstrip("=")
    return f"e30.{middle}.s3cret"


def workload(folder: Path, there: Services) -> dict[str, str]:
    (folder / "token").write_text(f"{PROOF}\n")
    return {
        "AZURE_FEDERATED_TOKEN_FILE": str(folder / "token"),
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_TENANT_ID": TENANT,
        "AZURE_AUTHORITY_HOST": f"{there.url}/",
    }


def azure(env: dict[str, str], there: Services) -> Azure:
    return Azure(env, there.url, lambda _: there.url, StillClock())


def form(there: Services, path: str) -> dict[str, str]:
    (asked,) = (one for one in there.asked if one.path == path)
    assert (asked.method, asked.headers["content-type"]) == ("POST", "application/x-www-form-urlencoded")
    return {name: value for name, (value,) in parse_qs(asked.body).items()}


@pytest.mark.parametrize(
    ("host", "applies"),
    [
        *((host, True) for host in (HOST, "acmereg-f1a2b3.azurecr.io", "acmereg.azurecr.cn", "acmereg.azurecr.us")),
        *((host, False) for host in ("acmereg.azurecr.io.evil.example", "evilazurecr.io", "a.b.azurecr.io")),
        *((host, False) for host in ("acmereg.azurecr.io:444", "mcr.microsoft.com")),
    ],
)
def test_azure_provider_applies_only_to_acr_hosts(host: str, *, applies: bool) -> None:
    assert Azure({}).applies(host) is applies


async def test_workload_identity_token_is_exchanged_for_an_acr_token(tmp_path: Path) -> None:
    async with Services().serving() as there:
        refresh = web_token(StillClock().unix_s() + 5000)
        there.replies[ENTRA] = (200, {"access_token": ACCESS, "expires_in": 86399, "token_type": "Bearer"})
        there.replies[EXCHANGE] = (200, {"refresh_token": refresh})
        login, lasts_s = await azure(workload(tmp_path, there), there).fetch(HOST)
        assert (login.identity_token, login.user, login.password, lasts_s) == (refresh, "", "", 5000)
        assert form(there, ENTRA) == {
            "grant_type": "client_credentials",
            "client_id": CLIENT,
            "scope": "https://containerregistry.azure.net/.default",
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "client_assertion": PROOF,
        }
        want = {"grant_type": "access_token", "service": HOST, "tenant": TENANT, "access_token": ACCESS}
        assert form(there, EXCHANGE) == want


@pytest.mark.parametrize("client", ["", CLIENT])
async def test_managed_identity_token_is_exchanged_for_an_acr_token(client: str) -> None:
    async with Services().serving() as there:
        there.replies[IMDS] = (200, {"access_token": ACCESS, "expires_in": "86399"})
        there.replies[EXCHANGE] = (200, {"refresh_token": "opaque"})
        login, lasts_s = await azure({"AZURE_CLIENT_ID": client}, there).fetch(HOST)
        assert (login.identity_token, lasts_s) == ("opaque", LASTS_S)
        asked = there.asked[0]
        assert (asked.method, asked.path, asked.headers["metadata"]) == ("GET", IMDS, "true")
        want = {"api-version": "2018-02-01", "resource": "https://containerregistry.azure.net"}
        assert asked.query == want | ({"client_id": client} if client else {})
        assert form(there, EXCHANGE) == {"grant_type": "access_token", "service": HOST, "access_token": ACCESS}


async def test_acr_token_lifetime_out_of_range_is_clamped_to_the_range() -> None:
    async with Services().serving() as there:
        there.replies[IMDS] = (200, {"access_token": ACCESS})
        for exp, lasts_s in ((10**12, LASTS_S_MAX), (5.0, 0.0)):
            there.replies[EXCHANGE] = (200, {"refresh_token": web_token(exp)})
            assert (await azure({}, there).fetch(HOST)).lasts_s == lasts_s


async def test_acr_login_without_an_azure_identity_is_anonymous_with_a_hint() -> None:
    async with Services().serving() as there:
        login, _ = await azure({}, there).fetch(HOST)
        assert login == Login(note=login.note)
        assert (
            "Azure: the machine has no identity to use: 404 (if it has several, select one with AZURE_CLIENT_ID)"
            in login.note
        )
    login, _ = await Azure({}, "http://127.0.0.1:1", pace=StillClock()).fetch(HOST)
    assert "Azure: no identity was found; give the pod a workload identity" in login.note


async def test_acr_login_error_names_the_failed_step_and_hides_secrets(tmp_path: Path) -> None:
    async with Services().serving() as there:
        env = workload(tmp_path, there)
        there.replies[ENTRA] = (401, {"error": "x", "error_description": f"AADSTS70021: {PROOF} does not match"})
        with pytest.raises(DeniedError, match=r"Entra ID returned no token \(401 AADSTS70021\)") as one:
            await azure(env, there).fetch(HOST)
        there.replies[ENTRA] = (200, {"access_token": ACCESS})
        there.replies[EXCHANGE] = (403, ACCESS.encode())
        with pytest.raises(DeniedError, match=rf"{HOST}: Azure: the exchange .* \(403\); .*AcrPull") as two:
            await azure(env, there).fetch(HOST)
        there.replies[EXCHANGE] = (200, ACCESS.encode())
        with pytest.raises(DeniedError, match="the response is not a token") as three:
            await azure(env, there).fetch(HOST)
        assert not any("s3cret" in str(error.value) for error in (one, two, three))


async def test_invalid_workload_identity_settings_fail_without_a_request(tmp_path: Path) -> None:
    async with Services().serving() as there:
        env = workload(tmp_path, there)
        with pytest.raises(PolicyError, match="AZURE_AUTHORITY_HOST is not https"):
            await azure(env | {"AZURE_AUTHORITY_HOST": "http://login.example/"}, there).fetch(HOST)
        with pytest.raises(PolicyError, match="AZURE_TENANT_ID is not a valid tenant ID or domain name"):
            await azure(env | {"AZURE_TENANT_ID": "../x"}, there).fetch(HOST)
        (tmp_path / "token").unlink()
        with pytest.raises(PolicyError, match="AZURE_FEDERATED_TOKEN_FILE contains no token"):
            await azure(env, there).fetch(HOST)
        assert there.asked == []
