"""The report: correct figures as JSON, and a self-contained page without any response text."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import msgspec

from loadtest.coldstart import INTERRUPTED, ColdStarts, Round, compute_phase_spreads
from loadtest.report import coldstart
from loadtest.report.plots import Series, choose_ticks, render_plot
from loadtest.report.report import Report, as_html, as_json, build_report, describe_interruption
from loadtest.result import Ending, Result
from loadtest.run_verdict import judge_run

RESULTS = [
    Result(
        model=model, at_s=i / 10, status=200, saw_done=True, finish_reason="stop", text="canary answer",
        first_byte_s=0.1 + i / 100, last_byte_s=0.5 + i / 100, cold=i == 0,
    )
    for i, model in enumerate(["ada", "<script>", "ada", "<script>"])
]  # fmt: skip
REFUSED = Result(model="ada", status=503, code="model_starting", errors=1, first_byte_s=0.01, last_byte_s=0.01)


def made() -> Report:
    return build_report("http://127.0.0.1:1", "a plan", 5, [*RESULTS, REFUSED])


def test_report_latencies_include_only_completed_requests() -> None:
    report = made()
    assert report.verdict.holds
    assert report.first_byte_s is not None
    assert (report.first_byte_s.min, report.first_byte_s.count) == (0.1, 4)
    assert report.by_model["ada"].count == 2
    assert report.cold == 1
    assert report.completed_per_s == 4 / (0.3 + 0.53)


def test_report_written_as_json_is_read_back_unchanged() -> None:
    assert msgspec.json.decode(as_json(made()), type=Report) == made()


def test_json_report_escapes_every_character_that_is_not_printable_ascii() -> None:
    code = '\u009b31m\u202e\x7f\N{GRINNING FACE}\u00e9"'
    report = build_report("http://a", "a plan", 1, [Result(model="ada", status=500, code=code, errors=1)])
    written = as_json(report).decode("ascii")
    assert all(line.isprintable() for line in written.split("\n"))
    assert list(json.loads(written)["verdict"]["codes"]) == [code]


def test_report_page_is_self_contained_and_excludes_response_text() -> None:
    page = as_html(made())
    assert "canary" not in page
    assert b"canary" not in as_json(made())
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not any(word in page for word in ("src=", "href=", "@import", "url("))
    assert "verdict holds: 5 requests" in page


def test_report_of_an_interrupted_run_counts_only_sent_requests() -> None:
    report = build_report("http://127.0.0.1:1", "a plan", 200, [*RESULTS, REFUSED], interrupted=True)
    assert (report.planned, report.verdict.admitted, report.verdict.holds) == (200, 5, True)
    assert (
        describe_interruption(report) == "interrupted: 5 of 200 requests were sent, and those in flight were abandoned"
    )
    assert describe_interruption(report) in as_html(report)
    assert "interrupted" not in as_html(made())


def test_report_of_a_run_without_results_has_no_plot() -> None:
    page = as_html(build_report("http://127.0.0.1:1", "a plan", 1, []))
    assert "DOES NOT HOLD" in page
    assert "nothing to plot" in page


def cold_starts(*rounds: Round, ended: str = "") -> ColdStarts:
    results = [RESULTS[0] if one.ending is Ending.COMPLETED else REFUSED for one in rounds]
    return ColdStarts(
        model="<script>", rounds=rounds, warm=1, spreads_ms=compute_phase_spreads(rounds),
        verdict=judge_run(len(rounds), results), ended=ended,
    )  # fmt: skip


COLD = Round(
    waited_s=2.0, ending=Ending.COMPLETED, cold=True, first_byte_ms=321.0, total_ms=400.0,
    phases_ms={"queue": 310.0, "load": 300.0},
)  # fmt: skip


def test_coldstart_page_shows_phases_and_rounds() -> None:
    warm = Round(waited_s=1.5, ending=Ending.COMPLETED, first_byte_ms=20.0, total_ms=80.0)
    failed = Round(waited_s=2.5, ending=Ending.FAILED, code="model_start_failed", cold=True)
    page = coldstart.as_html("http://127.0.0.1:1", 5, cold_starts(COLD, warm, failed, ended=INTERRUPTED))
    assert "<script>" not in page
    assert "5 cold starts of &lt;script&gt;" in page
    assert not any(word in page for word in ("src=", "href=", "@import", "url("))
    assert "verdict holds: 3 requests, 2 completed, 1 failed" in page
    assert "ended after 3 of 5 rounds: interrupted" in page
    assert "<tr><td>load<td>300.0<td>300.0<td>300.0<td>300.0<td>300.0</tr>" in page
    assert "<tr><td>1<td>2.0<td>completed<td>yes<td>321.0<td>400.0</tr>" in page
    assert "<tr><td>3<td>2.5<td>failed (model_start_failed)<td>yes<td>-<td>-</tr>" in page
    names = ("cold start reported", "no cold start reported", "queue", "load")
    assert all(f"</i>{name}</li>" in page for name in names)


def test_coldstart_page_without_completed_rounds_has_no_plot() -> None:
    page = coldstart.as_html("http://127.0.0.1:1", 1, cold_starts(Round(waited_s=0.1, ending=Ending.FAILED, code="x")))
    assert "nothing to plot" in page
    assert "<b>-</b>ms, median first byte" in page


def test_axis_ticks_are_round_numbers_and_reach_the_highest_value() -> None:
    assert choose_ticks(1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert choose_ticks(7.3) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert choose_ticks(0.0037) == [0.0, 0.001, 0.002, 0.003, 0.004]


def test_plot_is_well_formed_xml_within_its_frame() -> None:
    drawn = render_plot(
        "x & y", "<y>", [Series("a", [(0.0, 0.0), (9.9, 123.0)], 0), Series("b", [(5.0, 5.0)], 1, dots=True)]
    )
    tree = ET.fromstring(f"<body>{drawn}</body>")  # noqa: S314 - our own text
    line = tree.find(".//polyline")
    assert line is not None
    corners = [tuple(map(float, corner.split(","))) for corner in line.attrib["points"].split()]
    assert all(0 <= x <= 720 and 0 <= y <= 300 for x, y in corners)


def test_plot_with_many_points_is_thinned_but_keeps_the_last_point() -> None:
    drawn = render_plot("x", "y", [Series("a", [(float(i), 1.0) for i in range(10_000)], 0)])
    assert 3000 < drawn.count(",") < 4100
    assert "706.0," in drawn or "705." in drawn
