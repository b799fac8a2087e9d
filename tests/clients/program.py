"""What the client programs for Python share: the command line, the printed outcome, and how an error is shown.

`main.py URL MODEL BEHAVIOUR FILE` prints one line of JSON. After `cancel` it runs on until its standard input ends, so
that the client itself has to close the connection. Uses only the standard library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

PROMPT = "Who is there?"
INPUTS = ["one", "two words"]
TOOL_NAME, TOOL_TEXT, TOOL_RESULT = "weather", "The weather in a city", "18 degrees"
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": TOOL_SCHEMA}}


class Target(NamedTuple):
    """What a behaviour uses."""

    url: str
    """Of the inference port, without a path."""
    model: str
    file: Path
    """The file to upload."""


Outcome = Mapping[str, object]


def run(**behaviours: Callable[[Target], Outcome]) -> None:
    """Run the behaviour that the command line names, and print its outcome. A failed chat is the outcome `error`."""
    url, model, name, file = sys.argv[1:]
    behaviour = behaviours["chat" if name in {"error", "cold_start"} else name]
    try:
        outcome = behaviour(Target(url, model, Path(file)))
    except Exception as error:  # each client has a type of its own, which the test compares
        if name != "error":
            raise
        status, code = getattr(error, "status_code", None), getattr(error, "code", None)
        outcome = {"error": type(error).__name__, "status": status, "code": code, "message": str(error)}
    print(json.dumps(outcome), flush=True)
    if name == "cancel":
        sys.stdin.read()
