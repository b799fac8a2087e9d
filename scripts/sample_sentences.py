"""Draws the sentences of the reading test: `python -m scripts.sample_sentences --seed N`.

Each group contributes the same number of sentences: the README and the documentation; docstrings and comments of the
product; its messages and help texts; and the changelog with subjects of commits. A reader who has not seen the code
reads them and lists each sentence that needs a second reading. The same seed and commit give the same sample.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from scripts import prose

SENTENCES = 80
WORDS_MIN = 4
"""Shorter sentences say too little to be judged. Inline code and inserted values, shown as `code`, do not count."""
COMMITS_MAX = 300
"""The newest commits whose subjects can be drawn."""
EPILOG = """Example:

  python -m scripts.sample_sentences --seed 7

prints 80 lines such as

  12  docs/how-to/quotas.md:14  A Tenant with a limit cannot use more than this share.
"""


class Sentence(NamedTuple):
    """One sentence and its place."""

    place: str
    """FILE:LINE, or the commit."""
    text: str


def sentences(path: str, paragraphs: Iterator[tuple[int, str]]) -> Iterator[Sentence]:
    """Yield the sentences of paragraphs, each given as (line number, text)."""
    for line, paragraph in paragraphs:
        for one in prose.split_sentences(paragraph):
            text = " ".join(one.split())
            if sum("`code`" not in word for word in text.split()) >= WORDS_MIN:
                yield Sentence(f"{path}:{line}", text)


def docstrings_and_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of the docstrings and comments of a module."""
    tree = ast.parse(source)
    documentation = _documentation(tree)
    for node, text in prose.strings(tree):
        if id(node) in documentation:
            yield from prose.string_paragraphs(node, text)
    yield from prose.comments(source)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each paragraph of the other strings of a module: errors, logs and help."""
    tree = ast.parse(source)
    documentation = _documentation(tree) - _help(tree)
    for node, text in prose.strings(tree):
        if id(node) not in documentation and (" " in text.strip()):
            yield from prose.string_paragraphs(node, text)


def _documentation(tree: ast.AST) -> set[int]:
    """The identities of the strings that stand alone: docstrings of modules, classes, functions and attributes."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _help(tree: ast.AST) -> set[int]:
    """The identities of the docstrings of commands, which `--help` prints."""
    commands = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list)
    )
    return {id(node.body[0].value) for node in commands if isinstance(node.body[0], ast.Expr)}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=prose.ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def groups() -> dict[str, list[Sentence]]:
    """All sentences of each group."""
    pages = [name for name in _git("ls-files", "README.md", "docs/*.md") if name not in prose.EXCLUDED]
    modules = _git("ls-files", *(f"{folder}/*.py" for folder in prose.PRODUCT))
    texts = {name: (prose.ROOT / name).read_text() for name in (*pages, *modules, "CHANGELOG.md")}
    subjects = (line.partition(" ") for line in _git("log", f"-{COMMITS_MAX}", "--no-merges", "--format=%h %s"))
    return {
        "documentation": [one for name in pages for one in sentences(name, prose.paragraphs(texts[name]))],
        "docstrings": [one for name in modules for one in sentences(name, docstrings_and_comments(texts[name]))],
        "messages": [one for name in modules for one in sentences(name, messages(texts[name]))],
        "changes": [
            *sentences("CHANGELOG.md", prose.paragraphs(texts["CHANGELOG.md"])),
            *(Sentence(f"commit {commit}", subject) for commit, _, subject in subjects),
        ],
    }


def draw(population: Mapping[str, Sequence[Sentence]], seed: int, count: int = SENTENCES) -> list[Sentence]:
    """Draw `count` different sentences, the same number from each group. Raises ValueError if a group has too few."""
    random_ = random.Random(seed)  # noqa: S311  a sample that can be repeated, not a secret
    share = count // len(population)
    return [one for group in population.values() for one in random_.sample(sorted(set(group)), share)]


def main(arguments: Sequence[str]) -> None:
    """Print the sample: number, place, sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample_sentences",
        description="Draw 80 sentences for the reading test: 20 each of documentation, docstrings and comments, "
        "messages and help, changelog and commit subjects.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, required=True, help="Seed of the sample; an integer.")
    seed = parser.parse_args(arguments).seed
    for number, one in enumerate(draw(groups(), seed), 1):
        print(f"{number:2}  {one.place}  {one.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
