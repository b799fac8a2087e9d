"""KubeAI's Models on a real API server, followed live: a cluster without the kind, then one with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from autoscaler.contract import ModelName
from autoscaler.importers.kubeai import models as kubeai
from autoscaler.kubernetes import watch_set
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.kubernetes.resources.document_merge import Installation, Status
from autoscaler.kubernetes.resources.kubeai_watcher import API_VERSION, KUBEAI, KubeaiModels
from autoscaler.kubernetes.watch import ObjectKey
from autoscaler.spec.model import Model
from autoscaler.state.events import DocumentsSeen

pytestmark = pytest.mark.standard

WAIT_S_MAX = 90.0
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
VERSION = {
    "name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": ANYTHING, "status": ANYTHING}}},
}  # fmt: skip
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "models.kubeai.org"},
    "spec": {
        "group": "kubeai.org", "scope": "Namespaced", "versions": [VERSION],
        "names": {"kind": "Model", "plural": "models", "singular": "model", "listKind": "ModelList"},
    },
}  # fmt: skip


def theirs(name: str, **spec: object) -> Object:
    """A Model of KubeAI."""
    common = {"engine": "VLLM", "url": "hf://acme/tiny", "features": ["TextGeneration"], "resourceProfile": "cpu:1"}
    return {"apiVersion": API_VERSION, "kind": "Model", "metadata": {"name": name}, "spec": common | spec}


class Following:
    """Records the documents that the installation reports."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.received: list[DocumentsSeen] = []
        self.read = 0
        self._news = asyncio.Event()
        installation = Installation(self._tell, (KUBEAI,))
        self.kubeai = KubeaiModels(api, self._convert, installation, [namespace])

    def _convert(self, value: object) -> tuple[Model | None, str, tuple[str, ...]]:
        self.read += 1
        return kubeai.convert_live_model(value)

    def _tell(self, documents: DocumentsSeen, statuses: Mapping[ModelName, Status]) -> None:
        self.received.append(documents)
        self._news.set()

    def models(self) -> dict[str, Model]:
        """The models in effect."""
        return {model.name: model for model in self.received[-1].models} if self.received else {}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for reports until `holds` is true."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not holds():
                self._news.clear()
                await self._news.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.kubeai.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()


async def install(api: Api) -> None:
    """Installs the definition; returns when the kind is served."""
    await api.create(CRDS, CRD)
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            try:
                await api.get(f"/apis/{API_VERSION}/models", limit="1")
            except ApiError:
                await asyncio.sleep(0.02)
            else:
                return


async def test_kubeai_models_are_read_as_soon_as_their_crd_is_installed(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_set, "ABSENT_S", 0.05)
    following, path = Following(api, namespace), f"/apis/{API_VERSION}/namespaces/{namespace}/models"
    key = ObjectKey(namespace, "tiny")
    async with following.running():
        await following.until(lambda: following.received != [])
        assert following.models() == {}, "startup does not wait for a kind that is not installed"
        await install(api)
        try:
            await api.create(path, theirs("tiny", targetRequests=7))
            await following.until(lambda: "tiny" in following.models())
            tiny = following.models()["tiny"]
            assert (tiny.spec.engine, tiny.slots, tiny.namespace) == ("vllm", 7, namespace)
            assert tiny.created_unix_s > 0

            await api.patch(f"{path}/tiny", {"spec": {"targetRequests": 9}}, MERGE)
            await following.until(lambda: following.models()["tiny"].slots == 9)

            read, count = following.read, len(following.received)
            await api.patch(f"{path}/tiny/status", {"status": {"replicas": {"all": 1, "ready": 1}}}, MERGE)
            await api.create(path, theirs("whisper", engine="FasterWhisper"))
            await following.until(lambda: len(following.received) > count)
            assert following.read == read + 1, "a status is no news of a spec"
            assert following.models().keys() == {"tiny"}
            assert "FasterWhisper" in following.kubeai.wrong[ObjectKey(namespace, "whisper")]

            await api.patch(f"{path}/tiny", {"spec": {"url": "gs://bucket/tiny"}}, MERGE)
            await following.until(lambda: key in following.kubeai.wrong)
            assert "gs:// is not supported yet" in following.kubeai.wrong[key]
            assert following.models()["tiny"].slots == 9, "its last valid content stays in force"

            await api.delete(f"{path}/tiny")
            await following.until(lambda: following.models() == {})
            assert key not in following.kubeai.wrong
        finally:
            await api.delete(f"{CRDS}/models.kubeai.org")
