"""Cluster objects of a Redfish fabric: Secret, ConfigMap, nodes; and the provider built from the Settings entry."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from autoscaler.providers.provider import RefusedError
from autoscaler.providers.redfish.client import Login
from autoscaler.providers.redfish.inventory import StoredMarks
from autoscaler.providers.redfish.kubernetes_objects import (
    NOTES,
    ConfigMapNotes,
    OpenSites,
    RedfishCredentials,
    RedfishCredentialsError,
)
from autoscaler.providers.redfish.provider import RedfishFabric
from autoscaler.spec.capacity import ProviderSettings, Redfish
from autoscaler.spec.installation_ownership import Ownership
from autoscaler.spec.settings import Settings
from autoscaler.state.world import World
from pilotlight.models import capacity_providers
from pilotlight.models.capacity_providers import Around
from tests.contracts.provider import order, release
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.fakes.redfish import A100, PASSWORD, USER, FakeFabric
from tests.support.harness.async_tests import run_with
from tests.support.harness.providers.redfish_rig import TURN_S
from tests.support.net import certificates


def mounted(folder: Path, **keys: str) -> Path:
    """Secret `fabric` as a kubelet mounts it."""
    (folder / "fabric").mkdir(parents=True, exist_ok=True)
    for key, text in keys.items():
        (folder / "fabric" / key.replace("_", ".")).write_text(text)
    return folder


def node(name: str, *, ready: bool = True) -> dict[str, object]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name, "resourceVersion": "1"}, "status": {"conditions": conditions}}


@run_with(asyncio.run)
async def test_login_is_reread_from_the_secret_and_its_repr_hides_the_password(tmp_path: Path) -> None:
    access = RedfishCredentials("fabric", None, mounted(tmp_path, username=USER, password=f"{PASSWORD}\n"))
    assert await access.login() == Login(USER, PASSWORD)
    mounted(tmp_path, password="another")
    assert (await access.login() or Login("", "")).password == "another"
    assert PASSWORD not in repr(Login(USER, PASSWORD))
    assert await RedfishCredentials(None, None, tmp_path).login() is None


def test_incomplete_secret_is_named_in_the_error(tmp_path: Path) -> None:
    no_text = mounted(tmp_path / "other", username="a")
    (no_text / "fabric" / "password").write_bytes(b"\xe9")
    for folder in (tmp_path, mounted(tmp_path, username="a"), no_text):
        with pytest.raises(RedfishCredentialsError) as caught:
            asyncio.run(RedfishCredentials("fabric", None, folder).login())
        assert str(caught.value) == "Secret fabric does not exist, or lacks username or password"


@pytest.mark.standard
@run_with(asyncio.run)
async def test_provider_error_names_the_missing_secret(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, FakeFabric().serving() as fabric:
        around = Around(PlayedServer(lambda: 0.0), lambda: World(epoch=1), "engines", "home", stack, secrets=tmp_path)
        redfish = Redfish(url=fabric.url, systems={"w1": fabric.path("1")}, secret_ref="fabric")
        provider = capacity_providers.build_redfish_provider(ProviderSettings(name="rack", redfish=redfish), around)
        for asked in (provider.list(), provider.offers()):
            with pytest.raises(RefusedError, match=r"^Secret fabric does not exist, or lacks username"):
                await asked


@run_with(asyncio.run)
async def test_ca_of_a_secret_or_file_replaces_the_ca_of_the_system(tmp_path: Path) -> None:
    folder = mounted(tmp_path, ca_crt=certificates.pem(certificates.OURS))
    path = certificates.write_authority(tmp_path, certificates.OURS)
    for access in (RedfishCredentials("fabric", None, folder), RedfishCredentials(None, str(path), folder)):
        found = await access.tls()
        assert len(found.get_ca_certs()) == 1
        assert (found.verify_mode, found.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len((await RedfishCredentials("other", None, folder).tls()).get_ca_certs()) != 1, "the system's"
    mounted(tmp_path, ca_crt="x")
    for wrong in (RedfishCredentials("fabric", None, folder), RedfishCredentials(None, str(tmp_path / "none"), folder)):
        with pytest.raises(RedfishCredentialsError):
            await wrong.tls()


@pytest.mark.parametrize(
    "content", [b"", b"\n", b" \n\n", b"# none yet\n", "é\n".encode(), b"\xe9\n"],
    ids=["empty", "a line's end", "blank", "a comment", "another language's", "no text"],
)  # fmt: skip
def test_ca_without_certificates_is_rejected(tmp_path: Path, content: bytes) -> None:
    folder, path = mounted(tmp_path), tmp_path / "ca.pem"
    for file in (path, folder / "fabric" / "ca.crt"):
        file.write_bytes(content)
    for access in (RedfishCredentials("fabric", None, folder), RedfishCredentials(None, str(path), folder)):
        with pytest.raises(RedfishCredentialsError, match=r"contains no valid PEM certificate: add "):
            asyncio.run(access.tls())


def test_ca_with_a_non_ascii_comment_is_accepted(tmp_path: Path) -> None:
    folder = mounted(tmp_path, ca_crt=f"# Autorité de la salle\n{certificates.pem(certificates.OURS)}")
    assert len(asyncio.run(RedfishCredentials("fabric", None, folder).tls()).get_ca_certs()) == 1


@run_with(asyncio.run)
async def test_configmap_write_of_an_outdated_version_fails() -> None:
    played = PlayedServer(lambda: 0.0)
    mine, others = ConfigMapNotes(played, "home", "pod2"), ConfigMapNotes(played, "home", "pod3")
    empty = await mine.read()
    assert await mine.write(StoredMarks({"/redfish/v1/b": "pilotlight name=a b"}, empty.version))
    assert not await others.write(StoredMarks({"/x": "y"}, empty.version)), "another client created it meanwhile"
    first = await others.read()
    assert not first.marks
    assert await others.write(StoredMarks({"/x": "y z"}, first.version))
    assert not await mine.write(StoredMarks({}, first.version))
    now = await mine.read()
    assert now.marks == {"/redfish/v1/b": "pilotlight name=a b"}
    assert await mine.write(StoredMarks({}, now.version))
    assert played.objects[f"/api/v1/namespaces/home/configmaps/{NOTES}"]["data"] == {"pod3": "/x y z\n"}


@run_with(asyncio.run)
async def test_two_installations_keep_separate_configmap_entries() -> None:
    played = PlayedServer(lambda: 0.0)
    earlier = ConfigMapNotes(played, "home", "pod2")
    assert await earlier.write(StoredMarks({"/a": "x"}, (await earlier.read()).version))
    played.owner = Ownership("home-1")
    mine = ConfigMapNotes(played, "home", "pod2")
    found = await mine.read()
    assert found.marks == {"/a": "x"}
    assert await mine.write(found)
    played.owner = Ownership("home-2")
    others = ConfigMapNotes(played, "home", "pod2")
    assert not (await others.read()).marks
    assert (await mine.read()).marks == {"/a": "x"}


@run_with(asyncio.run)
async def test_device_can_be_attached_only_to_a_ready_node() -> None:
    played = PlayedServer(lambda: 0.0)
    for one in (node("w1"), node("w2", ready=False), node("w3")):
        played.objects[f"/api/v1/nodes/{one['metadata']['name']}"] = one  # type: ignore[index]  # as it is made above
    found = OpenSites(played, Settings)
    assert set(await found(("w1", "w2"))) == {"w1"}
    assert set(await found(("w3",))) == {"w3"}
    assert not await found(("w9",))


@pytest.mark.standard
@pytest.mark.parametrize("keeps", [True, False], ids=["the service keeps names", "the ConfigMap does"])
@run_with(asyncio.run)
async def test_redfish_provider_from_settings_attaches_and_releases_a_device(tmp_path: Path, *, keeps: bool) -> None:
    played = PlayedServer(lambda: 0.0)
    secrets = mounted(tmp_path, username=USER, password=PASSWORD, ca_crt=certificates.pem(certificates.OURS))
    played.objects["/api/v1/nodes/w1"] = node("w1")
    async with AsyncExitStack() as stack, FakeFabric(keeps=keeps).serving(certificates.sides().server) as fabric:
        around = Around(played, lambda: World(epoch=1), "engines", "home", stack, secrets=secrets)
        redfish = Redfish(url=fabric.url, systems={"w1": fabric.path("1")}, secret_ref="fabric")
        provider = capacity_providers.build_redfish_provider(ProviderSettings(name="rack", redfish=redfish), around)
        assert isinstance(provider, RedfishFabric)
        attending = asyncio.create_task(provider.attend(lambda: None))
        (offer,) = [one for one in await provider.offers() if one.product == A100[0]]
        await provider.acquire(order(offer))
        while [one.phase for one in await provider.list()] != ["here"]:
            await asyncio.sleep(TURN_S)
        (here,) = await provider.list()
        assert here.device_ids[0].startswith("w1/GPU-")
        assert here.alone, "no slice identifies the device"
        await provider.release(release(order(offer)))
        while await provider.list():
            await asyncio.sleep(TURN_S)
        assert not fabric.attached("1")
        attending.cancel()
