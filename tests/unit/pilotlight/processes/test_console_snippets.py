"""Snippets that `serve` prints for pasting: valid in a shell and in Python, and with what the listener requires."""

from __future__ import annotations

import ast
import json
import shlex

import pytest

from pilotlight.processes import console

URL, MODEL = "http://127.0.0.1:8080", "llama-8b"


@pytest.mark.parametrize("key", [False, True])
def test_printed_curl_snippet_is_one_command_with_the_model_name(key: bool) -> None:
    words = shlex.split(console.format_curl_command(URL, MODEL, key=key))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == MODEL
    assert ("Authorization: Bearer YOUR_KEY" in words) is key


@pytest.mark.parametrize("key", [False, True])
def test_printed_python_snippet_is_valid_code_with_url_key_and_model(key: bool) -> None:
    text = console.format_python_program(URL, MODEL, key=key)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    words = {
        k.arg: ast.literal_eval(k.value) for call in calls for k in call.keywords if isinstance(k.value, ast.Constant)
    }
    assert words == {"base_url": f"{URL}/v1", "api_key": "YOUR_KEY" if key else "none-needed", "model": MODEL}
