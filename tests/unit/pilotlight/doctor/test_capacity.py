"""The capacity checks of `pilotlight doctor`: each provider setting, its finding and its fix."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autoscaler.documents.parse import parse_documents
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.spec.settings import Settings
from pilotlight.doctor.capacity import APIS, NO_MOST, Place, check_capacity
from pilotlight.doctor.finding import Finding
from tests.support.fakes.kubernetes.karpenter import node_pool
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.fakes.kubernetes.kueue import NEWEST
from tests.support.fakes.redfish import PASSWORD, USER, FakeFabric
from tests.support.net import certificates

HEAD = "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n"
NODES = """
nodes:
  - selector: {example.com/group: g4}
    device: {model: NVIDIA-L4, memory: 24Gi, count: 1}
"""


def settings(entry: str, nodes: str = NODES) -> Settings:
    return parse_documents([("settings.yaml", f"{HEAD}{nodes}\ncapacity:\n  - name: rack\n{entry}")], {}).settings


class Server(PlayedServer):
    """A fake API server. `refuse_at`: paths that contain this text cannot be read."""

    refuse_at = "/nothing"

    async def find(self, path: str) -> Object | None:
        """Like the method of the base class, with 403 for `refuse_at`."""
        if self.refuse_at in path:
            raise AnswerError(403, "Forbidden", "User x cannot get")
        return await super().find(path)


def cluster(*kinds: str) -> Server:
    """An API server with the APIs that these kinds need."""
    played = Server(lambda: 0.0)
    for api in (APIS[kind] for kind in kinds):
        names: list[Object] = [{"name": one} for one in api.resources]
        played.objects[f"/apis/{api.group}"] = {"versions": [{"version": api.versions[0]}]}
        played.objects[f"/apis/{api.group}/{api.versions[0]}"] = {"resources": names}
    return played


def found(played: PlayedServer, given: Settings, secrets: Path = Path("/nowhere")) -> Finding:
    (one,) = asyncio.run(check_capacity(Place(played, given, "engines", "home", secrets)))
    assert one.check == "capacity rack"
    assert not played.writes, "nothing is changed"
    return one


KARPENTER = "    karpenter: {nodePool: g4-nodepool}"
QUEUE = "    kueue: {localQueue: gpus}"
GROUP = "    clusterAutoscaler: {nodeLabels: {example.com/group: g4}}"
DWS = "    provisioningRequest: {class: %s, selector: {example.com/group: g4}}"
CRO_KINDS = "composabilityrequests, composableresources"
CRO = "    cro: {model: A100}"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (KARPENTER, "Karpenter: nodepools, nodeclaims of karpenter.sh/v1 are not served"),
        (QUEUE, "Kueue: localqueues, workloads of kueue.x-k8s.io/v1beta2 are not served"),
        (DWS % "x.example", "ProvisioningRequest: provisioningrequests of autoscaling.x-k8s.io/v1 are not served"),
        (CRO, f"composable resources (CRO): {CRO_KINDS} of cro.hpsys.ibm.ie.com/v1alpha1 are not served"),
    ],
)
def test_missing_provider_crds_are_a_blocker(entry: str, message: str) -> None:
    one = found(cluster(), settings(entry))
    assert (one.grade, one.says) == ("blocker", message)
    assert "CustomResourceDefinitions" in one.fix
    assert "`capacity[]." in one.fix


def test_crd_missing_from_a_served_api_group_is_named_in_the_finding() -> None:
    played = cluster("provisioningRequest")
    played.objects["/apis/autoscaling.x-k8s.io/v1"] = {"resources": [{"name": "capacitybuffers"}]}
    assert found(played, settings(DWS % "x.example")).says.startswith("ProvisioningRequest: provisioningrequests of")


def test_doctor_finding_names_why_a_karpenter_node_pool_is_unusable() -> None:
    played, path = cluster("karpenter"), "/apis/karpenter.sh/v1/nodepools/g4-nodepool"
    missing = found(played, settings(KARPENTER))
    assert (missing.grade, missing.says) == ("blocker", "NodePool g4-nodepool does not exist: fix Settings `capacity`")
    assert "capacity[].karpenter.nodePool" in missing.fix
    played.objects[path] = node_pool()
    bare = found(played, settings(KARPENTER, "nodes: []"))
    assert (
        bare.says == "the devices of NodePool g4-nodepool are unknown: add an entry for its nodes to Settings `nodes`"
    )
    played.objects[path]["status"] = {"conditions": [{"type": "Ready", "status": "False", "message": "no NodeClass"}]}
    assert found(played, settings(KARPENTER)).says == "NodePool g4-nodepool is not ready: no NodeClass"


def test_ready_karpenter_node_pool_with_known_nodes_passes_the_check() -> None:
    played = cluster("karpenter")
    pool = node_pool()
    pool["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {})["example.com/group"] = "g4"
    played.objects["/apis/karpenter.sh/v1/nodepools/g4-nodepool"] = pool
    one = found(played, settings(KARPENTER))
    assert one.grade == "ok"
    assert "g4" in one.says


def test_missing_or_stopped_local_queue_is_a_blocker() -> None:
    played, path = cluster("kueue"), f"/apis/{NEWEST}/namespaces/engines/localqueues/gpus"
    missing = found(played, settings(QUEUE))
    assert (missing.grade, missing.says) == ("blocker", "LocalQueue gpus does not exist in namespace engines")
    played.objects[path] = {"metadata": {"name": "gpus"}, "spec": {"stopPolicy": "Hold"}}
    stopped = found(played, settings(QUEUE))
    assert (stopped.grade, stopped.says) == ("blocker", "its LocalQueue is stopped (Hold)")
    assert "kubectl describe localqueue gpus -n engines" in stopped.fix
    played.objects[path]["spec"] = {}
    assert found(played, settings(QUEUE)).grade == "ok"


def test_missing_priority_class_or_node_entry_of_a_node_group_is_reported() -> None:
    played = cluster()
    missing = found(played, settings(GROUP))
    assert "PriorityClass pilotlight-placeholder does not exist" in missing.says
    played.objects["/apis/scheduling.k8s.io/v1/priorityclasses/pilotlight-placeholder"] = {"metadata": {"name": "x"}}
    assert found(played, settings(GROUP)).grade == "ok"
    unread = cluster()
    unread.refuse_at = "/priorityclasses/"
    assert found(unread, settings(GROUP)).grade == "ok", "who may not read it, as an autoscaler, is not troubled"
    assert "add its nodeLabels to Settings `nodes`" in found(played, settings(GROUP, "nodes: []")).says


def test_unknown_provisioning_class_is_a_warning() -> None:
    played = cluster("provisioningRequest")
    known = found(played, settings(DWS % "queued-provisioning.gke.io"))
    assert known.grade == "ok"
    other = found(played, settings(DWS % "flex.example.com"))
    assert (other.grade, other.says.endswith("unknown provisioning class flex.example.com")) == (
        "warning", True
    )  # fmt: skip
    assert "queued-provisioning.gke.io" in other.fix


@pytest.mark.parametrize(
    ("kind", "entry", "fix"),
    [
        ("provisioningRequest", DWS % "queued-provisioning.gke.io", "that matches `provisioningRequest.selector`"),
        ("kueue", QUEUE, "add one with its nodes' `selector` and `device`"),
    ],
)
def test_queue_without_node_description_in_settings_is_a_blocker(kind: str, entry: str, fix: str) -> None:
    played = cluster(kind)
    played.objects[f"/apis/{NEWEST}/namespaces/engines/localqueues/gpus"] = {"metadata": {"name": "gpus"}, "spec": {}}
    assert found(played, settings(entry)).grade == "ok"
    for nodes in ("nodes: []", NODES + "    slicing: {kind: mig}\n"):
        one = found(played, settings(entry, nodes))
        assert one.grade == "blocker"
        assert one.says.startswith("no entry of Settings `nodes` describes its devices")
        assert one.says.endswith(fix)


def test_cro_check_lists_nodes_whose_settings_allow_more_devices() -> None:
    played = cluster("cro")
    played.objects["/api/v1/nodes/w1"] = node("w1", "g4")
    assert found(played, settings(CRO)).says == NO_MOST
    more = NODES.replace("    device:", "    devicesMax: 4\n    device:")
    one = found(played, settings(CRO.replace("A100", "NVIDIA-L4"), more))
    assert (one.grade, one.says) == ("ok", "the CustomResourceDefinitions are installed; GPUs can be attached to w1")
    assert found(played, settings(CRO.replace("A100", "A100-PCIE-40GB"), more)) == one, "its name contains its memory"


def test_unknown_memory_of_a_cro_gpu_model_is_a_warning() -> None:
    played = cluster("cro")
    played.objects["/api/v1/nodes/w1"] = node("w1", "g4")
    one = found(played, settings(CRO, NODES.replace("    device:", "    devicesMax: 4\n    device:")))
    assert one.grade == "warning"
    assert "unknown GPU memory of A100" in one.says
    assert "Settings `nodes`, for example `device: {model: A100, memory: " in one.fix


def node(name: str, group: str) -> Object:
    labels = {"example.com/group": group}
    conditions = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"conditions": conditions}}


def test_forbidden_api_read_is_a_warning() -> None:
    played = cluster("kueue")
    played.refused["GET"] = AnswerError(403, "Forbidden", "User x cannot get")
    one = found(played, settings(QUEUE))
    assert (one.grade, one.says) == ("warning", "the check failed: Forbidden: User x cannot get")


# --- Redfish ----------------------------------------------------------------------------------------------------------


def secret(**keys: str) -> Object:
    return {"metadata": {"name": "fabric"}, "data": {k: base64.b64encode(v.encode()).decode() for k, v in keys.items()}}


def authority() -> str:
    return certificates.pem(certificates.OURS)


def redfish(
    data: Object | None, *, url: str = "", systems: Sequence[str] = ("1",), secrets: Path = Path("/nowhere"),
    **fields: Any,
) -> tuple[Finding, FakeFabric]:  # fmt: skip
    """The finding about a fake fabric or another `url`. It must contain neither the address nor the password."""

    async def scenario() -> tuple[Finding, FakeFabric]:
        fabric = FakeFabric(**fields)
        async with fabric.serving(certificates.sides().server):
            paths = ", ".join(f"w{one}: /redfish/v1/Systems/{one}" for one in systems)
            entry = f"    redfish: {{url: '{url or fabric.url}', secretRef: fabric, systems: {{{paths}}}}}"
            played = PlayedServer(lambda: 0.0)
            if data is not None:
                played.objects["/api/v1/namespaces/home/secrets/fabric"] = data
            (one,) = await check_capacity(Place(played, settings(entry), "engines", "home", secrets))
            assert not fabric.sessions, "it leaves no session behind"
            assert not played.writes
            assert {asked.method for asked in fabric.asked} <= {"GET", "POST", "DELETE"}, "nothing is changed"
        for never in (fabric.url, fabric.url.rpartition("/")[2], PASSWORD, "127.0.0.1"):
            assert never not in f"{one.says} {one.fix}"
        return one, fabric

    return asyncio.run(scenario())


@pytest.mark.standard
def test_redfish_login_accepts_secret_from_api_server_or_mount(tmp_path: Path) -> None:
    one, _ = redfish(secret(**{"username": USER, "password": PASSWORD, "ca.crt": authority()}))
    message = (
        "the Redfish service accepts the user of Secret fabric of namespace home; it has 3 GPUs, "
        "and the systems of all configured nodes (1)"
    )
    assert (one.grade, one.says) == ("ok", message)
    (tmp_path / "fabric").mkdir()
    for key, text in (("username", USER), ("password", PASSWORD), ("ca.crt", authority())):
        (tmp_path / "fabric" / key).write_text(f"{text}\n")
    assert redfish(None, secrets=tmp_path)[0] == one


@pytest.mark.standard
def test_missing_or_incomplete_redfish_secret_is_a_blocker() -> None:
    for data in (None, secret(**{"username": USER, "ca.crt": authority()})):
        one, fabric = redfish(data)
        assert (one.grade, one.says) == ("blocker", "Secret fabric does not exist, or lacks username or password")
        assert "Secret fabric of namespace home: username, password" in one.fix
        assert not fabric.asked


@pytest.mark.standard
def test_rejected_redfish_password_is_a_blocker() -> None:
    one, _ = redfish(secret(**{"username": USER, "password": "another", "ca.crt": authority()}))
    assert one.grade == "blocker"
    assert one.says.startswith("the Redfish service rejects the login: the fabric returned status 401")
    assert "another" not in one.says + one.fix


@pytest.mark.standard
def test_finding_for_a_wrong_or_invalid_redfish_ca_names_ca_crt() -> None:
    other = certificates.pem("somebody else")
    one, _ = redfish(secret(**{"username": USER, "password": PASSWORD, "ca.crt": other}))
    assert "ClientConnectorCertificateError" in one.says
    assert "ca.crt of Secret fabric" in one.fix
    none, _ = redfish(secret(**{"username": USER, "password": PASSWORD, "ca.crt": "x"}))
    message = "ca.crt of Secret fabric contains no valid PEM certificate: add the CA certificate, or omit it "
    assert (none.grade, none.says) == ("blocker", f"{message}to trust the CAs of the system")
    raw = secret(username=USER, password=PASSWORD)
    raw["data"]["ca.crt"] = base64.b64encode(b"# Autorit\xe9\n").decode()
    assert redfish(raw)[0] == none, "one that is there and is no text is not one that is not there"


@pytest.mark.standard
def test_redfish_ca_certificate_with_comments_passes_the_check() -> None:
    commented = f"# Autorité de la salle\n{authority()}"
    one, _ = redfish(secret(**{"username": USER, "password": PASSWORD, "ca.crt": commented}))
    assert one.grade == "ok"


@pytest.mark.standard
def test_unreachable_redfish_is_a_warning_missing_composition_a_blocker() -> None:
    good = secret(**{"username": USER, "password": PASSWORD, "ca.crt": authority()})
    away, _ = redfish(good, url="https://127.0.0.1:1")
    assert away.grade == "warning"
    assert away.says == "the Redfish service cannot be reached from this machine (ClientConnectorError)"
    other, _ = redfish(good, raw=b"{}", login="none")
    assert other.grade == "blocker"
    assert "CompositionService" in other.says


@pytest.mark.standard
def test_unknown_redfish_system_is_a_blocker_that_names_the_node() -> None:
    one, _ = redfish(secret(**{"username": USER, "password": PASSWORD, "ca.crt": authority()}), systems=("1", "7"))
    assert one.grade == "blocker"
    assert "the configured system of w7 does not exist" in one.says
    assert "capacity[].redfish.systems" in one.fix
