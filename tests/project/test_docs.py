"""The documents match the code: modules, states, keys, metrics, commands and links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.documents import parse
from autoscaler.documents.document_rules import KEYS, LATER_ENGINES, SCHEMES
from autoscaler.drivers.probes import FAST_EVERY_S, FAST_FOR_S, LISTENS_EVERY_S, PROBES_PER_S_MAX, SLOW_EVERY_S
from autoscaler.placement.model.prices import CLASSES
from autoscaler.providers import future_nodes
from autoscaler.providers.cro import provider as cro
from autoscaler.providers.provisioning_request import provider as provisioning_request
from autoscaler.providers.redfish import planning
from autoscaler.server.metrics import Metrics
from autoscaler.spec.capacity import KINDS, QUEUES, ProviderSettings
from autoscaler.state.world import World
from docs import commands, draw_call, engines, states
from gateway.telemetry import Telemetry
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.cli.main import cli
from scripts.gates import PACKAGES, PAGES, ROOT, SOURCES

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
FOLDERS = (ROOT / "docs" / "development" / "folders.md").read_text()
CONFIGURATION = sorted((ROOT / "docs" / "reference").glob("configuration*.md"))
CAPACITY = (ROOT / "docs" / "how-to" / "capacity.md").read_text()
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table whose first cell is one code word: that word -> the other cells."""
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {key: [cell.strip() for cell in rest.split(" | ")] for key, rest in found}


def block(mark: str) -> str:
    """The content of a generated block of docs/reference/replica-states.md."""
    return states.PAGE.read_text().partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- /{mark} -->")[0]


