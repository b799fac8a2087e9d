"""Service accounts on the API server, their bound tokens, and the chart's rights and policies for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from autoscaler.drivers.kubernetes.access import Access, access
from autoscaler.drivers.kubernetes.api import Api, ApiError
from tests.kit.chart import Values, texts

RBAC = "/apis/rbac.authorization.k8s.io/v1"
POLICIES = "/apis/admissionregistration.k8s.io/v1"


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/serviceaccounts"


async def make_account(api: Api, namespace: str, name: str) -> None:
    """One without any right."""
    await api.create(_path(namespace), {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})


async def token(api: Api, namespace: str, account: str, **spec: object) -> str:
    """A bound one, as a kubelet asks for it; `spec` of a TokenRequest: `audiences`, `expirationSeconds`."""
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str((await api.create(f"{_path(namespace)}/{account}/token", asked))["status"]["token"])


class Account(Access):
    """As a service account."""

    def __init__(self, of: Access, shown: str) -> None:
        super().__init__(of._configuration)
        self._shown = shown

    async def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._shown}"}


@asynccontextmanager
async def acting_as_autoscaler(
    api: Api, kubeconfig: Path, namespace: str, values: Values, *templates: str
) -> AsyncIterator[Api]:
    """With the rights and the policies of `templates` that the chart makes when it is released into the namespace."""
    kinds = {
        "ClusterRole": f"{RBAC}/clusterroles",
        "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
        "Role": f"{RBAC}/namespaces/{namespace}/roles",
        "RoleBinding": f"{RBAC}/namespaces/{namespace}/rolebindings",
        "ValidatingAdmissionPolicy": f"{POLICIES}/validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding": f"{POLICIES}/validatingadmissionpolicybindings",
    }
    rendered = texts(values, namespace=namespace)
    made = [one for name in ("rights.yaml", *templates) for one in yaml.safe_load_all(rendered[name])]
    for one in made:
        await api.create(kinds[one["kind"]], one)
    await make_account(api, namespace, "pl-pilotlight-autoscaler")
    shown = await token(api, namespace, "pl-pilotlight-autoscaler")
    try:
        async with Api(Account(await access(kubeconfig), shown)) as acting:
            yield acting
    finally:
        for one in made:
            await api.delete(f"{kinds[one['kind']]}/{one['metadata']['name']}")


async def refused(write: Awaitable[object]) -> str:
    """The API server's reason; empty: it accepts the write."""
    try:
        await write
    except ApiError as error:
        return error.message
    return ""
