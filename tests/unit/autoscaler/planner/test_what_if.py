"""`pilotlight plan`: what the planner would start and where, from documents or from a live autoscaler."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents.document_types import Documents
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.what_if import Answer, AssumedDemand, simulate_world, what_if
from autoscaler.provisioning.release import WITHDRAW_S
from autoscaler.spec.model import Gpu
from autoscaler.spec.settings import Price, Settings
from autoscaler.state.events import Reported
from autoscaler.state.lifecycle import ReplicaState as S
from pilotlight.cli.main import cli
from tests.support.builders.capacity import acted, observe, offer, surge
from tests.support.builders.mig_nodes import town
from tests.support.builders.worlds import GI, T0, device, drain, gateway, level, model, replica, use, world
from tests.support.example_budget import examples

DOCUMENTS = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- selector: {type: g4dn}
  device: {model: T4, memory: 16Gi}
  slicing: {kind: timeslice, replicas: 3}
- selector: {type: p5}
  device: {model: H100, memory: 80Gi, count: 2}
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: small}
spec: {engine: command, command: [x, "{port}"], gpu: {memory: 4Gi}, replicas: {max: 5}}
---
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: big}
spec: {engine: command, command: [x, "{port}"], gpu: {memory: 60Gi}, replicas: {max: 3}}
"""


def asked(**calls: int) -> dict[ModelName, AssumedDemand]:
    return {ModelName(name): AssumedDemand(waiting) for name, waiting in calls.items()}


def starts(answer: Answer) -> list[tuple[str, ...]]:
    return [(one.model, *one.slices) for one in answer.starts]


def test_what_if_lists_all_sequential_starts_on_a_device() -> None:
    """Replicas start one at a time on a device; the answer shows the final state."""
    documents = Documents(models=(model("a", 4, high=3), model("b", 21)))
    answer = what_if(documents, [device("g0", 24)], asked(a=9, b=1))
    assert starts(answer) == [("a", "g0"), ("a", "g0"), ("a", "g0")]
    assert [(left.free_bytes, left.memory_bytes) for left in answer.left] == [(12 * GI, 24 * GI)]
    assert [unmet.model for unmet in answer.unmet] == ["b"]


def test_what_if_starts_a_two_device_model_and_a_cpu_only_model() -> None:
    team = model("team", 20, gpu=Gpu(count=2))
    documents = Documents(models=(team, model("cpu", 0, gpu=Gpu(count=0))))
    answer = what_if(documents, [device("g0", 24), device("g1", 24)], asked(team=1, cpu=1))
    assert starts(answer) == [("cpu",), ("team", "g0", "g1")]
    assert [left.free_bytes for left in answer.left] == [0, 0]


def test_what_if_starts_a_model_on_the_cheaper_of_two_suitable_devices() -> None:
    documents = Documents(
        models=(model("a", 4),), settings=Settings(prices=(Price(device="H100", per_hour=9.0),))
    )  # fmt: skip
    there = [device("g0", 24, "n0", product="NVIDIA H100"), device("g1", 24, "n1", product="L4")]
    assert starts(what_if(documents, there, asked(a=1))) == [("a", "g1")]


