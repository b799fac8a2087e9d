"""The command `llm` with its command `llm openai endpoint`, and `llm embed`."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys

from tests.clients import program
from tests.clients.program import Outcome, Target

FUNCTION = f"""
def {program.TOOL_NAME}(city: str) -> str:
    "{program.TOOL_TEXT}"
    return "{program.TOOL_RESULT}"
"""


class ExitError(Exception):
    """The command reported an error."""


def begin(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command."""
    return subprocess.Popen(
        [sys.executable, "-m", "llm", *words], env={**os.environ, **environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def llm(*words: str, **environment: str) -> tuple[str, str]:
    """Return what the command printed, and its errors."""
    with begin(*words, **environment) as process:
        output, errors = process.communicate()
    if process.returncode:
        raise ExitError(errors)
    return output.strip(), errors


def endpoint(target: Target) -> list[str]:
    """The words of a prompt."""
    return ["openai", "endpoint", f"{target.url}/v1", program.PROMPT, "-m", target.model]


def models(target: Target) -> Outcome:
    """List the models."""
    return {"models": llm("openai", "endpoint", f"{target.url}/v1", "--models")[0].split()}


def chat(target: Target) -> Outcome:
    """Return one answer."""
    return {"text": llm(*endpoint(target), "--no-stream")[0]}


def stream(target: Target) -> Outcome:
    """Return the answer of a stream."""
    with begin(*endpoint(target), PYTHONUNBUFFERED="1") as process:
        assert process.stdout is not None
        output = process.stdout
        parts = list(iter(lambda: os.read(output.fileno(), 1000).decode(), ""))
    return {"parts": [part for part in (*parts[:-1], parts[-1].rstrip("\n")) if part]}


def tools(target: Target) -> Outcome:
    """Call a tool and return the answer to its result."""
    text, calls = llm(*endpoint(target), "--functions", FUNCTION, "--td", "--no-stream")
    called = re.search(r"Tool call: (\w+)\((.*)\)", calls)
    assert called is not None, calls
    return {"tool": called[1], "arguments": ast.literal_eval(called[2]), "text": text}


def structured(target: Target) -> Outcome:
    """Return an object of a schema."""
    return {"object": json.loads(llm(*endpoint(target), "--schema", "name, age int")[0])}


def embeddings(target: Target) -> Outcome:
    """Return two vectors. The model is an alias, because the command has fixed names of models."""
    words = ("embed", "-m", "text-embedding-3-small", "-f", "json", "--key", "none-needed", "-c")
    base = f"{target.url}/v1"
    return {"vectors": [json.loads(llm(*words, text, OPENAI_BASE_URL=base)[0]) for text in program.INPUTS]}


def cancel(target: Target) -> Outcome:
    """Interrupt a stream after its first words."""
    with begin(*endpoint(target), PYTHONUNBUFFERED="1") as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
    return {"text": first}


if __name__ == "__main__":
    program.run(
        list=models, chat=chat, stream=stream, tools=tools, structured=structured, embeddings=embeddings, cancel=cancel
    )
