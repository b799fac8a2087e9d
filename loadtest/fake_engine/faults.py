"""The arguments of the fake engine, and the faults that it can simulate.

Defines their names, defaults and meaning. Only arguments are read. Uses only the standard library, like the whole fake
engine.
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
    "busy-503": 1,  # every n-th request
    "error-500": 1,  # every n-th request
    "slow-health": 1.0,  # seconds
    "bad-chunk": 0,
    "cl-mismatch": 10,  # bytes announced but never sent; only for responses that are not streams
    "flood-1xx": 1000,  # interim responses before a response
}
"""Each fault, with its argument if `--fail` gives none."""


class Knobs(argparse.Namespace):
    """The typed arguments."""

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
    """Parse one --fail argument, MODE or MODE:ARG."""
    mode, _, argument = text.partition(":")
    if mode not in FAULTS:
        raise argparse.ArgumentTypeError(f"no such fault {mode!r}; there are {', '.join(FAULTS)}")
    return mode, float(argument) if argument else FAULTS[mode]


def parse_arguments(argv: list[str]) -> Knobs:
    """Parse the arguments; exit with status 2 if they are invalid."""
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