def leaves(schema: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(key path, its schema) of every key without nested keys; `[]` stands for the items of a list."""
    for key, value in schema["properties"].items():
        path = f"{at}{key}"
        if "properties" in value:
            yield from leaves(value, f"{path}.")
        elif "properties" in value.get("items", {}):
            yield from leaves(value["items"], f"{path}[].")
        else:
            yield path, value


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub generates it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_source_folder_is_listed_in_the_architecture_document() -> None:
    listed = re.findall(r"^\| `([\w/]+)/` \|", FOLDERS, re.MULTILINE)
    assert sorted(listed) == sorted({str(path.parent.relative_to(ROOT)) for path in SOURCES})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_path_named_in_a_document_exists(page: Path) -> None:
    folders = "|".join((*PACKAGES, "tests", "docs", "examples", "bench"))
    for path in re.findall(rf"`((?:{folders})/[\w/.-]*\.(?:py|md|yaml|json|svg))`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_documented_state_table_equals_the_generated_one() -> None:
    assert block("states") == states.states(), "run `.venv/bin/python -m docs.states`"


@pytest.mark.parametrize("kind", ["Model", "Tenant", "Settings"])
def test_documented_keys_and_defaults_equal_those_of_the_schema(kind: str) -> None:
    schema = json.loads((ROOT / "docs" / "schema" / f"{kind.lower()}.json").read_text())
    tables = [rows(section(page.read_text(), kind)) for page in CONFIGURATION]
    documented, known = {key: cells for table in tables for key, cells in table.items()}, dict(leaves(schema))
    assert sorted(key for table in tables for key in table) == sorted(known)
    for key, value in known.items():
        default = documented[key][1].strip("`")
        if isinstance(value.get("default"), bool | int | float | str):
            wanted = value["default"]
            assert default in {json.dumps(wanted), str(wanted), str(wanted).removesuffix(".0")}, f"{key}: {default}"


def test_documented_provider_kinds_match_the_code() -> None:
    documented = rows(section(CAPACITY, "Provider kinds"))
    assert tuple(documented) == KINDS
    own = {"cro": cro, "redfish": planning, "karpenter": future_nodes, "clusterAutoscaler": future_nodes}
    assert {kind: documented[kind][1] for kind in own} == {kind: f"{one.EXPECTED_S:g}" for kind, one in own.items()}
    for class_name, expected_s in provisioning_request.EXPECTED_S.items():
        assert f"`{class_name.partition('.')[0]}` {expected_s:g}," in documented["provisioningRequest"][1]
    assert documented["kueue"][1] == "unknown"
    assert tuple(kind for kind, cells in documented.items() if cells[2] == "no") == QUEUES


def test_capacity_example_is_valid_and_uses_every_common_key() -> None:
    (message,) = re.findall(r"```yaml\n(.*?)```", section(CAPACITY, "Configure providers"), re.DOTALL)
    settings = parse.parse_documents(
        [("page", f"apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n{message}")]
    ).settings
    common = {field.encode_name for field in msgspec.structs.fields(ProviderSettings)} - {*KINDS}
    assert all(f"{key}: " in message for key in common), "it has all keys that each kind takes"
    assert [one.name for one in settings.capacity] == ["rack", "p4d"]


def test_documented_price_class_labels_match_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "configuration-capacity.md").read_text()
    reported = rows(section(page, "Settings"))["prices[].class"][2]
    labels = re.findall(r"`([\w.-]+/[\w-]+)(?:: \"true\")?`", reported)
    assert labels == [label for label, _ in CLASSES]


def test_documented_unsupported_keys_match_the_rejected_ones() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    documented = section(page, "Not supported yet")
    for kind, keys in KEYS.items():
        row = re.search(rf"^\| {kind} \| (.*) \|$", documented, re.MULTILINE)
        assert row is not None
        assert sorted(re.findall(r"`([^`]+)`", row[1])) == sorted(keys)
    assert all(f"`{engine}`" in documented for engine in LATER_ENGINES)
    assert all(f"`{scheme}://`" in documented for scheme in SCHEMES)


def test_documented_metrics_match_the_exported_ones() -> None:
    texts = [Metrics(lambda: World(epoch=1)).text(), Telemetry().text((), 0.0), StoreMetrics().text()]
    families = [family for text in texts for family in text_string_to_metric_families(text.decode())]
    known = {f.name + ("_total" if f.type == "counter" else "") for f in families if not f.name.endswith("_created")}
    assert sorted(rows(section(METRICS, "Metrics"))) == sorted(known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_in_a_document_has_an_existing_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_and_make_targets_exist(page: Path) -> None:
    context = cli.make_context("pilotlight", ["--help"], resilient_parsing=True)
    for command in re.findall(r"(?:^|[`$/] ?)pilotlight ([a-z]+)", page.read_text(), re.MULTILINE):
        assert cli.get_command(context, command) is not None, f"{page.name} names pilotlight {command}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_documented_probe_intervals_match_the_code() -> None:
    first, then, slow = (f"{1000 * s:g}" for s in (FAST_EVERY_S, LISTENS_EVERY_S, SLOW_EVERY_S))
    for page in ((ROOT / "README.md").read_text(), ARCHITECTURE):
        assert f"every {first} ms until its port listens, then every {then} ms until it is ready" in page
    assert (
        f"after {FAST_FOR_S:g} s every {slow} ms;\n   all engines together at most {PROBES_PER_S_MAX} times"
        in ARCHITECTURE
    )
    assert f"every {first}, then {then} ms" in draw_call.picture()


def test_reference_of_command_options_equals_the_generated_one() -> None:
    assert commands.PAGE.read_text() == commands.page(), "run `.venv/bin/python -m docs.commands`"


def test_reference_of_engines_equals_the_generated_one() -> None:
    assert engines.PAGE.read_text() == engines.page(), "run `.venv/bin/python -m docs.engines`"


def test_documented_cold_start_diagram_equals_the_generated_one() -> None:
    assert (ROOT / "docs" / "call-from-zero.svg").read_text() == draw_call.picture(), "run `python docs/draw_call.py`"


@pytest.mark.parametrize("marker", ["case", "point"])
def test_fault_cases_marked_in_tests_are_documented(marker: str) -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "development").glob("fault-cases*.md")]
    tables = [part for page in pages for part in page.split("\n## ") if f"| {marker} |" in part]
    listed = {number for table in tables for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marked = {number for text in texts for number in re.findall(rf'@pytest\.mark\.{marker}\("(.+)"\)', text)}
    assert marked
    assert marked <= listed
