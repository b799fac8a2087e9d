"""Which login a command uses: the user's files first, then the cloud of the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotlight.models.registry_access import build_cloud_keychain, build_keychain

ECR, GAR, ACR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com", "eu-docker.pkg.dev", "acmereg.azurecr.io"


@pytest.fixture(autouse=True)
def logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    auths = {GAR: {"username": "_json_key", "password": "key"}}
    (tmp_path / "auth.json").write_text(json.dumps({"auths": auths}))


async def test_stored_login_takes_precedence_over_the_cloud_login() -> None:
    found = await build_keychain().login(GAR, "x")
    assert found is not None
    assert found.user == "_json_key"


@pytest.mark.standard
async def test_cloud_login_is_used_only_for_its_registries_over_https() -> None:
    for host, expected in ((ECR, "AWS: no keys"), ("gcr.io", "Google Cloud: no metadata server")):
        found = await build_keychain().login(host, "x")
        assert found is not None
        assert expected in found.note
        assert await build_keychain(plain_http=True).login(host, "x") is None
    assert await build_keychain().login("ghcr.io", "x") is None


def test_cloud_keychain_applies_to_ecr_gar_and_acr_registries(tmp_path: Path) -> None:
    there = build_cloud_keychain({}, tmp_path)
    assert [any(one.applies(host) for one in there._clouds) for host in (ECR, GAR, ACR, "ghcr.io")] == [
        True, True, True, False,
    ]  # fmt: skip
