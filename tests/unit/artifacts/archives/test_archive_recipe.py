"""Archives rebuilt from their files, byte by byte."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.archives import archive_recipe, tar_reader
from artifacts.archives.archive_recipe import ArchivedFile, FileRange, Recipe
from artifacts.oci.blob_progress import Span


def archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for path, content in files.items():
            head = tarfile.TarInfo(path)
            head.size = len(content)
            made.addfile(head, io.BytesIO(content))
    return out.getvalue()


def recipe_of(content: bytes, piece_bytes: int) -> Recipe:
    """Return the recipe recorded while the archive is read in pieces of this size."""
    reader, places = tar_reader.Reader(), list[ArchivedFile]()
    for at in range(0, len(content), piece_bytes):
        for event in reader.feed(content[at : at + piece_bytes]):
            if isinstance(event, tar_reader.Member) and event.size:
                places.append(ArchivedFile(reader.at, event.size, event.path))
    rest = b"".join(content[one.first : one.end] for one in archive_recipe.list_gaps(len(content), places))
    return Recipe(len(content), tuple(places), rest)


def joined(recipe: Recipe, files: dict[str, bytes], first: int, end: int) -> bytes:
    found = archive_recipe.iter_archive_range(recipe, first, end)
    return b"".join(files[one.path][one.first : one.end] if isinstance(one, FileRange) else one for one in found)


FILES = st.dictionaries(
    st.text("abcdefghij", min_size=1, max_size=160), st.binary(max_size=2000), min_size=1, max_size=5
)


@given(FILES, st.integers(1, 3000), st.data())
def test_any_range_of_an_archive_is_rebuilt_from_its_recipe_and_files(
    files: dict[str, bytes], piece: int, data: st.DataObject
) -> None:
    content = archive(files)
    recipe = archive_recipe.decode_recipe(archive_recipe.encode_recipe(recipe_of(content, piece)))
    assert recipe is not None
    assert joined(recipe, files, 0, len(content)) == content
    first = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(first + 1, len(content)))
    assert joined(recipe, files, first, end) == content[first:end]
    assert len(recipe.rest) == len(content) - sum(map(len, files.values()))


def test_bytes_outside_of_archived_files_are_listed_as_gaps() -> None:
    places = [ArchivedFile(10, 5, "a"), ArchivedFile(15, 5, "b"), ArchivedFile(30, 1, "c")]
    assert archive_recipe.list_gaps(40, places) == [Span(0, 10), Span(20, 30), Span(31, 40)]
    assert archive_recipe.list_gaps(5, [ArchivedFile(0, 5, "a")]) == []


@pytest.mark.parametrize(
    "places",
    [
        [ArchivedFile(0, 6, "a")],
        [ArchivedFile(0, 3, "a"), ArchivedFile(2, 3, "b")],
        [ArchivedFile(0, 0, "a")],
        [ArchivedFile(-1, 2, "a")],
    ],
)
def test_archive_recipe_with_overlapping_empty_or_outside_file_is_rejected(places: list[ArchivedFile]) -> None:
    with pytest.raises(ValueError, match="overlap, are empty, or lie beyond the end"):
        archive_recipe.list_gaps(5, places)
    assert archive_recipe.decode_recipe(archive_recipe.encode_recipe(Recipe(5, tuple(places), b""))) is None


def test_truncated_or_inconsistent_archive_recipe_decodes_to_none() -> None:
    good = archive_recipe.encode_recipe(Recipe(5, (ArchivedFile(1, 3, "a"),), b"xy"))
    assert archive_recipe.decode_recipe(good) is not None
    assert archive_recipe.decode_recipe(good[:-1]) is None
    assert archive_recipe.decode_recipe(b"") is None
    assert (
        archive_recipe.decode_recipe(archive_recipe.encode_recipe(Recipe(5, (ArchivedFile(1, 3, "a"),), b"x"))) is None
    )
