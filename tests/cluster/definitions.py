"""CustomResourceDefinitions on the API server, ours and others', once for all tests of a run, and objects of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from autoscaler.drivers.kubernetes.api import Api, ApiError, Object

FOLDER = Path(__file__).parents[2] / "charts" / "pilotlight" / "crds"
FOREIGN = Path(__file__).parent / "foreign"
GROUP, VERSION = "pilotlight.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
TENANTS = f"/apis/{API_VERSION}/tenants"
SERVED_S_MAX = 90.0


async def install(api: Api, group: str = GROUP) -> None:
    """As the chart does it; returns when both kinds are served."""
    for file in sorted(FOLDER.glob("*.yaml")):
        one = yaml.safe_load(file.read_text().replace(GROUP, group))
        await api.apply(definition(one["spec"]["names"]["plural"], group), one, "test")
        async with asyncio.timeout(SERVED_S_MAX):
            while not await _served(api, f"/apis/{group}/{VERSION}/{one['spec']['names']['plural']}"):
                await asyncio.sleep(0.02)


async def install_foreign(api: Api, of: str) -> None:
    """Those of others, in a folder of `foreign`; returns when all are served."""
    await install_folder(api, FOREIGN / of)


async def install_folder(api: Api, folder: Path) -> None:
    """All of a folder; returns when they are served."""
    for file in sorted(folder.glob("*.yaml")):
        one = yaml.safe_load(file.read_text())
        group, plural = one["spec"]["group"], one["spec"]["names"]["plural"]
        await api.apply(definition(plural, group), one, "test")
        async with asyncio.timeout(SERVED_S_MAX):
            while not await _served(api, f"/apis/{group}/{one['spec']['versions'][0]['name']}/{plural}"):
                await asyncio.sleep(0.02)


def definition(plural: str, group: str = GROUP) -> str:
    """The path of a definition."""
    return f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{group}"


async def _served(api: Api, path: str) -> bool:
    try:
        await api.get(path, limit="1")
    except ApiError:
        return False
    return True


def models(namespace: str) -> str:
    """The path of the Models of a namespace."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/models"


def document(kind: str, name: str, **parts: object) -> Object:
    """One of ours: `spec`, `status` and what else it has."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, **parts}


def model(name: str, **spec: object) -> Object:
    """A Model that needs nothing, with what `spec` says over it."""
    common = {"engine": "command", "command": ["engine", "--port", "{port}"]}
    return document("Model", name, spec={**common, **spec})


def tenant(name: str, **spec: object) -> Object:
    """A Tenant."""
    return document("Tenant", name, spec=spec)
