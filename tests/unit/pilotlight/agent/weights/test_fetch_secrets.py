"""Pull secrets as a node agent reads them from an API server on loopback, and the error if there is none."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from artifacts.credentials.docker_config import AuthConfig, Config
from artifacts.registry_errors import PolicyError
from pilotlight.agent.weights.fetch import NoSecretError, PullSecrets

AUTHS = {"reg.example": {"username": "ada", "password": "s3cret"}}
SECRETS = {
    "new": ("kubernetes.io/dockerconfigjson", ".dockerconfigjson", json.dumps({"auths": AUTHS, "credsStore": "evil"})),
    "old": ("kubernetes.io/dockercfg", ".dockercfg", json.dumps(AUTHS)),
    "other": ("Opaque", "password", "s3cret"),
}


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Path]:
    """Serves the API server; yields its kubeconfig."""

    async def secret(request: web.Request) -> web.Response:
        if request.match_info["name"] not in SECRETS:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        type_, key, text = SECRETS[request.match_info["name"]]
        return web.json_response({"type": type_, "data": {key: base64.b64encode(text.encode()).decode()}})

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/engines/secrets/{name}", secret)
    async with TestServer(app) as server:
        named = {"name": "x", "context": {"cluster": "x", "user": "x"}}
        fields = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [named],
            "clusters": [{"name": "x", "cluster": {"server": str(server.make_url("")).rstrip("/")}}],
            "users": [{"name": "x", "user": {}}],
        }  # fmt: skip
        path = folder / "kubeconfig"
        path.write_text(json.dumps(fields))
        yield path


@pytest.mark.parametrize("name", ["new", "old"])
async def test_logins_are_read_from_both_kubernetes_pull_secret_types(tmp_path: Path, name: str) -> None:
    async with cluster(tmp_path) as kubeconfig:
        found = await PullSecrets("engines", kubeconfig)(name)
    assert found == Config({"reg.example": AuthConfig(username="ada", password="s3cret")})


async def test_error_for_an_unusable_pull_secret_does_not_contain_its_data(tmp_path: Path) -> None:
    async with cluster(tmp_path) as kubeconfig:
        with pytest.raises(
            PolicyError, match=r"pull secret other: its type is not kubernetes\.io/dockerconfigjson"
        ) as refused:
            await PullSecrets("engines", kubeconfig)("other")
        assert "s3cret" not in str(refused.value)
        with pytest.raises(NoSecretError, match="pull secret nobody of namespace engines: "):
            await PullSecrets("engines", kubeconfig)("nobody")
        with pytest.raises(NoSecretError, match="set its --pull-secrets NAMESPACE"):
            await PullSecrets(None, kubeconfig)("new")
