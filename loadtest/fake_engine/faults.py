"""The knobs of the fake engine: its arguments and the faults it can be told to have.

Owns their names, defaults and meaning. Standard library only, like all of the fake engine. It must not read anything
but its arguments.
"""

from __future__ import annotations

import argparse

CHILD_S_MAX = 60.0

FAULTS: dict[str, float] = {
    "never-ready": 0,
    "dies-on-start": 1,  # exit code, after the start delay
    "dies-after": 1.0,  # seconds after the process began to serve or to start
    "dies-mid-stream": 2,  # tokens
    "dies-before-first-byte": 0,
    "hangs-after-first-byte": 0,
    "hangs-before-first-byte": 0,
    "closes-keepalive-after-stream": 0,
    "ignores-sigterm": 0,
    "leaves-child": CHILD_S_MAX,  # seconds the child lives
    "busy-503": 1,  # every n-th Call
    "error-500": 1,  # every n-th Call
    "slow-health": 1.0,  # seconds
    "bad-chunk": 0,
    "cl-mismatch": 10,  # bytes promised and never sent; answers that are not streams
    "flood-1xx": 1000,  # interim responses before a Call's answer
}
"""Each fault, and its argument where `--fail` gives none."""


class Knobs(argparse.Namespace):
    """The arguments, typed."""

    host: str
    port: int
    name: str
    slots: int
    tokens_per_s: float
    tokens: int
    start_delay: float
    loading_503: bool
    sentence: str
    transcript: str
    once: str
    fail: list[tuple[str, float]]


def fault(text: str) -> tuple[str, float]:
    """One --fail argument, MODE or MODE:ARG."""
    mode, _, argument = text.partition(":")
    if mode not in FAULTS:
        raise argparse.ArgumentTypeError(f"no such fault {mode!r}; there are {', '.join(FAULTS)}")
    return mode, float(argument) if argument else FAULTS[mode]


def parse_arguments(argv: list[str]) -> Knobs:
    """The knobs; exits 2 on wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.fake_engine", description="A fake engine that fails on demand.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: a free one, printed")
    add("--name", default="fake")
    add("--slots", type=int, default=4)
    add("--tokens-per-s", type=float, default=200.0, help="per Call; 0: as fast as it can")
    add("--tokens", type=int, default=0, help="of an answer; 0: once through the sentence")
    add("--start-delay", type=float, default=0.0, help="seconds until ready")
    add("--loading-503", action="store_true", help="listen at once, answer 503 until ready")
    add("--sentence", default="", help="what it says; default: its name in a sentence")
    add("--transcript", default="", metavar="FILE", help="append one JSON line per Call to this file")
    add("--fail", action="append", default=[], type=fault, metavar="MODE[:ARG]", help=", ".join(FAULTS))
    add("--once", default="", metavar="FILE", help="a fault strikes only while FILE is absent, and creates it")
    knobs = parser.parse_args(argv, namespace=Knobs())
    if knobs.slots < 1:
        parser.error("--slots must be at least 1")
    knobs.sentence = knobs.sentence or f"Hello, I am {knobs.name}, asleep until you called."
    return knobs
