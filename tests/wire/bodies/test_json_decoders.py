"""An accepted body has the same meaning for other JSON decoders: Go's, which ignores case, and Python's.

Both use the last of repeated members. The gateway must reject what they would read differently.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import CallError
from gateway.request.body_members import edit_json, read_json

pytestmark = pytest.mark.standard

PROGRAM = Path(__file__).parents[2] / "support" / "go_json_reader" / "main.go"
SEED, BODIES = 26, 4_000
NAMES = ("model", "stream", "stream_options", "cache_salt", "lora", "messages", "include_usage", "api_base")
LIKE = {"s": "sS\u017f", "k": "kK\u212a"}
"""Letters that Go folds to these."""


class Go:
    """The Go program, which answers each line."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, bodies: list[bytes]) -> list[dict[str, Any]]:
        """Return how it decodes these bodies."""
        output, _ = self._process.communicate(b"".join(body + b"\n" for body in bodies), timeout=120)
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Go:
    if shutil.which("go") is None:
        pytest.skip("go is not installed, which builds the decoder (Debian: apt install golang)")
    program = tmp_path_factory.mktemp("go") / "gojson"
    subprocess.run(["go", "build", "-o", program, PROGRAM], check=True, capture_output=True)
    return Go(program)


def spelled(name: str, draw: random.Random) -> str:
    """Return a JSON name, sometimes with other case, with letters that fold to its own, or with escapes."""
    if draw.random() < 0.7:
        return f'"{name}"'
    letters = []
    for letter in name:
        one = draw.choice(LIKE.get(letter, letter + letter.upper())) if draw.random() < 0.2 else letter
        letters.append(f"\\u{ord(one):04x}" if draw.random() < 0.2 else one)
    return f'"{"".join(letters)}"'


def value(name: str, draw: random.Random) -> str:
    """Return a value for a member, mostly of its type."""
    if name == "stream_options":
        return f"{{{spelled('include_usage', draw)}:{draw.choice(('true', 'false'))}}}"
    booleans = name in {"stream", "include_usage"}
    return draw.choice(("true", "false")) if booleans else f'"{draw.choice(("small", "secret"))}"'


def body(draw: random.Random) -> bytes:
    """Return an object with some members, in any order and possibly repeated."""
    names = ["model", *draw.choices(NAMES, k=draw.randint(0, 4))]
    draw.shuffle(names)
    return f"{{{','.join(f'{spelled(name, draw)}:{value(name, draw)}' for name in names)}}}".encode()


def test_accepted_body_has_the_same_meaning_in_go_and_python(go: Go) -> None:
    draw = random.Random(SEED)
    taken, sent = [], []
    for _ in range(BODIES):
        text = body(draw)
        try:
            peek = read_json(text)
        except CallError:
            continue
        taken.append(peek)
        edited = edit_json(peek, model="served", include_usage=True)
        assert isinstance(edited, bytes)
        sent.append(edited)
    assert BODIES / 10 < len(taken) < BODIES / 2
    for peek, text, by_go in zip(taken, sent, go.read(sent), strict=True):
        by_python = json.loads(text)
        assert by_go["model"] == by_python["model"] == "served", text
        assert by_go["stream"] == by_python.get("stream", False) == peek.stream, text
        usage = (by_go["stream_options"] or {}).get("include_usage", False)
        assert usage == (by_python.get("stream_options") or {}).get("include_usage", False), text
        assert usage or not peek.stream, text
        assert by_go["cache_salt"] is None, text
        assert by_go["lora"] is None, text
