"""Service accounts on the API server, and their bound tokens."""

from __future__ import annotations

from autoscaler.drivers.kubernetes.api import Api


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/serviceaccounts"


async def make_account(api: Api, namespace: str, name: str) -> None:
    """One without any right."""
    await api.create(_path(namespace), {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})


async def token(api: Api, namespace: str, account: str, **spec: object) -> str:
    """A bound one, as a kubelet asks for it; `spec` of a TokenRequest: `audiences`, `expirationSeconds`."""
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str((await api.create(f"{_path(namespace)}/{account}/token", asked))["status"]["token"])
