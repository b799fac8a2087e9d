"""A pod is marked and deleted even if another writer removes the mark; no stop is lost while writes are permitted."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes import pod_writer as orders_
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.drivers.kubernetes.objects.pod_state import PodSeen
from autoscaler.drivers.kubernetes.pod_writer import CONFLICTS_MAX, RETRY_S, Orders, Pauses, StartListener
from autoscaler.kubernetes.api import Api, ApiError, FencedError, Object, UnreachableError
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.watch import Watched
from autoscaler.spec.installation_ownership import ANYBODYS, INSTALLATION, Ownership
from autoscaler.state.capacity import Marks
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Drain, Replica
from tests.simulation.environment import virtual_loop
from tests.support.harness.local_rig import launch, replica

PATH = "/api/v1/namespaces/n/pods"
EPOCH = 7


class Server:
    """One pod. Another writer removes each mark, up to `meddles` times; `writes` is how many writes are permitted."""

    def __init__(self, meddles: int = 0, writes: int = 1000) -> None:
        self.one, model = replica("r1", ("engine", "{port}"), ("n/gpu0",))
        self.one = replace(self.one, drain=Drain(since_s=0.0, reason="idle", came_from=S.READY, epoch=EPOCH, version=1))
        self.pod: Object | None = pods.build_pod_manifest(self.one, model, launch(model, "", 1), "image")
        self.pod["metadata"] |= {"uid": "u1", "namespace": "n", "resourceVersion": "1"}
        self.meddles = meddles
        self.writes = writes
        self.contended = 0
        self.writing_kubelet = 0
        """How often the pod changes just before it would be deleted."""
        self.asked: list[str] = []
        self.graces: list[int | None] = []

    def _wrote(self, metadata: Any) -> None:
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)

    def _write(self, what: str) -> Any:
        if not self.writes:
            raise FencedError(what)
        self.writes -= 1
        self.asked.append(what)
        if self.pod is None:
            raise ApiError(404, "NotFound", "")
        return self.pod["metadata"]

    async def get(self, path: str) -> Object:
        del path
        if self.pod is None:
            raise ApiError(404, "NotFound", "")
        return self.pod

    async def patch(self, path: str, body: Object, kind: str) -> Object:
        del path, kind
        metadata = self._write("mark")
        if self.contended:
            self.contended -= 1
            raise ApiError(409, "Conflict", "the object has been modified")
        metadata["annotations"] = metadata["annotations"] | body["metadata"]["annotations"]
        self._wrote(metadata)
        fields = {"metadata": dict(metadata)}
        if self.meddles:
            self.meddles -= 1
            metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != pods.DRAIN}
            self._wrote(metadata)
        return fields

    async def delete(self, path: str, *, uid: str, version: str | None, grace_s: int | None) -> Object:
        del path
        metadata = self._write("delete")
        self.graces.append(grace_s)
        if self.writing_kubelet:
            self.writing_kubelet -= 1
            self._wrote(metadata)
        if uid != metadata["uid"] or version != metadata["resourceVersion"]:
            raise ApiError(409, "Conflict", "the precondition failed")
        assert grace_s is None or metadata["annotations"][pods.DRAIN] == str(EPOCH)
        self.pod = None
        return {}


class Deaf:
    """A watch that ignores all calls of a stop."""

    def __init__(self) -> None:
        self.items: dict[object, PodSeen] = {}
        self.removed: list[str] = []

    def is_gone(self, one: Replica) -> None:
        self.removed.append(one.id)

    def suspect(self) -> None:
        """Does nothing."""

    def expect(self, version: str) -> None:
        """Does nothing."""


def orders(server: Server) -> Orders:
    deaf = Deaf()
    return Orders(cast("Api", server), PATH, cast("Watched[PodSeen]", deaf), cast("StartListener", deaf))


def seen(server: Server) -> PodSeen:
    """The pod as the watch reads it."""
    assert server.pod is not None
    pod = pod_state.read_replica_pod(server.pod)
    assert pod is not None
    return pod


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the retry delay."""
    monkeypatch.setattr(orders_, "RETRY_S", 0.0)


