"""A checker of prose for `make check`: words of docs/style-words.txt, free relative clauses and long sentences.

Run `python -m scripts.prose [FILE ...]`; without files it checks all documentation. Exit status 1 and one line per
finding, or nothing. Code, tables of generated content, headings and links are not prose.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "docs" / "style-words.txt"
WORDS_MAX = 40
"""Words of a sentence."""
OPENING = re.compile(r"(?:Who(?:ever)?|What(?:ever)?|Whichever|That which|Those (?:who|that|of which))\b(?!.*\?$)")
"""A sentence that opens with a free relative clause ("What is late is ended"); questions may."""
EXCLUDED = ("docs/development/fault-cases.md", "docs/reference/chart-values.md")
"""Generated, or quotes of the reports that the cases come from."""
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_CODE = re.compile(r"`[^`]*`")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"\*\*|__")
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


def findings(path: str, text: str) -> Iterator[Finding]:
    """Yield the problems of a Markdown text."""
    words = rules()
    for line, paragraph in paragraphs(text):
        for pattern, substitute in words:
            yield from (
                Finding(path, line, f"{found[0]!r}: write {substitute}") for found in pattern.finditer(paragraph)
            )
        for sentence in _END.split(paragraph):
            count = len(sentence.split())
            if count > WORDS_MAX:
                yield Finding(path, line, f"a sentence of {count} words; the limit is {WORDS_MAX}: {sentence[:60]}...")
            if OPENING.match(sentence):
                yield Finding(path, line, f"opens with a free relative clause: {sentence[:60]}")


def documentation() -> list[str]:
    """The Markdown files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if name not in EXCLUDED]


def main(names: Sequence[str]) -> int:
    """Print the findings; exit status 1 if there is one."""
    found = [one for name in names or documentation() for one in findings(name, (ROOT / name).read_text())]
    for one in found:
        print(f"{one.path}:{one.line}: {one.problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
