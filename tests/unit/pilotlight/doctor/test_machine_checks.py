"""`pilotlight doctor`: the findings of each check, and their output."""

from __future__ import annotations

import json
import resource
import socket
import sys
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from autoscaler.drivers.local.nvml import NvmlError, NvmlGpu
from autoscaler.drivers.local.state_directory import StateDirectory
from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.rbac import list_required_rights
from autoscaler.kubernetes.safe_decoding import ListPage
from autoscaler.kubernetes.unreadable_objects import Unreadable
from autoscaler.spec import installation_ownership
from pilotlight.cli.main import cli
from pilotlight.doctor import cluster_checks, gpu_operator, machine_checks, nodes
from pilotlight.doctor.finding import Finding
from pilotlight.models.document_loading import load_settings
from pilotlight.net.listen import Address
from tests.support.fakes.nvml import FakeNvml

NONE: tuple[str, ...] = ()


def grades(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.grade for one in findings}


# --- one machine ----------------------------------------------------------------------------------------------------


def test_driver_check_lists_gpus_and_reports_driver_faults(tmp_path: Path) -> None:
    nvml = FakeNvml()
    assert machine_checks.check_driver(lambda: nvml, NONE).says == "2 GPUs: NVIDIA H200 140Gi, NVIDIA H200 140Gi"
    nvml.found = (NvmlGpu("GPU-a", "H200", 1, healthy=False),)
    assert machine_checks.check_driver(lambda: nvml, NONE).says == "unhealthy GPUs: GPU-a"
    sign = tmp_path / "version"
    assert machine_checks.check_driver(lambda: None, (str(sign),)).grade == "info"
    sign.touch()
    assert machine_checks.check_driver(lambda: None, (str(sign),)).grade == "warning"

    def fails() -> None:
        raise NvmlError("driver/library version mismatch")

    assert "version mismatch" in machine_checks.check_driver(fails, NONE).says


def test_doctor_reports_a_blocker_if_no_engine_is_installed() -> None:
    assert machine_checks.check_engines({"vllm": "/usr/bin/vllm"}) == Finding("engines", "ok", "vllm")
    none = machine_checks.check_engines({})
    assert (none.grade, "pip install xllamacpp" in none.fix) == ("blocker", True)


@pytest.mark.parametrize(
    ("found", "cpu_only", "grade"),
    [
        ({"xllamacpp": "python"}, True, "warning"),
        ({"xllamacpp": "python"}, False, "ok"),
        ({"xllamacpp": "python", "llama-server": "/x"}, True, "ok"),
        ({}, True, "ok"),
    ],
)
def test_cpu_only_llama_wheel_on_gpu_machine_is_a_warning(found: dict[str, str], cpu_only: bool, grade: str) -> None:
    assert machine_checks.check_llama_on_gpu(found, lambda _: cpu_only).grade == grade


def test_low_open_file_limit_is_a_warning() -> None:
    assert machine_checks.check_open_files(4096).grade == "warning"
    assert machine_checks.check_open_files(resource.RLIM_INFINITY).says == "no limit"
    assert machine_checks.check_open_files(1 << 20).says == "1,048,576"


@pytest.mark.standard
def test_port_in_use_is_a_blocker_unless_pilotlight_serve_is_running() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = Address("127.0.0.1", taken.getsockname()[1])
        found = machine_checks.check_port("inference port", "--listen", address, "")
        assert (found.grade, "--listen" in found.fix) == ("blocker", True)
        assert machine_checks.check_port("inference port", "--listen", address, "17").grade == "info"
    assert machine_checks.check_port("inference port", "--listen", address, "").grade == "ok"


def test_state_directory_check_reports_files_long_paths_and_new_versions(tmp_path: Path) -> None:
    assert machine_checks.check_state_directory(tmp_path / "a" / "b").says.endswith("will be created")
    assert not (tmp_path / "a").exists(), "nothing was made"
    (tmp_path / "file").touch()
    assert machine_checks.check_state_directory(tmp_path / "file").grade == "blocker"
    assert machine_checks.check_state_directory(tmp_path / ("x" * 80)).says.endswith(
        "is too long: Unix sockets in this folder would exceed the limit of 108 bytes"
    )
    StateDirectory.open(tmp_path / "s").close()
    assert machine_checks.check_state_directory(tmp_path / "s").grade == "ok"
    (tmp_path / "s" / "version").write_text("99")
    assert "newer" in machine_checks.check_state_directory(tmp_path / "s").says