async def test_removed_drain_annotation_is_written_again_before_pod_delete() -> None:
    server = Server(meddles=1)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None
    assert server.asked == ["mark", "delete"] * 2


@pytest.mark.parametrize(("lingers", "grace_s"), [(False, 5), (True, 1)])
async def test_drained_pod_has_one_second_grace_only_if_it_has_a_pre_stop_sleep(lingers: bool, grace_s: int) -> None:
    server = Server()
    if lingers and server.pod is not None:
        pods.add_pre_stop_sleep(server.pod)
    await orders(server).delete(server.one, 5.0)
    assert server.graces == [grace_s]


async def test_pod_delete_is_retried_even_after_many_conflicts() -> None:
    server = Server(meddles=CONFLICTS_MAX + 3)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None
    assert server.asked == ["mark", "delete"] * (CONFLICTS_MAX + 4)


async def test_drain_annotation_is_retried_after_conflict() -> None:
    server = Server()
    server.contended = 2
    await orders(server).delete(server.one, 5.0)
    assert server.pod is None


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
async def test_writer_that_loses_leadership_stops_deleting_a_pod(writes: int) -> None:
    server = Server(meddles=2, writes=writes)
    await orders(server).delete(server.one, 5.0)
    assert server.pod is not None
    assert len(server.asked) == writes


async def test_pod_that_cannot_start_is_deleted_with_its_own_grace_period() -> None:
    """The kubelet may have started it meanwhile; then only the kubelet can end it, within the grace period."""
    server = Server()
    server.writing_kubelet = 2
    pod = seen(server)
    assert not pod.ended
    await orders(server).remove(pod)
    assert server.pod is None
    assert server.graces == [None, None, None]


async def test_pod_with_same_name_and_other_uid_is_not_deleted() -> None:
    server = Server()
    pod = seen(server)
    await orders(server).remove(pod._replace(uid="another"))
    assert server.pod is not None
    assert not server.asked


class Queue(Server):
    """A pod holds the name of the one to create; the first `deaf` deletes get no response."""

    def __init__(self, deaf: int = 0) -> None:
        super().__init__()
        self.deaf = deaf
        self.one = replace(self.one, runtime=replace(self.one.runtime, marks=Marks(instead="keeper")))

    async def create(self, path: str, body: Object) -> Object:
        del path
        self.asked.append(f"create {body['metadata']['name']}")
        return {"metadata": {"resourceVersion": "1", "name": body["metadata"]["name"], "uid": "u1"}}

    async def delete(
        self, path: str, *, uid: str | None = None, version: str | None = None, grace_s: int | None = None
    ) -> Object:
        assert (uid, version, grace_s) == (None, None, 0)
        self.asked.append(f"delete {path.rpartition('/')[2]}")
        self.deaf -= 1
        if self.deaf >= 0:
            raise UnreachableError("no answer")
        raise ApiError(404, "NotFound", "it is gone")


async def test_replica_pod_replaces_its_placeholder_pod_despite_api_errors() -> None:
    server = Queue(deaf=1)
    assert server.pod is not None
    hears = Hearing()
    watched = cast("Watched[PodSeen]", Deaf())
    await Orders(cast("Api", server), PATH, watched, cast("StartListener", hears)).create(server.one, server.pod)
    assert server.asked == ["create r1", "delete keeper"] * 2
    assert hears.heard == ["waits", "made"]


