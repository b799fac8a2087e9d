"""Objects that cannot be decoded, on a real API server: the autoscaler reports them and serves everything else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from autoscaler.kubernetes.api import Api, ApiError, Object
from pilotlight.doctor.cluster_checks import Scene, objects
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.waiting import WITHIN_S, until

LEVELS = 1_100
"""The API server accepts this depth in fields without a schema; msgspec raises RecursionError."""
KINDS = ("Model", "ResourceClaim")
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"


def deep_model(name: str) -> Object:
    """A Model with a nested affinity."""
    nested = msgspec.Raw(b'{"a":' * LEVELS + b"1" + b"}" * LEVELS)
    return custom_resources.model(name, pod={"affinity": {"podAffinity": nested}})


def deep_claim(name: str) -> Object:
    """A ResourceClaim with nested driver parameters. Any user may create one."""
    nested = msgspec.Raw(b'{"a":' + b"[" * LEVELS + b"]" * LEVELS + b"}")
    devices = {
        "requests": [{"name": "r", "exactly": {"deviceClassName": "any"}}],
        "config": [{"opaque": {"driver": "x.example", "parameters": nested}}],
    }
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": devices},
    }  # fmt: skip


@contextlib.asynccontextmanager
async def definition_of_an_older_release(api: Api) -> AsyncIterator[None]:
    """The current definition drops nested fields of a Model; a cluster may have an older one."""
    await custom_resources.install_models_of_an_older_release(api)
    try:
        yield
    finally:
        await custom_resources.install_models_of_this_release(api)


async def until_events(api: Api, namespace: str, expected: set[tuple[str, str]]) -> None:
    """Waits until an Event names each (kind, name). Fails if there is a second Event about an object."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            items = (await api.get(f"/api/v1/namespaces/{namespace}/events"))["items"]
            found = [(one["involvedObject"], one["count"]) for one in items if one["reason"] == "Unreadable"]
            assert len(found) <= len(expected), found
            if {(of["kind"], of["name"]) for of, _ in found} == expected:
                assert {count for _, count in found} == {1}
                assert all(of["uid"] and of["apiVersion"] for of, _ in found)
                return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def poisoned(api: Api, namespace: str, name: str) -> AsyncIterator[None]:
    """Creates one of each and deletes them at the end."""
    objects = {custom_resources.models(namespace): deep_model(name), CLAIMS.format(namespace): deep_claim(name)}
    for path, body in objects.items():
        with pytest.raises(ApiError, match="nested more than 100 levels deep"):  # created; the response has the object
            await api.create(path, body)
    try:
        yield
    finally:
        for path in objects:
            with contextlib.suppress(ApiError):
                await api.delete(f"{path}/{name}")


@pytest.mark.standard
async def test_deeply_nested_objects_are_reported_and_valid_models_still_serve(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    await custom_resources.install(api)
    # Another leadership, after a pause of the autoscaler, would report each object again.
    house.write(*(model(name, idleSeconds=600) for name in ("ada", "bob")), leaseSeconds=60)
    log = tmp_path / "autoscaler.log"

    def named(kind: str, name: str) -> bool:
        return f"event=unreadable_object kind={kind} namespace={namespace} name={name} " in log.read_text()

    async with (
        definition_of_an_older_release(api),
        poisoned(api, namespace, "before"),
        house.running() as one,
        asyncio.timeout(180),
    ):
        assert (await one.call("ada"))[0] == 200
        await until("both are named", lambda: all(named(kind, "before") for kind in KINDS))
        async with poisoned(api, namespace, "after"):
            await until("both are named", lambda: all(named(kind, "after") for kind in KINDS))
            async with one.session.get(f"http://127.0.0.1:{one.ops}/metrics") as answer:
                metrics = await answer.text()
            for kind in KINDS:
                assert f'pilotlight_unreadable_objects{{kind="{kind}"}} 2.0' in metrics
            assert (await one.call("bob"))[0] == 200
            await until_events(api, namespace, {(kind, name) for kind in KINDS for name in ("before", "after")})
        assert one.autoscaler.returncode is None
        found = await objects(api, Scene(engines=namespace, home=namespace, scope="cluster"))
        assert {finding.says for finding in found if namespace in finding.says} == {
            f"{kind} {namespace}/before is skipped, its values are nested more than 100 levels deep" for kind in KINDS
        }
        assert log.read_text().count("event=unreadable_object kind=Model") == 2, "once for each object"
    assert node.name