@pytest.mark.parametrize(("platform", "grade"), [("linux", "ok"), ("darwin", "info"), ("win32", "blocker")])
def test_doctor_grades_linux_ok_macos_info_and_windows_blocker(platform: str, grade: str) -> None:
    assert machine_checks.check_system(platform).grade == grade


# --- nodes ----------------------------------------------------------------------------------------------------------


def node(name: str = "n1", gpus: int = 1, *, taints: tuple[str, ...] = (), **labels: str) -> dict[str, Any]:
    full = {f"nvidia.com/{key.replace('_', '.', 1).replace('_', '-')}": value for key, value in labels.items()}
    return {
        "metadata": {"name": name, "labels": full},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"allocatable": {"cpu": "4", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}},
    }


LABELS: dict[str, Any] = {"gpu_product": "H100", "gpu_memory": "81559"}


def test_cluster_without_gpus_is_a_warning() -> None:
    (only,) = nodes.check_gpu_nodes([node(gpus=0)], dra=False)
    assert (only.grade, only.says) == ("warning", "none of 1 node offers nvidia.com/gpu")
    (with_dra,) = nodes.check_gpu_nodes([], dra=True)
    assert "DRA" in with_dra.says


def test_nodes_with_labelled_unshared_gpus_pass_all_gpu_checks() -> None:
    found = nodes.check_gpu_nodes([node(gpus=8, taints=("nvidia.com/gpu",), **LABELS), node("cpu", 0)], dra=False)
    assert set(grades(found).values()) == {"ok"}
    assert found[0].says == "8 on 1 node"


def test_node_labels_taints_sharing_and_mps_each_give_one_finding() -> None:
    shared = node("n2", 4, taints=("dedicated", "node.kubernetes.io/unschedulable"), gpu_replicas="4", **LABELS)
    by_mps = node("n3", 10, gpu_sharing_strategy="mps", gpu_replicas="10", **LABELS)
    found = {one.check: one for one in nodes.check_gpu_nodes([node("n1"), shared, by_mps], dra=False)}
    assert found["GPU labels"].says.startswith("n1 lacks the labels nvidia.com/gpu.product and nvidia.com/gpu.memory")
    assert found["taints"].says == "engine pods do not tolerate dedicated:NoSchedule on n2"
    assert "{key: dedicated, operator: Exists}" in found["taints"].fix
    assert found["sharing"].says == "mps on 1 node, time-slicing on 1 node, whole on 1 node"
    assert "does not run on n3" in found["MPS daemon"].says


def test_unknown_gpu_sharing_of_a_node_is_a_warning() -> None:
    hidden = node("n2", 4, gpu_count="1", **LABELS)
    found = {one.check: one for one in nodes.check_gpu_nodes([node("n1", **LABELS), hidden], dra=False)}
    assert found["sharing"].grade == "warning"
    assert "the labels of n2 do not describe how GPUs are shared" in found["sharing"].says
    assert "`slicing` in Settings `nodes`" in found["sharing"].fix


# --- repartitioning -------------------------------------------------------------------------------------------------


def policy(manager: object = None, strategy: str = "mixed") -> dict[str, Any]:
    spec = {"mig": {"strategy": strategy}, "migManager": manager or {"config": {"name": "ours"}, "enabled": True}}
    return {"metadata": {"name": "cluster-policy"}, "spec": spec}


def test_cluster_policy_with_expected_config_map_passes() -> None:
    (only,) = gpu_operator.check_cluster_policies([policy()], "ours")
    assert (only.grade, only.says) == ("ok", "the ClusterPolicy uses ConfigMap ours with strategy mixed")


