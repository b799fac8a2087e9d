"""A pod's volumes as local folders: configMap, secret, emptyDir, projected with the pod's tokens, and claims.

Manages the folders. Nothing is mounted: paths below a `mountPath` in a container's words or variables are replaced with
the folder. Files are written once, when the pod starts. Of the node's own folders (hostPath, and claims of local
volumes) only what lies below those that a test names (`Node.shown`) is visible. Read-only volumes are not enforced.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from autoscaler.kubernetes.api import Api, ApiError, Object
from tests.integration.cluster.support.control_plane.service_accounts import token

Spec = dict[str, Any]
OWN_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where clients look up the token, the authority and the namespace of their pod."""


class Volumes:
    """The volumes of one pod. `field` reads a fieldPath of the pod."""

    def __init__(
        self, api: Api, found: Object, folder: Path, field: Callable[[str], str], shown: Mapping[str, Path]
    ) -> None:
        self._api = api
        self._metadata: Spec = found["metadata"]
        self._spec: Spec = found["spec"]
        self._folder = folder
        self._field = field
        self._shown = shown
        self._base = f"/api/v1/namespaces/{self._metadata['namespace']}"

    async def make(self) -> None:
        """Writes all files. Raises ApiError if a source is missing, in which case a kubelet waits."""
        makers: dict[str, Callable[[Spec], Awaitable[dict[str, bytes]]]] = {
            "configMap": self._config_map, "secret": self._secret, "projected": self._projected, "emptyDir": _empty,
            "hostPath": self._host_path, "persistentVolumeClaim": self._claim,
        }  # fmt: skip
        chosen = [
            (volume["name"], make(volume[kind]))
            for volume in self._spec.get("volumes", [])
            for kind, make in makers.items()
            if kind in volume
        ]
        for (name, _), files in zip(chosen, await asyncio.gather(*(made for _, made in chosen)), strict=True):
            await self._write(name, files)
        for volume in self._spec.get("volumes", []):
            source = volume.get("hostPath", {})
            if "persistentVolumeClaim" in volume:
                source = await self._behind(volume["persistentVolumeClaim"]["claimName"])
            if (path := self._of_host(source)) is not None:
                (self._folder / volume["name"]).rmdir()
                (self._folder / volume["name"]).symlink_to(path)

    def _of_host(self, source: Spec) -> Path | None:
        """The local folder for a node path, if a test named one."""
        for prefix, folder in self._shown.items():
            path = str(source.get("path", ""))
            if f"{path}/".startswith(f"{prefix}/"):
                return folder / path.removeprefix(prefix).lstrip("/")
        return None

    async def _host_path(self, source: Spec) -> dict[str, bytes]:
        path = self._of_host(source)
        if path is not None and source.get("type") == "Directory" and not path.is_dir():
            raise ApiError(404, "NotFound", f"hostPath {source['path']} is no folder")
        return {}

    async def _claim(self, source: Spec) -> dict[str, bytes]:
        behind = await self._behind(source["claimName"])
        if self._of_host(behind) is None:
            raise ApiError(404, "NotFound", f"path {behind['path']} does not exist on the node")
        return await self._host_path({**behind, "type": "Directory"})

    async def _behind(self, claim: str) -> Spec:
        """Returns the node folder to which a claim is bound."""
        found = await self._api.get(f"{self._base}/persistentvolumeclaims/{claim}")
        if found["status"].get("phase") != "Bound":
            raise ApiError(404, "NotFound", f"claim {claim} is not bound")
        of = (await self._api.get(f"/api/v1/persistentvolumes/{found['spec']['volumeName']}"))["spec"]
        folder: Spec = of["local"] if "local" in of else of["hostPath"]
        return folder

    def of(self, container: Spec) -> Callable[[str], str]:
        """Returns the function that translates a container's words to local paths."""
        places = {
            mount["mountPath"].rstrip("/"): str(self._folder / mount["name"] / mount.get("subPath", ""))
            for mount in container.get("volumeMounts", [])
        }
        if not places:
            return str
        longest_first = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w/.-])({longest_first})(?=/|$)")
        return lambda word: pattern.sub(lambda match: places[match[1]], word)

    def kubeconfig(self, container: Spec) -> str | None:
        """Writes a kubeconfig with the pod's service account, for a container that has its token."""
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] == OWN_ACCOUNT:
                return str(self._write_kubeconfig(self._folder / mount["name"]))
        return None

    def _write_kubeconfig(self, folder: Path) -> Path:
        path = folder.with_suffix(".kubeconfig")
        cluster = {"server": self._api._access.server, "certificate-authority": str(folder / "ca.crt")}
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "pod",
            "clusters": [{"name": "pod", "cluster": cluster}],
            "users": [{"name": "pod", "user": {"tokenFile": str(folder / "token")}}],
            "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "pod"}}],
        }))  # fmt: skip
        return path

    async def _write(self, name: str, files: dict[str, bytes]) -> None:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            place.chmod(0o600)

    async def _config_map(self, source: Spec) -> dict[str, bytes]:
        data = await self._data("configmaps", source, source.get("name", ""))
        return _chosen({key: value.encode() for key, value in data.items()}, source)

    async def _secret(self, source: Spec) -> dict[str, bytes]:
        data = await self._data("secrets", source, source.get("secretName") or source["name"])
        return _chosen({key: base64.b64decode(value) for key, value in data.items()}, source)

    async def _data(self, kind: str, source: Spec, name: str) -> dict[str, str]:
        try:
            found = await self._api.get(f"{self._base}/{kind}/{name}")
        except ApiError as error:
            if error.status == 404 and source.get("optional"):
                return {}
            raise
        data: dict[str, str] = found.get("data", {})
        return data

    async def _projected(self, source: Spec) -> dict[str, bytes]:
        makers = {"configMap": self._config_map, "secret": self._secret, "serviceAccountToken": self._token}
        made = [make(one[kind]) for one in source["sources"] for kind, make in makers.items() if kind in one]
        files = {path: content for some in await asyncio.gather(*made) for path, content in some.items()}
        for one in source["sources"]:
            for item in one.get("downwardAPI", {}).get("items", []):
                files[item["path"]] = self._field(item["fieldRef"]["fieldPath"]).encode()
        return files

    async def _token(self, wanted: Spec) -> dict[str, bytes]:
        """Returns a token that is bound to the pod and becomes invalid with it."""
        pod = {"kind": "Pod", "apiVersion": "v1", "name": self._metadata["name"], "uid": self._metadata["uid"]}
        spec: Spec = {"expirationSeconds": wanted.get("expirationSeconds", 3600), "boundObjectRef": pod}
        if "audience" in wanted:
            spec["audiences"] = [wanted["audience"]]
        shown = await token(self._api, self._metadata["namespace"], self._spec["serviceAccountName"], **spec)
        return {wanted["path"]: shown.encode()}


async def _empty(_: Spec) -> dict[str, bytes]:
    return {}


def _chosen(files: dict[str, bytes], source: Spec) -> dict[str, bytes]:
    """Applies `items`: selects files and their names."""
    if "items" not in source:
        return files
    return {item["path"]: files[item["key"]] for item in source["items"]}
