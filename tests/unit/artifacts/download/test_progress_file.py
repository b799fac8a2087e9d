"""Division of a blob into parts, its progress file, the number of requests, and stalls; all in virtual time."""

from __future__ import annotations

import zlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.digest import Digest
from artifacts.download import concurrency, progress_file
from artifacts.download.concurrency import Judge, Window
from artifacts.oci import blob_progress as parts
from artifacts.oci.blob_progress import BlobProgress, Span, part_bytes

DIGEST = Digest("sha256:" + "a" * 64)
MIB = 1 << 20


def test_small_blobs_use_one_request_and_large_blobs_use_parts() -> None:
    assert BlobProgress(200 * MIB, part_bytes(200 * MIB)).spans() == [Span(0, 200 * MIB)]
    large = BlobProgress(300 * MIB, part_bytes(300 * MIB))
    assert large.spans()[:2] == [Span(0, 32 * MIB), Span(32 * MIB, 64 * MIB)]
    assert large.spans()[-1] == Span(288 * MIB, 300 * MIB)
    assert part_bytes(16 << 40) * parts.PARTS_MAX >= 16 << 40  # the limit holds for the largest blob, too
    assert BlobProgress(0, part_bytes(0)).complete
    assert BlobProgress(200 * MIB, 8 * MIB, frozenset({0, 3})).spans() == [
        Span(8 * MIB, 24 * MIB),
        Span(32 * MIB, 200 * MIB),
    ]


@pytest.mark.parametrize(("size", "part", "done"), [(10, 0, ()), (-1, 4, ()), (10, 4, (3,)), (1 << 40, 1, ())])
def test_blob_layout_with_invalid_sizes_or_part_numbers_is_rejected(
    size: int, part: int, done: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"parts"):
        BlobProgress(size, part, frozenset(done))


def test_write_that_does_not_start_at_a_parts_next_byte_is_rejected() -> None:
    ledger = BlobProgress(100, 30)
    ledger.wrote(30, 40)
    for at in (0 + 1, 71, 30, 100):
        with pytest.raises(ValueError, match="is not the next byte of its part"):
            ledger.wrote(at, 1)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.randoms(use_true_random=False))
def test_first_missing_byte_is_found_for_writes_in_any_order(size: int, part: int, random: Random) -> None:
    ledger, there = BlobProgress(size, part), bytearray(size)
    while not ledger.complete:
        spans = ledger.spans()
        missing = [at for span in spans for at in range(*span)]
        assert missing == [at for at in range(size) if not there[at]]
        first, end = spans[random.randint(0, len(spans) - 1)]
        count = random.randint(1, end - first)
        ledger.wrote(first, count)
        there[first : first + count] = b"x" * count
        assert ledger.frontier == (there.index(0) if 0 in there else size)
        assert ledger.came == there.count(b"x")


# --- progress files --------------------------------------------------------------------------------------------------


BOOT = "3c0f2a5e-7c6d-4c58-8a55-6a1c2d6f0b1e"


def text(done: range) -> bytes:
    return progress_file.format_header(DIGEST, 1000, 100) + progress_file.format_parts(done)


def test_completed_parts_are_read_back_from_the_progress_file() -> None:
    found = progress_file.parse_progress(text(range(3)) + progress_file.format_parts([7]), DIGEST, 1000, BOOT)
    assert found is not None
    assert found.full == {0, 1, 2, 7}
    assert (found.size, found.part) == (1000, 100)


def test_unsynced_parts_are_resumed_only_within_the_same_boot() -> None:
    reported = text(range(2)) + progress_file.format_parts([4, 5], BOOT) + progress_file.format_parts([5, 6], "another")
    found, later = (
        progress_file.parse_progress(reported, DIGEST, 1000, BOOT),
        progress_file.parse_progress(reported, DIGEST, 1000, "a third"),
    )
    assert found is not None
    assert later is not None
    assert found.full == {0, 1, 4, 5}
    assert later.full == {0, 1}


def test_last_offset_recorded_in_the_current_boot_is_resumed() -> None:
    reported = (
        text(range(2)) + progress_file.format_marks({1: 50, 4: 30}, BOOT) + progress_file.format_marks({4: 60}, BOOT)
    )
    reported += progress_file.format_marks({4: 70, 5: 20}, "another")
    found, later = (
        progress_file.parse_progress(reported, DIGEST, 1000, BOOT),
        progress_file.parse_progress(reported, DIGEST, 1000, "a third"),
    )
    assert found is not None
    assert later is not None
    assert (found.full, found.begun(), found.came) == ({0, 1}, {4: 60}, 260)
    assert found.spans()[:3] == [Span(200, 400), Span(460, 1000)]
    assert not later.begun()


