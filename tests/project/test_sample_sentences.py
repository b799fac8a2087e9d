"""The sample of the reading test: repeatable, of equal parts, with docstrings and messages kept apart."""

from __future__ import annotations

import pytest

from scripts import sample_sentences as sample

SOURCE = '''"""A module about a queue of requests."""
import click

LIMIT = 3
"""The limit of the queue of requests."""


@click.command()
def show():
    """Show the queue of one model."""
    # A comment about the empty queue.
    raise ValueError(f"queue of {LIMIT} requests is full; raise the limit")
'''


def population(size: int = 30) -> dict[str, list[sample.Sentence]]:
    return {name: [sample.Sentence(f"{name}:{n}", f"sentence number {n} here") for n in range(size)] for name in "abcd"}


def test_sample_has_eighty_distinct_sentences_twenty_of_each_group() -> None:
    drawn = sample.draw(population(), seed=7)
    assert len(set(drawn)) == sample.SENTENCES
    assert [one.place[0] for one in drawn] == [name for name in "abcd" for _ in range(20)]


def test_equal_seeds_draw_equal_samples_and_different_seeds_do_not() -> None:
    assert sample.draw(population(), seed=7) == sample.draw(population(), seed=7)
    assert sample.draw(population(), seed=7) != sample.draw(population(), seed=8)


def test_sample_of_a_group_with_too_few_sentences_raises_value_error() -> None:
    with pytest.raises(ValueError, match="larger than population"):
        sample.draw(population(size=19), seed=7)


def test_sampled_docstrings_and_comments_contain_no_error_messages() -> None:
    texts = [one.text for one in sample.sentences("m.py", sample.docstrings_and_comments(SOURCE))]
    assert texts == [
        "A module about a queue of requests.", "The limit of the queue of requests.", "Show the queue of one model.",
        "A comment about the empty queue.",
    ]  # fmt: skip


def test_sampled_messages_are_error_texts_and_help_texts() -> None:
    found = list(sample.sentences("m.py", sample.messages(SOURCE)))
    assert [one.text for one in found] == [
        "Show the queue of one model.", "queue of `code` requests is full; raise the limit",
    ]  # fmt: skip
    assert [one.place for one in found] == ["m.py:10", "m.py:12"]


def test_help_of_the_sentence_sampler_contains_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sample.main(["--help"])
    assert ended.value.code == 0
    assert "python -m scripts.sample_sentences --seed 7" in capsys.readouterr().out
