"""The prose checker reports words to avoid, free relative clauses and long sentences, and nothing in code."""

from __future__ import annotations

import pytest

from scripts import prose


def problems(text: str) -> list[str]:
    return [one.problem for one in prose.findings("page.md", text)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The agent is told the address.", 1),
        ("Nobody may write it, and it is started anew.", 2),
        ("What is late is ended.", 1),
        ("Who may call is in the Tenant.", 1),
        ("What can go wrong?", 0),
        ("word " * 40 + "end.", 1),
        ("word " * 39 + "end.", 0),
        ("| `key` | told by nobody |", 2),
        ("A line with `told` in code, and [a link](told.md).", 0),
        ("```sh\necho told\n```", 0),
        ("![What is told](picture.svg)", 0),
        ("# What is told", 0),
        ("First sentence is short. What is late is ended.", 1),
    ],
)
def test_text_with_wording_problems_gives_one_finding_per_problem(text: str, count: int) -> None:
    assert len(problems(text)) == count


def test_prose_finding_names_file_line_and_substitute() -> None:
    (found,) = prose.findings("page.md", "# Title\n\nText.\n\nIt starts anew.\n")
    assert (found.path, found.line, found.problem) == ("page.md", 5, "'anew': write again")


def test_prose_check_covers_docstrings_comments_and_strings_but_not_code() -> None:
    source = (
        '"""A module.\n\nIt starts anew.\n"""\n\nold = told(beside)\n# Nobody reads\n# this.\n'
        'raise ValueError(f"{old}: it is not told")\n'
    )
    found = [(one.line, one.problem) for one in prose.findings("module.py", source)]
    assert [(line, problem.split(":")[0]) for line, problem in found] == [(3, "'anew'"), (9, "'told'"), (7, "'Nobody'")]


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("examples/a.yaml", "# Nobody\n# reads.\nkey: told  # told\n#   told --all\n", [(1, "Nobody"), (3, "told")]),
        ("charts/a/alerts.yaml", "  - expr: told\n    description: Nobody leads.\n", [(2, "Nobody")]),
        ("charts/a/templates/a.yaml", "{{/*\nA told one\n*/}}\nk: {{ .told }}  # anew\n", [(1, "told"), (4, "anew")]),
        ("charts/a/templates/_a.tpl", '{{ fail "it is told" }}', [(1, "told")]),
        ("charts/a/templates/NOTES.txt", "{{ .told }}\n   Nobody leads.\n", [(2, "Nobody")]),
        (
            "page.html",
            '<p id="told">It is\n told.</p><script>const told = "nobody"; // anew\n</script>',
            [(1, "told"), (2, "nobody"), (2, "anew")],
        ),
        ("pyproject.toml", 'name = "told"\ndescription = "Nobody leads."\n', [(2, "Nobody")]),
        ("Makefile", "told:  ## told by nobody\n", [(1, "told"), (1, "nobody")]),
    ],
)
def test_prose_check_covers_text_in_yaml_templates_html_and_makefiles(
    path: str, text: str, found: list[tuple[int, str]]
) -> None:
    words = [(one.line, one.problem.split("'")[1]) for one in prose.findings(path, text)]
    assert sorted(words) == sorted(found)


@pytest.mark.standard
def test_prose_check_covers_every_kind_of_file_that_people_read() -> None:
    checked = set(prose.checked_files())
    assert {"README.md", "examples/tiny.yaml", "charts/pilotlight/values.yaml", "autoscaler/pages/operator.html",
            "pyproject.toml", "docs/states.py", "examples/demo.py", "scripts/prose.py"} <= checked  # fmt: skip


def test_long_lines_are_reported_in_text_and_code_blocks_but_not_in_tables() -> None:
    long = "x" * (prose.LINE_CHARACTERS_MAX + 1)
    text = f"{long[1:]}\n{long}\n| {long} |\n```\n{long[1:]}\n{long}\n| {long} |\n```\n| {long} |\n"
    assert [one.line for one in prose.long_lines("page.md", text)] == [2, 6, 7]
