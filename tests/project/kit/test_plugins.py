"""The pytest plug-ins: tiers, isolation, shards, failures, changed files, costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gates import ROOT
from tests import flaky, run
from tests.plugins import changed, failures, report, tiers

pytest_plugins = ["pytester"]
INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    fast\n    standard\n    deep\n"
PLUGINS = ("-p", "tests.plugins.tiers", "-p", "tests.plugins.failures", "-p", "no:xdist")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite in tests/ of a temporary folder."""
    pytester.makeini(INI)
    (pytester.path / "tests" / "integration" / "cluster").mkdir(parents=True)
    return pytester


def outcome(suite: pytest.Pytester, source: str, *words: str, folder: str = "tests") -> pytest.RunResult:
    """Run one test file."""
    (suite.path / folder / "test_it.py").write_text(source)
    return suite.runpytest_inprocess(*PLUGINS, *words, "tests")


@pytest.mark.standard
def test_fast_test_that_connects_a_socket_fails(suite: pytest.Pytester) -> None:
    source = "import socket\ndef test_it():\n    socket.create_connection(('127.0.0.1', 1))\n"
    outcome(suite, source).stdout.fnmatch_lines(["*IsolationError: *test_it is marked fast and raised socket.*"])


@pytest.mark.standard
def test_fast_test_that_catches_the_isolation_error_fails(suite: pytest.Pytester) -> None:
    source = (
        "import socket\ndef test_it():\n    try:\n        socket.create_connection(('127.0.0.1', 1))\n"
        "    except Exception:\n        pass\n"
    )
    outcome(suite, source).assert_outcomes(failed=1)


@pytest.mark.standard
def test_fast_test_with_a_process_in_a_session_fixture_fails(suite: pytest.Pytester) -> None:
    source = (
        "import subprocess, pytest\n@pytest.fixture(scope='session')\ndef one():\n    subprocess.run(['true'])\n"
        "def test_it(one): pass\n"
    )
    outcome(suite, source).stdout.fnmatch_lines(["*IsolationError: *marked fast and raised subprocess.Popen*"])


@pytest.mark.standard
def test_standard_tier_test_that_binds_a_socket_passes(suite: pytest.Pytester) -> None:
    source = (
        "import socket, pytest\n@pytest.mark.standard\ndef test_it():\n"
        "    with socket.socket() as one: one.bind(('127.0.0.1', 0))\n"
    )
    outcome(suite, source).assert_outcomes(passed=1)


def test_tier_marker_of_a_test_overrides_the_tier_of_its_folder(suite: pytest.Pytester) -> None:
    source = "import pytest\ndef test_a(): pass\n@pytest.mark.standard\ndef test_b(): pass\n"
    outcome(suite, source, "-m", "not deep", folder="tests/integration/cluster").assert_outcomes(passed=1, deselected=1)


