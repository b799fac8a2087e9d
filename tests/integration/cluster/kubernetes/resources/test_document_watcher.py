"""Models and Tenants as custom resources on a real API server: they take effect; an invalid one affects no other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from autoscaler.contract import ModelName
from autoscaler.documents.parse import read_document
from autoscaler.kubernetes import watch_set
from autoscaler.kubernetes.api import MERGE, Api
from autoscaler.kubernetes.resources import document_watcher
from autoscaler.kubernetes.resources.document_merge import CUSTOMS, FILES, Installation, Status
from autoscaler.kubernetes.resources.document_watcher import DocumentWatcher
from autoscaler.kubernetes.watch import ObjectKey
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.spec.tenant import Tenant, TenantSpec
from autoscaler.state.events import DocumentsSeen
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.custom_resources import TENANTS, model, models, tenant
from tests.support.waiting import until

WAIT_S_MAX = 90.0
OF_FILES = Model(name=ModelName("of-files"), spec=ModelSpec(engine="vllm"))
HASH = "cd" * 32


class Following:
    """Records the reported custom resources; counts the reads."""

    def __init__(self, api: Api, namespaces: list[str]) -> None:
        self.received: list[DocumentsSeen] = []
        self.statuses: dict[str, Status] = {}
        self.read: list[str] = []
        self._news = asyncio.Event()
        self.installation = Installation(self._tell, (FILES, CUSTOMS))
        self.installation.put_files(DocumentsSeen(models=(OF_FILES,)))
        self.customs = DocumentWatcher(api, self._parse, self.installation, namespaces)

    def _parse(self, document: object) -> Model | Tenant:
        assert isinstance(document, dict)
        message = read_document(document | {"apiVersion": custom_resources.API_VERSION})
        self.read.append(message.name)
        return message

    def _tell(self, documents: DocumentsSeen, statuses: Mapping[ModelName, Status]) -> None:
        self.received.append(documents)
        self.statuses.update({str(name): status for name, status in statuses.items()})
        self._news.set()

    @property
    def names(self) -> list[str]:
        """Names of the Models in effect."""
        return [model.name for model in self.received[-1].models] if self.received else []

    def model(self, name: str) -> Model:
        """One of these Models."""
        return next(model for model in self.received[-1].models if model.name == name)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` is true of what was reported."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not (self.received and holds()):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def following(api: Api, *namespaces: str) -> AsyncIterator[Following]:
    """Watches custom resources while the context is open."""
    found = Following(api, list(namespaces))
    run = asyncio.create_task(found.customs.run())
    try:
        yield found
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.fixture
async def served(api: Api) -> Api:
    """An API client after both kinds were installed."""
    await custom_resources.install(api)
    return api


@pytest.mark.standard
async def test_created_updated_and_deleted_models_change_the_model_list(served: Api, namespace: str) -> None:
    path = models(namespace)
    made = await served.create(path, model("first", aliases=["one"]))
    await served.patch(f"{path}/first/status", {"status": {"learned": {"startSeconds": [1.5]}}}, MERGE)
    async with following(served, namespace) as found:
        await found.until(lambda: found.names == ["of-files", "first"])
        assert found.statuses == {"first": {"learned": {"startSeconds": [1.5]}}}
        assert found.model("first").namespace == namespace
        assert found.model("first").created_unix_s > 1_700_000_000
        kept = found.customs.models[ObjectKey(namespace, "first")]
        assert (kept.uid, kept.generation, kept.wrong) == (made["metadata"]["uid"], 1, "")
        await served.create(path, model("second"))
        await found.until(lambda: found.names == ["of-files", "first", "second"])
        first = found.model("first")
        await served.patch(f"{path}/second", {"spec": {"slots": 7}}, MERGE)
        await found.until(lambda: found.model("second").slots == 7)
        assert found.model("first") is first, "who did not change is not read again"
        assert found.read == ["first", "second", "second"]
        await served.delete(f"{path}/first")
        await found.until(lambda: found.names == ["of-files", "second"])


async def test_status_and_label_changes_of_a_model_cause_no_reload(served: Api, namespace: str) -> None:
    path = models(namespace)
    await served.create(path, model("a"))
    async with following(served, namespace) as found:
        await found.until(lambda: "a" in found.names)
        count = len(found.received)
        await served.patch(f"{path}/a/status", {"status": {"observedGeneration": 1}}, MERGE)
        await served.patch(f"{path}/a", {"metadata": {"labels": {"x": "y"}}}, MERGE)
        await served.create(path, model("b"))
        await found.until(lambda: "b" in found.names)
        assert found.read == ["a", "b"]
        assert len(found.received) == count + 1


async def test_invalid_model_is_skipped_or_keeps_its_last_valid_spec(served: Api, namespace: str) -> None:
    path, wrong = models(namespace), {"CUDA_VISIBLE_DEVICES": "0"}
    await served.create(path, model("never-right", env=wrong))
    await served.create(path, model("right", slots=3))
    async with following(served, namespace) as found:
        await found.until(lambda: found.names == ["of-files", "right"])
        reported = found.customs.wrong[ObjectKey(namespace, "never-right")]
        assert reported.startswith("spec.env.CUDA_VISIBLE_DEVICES: is set by Pilotlight")
        await served.patch(f"{path}/right", {"spec": {"slots": 4, "env": wrong}}, MERGE)
        await found.until(lambda: ObjectKey(namespace, "right") in found.customs.wrong)
        assert found.model("right").slots == 3, "its last valid content"
        kept = found.customs.models[ObjectKey(namespace, "right")]
        assert kept.generation == 2
        await served.patch(f"{path}/right", {"spec": {"env": None}}, MERGE)
        await served.patch(f"{path}/never-right", {"spec": {"env": None}}, MERGE)
        await found.until(lambda: "never-right" in found.names and found.model("right").slots == 4)
        assert not found.customs.wrong


async def test_name_of_a_deleted_model_passes_to_another_model_that_claims_it(served: Api, namespace: str) -> None:
    other = f"{namespace}-z"
    await make_namespace(served, other)
    await served.create(models(namespace), model("x"))
    await served.create(models(other), model("x"))
    async with following(served, namespace, other) as found:
        await found.until(lambda: found.names == ["of-files", "x", f"{other}/x"])
        late = Origin(CUSTOMS, other, "x")
        assert found.installation.settled.taken == {
            late: f"name `x` belongs to Model {namespace}/x; this Model is renamed to `{other}/x`"
        }
        await served.delete(f"{models(namespace)}/x")
        await found.until(lambda: found.names == ["of-files", "x"])
        assert found.model("x").namespace == other
        assert found.installation.settled.names == {late: "x"}
    await served.delete(f"/api/v1/namespaces/{other}")


async def test_invalid_recreated_model_gets_no_spec_from_the_deleted_model(served: Api, namespace: str) -> None:
    path = models(namespace)
    await served.create(path, model("a", slots=2))
    async with following(served, namespace) as found:
        await found.until(lambda: "a" in found.names)
        await served.delete(f"{path}/a")
        await served.create(path, model("a", slots=5, env={"CUDA_VISIBLE_DEVICES": "0"}))
        key = ObjectKey(namespace, "a")
        await until("the second is known", lambda: key in found.customs.wrong, WAIT_S_MAX)
        await found.until(lambda: "a" not in found.names)
        assert found.customs.models[key].model is None, "the content of an object with the same name does not apply"


async def test_many_simultaneous_changes_are_reported_in_batches(
    served: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_set, "TOGETHER_S", 1.0)  # they arrive as fast as this machine creates them
    async with following(served, namespace) as found:
        await found.until(lambda: found.names == ["of-files"])
        async with asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(served.create(models(namespace), model(f"m{number:02}")))
        await found.until(lambda: len(found.names) == 61)
        assert len(found.read) == 60, "each is read once"
        assert len(found.received) < 50


async def test_keys_of_an_invalid_tenant_are_not_accepted(served: Api, namespace: str) -> None:
    right, wrong = f"r-{uuid.uuid4().hex[:8]}", f"w-{uuid.uuid4().hex[:8]}"
    keys = [{"sha256": HASH, "name": "ci"}]
    await served.create(TENANTS, tenant(right, keys=keys, weight=2))
    async with following(served, namespace) as found:
        await found.until(lambda: right in {one.name for one in found.received[-1].tenants})
        small = "2027-01-31t12:00:00z"  # valid in RFC 3339 and thus in the schema, but not in Python
        await served.create(TENANTS, tenant(wrong, keys=[{"sha256": "ef" * 32, "expiresAt": small}]))
        await found.until(lambda: wrong in {one.name for one in found.received[-1].tenants})
        tenants = {str(one.name): one for one in found.received[-1].tenants}
        assert (tenants[right].spec.weight, len(tenants[right].spec.keys)) == (2, 1)
        assert tenants[wrong].spec == TenantSpec(models=()), "a key that is not known opens nothing"
        assert found.customs.wrong[ObjectKey("", wrong)].startswith("spec.keys[0].expiresAt: expected a time")
        for name in (right, wrong):
            await served.delete(f"{TENANTS}/{name}")
        await found.until(lambda: not {right, wrong} & {one.name for one in found.received[-1].tenants})


async def test_models_are_read_as_soon_as_their_crds_are_installed(
    served: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"{namespace}.example"
    monkeypatch.setattr(document_watcher, "API_VERSION", f"{group}/v1alpha1")
    monkeypatch.setattr(watch_set, "ABSENT_S", 0.05)
    async with following(served, namespace) as found:
        await found.until(lambda: found.names == ["of-files"])
        await custom_resources.install(served, group)
        late = model("late") | {"apiVersion": f"{group}/v1alpha1"}
        await served.create(f"/apis/{group}/v1alpha1/namespaces/{namespace}/models", late)
        await found.until(lambda: found.names == ["of-files", "late"])
    for plural in ("models", "tenants"):
        await served.delete(custom_resources.definition(plural, group))
