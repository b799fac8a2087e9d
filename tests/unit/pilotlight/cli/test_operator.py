"""Operator orders: one-line errors, how names are resolved, and the progress of a drain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

import pytest
from click.testing import CliRunner, Result
from msgspec import convert

from pilotlight.cli import operator
from pilotlight.cli.main import cli

Sent = tuple[str, Mapping[str, object] | None, str | None]


T = TypeVar("T")
DEVICE: dict[str, object] = {
    "id": "gpu0", "device": "gpu0", "node": "n0", "product": "", "memory_bytes": 0, "compute_percent": 100,
    "isolation": "none", "shared": True, "healthy": True,
}  # fmt: skip


class Port:
    """A fake operations port with two devices; each query of them takes the next value of `held`."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.sent: list[Sent] = []

    def fetch(
        self, ops: str, path: str, kind: type[T], *, order: Mapping[str, object] | None = None, key: str | None = None
    ) -> T:  # fmt: skip
        if order is not None:
            self.sent.append((path, order, key))
            return convert({"verb": "wake", "kind": "model", "name": "a", "says": "so it will be"}, kind)
        if path == "/api/v1/nodes":
            return convert([{"name": name, "cordoned": False, "drains": False} for name in ("n0", "same")], kind)
        count = self.held.pop(0) if len(self.held) > 1 else self.held[0] if self.held else 0
        held = [{"id": f"r{i}", "model": f"m{i}", "state": "draining", "memory_bytes": 0} for i in range(count)]
        return convert([DEVICE | {"replicas": held}, DEVICE | {"device": "same", "node": "same", "replicas": []}], kind)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    made = Port()
    monkeypatch.setattr(operator, "fetch", made.fetch)
    monkeypatch.setattr(operator, "LOOK_S", 0.0)
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words, prog_name="pilotlight")


@pytest.mark.parametrize(
    ("words", "path", "force"),
    [
        (("wake", "org/b"), "models/org/b/wake", False),
        (("stop", "a", "--force"), "models/a/stop", True),
        (("cordon", "gpu0"), "devices/gpu0/cordon", False),
        (("uncordon", "n0"), "nodes/n0/uncordon", False),
        (("uncordon", "gone", "--kind", "device"), "devices/gone/uncordon", False),
        (("drain", "same", "--kind", "node", "--no-wait", "--force"), "nodes/same/drain", True),
    ],
)
def test_each_operator_command_posts_one_request(port: Port, words: tuple[str, ...], path: str, force: bool) -> None:
    done = run(*words)
    assert (done.exit_code, done.output) == (0, "so it will be\n")
    assert port.sent == [(f"/api/v1/{path}", {"force": force}, None)]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("cordon", "same"), 2, "same is the name of a device and of a node: select one with --kind"),
        (("drain", "gpu9"), 1, "no device or node gpu9 exists; existing: devices gpu0, same; nodes n0, same"),
        (("wake", "a", "--key-env", "NOT_THERE"), 2, "--key-env: the environment variable NOT_THERE is not set"),
        (("wake",), 2, "Missing argument 'MODEL'"),
    ],
)
def test_operator_command_error_is_one_line_and_posts_nothing(
    port: Port, words: tuple[str, ...], status: int, message: str
) -> None:
    done = run(*words)
    assert (done.exit_code, port.sent) == (status, [])
    assert done.output.startswith(f"pilotlight: {message}")
    assert done.output.count("\n") == 1


def test_operator_key_from_the_environment_is_sent_and_not_printed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPS_KEY", "pl-secret")
    done = run("wake", "a", "--key-env", "OPS_KEY")
    assert port.sent[0][2] == "pl-secret"
    assert "pl-secret" not in done.output


def test_drain_waits_until_empty_and_prints_each_change(port: Port) -> None:
    port.held = [2, 2, 2, 1, 0]
    done = run("drain", "gpu0")
    assert done.output.splitlines() == [
        "so it will be",
        "2 replicas on gpu0: m0 (draining), m1 (draining)",
        "1 replica on gpu0: m0 (draining)",
        "gpu0 is empty",
    ]


def test_drain_json_output_reports_whether_the_device_is_empty(port: Port) -> None:
    port.held = [1, 1, 0]
    assert json.loads(run("drain", "gpu0", "--output", "json").output) == {
        "verb": "wake", "kind": "model", "name": "a", "says": "so it will be", "replicas": [], "empty": True,
    }  # fmt: skip
    port.held = [1]
    assert not json.loads(run("drain", "gpu0", "--no-wait", "--output", "json").output)["empty"]