class Hearing:
    """Records the outcome of a start."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start_waits(self, one: Replica, reason: str) -> None:
        del one, reason
        self.heard.append("waits")

    def start_made(self, one: Replica) -> None:
        del one
        self.heard.append("made")

    def is_gone(self, one: Replica) -> None:
        del one
        self.heard.append("gone")

    def order_failed(self, replica: str, reason: str) -> None:
        del replica
        self.heard.append(reason.partition(":")[0].split()[0])

    def start_refused(self, one: Replica, reason: str) -> None:
        del one, reason
        self.heard.append("refused")


@pytest.mark.parametrize(
    ("status", "reason", "message", "passes"),
    [
        (500, "InternalError", "etcdserver: leader changed", True),
        (500, "InternalError", 'failed calling webhook "a": no endpoints available for service "b"', True),
        (502, "Bad Gateway", "", True),
        (503, "ServiceUnavailable", "", True),
        (504, "Timeout", "", True),
        (408, "RequestTimeout", "", True),
        (429, "TooManyRequests", "", True),
        (409, "Conflict", "the object has been modified", True),
        (403, "Forbidden", "exceeded quota: q", True),
        (403, "Forbidden", "status unknown for quota: q, resources: limits.cpu", True),
        (403, "Forbidden", "error looking up service account a/default: serviceaccount not found", True),
        (500, "InternalError", "etcdserver: request timed out", True),
        (500, "InternalError", 'failed calling webhook "a": context deadline exceeded', True),
        (403, "Forbidden", "must specify limits.cpu", False),
        (400, "BadRequest", "", False),
        (422, "Invalid", "", False),
        (409, "AlreadyExists", "a pod of its name exists and is not ours", False),
    ],
)
async def test_start_retries_transient_api_errors_and_fails_on_rejection(
    status: int, reason: str, message: str, passes: bool
) -> None:
    class Failing(Server):
        failures = 1

        async def create(self, path: str, body: Object) -> Object:
            del path, body
            if self.failures:
                self.failures -= 1
                raise ApiError(status, reason, message)
            assert self.pod is not None
            return self.pod

        async def get(self, path: str) -> Object:
            raise ApiError(status, reason, message)

    server, hears = Failing(), Hearing()
    assert server.pod is not None
    watched = cast("Watched[PodSeen]", Deaf())
    await Orders(cast("Api", server), PATH, watched, cast("StartListener", hears)).create(server.one, server.pod)
    assert hears.heard == (["waits", "made"] if passes else ["refused"])


def test_pause_before_a_retry_grows_from_200_ms_to_10_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_, "RETRY_S", RETRY_S)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)

    async def rest() -> list[float]:
        pauses, clock = Pauses(), asyncio.get_running_loop().time
        ends_s = [clock()]
        for _ in range(12):
            await pauses.rest()
            ends_s.append(clock())
        return [after - before for before, after in pairwise(ends_s)]

    paused_s = virtual_loop.run(rest())
    assert paused_s[:4] == pytest.approx([0.2, 0.3, 0.45, 0.675])
    assert paused_s[-2:] == pytest.approx([10.0, 10.0])


async def test_pod_delete_is_retried_after_an_exception_and_reports_it_once() -> None:
    class Odd(Server):
        odd = 2

        async def delete(self, path: str, *, uid: str, version: str | None, grace_s: int | None) -> Object:
            self.odd -= 1
            if self.odd >= 0:
                raise KeyError("metadata")
            return await super().delete(path, uid=uid, version=version, grace_s=grace_s)

    server, hears = Odd(), Hearing()
    watched = cast("Watched[PodSeen]", Deaf())
    await Orders(cast("Api", server), PATH, watched, cast("StartListener", hears)).delete(server.one, 5.0)
    assert (server.pod, hears.heard) == (None, ["KeyError"])


# --- takeover of objects without the label of an installation ---------------------------------------------------------

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims"
OWNER = Ownership("team-a-11111111")
OURS = {"app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/intent": "i"}


class Unlabelled:
    """Pods and ResourceClaims by path. `refuses`: the errors of requests, by path."""

    def __init__(self) -> None:
        self.refuses: dict[str, ApiError] = {}
        self.patched: list[str] = []
        self.labels: dict[str, dict[str, str]] = {
            f"{path}/{name}": labels
            for path in (PATH, CLAIMS)
            for name, labels in (
                ("earlier", OURS), ("earlier-2", OURS), ("ours", OURS | OWNER.labels),
                ("theirs", OURS | {INSTALLATION: "team-b-22222222"}), ("foreign", {"app": "x"}),
            )
        }  # fmt: skip

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[ListPage]:
        if path in self.refuses:
            raise self.refuses[path]
        terms = query["labelSelector"].split(",")
        for name in [one for one, labels in self.labels.items() if one.startswith(f"{path}/") and fits(labels, terms)]:
            metadata = {"name": name.rpartition("/")[2], "uid": f"uid of {name}", "resourceVersion": "7"}
            yield ListPage("1", "", [{"metadata": metadata}], [])

    async def patch(self, path: str, body: Object) -> Object:
        self.patched.append(path)
        if path in self.refuses:
            raise self.refuses[path]
        metadata = body["metadata"]
        assert (metadata["uid"], metadata["resourceVersion"]) == (f"uid of {path}", "7"), "only this very version"
        self.labels[path] = self.labels[path] | metadata["labels"]
        return body


def fits(labels: Mapping[str, str], terms: list[str]) -> bool:
    """Return whether labels match a selector of `KEY=VALUE`, `KEY` and `!KEY`."""
    return all(
        term[1:] not in labels if term[0] == "!"
        else labels.get(term.partition("=")[0]) == (term.partition("=")[2] or labels.get(term, ""))
        for term in terms
    )  # fmt: skip


def labelling(server: Unlabelled, owner: Ownership = OWNER) -> Orders:
    deaf = Deaf()
    return Orders(cast("Api", server), PATH, cast("Watched[PodSeen]", deaf), cast("StartListener", deaf), owner=owner)


def installations(server: Unlabelled) -> dict[str, str]:
    """By object: the installation in its label, if any."""
    return {name: labels[INSTALLATION] for name, labels in server.labels.items() if INSTALLATION in labels}


async def test_new_leader_labels_unlabelled_pods_and_claims_once() -> None:
    server = Unlabelled()
    await labelling(server).label()
    earlier = [f"{path}/{name}" for path in (PATH, CLAIMS) for name in ("earlier", "earlier-2")]
    assert server.patched == earlier
    owned = [*earlier, f"{PATH}/ours", f"{CLAIMS}/ours"]
    others = dict.fromkeys((f"{PATH}/theirs", f"{CLAIMS}/theirs"), "team-b-22222222")
    assert installations(server) == dict.fromkeys(owned, OWNER.installation) | others
    await labelling(server).label()
    await labelling(server, Ownership("team-b-22222222")).label()
    assert server.patched == earlier, "neither again, nor by the second installation"


async def test_leader_without_an_installation_labels_nothing() -> None:
    server = Unlabelled()
    await labelling(server, ANYBODYS).label()
    assert server.patched == []


@pytest.mark.parametrize(("path", "name"), [(PATH, "earlier"), (CLAIMS, "earlier")])
async def test_object_whose_label_is_refused_is_skipped_and_logged(
    path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An admission policy may forbid the change of one object; the others are labelled."""
    server = Unlabelled()
    server.refuses = {f"{path}/{name}": ApiError(403, "Forbidden", "policy frozen denied the request")}
    with caplog.at_level(logging.WARNING):
        await labelling(server).label()
    assert len(server.patched) == 4
    assert f"{path}/{name}" not in installations(server)
    assert len(installations(server)) == 7
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"event=label_refused object={path}/{name} error=")
    assert "policy frozen denied the request" in message