@pytest.mark.parametrize(
    ("found", "message", "fix"),
    [
        ([], "there is no ClusterPolicy", "install the GPU operator"),
        ([policy({"config": {"name": "theirs"}})], "uses ConfigMap theirs for MIG", '"name":"ours"'),
        ([policy({"enabled": True})], "uses ConfigMap default-mig-parted-config", '"config":{"name":"ours"}'),
        ([policy(strategy="single")], "has MIG strategy single", '"strategy":"mixed"'),
        ([policy({"config": {"name": "ours"}, "enabled": False})], "disables mig-manager", '"enabled":true'),
    ],
)  # fmt: skip
def test_mig_manager_misconfiguration_is_a_warning_with_fix(
    found: list[dict[str, Any]], message: str, fix: str
) -> None:
    (only,) = gpu_operator.check_cluster_policies(found, "ours")
    assert only.grade == "warning"
    assert message in only.says
    assert fix in only.fix


async def test_cluster_policy_is_fetched_only_if_repartitioning_is_enabled() -> None:
    class Paper(Api):
        asked: ClassVar[list[str]] = []

        def __init__(self) -> None:
            """Connects to nothing."""

        def unix_s(self) -> float:
            return 0.0

        async def _ask(self, method: str, path: str, *_: object, **__: object) -> bytes:
            self.asked.append(path)
            raise ApiError(404, "NotFound", "the server could not find the requested resource")

    scene = cluster_checks.Scene(engines="e", home="h", scope="cluster")
    assert await cluster_checks.cutting(Paper(), scene) == []
    assert Paper.asked == []
    found = await cluster_checks.cutting(Paper(), replace(scene, cutting=("gpu-operator", "ours")))
    assert found == [gpu_operator.NO_OPERATOR]
    assert cluster_checks.cutting in cluster_checks.CHECKS


async def test_clusterpolicy_that_cannot_be_decoded_is_reported() -> None:
    class Deep(Api):
        """An API client that lists one damaged ClusterPolicy."""

        def __init__(self) -> None:
            """Connects to nothing."""

        async def pages(self, path: str, query: Any = None) -> Any:
            yield ListPage("1", "", [], [Unreadable("ClusterPolicy", "", "p", "1", "nested")])

    scene = cluster_checks.Scene(engines="e", home="h", scope="cluster", cutting=("gpu-operator", "ours"))
    found = await cluster_checks.cutting(Deep(), scene)
    assert found[0] == Finding("objects", "warning", "ClusterPolicy p is skipped, nested", cluster_checks.SKIPPED_FIX)


class Reported(Api):
    """An API client that lists an object of each kind, and Events about three objects of which two exist."""

    def __init__(self) -> None:
        """Connects to nothing."""

    async def get(self, path: str, **_: object) -> Any:
        return {"preferredVersion": {"groupVersion": f"{path.removeprefix('/apis/')}/v1"}}

    async def pages(self, path: str, query: Any = None) -> Any:
        if path.endswith("/events") and query:
            assert query == {"fieldSelector": "reason=Unreadable"}
            rows = [("Pod", "a", "u1"), ("Node", "n1", "u2"), ("Pod", "gone", "u3")]
            events = [
                {
                    "involvedObject": {"kind": kind, "name": name, "uid": uid, "namespace": "e" * (kind == "Pod")},
                    "message": "Pilotlight skips this object: KeyError: 'x'",
                    "lastTimestamp": "2026-01-01T00:00:00Z",
                }
                for kind, name, uid in rows
            ]
            yield ListPage("1", "", events, [])
        elif path.endswith(("/pods", "/nodes")):
            uids = ["u1", "u7"] if path.endswith("/pods") else ["u2"]
            yield ListPage("1", "", [{"metadata": {"name": "a", "uid": uid}} for uid in uids], [])
        else:
            yield ListPage("1", "", [], [])


async def test_existing_object_that_an_event_reports_as_unreadable_is_listed() -> None:
    found = await cluster_checks.objects(Reported(), cluster_checks.Scene(engines="e", home="h", scope="cluster"))
    why = "is skipped, KeyError: 'x' (Event of 2026-01-01T00:00:00Z)"
    assert {finding.says for finding in found} == {f"Pod e/a {why}", f"Node n1 {why}"}