def test_tier_marker_of_a_function_overrides_the_one_of_its_module(suite: pytest.Pytester) -> None:
    source = (
        "import pytest\npytestmark = pytest.mark.standard\n@pytest.mark.deep\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    outcome(suite, source, "-m", "deep").assert_outcomes(passed=1, deselected=1)


def test_shard_option_selects_only_deep_and_property_tests_of_the_shard(suite: pytest.Pytester) -> None:
    source = (
        "from hypothesis import given, strategies as st\nimport pytest\n"
        "def test_fast(): pass\n@given(st.integers())\ndef test_property(x): pass\n"
        "@pytest.mark.deep\n@pytest.mark.parametrize('n', range(3))\ndef test_deep(n): pass\n"
    )
    expected = {"test_property": 1, "test_deep": 3}
    shards = {name: tiers.shard_of(name) for name in expected}
    number = shards["test_deep"]
    passed = sum(expected[name] for name in expected if shards[name] == number)
    outcome(suite, source, "--shard", str(number)).assert_outcomes(passed=passed, deselected=5 - passed)


def test_hundred_test_names_are_spread_over_all_shards() -> None:
    assert {tiers.shard_of(f"test_{number}") for number in range(100)} == set(range(tiers.SHARDS))


def test_failed_test_is_summarized_with_seed_repeat_command_and_log(suite: pytest.Pytester) -> None:
    source = (
        "def test_it():\n    print('of a process')\n    assert False, 'replay with `python -m tests.simulation 4711`'\n"
    )
    result = outcome(suite, source)
    log = "*tests-test_it.py-test_it.call.log"
    wanted = [
        "FAILED  tests/test_it.py::test_it",
        "*seed *4711",
        "*repeat *pytest tests/test_it.py::test_it",
        f"*log {log}",
    ]
    result.stdout.fnmatch_lines(wanted)
    (written,) = (suite.path / "build" / "test-logs").iterdir()
    assert "of a process" in written.read_text()


@pytest.mark.standard
def test_tests_of_an_xdist_group_run_in_one_worker(pytester: pytest.Pytester) -> None:
    """pytest-xdist 3.8 silently ignores groups if pytest is newer than 9.1."""
    pytester.makeini(INI + "    xdist_group\n")
    pytester.makepyfile(
        "import os, pytest\n@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('n', range(8))\n"
        "def test_it(n):\n    print('worker', os.environ['PYTEST_XDIST_WORKER'])\n"
    )
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup", "-rP")
    assert len({line for line in result.outlines if line.startswith("worker ")}) == 1


def test_command_to_repeat_a_process_test_runs_in_a_network_namespace() -> None:
    assert "tests.integration.network_namespace" in failures.command(
        "tests/integration/process/security/test_tls.py::test_it[a b]"
    )
    assert "'tests/integration/process/security/test_tls.py::test_it[a b]'" in failures.command(
        "tests/integration/process/security/test_tls.py::test_it[a b]"
    )


def test_direct_and_indirect_importers_of_a_changed_file_are_found() -> None:
    a, b, c, d = (Path(name) for name in "abcd")
    graph = {a: {b}, b: {c}, c: set[Path](), d: set[Path]()}
    assert changed.importers([c], graph) == {a, b, c}


def test_packer_change_selects_packer_tests_and_not_wire_tests() -> None:
    found = changed.reached([ROOT / "autoscaler" / "placement" / "packer.py"])
    assert ROOT / "tests" / "unit" / "autoscaler" / "placement" / "test_packer.py" in found
    assert ROOT / "tests" / "wire" / "requests" / "test_parser.py" not in found


def test_data_file_change_selects_tests_that_name_the_file_and_no_others() -> None:
    wire = ROOT / "tests" / "wire"
    found = changed.reached([wire / "corpus" / "index.json"])
    assert wire / "requests" / "test_parser.py" in found
    assert wire / "requests" / "test_habits.py" not in found
    assert not changed.reached([])


def test_deleted_module_selects_the_files_that_name_the_module() -> None:
    assert Path(__file__) in changed.reached([ROOT / "tests" / "plugins" / "gone_for_good.py"])


def test_cost_report_sums_test_durations_by_folder() -> None:
    lines: list[report.Line] = [
        {"test": "tests/simulation/test_a.py::test_x", "setup_s": 1.0, "call_s": 2.0, "cpu_s": 0.5, "processes": 3},
        {"test": "tests/simulation/test_b.py::test_y", "call_s": 4.0, "cpu_s": 4.0},
        {"collecting_s": 2.5},
    ]
    text = report.report(lines)
    assert "| tests/simulation | 2 | 7.0 | 4.5 |" in text
    assert "| imports of test modules, all workers, s | 2.5 |" in text
    assert "| process starts | 3 |" in text
    assert "| waiting (wall time without CPU time), s | 2.5 |" in text


def test_missing_tool_is_reported_with_package_and_skipped_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == "go" else f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    monkeypatch.setenv("PILOTLIGHT_OLLAMA", sys.executable)
    (line,) = run.missing_tools()
    assert line.startswith("missing: go (")
    assert "skipped: all of tests/integration/cluster" in line


def test_ollama_that_has_not_been_built_is_reported_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == "go" else f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    monkeypatch.delenv("PILOTLIGHT_OLLAMA", raising=False)
    (line,) = [line for line in run.missing_tools() if line.startswith("missing: Ollama 0.17.4 (")]
    assert "python -m tests.support.real_services.ollama" in line
    assert "test_ollama_transcript.py" in line


def test_tool_named_by_an_environment_variable_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    skopeo = next(tool for tool in run.TOOLS if tool.name == "skopeo")
    assert skopeo.is_missing
    monkeypatch.setenv("PILOTLIGHT_SKOPEO", "/opt/skopeo")
    assert not skopeo.is_missing


def test_unavailable_network_namespaces_are_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    monkeypatch.setenv("PILOTLIGHT_OLLAMA", sys.executable)
    assert [line.split(" (")[0] for line in run.missing_tools()] == ["missing: network namespaces"]


@pytest.mark.parametrize(("status", "result"), [(2, "failed"), (None, "not run")])
def test_part_that_failed_or_did_not_run_fails_the_whole_run(status: int | None, result: str) -> None:
    parts = [run.Part("a", [], status=0), run.Part("b", [], status=status)]
    assert not run.is_passed(parts)
    *_, b, total = run.summary(parts, 1.0).splitlines()
    assert (result in b, "failed" in total) == (True, True)


@pytest.mark.standard
def test_program_that_cannot_start_is_a_failed_part(capsys: pytest.CaptureFixture[str]) -> None:
    part = run.Part("nothing", ["/no/such/program"])
    part.run(show=True)
    assert part.result == "failed"
    assert "/no/such/program" in capsys.readouterr().out


def test_repeat_command_for_compiled_gateway_uses_the_compiled_script() -> None:
    command = failures.command("tests/wire/requests/test_parser.py::test_it[a]", compiled=True)
    assert command == "bash scripts/compiled.sh test -k test_it"


def test_each_failed_test_of_a_summary_is_listed_once() -> None:
    assert flaky.failed("x\nFAILED  a::b\n  repeat  c\nFAILED  a::b\nFAILED  d::e\n") == ["a::b", "d::e"]


def test_errors_of_each_failed_test_are_listed_after_its_log_name(tmp_path: Path) -> None:
    (tmp_path / "cluster-tests.txt").write_text("E   of a part, not of a test")
    (tmp_path / "tests-test_a.py-one.call.log").write_text(">  assert x\nE   assert 1 == 2\nE   " + "x" * 1000)
    name, *errors = run.failures(tmp_path)
    assert name == "failed: tests-test_a.py-one.call.log"
    assert errors == ["E   assert 1 == 2", "E   " + "x" * (run.ERROR_CHARACTERS_MAX - 4)]
