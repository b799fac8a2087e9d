"""`make mutants`: which mutants count, and which tests run against them."""

from __future__ import annotations

import pytest

from tests import mutants

TEXT = "def f(a: int | None, *, b: int = 1) -> int | None:\n    c: int | None = a\n    return c\n"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (TEXT, False),
        (TEXT.replace("a: int | None", "a: int & None"), False),
        (TEXT.replace("-> int | None", "-> int + None"), False),
        (TEXT.replace("c: int | None", "c: int - None"), False),
        (TEXT.replace("*, b", "+, b"), False),
        (TEXT.replace("= 1", "= 2"), True),
        (TEXT.replace("return c", "return not c"), True),
    ],
    ids=["same", "annotated argument", "result", "annotated variable", "no Python", "default", "value"],
)
def test_mutant_is_kept_only_if_it_changes_code_outside_annotations(text: str, counts: bool) -> None:
    assert mutants.is_other_program(text, TEXT) is counts


@pytest.mark.parametrize(
    ("line", "tests"), [(10, ["a", "b"]), (12, ["b"]), (3, ["a", "b", "c"]), (1, ["a", "b", "c"])],
    ids=["executed", "within a statement", "executed at import", "above all"],
)  # fmt: skip
def test_tests_run_for_a_mutant_are_those_that_execute_its_line(line: int, tests: list[str]) -> None:
    lines: dict[int, set[str]] = {2: set(), 10: {"a", "b"}, 11: {"b"}, 20: {"c"}}
    assert mutants.tests_of(mutants.Mutant("f.py", line, "core/X", ""), lines) == tests


def test_xdist_group_is_removed_from_test_ids() -> None:
    ids = ["tests/test_a.py::test_b[x@y]@group", "tests/test_a.py::test_b[x@y]", "tests/test_a.py::test_b@demo"]
    assert [mutants.GROUP.sub("", one) for one in ids] == [
        *["tests/test_a.py::test_b[x@y]"] * 2,
        "tests/test_a.py::test_b",
    ]