async def test_lease_that_cannot_be_decoded_is_reported() -> None:
    class Deep(Api):
        """An API client that lists one damaged Lease."""

        def __init__(self) -> None:
            """Connects to nothing."""

        async def pages(self, path: str, query: Any = None) -> Any:
            yield ListPage("1", "", [], [Unreadable("Lease", "b", installation_ownership.CLAIM, "1", "nested")])

    found = await cluster_checks.installations(Deep(), cluster_checks.Scene(engines="e", home="h", scope="cluster"))
    assert found[1:] == [
        Finding(
            "installation", "warning",
            "Lease b/models.pilotlight.dev cannot be decoded, nested: only the installation that already serves the "
            "Models of namespace b continues to serve them; if that installation restarts, their replicas keep "
            "running, but no new replicas start",
            "delete it, and it is created again: kubectl delete lease -n b models.pilotlight.dev",
        ),
    ]  # fmt: skip


class Leases(Api):
    """An API client that lists the Leases for the Models of two namespaces."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def pages(self, path: str, query: Any = None) -> Any:
        self.asked.append(f"{path}?{query['fieldSelector']}")
        holders = {"a": "h/pilotlight", "b": "other/x"}
        items = [{"metadata": {"namespace": of}, "spec": {"holderIdentity": by}} for of, by in holders.items()]
        yield ListPage("1", "", items, [])


async def test_namespaces_served_by_another_installation_are_listed() -> None:
    api, scene = Leases(), cluster_checks.Scene(engines="e", home="h", scope="cluster")
    found = await cluster_checks.installations(api, scene)
    assert found == [
        Finding("installation", "ok", "h/pilotlight"),
        Finding(
            "installation", "info", "installation other/x serves the Models of namespace b",
            "to let this installation serve a Model, set the Model's spec.installation to h/pilotlight",
        ),
    ]  # fmt: skip
    await cluster_checks.installations(api, replace(scene, scope="namespace"))
    leases = "leases?metadata.name=models.pilotlight.dev"
    assert api.asked == [
        f"/apis/coordination.k8s.io/v1/{leases}",
        f"/apis/coordination.k8s.io/v1/namespaces/e/{leases}",
    ]


# --- the command ----------------------------------------------------------------------------------------------------


def run(state: Path, *words: str) -> tuple[int, str]:
    given = ["--state", str(state), "--listen", "127.0.0.1:0", "--ops", "127.0.0.1:0", *words]
    done = CliRunner().invoke(cli, ["doctor", *given], prog_name="pilotlight")
    return done.exit_code, done.output


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an engine and without a GPU."""
    monkeypatch.setattr(machine_checks, "find_installed_programs", lambda: {"vllm": "/usr/bin/vllm"})
    monkeypatch.setattr(machine_checks, "open_nvml", lambda: None)
    monkeypatch.setattr(machine_checks, "SOCKET_CHARACTERS_MAX", 1000)