@settings(derandomize=True, deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(st.sampled_from([1, 4, 9, 30]), st.integers(0, 20)), min_size=1, max_size=5))
def test_what_if_with_random_demand_never_assigns_memory_twice(rows: list[tuple[int, int]]) -> None:
    models = [model(f"m{number}", size, high=4) for number, (size, _) in enumerate(rows)]
    calls = {one.name: AssumedDemand(many) for one, (_, many) in zip(models, rows, strict=True)}
    answer = what_if(Documents(models=tuple(models)), [device("g0", 24), device("g1", 24)], calls)
    assert all(0 <= left.free_bytes <= left.memory_bytes for left in answer.left)
    taken = sum(one.memory_bytes for one in answer.starts)
    assert taken == sum(left.memory_bytes - left.free_bytes for left in answer.left)
    unmet = {one.model for one in answer.unmet}
    for one, (_, many) in zip(models, rows, strict=True):
        begun = sum(start.model == one.name for start in answer.starts)
        assert begun == min(4, -(-many // one.slots)) or one.name in unmet


# --- live state -------------------------------------------------------------------------------------------------------


def test_live_what_if_assigns_only_free_memory() -> None:
    """Running replicas keep their devices, and their free slots are used first."""
    a, b = model("a", 10, high=3), model("b", 10)
    runs, calls = replica(a, "r1"), [gateway(levels=[level("a", 0, 2)], uses=[use("r1", 2)])]
    now = world([a, b], [device()], [runs], calls)
    assert simulate_world(now, asked(a=2), T0) == simulate_world(now, asked(a=0), T0), "two of its four Slots are free"
    assert starts(simulate_world(now, asked(a=3), T0)) == [("a", "gpu0")]
    answer = simulate_world(now, asked(b=1), T0)
    assert starts(answer) == [("b", "gpu0")]
    assert (answer.stops, answer.orders, answer.unmet, answer.more) == ((), (), (), False)


def test_live_what_if_evicts_idle_replicas_but_not_busy_recent_ones() -> None:
    a, b = model("a", 20, idle_seconds=3600.0, residency_seconds=60.0), model("b", 20)
    idle = world([a, b], [device()], [replica(a, "r1")])
    answer = simulate_world(idle, asked(b=1), T0)
    assert starts(answer) == [("b", "gpu0")]
    assert [(stop.replica, stop.model) for stop in answer.stops] == [("r1", "a")]
    assert answer.stops[0].reason.startswith("make room for b: a was resident")
    assert [left.free_bytes for left in answer.left] == [4 * GI]
    young = replica(a, "r1", ready_s=T0 - 1)
    busy = world([a, b], [device()], [young], [gateway(levels=[level("a", 0, 2)], uses=[use("r1", 2)])])
    answer = simulate_world(busy, asked(b=1), T0)
    assert (answer.starts, answer.stops) == ((), ())
    assert [unmet.model for unmet in answer.unmet] == ["b"]


def test_live_what_if_assumes_that_pending_changes_have_completed() -> None:
    """A starting replica counts as ready and no longer locks its device; a draining one is kept if needed again."""
    a, b, c = model("a", 6), model("b", 6), model("c", 18)
    begins = replica(a, "r1", state=S.STARTING)
    now = world([a, b, c], [device()], [begins], [gateway(levels=[level("a", 1)])])
    assert starts(simulate_world(now, asked(b=1), T0)) == [("b", "gpu0")]
    leaves = replica(c, "r2", state=S.DRAINING, drain=drain())
    now = world([a, b, c], [device()], [leaves])
    assert starts(simulate_world(now, asked(b=1), T0)) == [("b", "gpu0")]
    answer = simulate_world(now, asked(c=1), T0)
    assert (answer.starts, answer.stops, answer.unmet) == ((), (), ()), "it is kept"


def test_live_what_if_reports_each_stop_once_without_gateways() -> None:
    a, b, c = model("a", 20, idle_seconds=3600.0), model("b", 20), model("c", 18)
    answer = simulate_world(world([a, b], [device()], [replica(a, "r1")], []), asked(b=1), T0)
    assert [stop.replica for stop in answer.stops] == ["r1"]
    leaves = replica(c, "r2", state=S.DRAINING, drain=drain())
    assert simulate_world(world([b, c], [device()], [leaves], []), asked(b=1), T0).stops == (), "it went before"


def test_what_if_starts_replicas_for_running_and_waiting_requests_alike() -> None:
    a = model("a", 6, high=3)
    answer = simulate_world(world([a], [device()]), {a.name: AssumedDemand(waiting=1, running=4)}, T0)
    assert starts(answer) == [("a", "gpu0")] * 2


def test_what_if_gives_free_slots_to_already_waiting_requests_first() -> None:
    a = model("a", 6, high=3)
    here = world([a], [device()], [replica(a, "r1")], [gateway(levels=[level("a", 3)])])
    assert starts(simulate_world(here, asked(a=1), T0)) == []
    assert starts(simulate_world(here, asked(a=2), T0)) == [("a", "gpu0")]


def test_what_if_serves_already_waiting_requests_before_assumed_demand() -> None:
    a, b = model("a", 20), model("b", 20)
    now = world([a, b], [device()], [], [gateway(levels=[level("b", 1, wait_s=3.0)])])
    answer = simulate_world(now, asked(a=1), T0)
    assert starts(answer) == [("b", "gpu0")]
    assert [unmet.model for unmet in answer.unmet] == ["a"]


def test_live_what_if_repeated_gives_the_same_answer_and_changes_nothing() -> None:
    a, b = model("a", 20), model("b", 20)
    now = world([a, b], [device()], [replica(a, "r1")])
    before = repr(now)
    assert simulate_world(now, asked(b=3), T0) == simulate_world(now, asked(b=3), T0)
    assert repr(now) == before


def test_live_what_if_reports_each_capacity_order_once() -> None:
    """Each request needs one device: one order is for the queued request, two are for the simulated ones."""
    here = surge(offer(devices_max=4))
    answer = simulate_world(here, asked(a=2), T0)
    assert [(one.kind, one.what.partition("-")[0]) for one in answer.orders] == [("acquire", "pilotlight")] * 3
    assert (answer.starts, answer.more) == ((), False)
    assert {one.model for one in answer.unmet} == {"a"}


def test_live_what_if_reports_the_release_of_an_unneeded_order() -> None:
    after, _ = acted(surge(offer()))
    late_s = T0 + WITHDRAW_S + 1
    left = gateway(seen_s=late_s).report
    assert left is not None
    idle = observe(after, Reported(report=replace(left, sequence=9, epoch=after.epoch)), now_s=late_s)
    assert [one.kind for one in simulate_world(idle, asked(a=0), late_s).orders] == ["release"]
    assert simulate_world(idle, asked(a=1), late_s).orders == (), "it is for who would come"


def test_live_what_if_reports_a_repartition_without_waiting_requests() -> None:
    at = replace(town(), gateways={}, loads={})
    answer = simulate_world(rebuild_indices(at, T0), asked(big=1), T0)
    assert [(one.kind, one.what) for one in answer.orders] == [("cut", "n1")]
    assert (answer.starts, answer.more) == ((), False)
    assert [one.model for one in answer.unmet] == ["big"]


def test_what_if_result_is_marked_incomplete_at_its_round_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoscaler.planner.what_if.AHEAD_ROUNDS_MAX", 2)
    a = model("a", 1, slots=1, high=8)
    assert simulate_world(world([a], [device()]), asked(a=8), T0).more


# --- the command ------------------------------------------------------------------------------------------------------


def run(folder: Path, demand: str, *more: str, documents: str = DOCUMENTS) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr)."""
    (folder / "p.yaml").write_text(documents)
    (folder / "d.yaml").write_text(demand)
    done = CliRunner().invoke(cli, ["plan", "-c", f"{folder}/p.yaml", "--demand", f"{folder}/d.yaml", *more])
    return done.exit_code, done.stdout, done.stderr


def test_plan_command_prints_text_by_default_and_json_on_request(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, "small: {waiting: 17}\nbig: 9\n")
    lines = output.splitlines()
    assert status == 0
    assert lines[0] == "start big on nodes[1]/gpu0 (60Gi of each): wake big: 9 waiting, tenant default: 3 x 4 slots"
    assert "free  nodes[0]/gpu0/s2: 0 bytes of 5.3Gi remain" in lines
    assert any(line.startswith("unmet small: needs 4Gi on one device") for line in lines)
    status, output, _ = run(tmp_path, "small: 1\n", "--output", "json")
    found = json.loads(output)
    assert [start["slices"] for start in found["starts"]] == [["nodes[0]/gpu0/s0"]], "the T4, not an H100"
    assert (found["unmet"], len(found["left"])) == ([], 5)
    assert run(tmp_path, "small: 0\n")[1].startswith("nothing would be started\n")


def test_plan_command_warns_that_configured_providers_are_not_simulated(tmp_path: Path) -> None:
    assert run(tmp_path, "small: 1\n")[2] == ""
    capacity = "capacity: [{name: g4, karpenter: {nodePool: g4}}, {name: queue, kueue: {localQueue: q}}]"
    rented = DOCUMENTS.replace("nodes:", f"{capacity}\nnodes:")
    status, output, result = run(tmp_path, "small: 1\n", "--output", "json", documents=rented)
    assert status == 0
    assert json.loads(output)["starts"]
    assert result == (
        "pilotlight: `capacity` (g4, queue) is not simulated, and each entry of `nodes` counts as one existing node;"
        " --live uses the running system\n"
    )


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ("smal: 1", "smal: no such Model in the documents; existing: big, small"),
        (
            "small: -1",
            "small.waiting: expected {waiting: NUMBER, running: NUMBER} or a number of waiting requests, from 0",
        ),
        ("small: true", "small.waiting: expected"),
        ("small: {waiting: 1, now: 2}", "small: expected {waiting: NUMBER, running: NUMBER}"),
        ("small: 1\nsmall: 2", "line 2: key `small` occurs twice"),
        ("small: .nan", "expected a finite number"),
        ("", "expected one line per requested Model"),
        ("- small", "expected one line per requested Model"),
    ],
)
def test_invalid_demand_is_rejected_with_a_one_line_error(tmp_path: Path, demand: str, message: str) -> None:
    status, _, error = run(tmp_path, demand)
    assert (status, error.count("\n")) == (2, 1)
    assert message in error


def test_missing_demand_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(DOCUMENTS)
    done = CliRunner().invoke(cli, ["plan", "-c", f"{tmp_path}/p.yaml", "--demand", f"{tmp_path}/none.yaml"])
    assert done.stderr == f"pilotlight: {tmp_path}/none.yaml: No such file or directory\n"


def test_plan_command_requires_either_documents_or_live(tmp_path: Path) -> None:
    """Both or neither is an error."""
    (tmp_path / "p.yaml").write_text(DOCUMENTS)
    (tmp_path / "d.yaml").write_text("small: 1")
    for words in (
        [],
        ["-c", f"{tmp_path}/p.yaml", "--live"],
        ["-c", f"{tmp_path}/p.yaml", "--ops", "x"],
        ["-c", f"{tmp_path}/p.yaml", "--key-env", "K"],
    ):
        done = CliRunner().invoke(cli, ["plan", "--demand", f"{tmp_path}/d.yaml", *words])
        assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "pilotlight")
        assert "expected either -c FILE for documents, or --live" in done.stderr


def test_live_plan_sends_the_demand_and_prints_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = model("a", 20, idle_seconds=3600.0), model("b", 20)
    answer = simulate_world(world([a, b], [device()], [replica(a, "r1")]), asked(b=1), T0)
    orders: list[object] = []

    def fetch(ops: str, path: str, kind: object, *, order: object, key: str | None, timeout_s: float) -> object:
        orders.append((ops, path, order, key))
        return answer if kind is Answer and timeout_s > 5 else None

    monkeypatch.setattr("pilotlight.net.ops_client.fetch", fetch)
    (tmp_path / "d.yaml").write_text("b: {waiting: 2, running: 1}")
    monkeypatch.setenv("KEY", "pl-1")
    words = ["plan", "--live", "--ops", "http://there", "--key-env", "KEY", "--demand", f"{tmp_path}/d.yaml"]
    done = CliRunner().invoke(cli, words)
    assert orders == [("http://there", "/api/v1/what-if", {"demand": {"b": {"waiting": 2, "running": 1}}}, "pl-1")]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("start b on gpu0 (20Gi of each): wake b: ")
    assert lines[1].startswith("stop  a (r1): make room for b: a was resident")
    assert lines[2:] == ["free  gpu0: 4Gi of 24Gi remain"]
    assert json.loads(CliRunner().invoke(cli, [*words, "--output", "json"]).stdout)["stops"][0]["replica"] == "r1"


@pytest.mark.standard
def test_live_plan_failure_is_reported_as_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.yaml").write_text("b: 1")
    words = ["plan", "--live", "--demand", f"{tmp_path}/d.yaml"]
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        away = CliRunner().invoke(cli, [*words, "--ops", f"127.0.0.1:{unheard.getsockname()[1]}"])
    assert (away.exit_code, away.stdout, away.stderr.count("\n")) == (1, "", 1)
    assert "no response from --ops http://127.0.0.1:" in away.stderr
    unset = CliRunner().invoke(cli, [*words, "--key-env", "NOT_THERE"])
    assert (unset.exit_code, "--key-env: the environment variable NOT_THERE is not set" in unset.stderr) == (2, True)


def test_plan_help_has_an_example_of_each_mode() -> None:
    output = " ".join(CliRunner().invoke(cli, ["plan", "--help"]).stdout.split())
    assert "pilotlight plan -c pilotlight.yaml --demand demand.yaml" in output
    assert "pilotlight plan --live --demand demand.yaml" in output
