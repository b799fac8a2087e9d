"""The output of `status` and `explain`, built from the types that the operations port returns."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
import pytest

from autoscaler.contract import ModelName
from autoscaler.explain.model import Explanation
from autoscaler.queries.response_types import DemandView, ModelView, Row, Sentences
from pilotlight.cli import status as show
from pilotlight.net import ops_client
from pilotlight.tables import Console

pytestmark = pytest.mark.standard

ROWS = (
    Row(model=ModelName("ada"), state="ready", replicas={"ready": 2, "draining": 1}, waiting=3, running=4,
        devices=("gpu0", "gpu1"), since_s=125.0, why="last used 2 s ago, idle timeout 60 s"),
    Row(model=ModelName("bob"), state="zero", replicas={}, why="it has no requests"),
)  # fmt: skip


class Answers(http.server.BaseHTTPRequestHandler):
    """A fake operations port: path -> (status, body)."""

    paths: dict[str, tuple[int, bytes]] = {}

    def do_GET(self) -> None:
        status, body = self.paths.get(self.path, (404, b'{"error":"no such path"}'))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


BOB_VIEW = ModelView(
    name=ModelName("bob"), engine="command", aliases=("al-bob",), adapters=(), memory_bytes=0, slots=1, replicas={},
    demand=DemandView(waiting=0, running=0),
)  # fmt: skip


@contextmanager
def port(**paths: tuple[int, bytes]) -> Iterator[str]:
    """A port with these responses; `status` is /api/v1/status."""
    paths = {"off": (200, b'{"sentences": []}'), "documents": (200, b"{}"), **paths}
    answers = type("Playing", (Answers,), {"paths": {f"/api/v1/{path}": answer for path, answer in paths.items()}})
    with http.server.HTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


STATUS = (200, msgspec.json.encode(ROWS))


def test_status_row_of_the_api_is_formatted_into_the_table_columns() -> None:
    assert [show.format_cell(ROWS[0], column) for column in show.COLUMNS] == [
        "ada", "ready", "2 ready, 1 draining", "3", "4", "gpu0, gpu1", "2 min", "last used 2 s ago, idle timeout 60 s",
    ]  # fmt: skip
    assert show.format_cell(msgspec.structs.replace(ROWS[0], adapters=("x", "y")), "model") == "ada (+x, y)"
    assert [show.format_cell(ROWS[1], column) for column in show.COLUMNS] == [
        "bob",
        "zero",
        "0",
        "0",
        "0",
        "",
        "",
        "it has no requests",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_age_in_seconds_is_formatted_in_its_largest_unit(seconds: float, text: str) -> None:
    assert show.format_age(seconds) == text


def test_status_prints_one_line_per_model_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with port(status=STATUS) as url:
        show.print_status(url, None, watch=False, output="text")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == list(show.COLUMNS)
    assert [line.split()[0] for line in lines[1:]] == ["ada", "bob"]
    assert lines[1].endswith("last used 2 s ago, idle timeout 60 s")


def test_status_of_all_models_lists_disabled_features_and_degradation(capsys: pytest.CaptureFixture[str]) -> None:
    off = (200, b'{"sentences": ["nodes are not read", "agents"], "degraded": "plan: KeyError: 7"}')
    with port(status=STATUS, off=off) as url:
        show.print_status(url, None, watch=False, output="text")
        assert capsys.readouterr().out.splitlines()[-3:] == [
            "off: nodes are not read", "off: agents",
            "degraded: an internal error occurred, and the failed part is retried: plan: KeyError: 7",
        ]  # fmt: skip
        show.print_status(url, "bob", watch=False, output="text")
        assert "off:" not in capsys.readouterr().out


def test_status_shows_a_failed_reload(capsys: pytest.CaptureFixture[str]) -> None:
    content = b"a.yaml: document 1: line 3: not YAML;\\u001b[2J the last valid documents stay in force"
    problem = (200, b'{"problem": "%b"}' % content)
    with port(status=STATUS, documents=problem) as url:
        show.print_status(url, None, watch=False, output="text")
        last_line = capsys.readouterr().out.splitlines()[-1]
        assert last_line.startswith("documents: a.yaml: document 1: line 3: not YAML;")
        assert last_line.endswith("the last valid documents stay in force")


def test_status_of_an_unknown_model_fails_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    missing = (404, b'{"error":"no such model; existing: ada, bob"}')
    with port(status=STATUS, **{"models/eve": missing}) as url:
        show.print_status(url, "bob", watch=False, output="json")
        (row,) = json.loads(capsys.readouterr().out)
        assert row["model"] == "bob"
        with pytest.raises(click.ClickException, match="no such model; existing: ada, bob"):
            show.print_status(url, "eve", watch=False, output="text")


def test_status_watch_ends_without_error_on_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("pilotlight.cli.status.time.sleep", sleep)
    with port(status=STATUS) as url:
        show.print_status(url, None, watch=True, output="text")
    assert len(looks) == 3
    assert "ada" in capsys.readouterr().out


def test_status_finds_a_model_by_its_alias(capsys: pytest.CaptureFixture[str]) -> None:
    with port(status=STATUS, **{"models/al-bob": (200, msgspec.json.encode(BOB_VIEW))}) as url:
        show.print_status(url, "al-bob", watch=False, output="json")
        assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["bob"]


def watched(monkeypatch: pytest.MonkeyPatch, looks: list[list[Row]], output: str) -> None:
    """Run `status --watch` without a terminal: it receives these rows one after the other and is then interrupted."""
    left = list(looks)

    def sleep(_: float) -> None:
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr("pilotlight.cli.status.time.sleep", sleep)
    monkeypatch.setattr(show, "fetch", lambda _ops, _path, _kind: tuple(left.pop(0)))
    show.print_status("ops", None, watch=True, output=output)


ADA, BOB = ROWS
LATER = msgspec.structs.replace(ADA, since_s=127.5, why="last used 1 min 4 s ago, idle timeout 60 s")
IDLE = msgspec.structs.replace(LATER, running=0)
LOOKS = [[ADA, BOB], [LATER, BOB], [IDLE, BOB], [IDLE, BOB], [IDLE]]
"""Three distinct outputs: the passing of time alone is no change."""


def test_text_watch_prints_one_table_per_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, LOOKS, "text")
    lines = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["model"], ["ada"], ["bob"], ["model"], ["ada"], ["bob"], ["model"], ["ada"]]


def test_json_watch_prints_one_line_per_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, LOOKS, "json")
    models = [json.loads(line)["models"] for line in capsys.readouterr().out.splitlines()]
    assert [[(row["model"], row["running"]) for row in rows] for rows in models] == [
        [("ada", 4), ("bob", 0)],
        [("ada", 0), ("bob", 0)],
        [("ada", 0)],
    ]


def test_explanation_is_printed_with_one_sentence_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    with port(**{"explain/model/ada": (200, b'{"model":"ada","state":"zero","sentences":["One.","Two."]}')}) as url:
        show.print_explanation(url, "model/ada", Explanation, "text")
        assert capsys.readouterr().out == "One.\nTwo.\n"
        show.print_explanation(url.removeprefix("http://"), "model/ada", Explanation, "json")
        assert json.loads(capsys.readouterr().out)["sentences"] == ["One.", "Two."]


def test_explain_last_without_decisions_prints_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    with port(**{"explain/last": (200, b'{"sentences":[]}')}) as url:
        show.print_explanation(url, "last", Sentences, "text")
        assert capsys.readouterr().out == "Nothing was decided yet.\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b'{"error":"no such model; existing: ada"}'), "no such model; existing: ada"),
        ((404, b'{"error":{"message":"no such path on the inference port"}}'), ops_client.INFERENCE),
    ],
)
def test_error_response_of_the_operations_port_is_shown_to_the_user(answer: tuple[int, bytes], message: str) -> None:
    with port(status=answer) as url, pytest.raises(click.ClickException) as caught:
        show.print_status(url, None, watch=False, output="text")
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_unreachable_operations_port_suggests_serve_or_ops_option(url: str) -> None:
    with pytest.raises(click.ClickException, match="start `pilotlight serve`, or correct --ops"):
        ops_client.fetch(url, "/api/v1/status", object)


def test_http_proxy_variable_is_ignored_for_the_operations_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with port(status=STATUS) as url:
        assert len(ops_client.fetch(url, "/api/v1/status", tuple[Row, ...])) == 2


def test_no_color_variable_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(show.build_table(ROWS))
        return capture.get()

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in shown()
    colours = [code for code in shown().split("\x1b[")[1:] if code.split("m")[0] not in {"0", "1"}]
    assert not colours, "bold is no colour; anything else is"
