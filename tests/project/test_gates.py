"""The checks of the project's gates detect each violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import chart, commands, custom_resources, engines, error_codes
from scripts import gates


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from gateway import ops", ["1: gateway.ops"]),
        ("import gateway.ops", ["1: gateway.ops"]),
        ("from gateway.ops import build_ops_application", ["1: gateway.ops"]),
        ("def f():\n    from gateway.upstream import pool", ["2: gateway.upstream", "2: gateway.upstream.pool"]),
        ("from autoscaler.drivers.driver import Driver", ["1: autoscaler.drivers", "1: autoscaler.drivers.driver"]),
        ("from pilotlight import safe_output", ["1: pilotlight", "1: pilotlight.safe_output"]),
        ("from pathlib import Path", ["1: pathlib"]),
        ("import time, os.path", ["1: time", "1: os", "1: os.path"]),
        ("from datetime import datetime\nx = datetime.now()", ["1: datetime"]),
        ("import secrets, prometheus_client, sys", ["1: secrets", "1: prometheus_client", "1: sys"]),
        ("from . import ops", ["1: relative"]),
        ("x = open('f').read()", ["1: open"]),
        ("reader = open", ["1: open"]),
        ("async def f(): ...", ["1: async"]),
        ("from gateway import errors\nfrom autoscaler.contract import ModelName\nimport re, msgspec.json", []),
    ],
)
def test_io_and_forbidden_imports_in_a_pure_module_are_reported(text: str, found: list[str]) -> None:
    assert gates.impure_uses("gateway/request/body_members", text) == found


def test_clock_read_or_unsafe_numpy_use_in_a_module_is_reported() -> None:
    assert gates.impure_uses("autoscaler/text", "from datetime import datetime\nx = datetime.now()") == ["2: now"]
    text = "import numpy as np\nfrom numpy.random import default_rng\nx = np.random.rand(np.load('x'))"
    assert gates.impure_uses("autoscaler/placement/index/arrays", text) == [
        "2: numpy.random",
        "3: np.random",
        "3: np.load",
    ]


def test_overlong_file_or_function_is_reported_by_the_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "ROOT", tmp_path)
    source = tmp_path / "long.py"
    source.write_text('def f():\n    """Docstring."""\n' + "    x = 1\n" * 80)
    assert list(gates.too_long(source)) == []
    source.write_text("def f():\n" + "    x = 1\n" * 81)
    assert list(gates.too_long(source)) == ["long.py: f has 81 lines; the limit is 80"]
    source.write_text("x = 1\n" * 1_001)
    assert list(gates.too_long(source)) == ["long.py has 1001 lines; the limit is 1000"]
    source.write_text(f"def test_{'x' * 65}(): pass\ndef test_{'y' * 66}(): pass\n")
    assert list(gates.too_long(source)) == [f"long.py: test_{'y' * 66} has 71 characters; the limit is 70"]


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except Exception as error:\n    reraise_memory_error(error)\n    f()", []),
        ("except Exception:\n    f()\n    raise", []),
        ("except BaseException:\n    f()\n    raise", []),
        ("except ValueError:\n    f()", []),
        ("except Exception as error:\n    f()\n    reraise_memory_error(error)", ["3: Exception"]),
        ("except Exception:\n    pass", ["3: Exception"]),
        ("except:\n    pass", ["3: except"]),
        ("except BaseException:\n    if x:\n        raise", ["3: BaseException"]),
        ("except (OSError, Exception):\n    pass", ["3: (OSError, Exception)"]),
        ("finally:\n    pass\nwith suppress(Exception):\n    f()", ["5: suppress(Exception)"]),
        ("finally:\n    pass\nwith suppress(OSError):\n    f()", []),
    ],
)
def test_exception_handler_that_swallows_a_memory_error_is_reported(handler: str, found: list[str]) -> None:
    assert gates.memory_errors_caught(f"try:\n    f()\n{handler}") == found


@pytest.mark.parametrize(
    ("page", "limit", "whose"),
    [
        ("docs/how-to/tls.md", 12_288, "a page"),
        ("docs/README.md", 12_288, "a page"),
        ("README.md", 10_240, "this page"),
        ("CHANGELOG.md", 5_120, "this page"),
        ("ARCHITECTURE.md", 18_432, "this page"),
    ],
)
def test_page_with_too_many_bytes_is_reported_by_the_gates(page: str, limit: int, whose: str) -> None:
    assert list(gates.page_too_long(page, b"x" * limit)) == []
    (found,) = gates.page_too_long(page, "é".encode() * (limit // 2) + b"x")
    advice = "shorten it or move a part to another page"
    assert found == f"{page}: {limit + 1:,} bytes; the limit of {whose} is {limit:,}; {advice}"


def test_architecture_page_with_too_many_lines_is_reported_by_the_gates() -> None:
    assert list(gates.page_too_long("ARCHITECTURE.md", b"x\n" * 250)) == []
    (found,) = gates.page_too_long("ARCHITECTURE.md", b"x\n" * 251)
    assert found.startswith("ARCHITECTURE.md: 251 lines; the limit of this page is 250;")
    assert list(gates.page_too_long("docs/how-to/tls.md", b"x\n" * 251)) == []


def test_generated_page_has_no_size_limit_and_a_missing_page_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    generated = {
        str(page.relative_to(gates.ROOT))
        for page in (chart.PAGE, commands.PAGE, custom_resources.PAGE, engines.PAGE, error_codes.PAGE)
    }
    assert generated == gates.GENERATED_PAGES
    assert [found for page in generated for found in gates.page_too_long(page, b"x" * 100_000)] == []
    monkeypatch.setattr(gates, "GENERATED_PAGES", frozenset({"docs/reference/gone.md"}))
    assert list(gates.stale_exceptions()) == ["the limits of pages name docs/reference/gone.md, which does not exist"]


def test_pages_of_all_folders_are_checked_for_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = {str(page.relative_to(gates.ROOT)) for page in gates.PAGES}
    folders = ("", "bench/", "charts/pilotlight/", "tests/")
    assert {*(f"{folder}README.md" for folder in folders), "docs/index.md", "bench/results/one-gpu.md"} <= checked
    monkeypatch.setattr(gates, "EVERYTHING", [])
    monkeypatch.setattr(gates, "SOURCES", [])
    monkeypatch.setattr(gates, "PAGES_BYTES_MAX", {"bench/README.md": 1})
    assert any(found.startswith("bench/README.md: ") for found in gates.violations())


def test_public_class_name_repeated_in_a_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = {
        "a/x.py": "class Order: ...\nclass _Order: ...",
        "a/y.py": "class Order: ...",
        "b/x.py": "class Order: ...",
    }
    for path, text in modules.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(gates, "ROOT", tmp_path)
    monkeypatch.setattr(gates, "SOURCES", [tmp_path / path for path in modules])
    assert list(gates.repeated_classes()) == ["a/ has 2 public classes Order: a/x, a/y; rename one"]


def test_folder_with_too_many_modules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "SOURCES", [gates.ROOT / "a" / f"m{number}.py" for number in range(16)])
    assert list(gates.crowded()) == ["a/ has 16 modules; the limit is 15"]
    monkeypatch.setattr(gates, "SOURCES", gates.SOURCES[1:])
    assert list(gates.crowded()) == []
