"""A checker of prose for `make check`: words of docs/style-words.txt, free relative clauses and long sentences.

Run `python -m scripts.prose [FILE ...]`; without files it checks the documentation, the product, the chart, the
examples and the scripts. In modules it checks docstrings, comments and strings; in HTML pages their texts; in other
files comments and values such as `description`. Exit status 1 and one line per finding, or nothing. Code, tables of
generated content, headings and links are not prose.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "docs" / "style-words.txt"
WORDS_MAX = 40
"""Maximum number of words of a sentence."""
LINE_CHARACTERS_MAX = 140
"""Maximum length of a line of Markdown, code blocks included, except in tables."""
PROSE_WORDS_MIN = 3
"""A string of a Python module with fewer words is not prose."""
OPENING = re.compile(r"(?:Who(?:ever)?|What(?:ever)?|Whichever|That which|Those (?:who|that|of which))\b(?!.*\?$)")
"""A sentence that opens with a free relative clause ("What is late is ended"); questions may."""
EXCLUDED = (
    *(f"docs/development/fault-cases{part}.md" for part in ("", "-hostile-input")),
    *(f"docs/development/messages{part}.md" for part in ("", "-operators")),
    "docs/reference/chart-values.md",
)
"""Generated, or quotes: of the reports that the cases come from, and of messages before their revision."""
PRODUCT = ("artifacts", "autoscaler", "gateway", "loadtest", "pilotlight", "bench", "docs", "examples", "scripts")
"""Folders whose modules are checked without being named."""
OTHER = ("*.md", "*.html", "*.yml", "charts/*.yaml", "charts/*.tpl", "charts/*.txt", "charts/*/dashboards/*.json",
         "docs/*.yaml", "examples/*.yaml", "scripts/*.sh", "Makefile", "hatch_build.py", "pyproject.toml")  # fmt: skip
"""Further files that are checked without being named."""
_PROGRAM = re.compile(r"^(?:import|from) |[{}]\s*$|;\n", re.MULTILINE)
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_CODE = re.compile(r"`[^`]*`")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"\*\*|__")
_COMMENT = re.compile(r"^(\s*)# ?(?!!)(.*)|\s##? (.+)")
_VALUE = re.compile(r"^\s*\"?(?:summary|description|title)\"?\s*[:=]\s*(.+)")
_TEMPLATE = re.compile(r"\{\{-?\s*/\*(.*?)\*/|\{\{.*?\}\}", re.DOTALL)
_TAG = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL)
_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"")
_SCRIPT = re.compile(rf"//.*|{_STRING.pattern}")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(`*])")


class Finding(NamedTuple):
    """One place that the checker reports."""

    path: str
    line: int
    problem: str


def rules() -> list[tuple[re.Pattern[str], str]]:
    """The words to avoid and their substitutes."""
    pairs = (line.split("\t") for line in WORDS.read_text().splitlines() if line and not line.startswith("#"))
    return [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), substitute) for word, substitute in pairs]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph, list item and table cell; without code, links and headings."""
    block, begin, fenced = list[str](), 0, False
    for number, line in enumerate((*text.splitlines(), ""), 1):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        is_item = re.match(r"\s*(?:[*+-]|\d+\.)\s", line) is not None
        is_row = line.lstrip().startswith("|")
        if block and (fenced or not line.strip() or is_item or is_row or line.startswith(("#", "<"))):
            yield begin, " ".join(block)
            block = []
        if fenced or not line.strip() or line.startswith(("#", "<")):
            continue
        plain = _EMPHASIS.sub("", _LINK.sub(r"\1", _IMAGE.sub("", _CODE.sub("`code`", line))))
        if is_row:
            cells = re.split(r" \| |; ", plain.strip().strip("|"))
            yield from ((number, cell.strip()) for cell in cells if cell.strip())
            continue
        begin = begin if block else number
        block.append(re.sub(r"^\s*(?:[*+-]|\d+\.)\s+", "", plain).strip())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each block of comments."""
    begin, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#(?:!| fmt:| noqa| type:)", token.string):
            continue
        text = re.sub(r"# (?:noqa|type:).*", "", token.string[1:]).strip()
        if block and token.start[0] != begin + len(block):
            yield begin, " ".join(block)
            block = []
        begin = begin if block else token.start[0]
        block.append(text)
    if block:
        yield begin, " ".join(block)


def strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield each string of a Python module that is prose, docstrings included. Expressions of f-strings are `code`."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`code`" for part in node.values)
            yield node, text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node, node.value


def string_paragraphs(node: ast.expr, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of a string, if it is prose."""
    if len(text.split()) >= PROSE_WORDS_MIN and not _PROGRAM.search(text):
        first, _, rest = text.partition("\n")
        yield from ((node.lineno + line - 1, one) for line, one in paragraphs(f"{first}\n{textwrap.dedent(rest)}"))


