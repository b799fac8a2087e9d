"""Installs all CustomResourceDefinitions once for all tests, and builds custom resources of Pilotlight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object

FOLDER = Path(__file__).parents[5] / "charts" / "pilotlight" / "crds"
FOREIGN = Path(__file__).parent / "third_party_crds"
GROUP, VERSION = "pilotlight.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
TENANTS = f"/apis/{API_VERSION}/tenants"
SERVED_S_MAX = 90.0


async def install(api: Api, group: str = GROUP) -> None:
    """Installs our definitions as the chart does; returns when both kinds are served."""
    for file in sorted(FOLDER.glob("*.yaml")):
        await install_one(api, yaml.safe_load(file.read_text().replace(GROUP, group)))


async def install_foreign(api: Api, of: str) -> None:
    """Installs the third-party definitions in a folder of `foreign`; returns when all are served."""
    await install_folder(api, FOREIGN / of)


async def install_folder(api: Api, folder: Path) -> None:
    """Installs all definitions of a folder; returns when they are served."""
    for file in sorted(folder.glob("*.yaml")):
        await install_one(api, yaml.safe_load(file.read_text()))


async def install_one(api: Api, one: Object) -> None:
    """Installs one definition; returns when its kind is served."""
    group, plural = one["spec"]["group"], one["spec"]["names"]["plural"]
    await api.apply(definition(plural, group), one, "test")
    async with asyncio.timeout(SERVED_S_MAX):
        while not await _served(api, f"/apis/{group}/{one['spec']['versions'][0]['name']}/{plural}"):
            await asyncio.sleep(0.02)


async def install_models_of_an_older_release(api: Api) -> None:
    """Installs the definition of Model from before pods had types: it keeps values of any depth there."""
    one = yaml.safe_load((FOLDER / "models.yaml").read_text())
    pod = one["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["pod"]
    pod["properties"]["affinity"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    await install_one(api, one)
    await _until_kept(api, is_kept=True)


async def install_models_of_this_release(api: Api) -> None:
    """Restores the current definition of Model after an older one was installed."""
    await install(api)
    await _until_kept(api, is_kept=False)


async def _until_kept(api: Api, *, is_kept: bool) -> None:
    """Waits until the API server uses the definition that keeps unknown pod fields, or the one that drops them."""
    trial = model("trial", pod={"affinity": {"unknown": {}}})
    async with asyncio.timeout(SERVED_S_MAX):
        while is_kept != bool((await api.create(f"{models('default')}?dryRun=All", trial))["spec"]["pod"]["affinity"]):
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
    """Builds a Pilotlight custom resource from `spec`, `status` and other parts."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, **parts}


def model(name: str, **spec: object) -> Object:
    """Builds a Model without resource requests; `spec` overrides its fields."""
    common = {"engine": "command", "command": ["engine", "--port", "{port}"]}
    return document("Model", name, spec={**common, **spec})


def tenant(name: str, **spec: object) -> Object:
    """Builds a Tenant."""
    return document("Tenant", name, spec=spec)
