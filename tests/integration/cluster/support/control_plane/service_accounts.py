"""Service accounts on the API server, their bound tokens, and the chart's permissions and policies for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import ApiAccess, load_api_access
from tests.support.chart import Values, texts

RBAC = "/apis/rbac.authorization.k8s.io/v1"
AUTOSCALER = "pl-pilotlight-autoscaler"
POLICIES = "/apis/admissionregistration.k8s.io/v1"


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/serviceaccounts"


async def make_account(api: Api, namespace: str, name: str) -> None:
    """Creates a service account without any permission."""
    await api.create(_path(namespace), {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})


async def token(api: Api, namespace: str, account: str, **spec: object) -> str:
    """Returns a bound token, as a kubelet requests it. `spec` of the TokenRequest: `audiences`, `expirationSeconds`."""
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    return str((await api.create(f"{_path(namespace)}/{account}/token", asked))["status"]["token"])


class Account(ApiAccess):
    """API access as a service account."""

    def __init__(self, of: ApiAccess, shown: str) -> None:
        super().__init__(of._configuration)
        self._shown = shown

    async def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._shown}"}


@asynccontextmanager
async def acting_as_autoscaler(
    api: Api, kubeconfig: Path, namespace: str, values: Values, *templates: str
) -> AsyncIterator[Api]:
    """Yields a client with the permissions and policies that `templates` define for a release in the namespace."""

    def path(one: Object) -> str:
        group = RBAC if one["kind"] in {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"} else POLICIES
        kind = one["kind"].lower()
        within = f"/namespaces/{one['metadata']['namespace']}" if "namespace" in one["metadata"] else ""
        return f"{group}{within}/{kind.removesuffix('y') + 'ies' if kind.endswith('y') else kind + 's'}"

    rendered = texts(values, namespace=namespace)
    made = [one for name in ("rights.yaml", *templates) for one in yaml.safe_load_all(rendered[name])]
    for one in made:
        await api.create(path(one), one)
    await make_account(api, namespace, AUTOSCALER)
    shown = await token(api, namespace, AUTOSCALER)
    try:
        async with Api(Account(await load_api_access(kubeconfig), shown)) as acting:
            yield acting
    finally:
        for one in made:
            await api.delete(f"{path(one)}/{one['metadata']['name']}")
        await api.delete(f"{_path(namespace)}/{AUTOSCALER}")


async def refused(write: Awaitable[object]) -> str:
    """Returns the API server's reason for a rejected write, or an empty string if it accepts the write."""
    try:
        await write
    except ApiError as error:
        return error.message
    return ""