@settings(deadline=None)
@given(st.integers(0, 400), st.binary(max_size=40))
def test_truncated_progress_file_lists_no_part_that_was_not_written(cut: int, noise: bytes) -> None:
    found = progress_file.parse_progress(text(range(5))[:cut] + noise, DIGEST, 1000, BOOT)
    assert found is None or found.full <= set(range(5))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        progress_file.format_header(Digest("sha256:" + "b" * 64), 1000, 100),
        progress_file.format_header(DIGEST, 999, 100),
        progress_file.format_header(DIGEST, 1000, 0),
        progress_file.format_header(DIGEST, 1000, 100) + progress_file.format_parts([10]),
        progress_file.format_header(DIGEST, 1000, 100) + progress_file.format_marks({3: 100}, BOOT),
        progress_file.format_header(DIGEST, 1000, 100) + progress_file.format_marks({10: 1}, BOOT),
        progress_file.format_header(DIGEST, 1000, 100).replace(b"-1", b"-2"),
        b"\xff\xfe %08x\n" % zlib.crc32(b"\xff\xfe"),
    ],
    ids=[
        *("nothing", "another digest", "another size", "no parts", "too many", "too far", "beyond"),
        *("another format", "noise"),
    ],
)
def test_progress_file_that_is_invalid_or_of_another_blob_parses_to_none(content: bytes) -> None:
    assert progress_file.parse_progress(content, DIGEST, 1000, BOOT) is None


# --- number of requests ----------------------------------------------------------------------------------------------


def sizes(rate: dict[int, float], steps: int) -> list[int]:
    """Return the window after each second, if `rate[n]` bytes per second arrive with n requests."""
    window, came, found = Window(0.0), 0.0, []
    for second in range(1, steps + 1):
        came += rate[window.size]
        window.measured(float(second), int(came), busy=True)
        found.append(window.size)
    return found


def test_request_window_grows_while_throughput_increases() -> None:
    assert sizes({n: 100.0 * n for n in range(1, 17)}, 12)[-1] == concurrency.MOST
    assert sizes({n: 100.0 * min(n, 6) for n in range(1, 17)}, 60)[-1] in {6, 7}
    flat = sizes(dict.fromkeys(range(1, 17), 100.0), 40)
    assert max(flat) <= concurrency.START + 1
    assert flat.count(concurrency.START) > 30  # mostly the initial size


def test_connections_broken_together_halve_the_request_window_once() -> None:
    window = Window(0.0)
    window.size = 8
    for _ in range(8):
        window.broke(0.5)
    assert window.size == 4
    window.measured(2.0, 100, busy=True)
    window.broke(2.5)
    assert window.size == 2
    for second in range(3, 30):
        window.measured(float(second), 0, busy=True)
        window.broke(float(second))
    assert window.size == concurrency.LEAST


def test_idle_queue_leaves_the_request_window_unchanged() -> None:
    window = Window(0.0)
    for second in range(1, 20):
        window.measured(float(second), 100 * second, busy=False)
    assert window.size == concurrency.START


# --- stalls ----------------------------------------------------------------------------------------------------------


def judged(rates: list[dict[str, int]], restarts: dict[str, int] | None = None) -> list[list[str]]:
    """Return the stalled connections at each second, given the bytes that arrive in it."""
    judge, came, found = Judge(), dict[str, int](), []
    for second, each in enumerate(rates):
        came = {name: came.get(name, 0) + count for name, count in each.items()}
        found.append(judge.stalled(float(second), came, restarts or {}))
    return found


def test_connection_far_slower_than_the_others_is_reported_as_stalled() -> None:
    seen = judged([{"a": 100, "b": 90, "c": 5}] * 7)
    assert seen[int(concurrency.WINDOW_S)] == ["c"]
    assert not any(seen[: int(concurrency.WINDOW_S)])
    assert not any(judged([{"a": 100, "b": 100, "c": 100}] * 8 + [{"a": 1, "b": 1, "c": 2}] * 30)), "all are slow"


def test_last_connection_far_below_earlier_rates_is_reported_as_stalled() -> None:
    seen = judged([{"a": 100, "b": 100, "c": 100}] * 8 + [{"c": 1}] * 12)
    assert ["c"] in seen
    assert not any(judged([{"c": 1}] * 30))  # without other rates to compare with


def test_connection_restarted_too_often_is_not_reported_as_stalled() -> None:
    rates = [{"a": 100, "b": 90, "c": 0}] * 20
    assert any(judged(rates, {"c": concurrency.REPEATS_MAX - 1}))
    assert not any(judged(rates, {"c": concurrency.REPEATS_MAX}))