@pytest.mark.standard
@pytest.mark.usefixtures("short")
def test_doctor_with_a_blocker_exits_with_status_1_and_shows_the_fix(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 0
    StateDirectory.open(tmp_path).close()
    (tmp_path / "version").write_text("99")
    status, shown = run(tmp_path)
    assert status == 1
    assert "blocker  state directory" in shown
    assert "-> choose another with --state" in shown
    assert "1 blocker" in shown.splitlines()[-1]


@pytest.mark.standard
@pytest.mark.usefixtures("short")
def test_doctor_with_json_output_prints_the_findings_as_rows(tmp_path: Path) -> None:
    status, shown = run(tmp_path, "--output", "json")
    rows = json.loads(shown)
    assert status == 0
    assert {"check": "system", "grade": "ok", "says": "Linux", "fix": ""} in rows


def test_account_option_without_namespace_is_a_usage_error(tmp_path: Path) -> None:
    status, shown = run(tmp_path, "--driver", "kubernetes", "--account", "x")
    assert (status, shown) == (2, "pilotlight: --account: expected NAMESPACE:NAME of a service account\n")


def test_missing_kubeconfig_is_a_blocker(tmp_path: Path) -> None:
    status, shown = run(tmp_path, "--driver", "kubernetes", "--kubeconfig", str(tmp_path / "none"))
    assert (status, shown.startswith("blocker  API server")) == (1, True)
    assert f"there is no kubeconfig at {tmp_path / 'none'}\n" in shown


@pytest.mark.parametrize(
    ("variable", "where"), [("", "~/.kube/config"), ("/secret/a:/secret/b", "any path of $KUBECONFIG")]
)
def test_no_default_kubeconfig_prints_one_blocker_and_logs_nothing(
    variable: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", variable)
    status, shown = run(tmp_path, "--driver", "kubernetes")
    first, fix, _ = shown.splitlines()
    assert (status, first) == (1, f"blocker  API server  there is no kubeconfig at {where}")
    assert fix.endswith("-> pass --kubeconfig, or run in a pod")
    assert not caplog.records


def test_missing_kubernetes_extra_suggests_installing_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    _, shown = run(tmp_path, "--driver", "kubernetes")
    assert "the extra `kubernetes` is not installed" in shown
    assert '-> pip install "$(ls dist/pilotlight-*.whl)[kubernetes]"' in shown


# --- permissions ----------------------------------------------------------------------------------------------------


def test_namespace_scope_requires_no_cluster_wide_rights() -> None:
    assert {one.where for one in list_required_rights("namespace")} == {"engines", "home"}
    assert {one.where for one in list_required_rights("cluster")} == {"cluster", "engines", "home"}
    assert {one.where for one in list_required_rights("cluster", ("team-a",), cordons=True)} - {"adopted"} == {
        "cluster",
        "engines",
        "home",
    }
    for changes in ("deployments/scale", "nodes"):
        assert not [one for one in list_required_rights("cluster") if one.resource == changes and "patch" in one.verbs]


def test_rights_required_in_cluster_scope_are_listed_without_duplicates() -> None:
    named = [
        (one.group, one.resource, verb, one.where, one.name)
        for one in list_required_rights("cluster")
        for verb in one.verbs
    ]
    assert len(named) == len(set(named))


KUBECONFIG = """
current-context: x
clusters: [{name: x, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: x, user: {token: eA==}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
"""
CAPACITY = "capacity: [{name: rack, cro: {model: A100}, headroom: 2}]\n"


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n" + CAPACITY, CAPACITY,
        f"image: {{tag: v1}}\nsettings:\n  {CAPACITY}",
    ],
    ids=["a document", "without its head", "values of the chart"],
)  # fmt: skip
def test_settings_load_from_document_bare_mapping_or_chart_values(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "settings.yaml").write_text(text)
    (one,) = load_settings(file).capacity
    assert (one.name, one.headroom) == ("rack", 2)


def test_doctor_checks_publish_rights_only_if_settings_enable_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = list[cluster_checks.Scene]()

    async def seen(_: Api, scene: cluster_checks.Scene) -> list[Finding]:
        scenes.append(scene)
        return [Finding("API server", "ok", "")]

    monkeypatch.setattr(cluster_checks, "check_cluster", seen)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    (tmp_path / "config").write_text(KUBECONFIG)
    entry = "{name: r, redfish: {url: 'https://fabric', systems: {w1: /redfish/v1/Systems/1}, publish: %s}}"
    for publish, kinds in (("true", ("redfish", "publish")), ("false", ("redfish",))):
        (tmp_path / "settings.yaml").write_text(f"capacity: [{entry % publish}]")
        run(tmp_path, "--driver", "kubernetes", "--settings", str(tmp_path / "settings.yaml"))
        assert scenes.pop().capacity == kinds


@pytest.mark.parametrize(
    ("text", "message"), [("capacty: []", "capacty: unknown key"), ("settings: 3", "kind"), ("a: [", "line 1")]
)
def test_invalid_settings_file_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    (file := tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(click.UsageError, match=message):
        load_settings(file)


@pytest.mark.parametrize("words", [["--settings", "values.yaml"], ["--capacity", "cro"], ["--account", "a:b"]])
def test_cluster_options_without_kubernetes_driver_are_rejected(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(CAPACITY)
    arguments = [str(tmp_path / word) if word.endswith(".yaml") else word for word in words]
    done = CliRunner().invoke(cli, ["doctor", *arguments])
    assert (done.exit_code, f"{words[0]}: only for clusters" in done.output) == (2, True)