async def test_object_deleted_before_it_is_labelled_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Unlabelled()
    server.refuses = {f"{PATH}/earlier": ApiError(404, "NotFound", "")}
    await labelling(server).label()
    assert (len(server.patched), caplog.records) == (4, [])


@pytest.mark.parametrize(
    ("path", "status", "reason", "raised"),
    [
        (f"{CLAIMS}/earlier", 409, "Conflict", True),
        (f"{CLAIMS}/earlier", 503, "ServiceUnavailable", True),
        (PATH, 403, "Forbidden", True),
        (CLAIMS, 500, "InternalError", True),
        (CLAIMS, 403, "Forbidden", False),
        (CLAIMS, 404, "NotFound", False),
    ],
)
async def test_labelling_ignores_only_a_forbidden_or_missing_claim_api(
    path: str, status: int, reason: str, raised: bool
) -> None:
    """The driver retries a takeover that fails."""
    server = Unlabelled()
    server.refuses = {path: ApiError(status, reason, "")}
    if raised:
        with pytest.raises(ApiError) as error:
            await labelling(server).label()
        assert error.value.status == status
        server.refuses.clear()
        await labelling(server).label()
        assert f"{CLAIMS}/earlier" in installations(server)
    else:
        await labelling(server).label()
        assert installations(server)[f"{PATH}/earlier"] == OWNER.installation
        assert f"{CLAIMS}/earlier" not in installations(server)
