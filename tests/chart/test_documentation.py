"""Chart documentation is accurate: values have comments, the page lists them all, alerts name existing metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from docs import chart
from tests.support.chart import CHART, EVERYTHING, ROOT, SETS, named, texts

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
METRICS = set(re.findall(r"^\| `(pilotlight_[a-z_]+)` \|", PAGE, re.MULTILINE))


def test_every_chart_value_has_a_comment_in_the_values_file() -> None:
    found = list(chart.values(chart.VALUES.read_text()))
    assert [one.path for one in found if len(one.meaning) < 10] == []
    assert len(found) == len({one.path for one in found})


def test_json_schema_of_the_chart_has_exactly_the_chart_values() -> None:
    def keys(schema: dict[str, Any], at: str = "") -> Iterator[str]:
        for name, one in schema.get("properties", {}).items():
            yield at + name
            if at + name != "settings":
                yield from keys(one, f"{at}{name}.")

    schema = json.loads(chart.SCHEMA.read_text())
    known = {one.path for one in chart.values(chart.VALUES.read_text())}
    inner = re.compile(r"settings\..*|.*\.resources\..*")
    assert set(keys(schema)) - {"global"} == {path for path in known if not inner.fullmatch(path)}


def test_settings_in_the_chart_schema_equal_the_generated_json_schema() -> None:
    assert chart.SCHEMA.read_text() == chart.schema(chart.SCHEMA.read_text()), "run `.venv/bin/python -m docs.chart`"


def test_chart_values_page_equals_the_page_generated_from_the_values() -> None:
    assert chart.PAGE.read_text() == chart.page(chart.PAGE.read_text()), "run `.venv/bin/python -m docs.chart`"


def known(text: str) -> set[str]:
    """Return the metric names in an expression, without histogram suffixes."""
    return {re.sub(r"_(bucket|sum|count)$", "", one) for one in re.findall(r"pilotlight_[a-z_]+", text)}


def test_each_alert_of_the_chart_uses_only_existing_metrics() -> None:
    rules = named(EVERYTHING, "PrometheusRule", "pl-pilotlight")["spec"]["groups"][0]["rules"]
    assert len(rules) >= 5
    for rule in rules:
        assert known(rule["expr"]), rule["alert"]
        assert known(rule["expr"]) <= METRICS, rule["alert"]


def test_each_dashboard_panel_of_the_chart_uses_only_existing_metrics() -> None:
    data = named(EVERYTHING, "ConfigMap", "pl-pilotlight-dashboards")["data"]
    shown = json.loads(data["pilotlight.json"])
    fields = {panel["title"]: target["expr"] for panel in shown["panels"] for target in panel["targets"]}
    assert len(fields) == len(shown["panels"]) >= 12
    for title, expression in fields.items():
        assert known(expression), title
        assert known(expression) <= METRICS, title


def test_version_of_the_chart_equals_the_product_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "pilotlight/__init__.py").read_text(), re.MULTILINE)
    assert about["appVersion"] == version
    assert f"pilotlight:{version}" in texts(SETS["local"])["gateway.yaml"]
    assert f"image: pilotlight:{version}" in (ROOT / "examples/tiny.yaml").read_text()
