"""A body that says where the Call, or a part of it, shall go is refused, wherever such a name is looked for."""

from __future__ import annotations

import pytest

from gateway import elsewhere
from gateway.errors import CallError
from gateway.multipart import read_multipart
from gateway.rewrite import read_json

FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


def refused(error: CallError, name: str) -> bool:
    return (error.status, error.code, error.param) == (400, "invalid_request", name) and name in error.message


@pytest.mark.parametrize("name", sorted(elsewhere.PLACES))
def test_a_place_is_refused_by_its_name_and_its_value_is_not_told(name: str) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    forms = FORM % (name.encode(), b"http://canary") + FORM % (b"model", b"m") + b"--b--"
    for read in (
        lambda: read_json(b'{"model":"m","%b":"http://canary"}' % name.encode()),
        lambda: read_json(b'{"%b":null,"model":"m"}' % escaped.encode()),
        lambda: read_multipart(forms, b"multipart/form-data; boundary=b"),
    ):
        with pytest.raises(CallError) as caught:
            read()
        assert refused(caught.value, name)
        assert "canary" not in caught.value.message


def test_deeper_it_is_content() -> None:
    body = b'{"model":"m","messages":[{"api_base":"x","content":{"lora_path":"y"}}],"tools":[{"base_url":"z"}]}'
    assert read_json(body).body == body


def test_names_that_are_none_pass() -> None:
    elsewhere.check(["model", "messages", "url", "file", "image_url", "API_BASE", "api_base_"])
    elsewhere.check([])
