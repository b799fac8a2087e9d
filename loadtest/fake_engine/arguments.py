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
    "hangs-metrics": 0,
    "nan-metrics": 0,
    "flood-1xx": 1000,  # interim responses before a response
}
"""Each fault, with its argument if `--fail` gives none."""


class Knobs(argparse.Namespace):
    """The typed arguments."""

    host: str
    port: int
    name: str
    engine: str
    wake_delay: float
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
        raise argparse.ArgumentTypeError(f"no such fault {mode!r}; expected one of {', '.join(FAULTS)}")
    return mode, float(argument) if argument else FAULTS[mode]


def parse_arguments(argv: list[str]) -> Knobs:
    """Parse the arguments; exit with status 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.fake_engine", description="A fake engine that fails on demand.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="The address to listen on.")
    add("--port", type=int, default=0, help="The port to listen on. 0: use a free port and print it.")
    add("--name", default="fake", help="The name of the model.")
    add("--engine", default="llama.cpp", choices=["llama.cpp", "vllm"], help="The engine to imitate.")
    add("--wake-delay", type=float, default=0.0, help="The time that a wake takes, in seconds (vllm).")
    add("--slots", type=int, default=4, help="The number of concurrent requests.")
    add("--tokens-per-s", type=float, default=200.0, help="The number of tokens per second and request. 0: no limit.")
    add("--tokens", type=int, default=0, help="The number of tokens per response. 0: one repetition of the sentence.")
    add("--start-delay", type=float, default=0.0, help="The time until the engine is ready, in seconds.")
    add("--loading-503", action="store_true", help="Listen at once and return 503 until the engine is ready.")
    add("--sentence", default="", help="The text of responses. Default: a sentence with the name.")
    add("--transcript", default="", metavar="FILE", help="Append one JSON line per request to this file.")
    add("--fail", action="append", default=[], type=fault, metavar="MODE[:ARG]", help=", ".join(FAULTS))
    add(
        "--once",
        default="",
        metavar="FILE",
        help="A fault occurs only if FILE does not exist. It then creates FILE, so that it occurs once.",
    )
    knobs = parser.parse_args(argv, namespace=Knobs())
    if knobs.slots < 1:
        parser.error("--slots must be at least 1")
    knobs.sentence = knobs.sentence or f"Hello, I am {knobs.name}, asleep until you called."
    return knobs