def python_paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of the docstrings, comments and strings of a Python module."""
    for node, text in strings(ast.parse(source)):
        yield from string_paragraphs(node, text)
    yield from comments(source)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def html_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each text between tags, and of each comment and string of scripts."""
    begin = 0
    for tag in _TAG.finditer(text):
        yield _line(text, begin), " ".join(text[begin : tag.start()].split())
        begin = tag.end()
        if tag[1] == "script":
            script = _SCRIPT.finditer(tag[0])
            yield from ((_line(text, tag.start() + one.start()), one[0].strip('/ "')) for one in script)


def other_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each block of comments that begin with #, and of each value that is prose."""
    block, begin, indent = list[str](), 0, ""
    for number, line in enumerate((*text.splitlines(), ""), 1):
        comment, value = _COMMENT.search(line), _VALUE.match(line)
        before, whole, trailing = ("", "", "") if comment is None else comment.groups("")
        is_prose = bool(whole) and not whole.startswith("  ")  # otherwise an empty line, or an example of code
        if block and not (is_prose and before == indent):
            yield begin, " ".join(block)
            block = []
        if is_prose:
            begin, indent = begin if block else number, before
            block.append(whole)
        if trailing:
            yield number, trailing
        if value is not None:
            yield number, value[1].strip("'\",")


def template_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each comment, string and value of a template."""
    for action in _TEMPLATE.finditer(text):
        texts = [action[1]] if action[1] else [one.strip('"') for one in _STRING.findall(action[0])]
        yield from ((_line(text, action.start()), " ".join(one.split())) for one in texts)
    yield from other_paragraphs(_TEMPLATE.sub(lambda one: "`code`" + "\n" * one[0].count("\n"), text))


def paragraphs_of(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of a file, by its kind."""
    match Path(path).suffix:
        case ".md":
            return paragraphs(text)
        case ".py":
            return python_paragraphs(text)
        case ".html":
            return html_paragraphs(text)
        case ".txt":
            return enumerate(_TEMPLATE.sub("`code`", text).splitlines(), 1)
        case _ if "/templates/" in path:
            return template_paragraphs(text)
        case _:
            return other_paragraphs(text)


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph."""
    return _END.split(paragraph)


def findings(path: str, text: str) -> Iterator[Finding]:
    """Yield the problems of a text."""
    words = rules()
    for line, paragraph in paragraphs_of(path, text):
        for pattern, substitute in words:
            yield from (
                Finding(path, line, f"{found[0]!r}: write {substitute}") for found in pattern.finditer(paragraph)
            )
        for sentence in split_sentences(paragraph):
            count = len(sentence.split())
            if count > WORDS_MAX:
                yield Finding(path, line, f"a sentence of {count} words; the limit is {WORDS_MAX}: {sentence[:60]}...")
            if OPENING.match(sentence):
                yield Finding(path, line, f"opens with a free relative clause: {sentence[:60]}")


def long_lines(path: str, text: str) -> Iterator[Finding]:
    """Yield the lines of a Markdown text that are too long. Only rows of tables may be long."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= _FENCE.match(line) is not None
        if len(line) > LINE_CHARACTERS_MAX and (fenced or not line.lstrip().startswith("|")):
            yield Finding(path, number, f"a line of {len(line)} characters; the limit is {LINE_CHARACTERS_MAX}")


def checked_files() -> list[str]:
    """All files with text for people, except tests."""
    globs = [*OTHER, *(f"{folder}/*.py" for folder in PRODUCT)]
    listed = subprocess.run(["git", "ls-files", *globs], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def main(names: Sequence[str]) -> int:
    """Print the findings; exit status 1 if there is one."""
    found = list[Finding]()
    for name in names or checked_files():
        text = (ROOT / name).read_text()
        found += long_lines(name, text) if name.endswith(".md") else ()
        found += findings(name, text) if names or name not in EXCLUDED else ()
    for one in found:
        print(f"{one.path}:{one.line}: {one.problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
