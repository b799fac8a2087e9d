"""Forms of ten HTTP clients: the gateway accepts what werkzeug and Go's mime/multipart accept, and reads the same.

`forms_disagree` counts the forms for which this does not hold.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from werkzeug.http import parse_options_header
from werkzeug.sansio import multipart as werkzeug

from gateway.errors import CallError
from gateway.http.body_buffers import ChunkedBody
from gateway.request import media_types, multipart
from tests.support.net.client_forms import CLIENTS, Written, written

PROGRAM = Path(__file__).parents[2] / "support" / "go_form_reader" / "main.go"
PIECE_BYTES = 7
Parts = list[tuple[bytes, bytes]]
"""Names and values."""


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None:
        pytest.skip("go is not installed, which builds the reader (Debian: apt install golang)")
    program = tmp_path_factory.mktemp("go") / "goform"
    subprocess.run(["go", "build", "-o", program, PROGRAM], check=True, capture_output=True)
    return program


def parts_by_go(program: Path, forms: Sequence[Written]) -> list[Parts | None]:
    """Return the parts of each form as Go reads them; None if it rejects the form."""
    lines = [json.dumps({"type": one.content_type, "body": base64.b64encode(one.body).decode()}) for one in forms]
    done = subprocess.run([program], input="\n".join([*lines, ""]), capture_output=True, text=True, check=True)
    found: list[Parts | None] = []
    for line in done.stdout.splitlines():
        parts = json.loads(line).get("parts")
        decode = base64.b64decode
        found.append(None if parts is None else [(_plain(decode(one["name"])), decode(one["value"])) for one in parts])
    return found


def _plain(name: bytes) -> bytes:
    """Return a name without the escape of quotes that browsers write; only werkzeug decodes it."""
    return name.replace(b"%22", b'"')


def parts_by_werkzeug(form: Written) -> Parts | None:
    """Do the same with werkzeug."""
    kind, options = parse_options_header(form.content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        return None
    decoder = werkzeug.MultipartDecoder(options["boundary"].encode())
    decoder.receive_data(form.body)
    decoder.receive_data(None)
    found: Parts = []
    try:
        while not isinstance(event := decoder.next_event(), werkzeug.Epilogue):
            if isinstance(event, werkzeug.Field | werkzeug.File):
                found.append((event.name.encode(), b""))
            elif isinstance(event, werkzeug.Data):
                found[-1] = (found[-1][0], found[-1][1] + event.data)
    except ValueError:
        return None
    return found


def parts_by_gateway(form: Written) -> Parts | None:
    """Do the same with the gateway, which reads a form at once or while it arrives, with the same result."""
    content_type = form.content_type.encode()
    boundary = media_types.parse_boundary(content_type)
    assert boundary is not None, form.content_type
    pieces = ChunkedBody()
    multipart.scan_multipart(pieces, content_type)
    for at in range(0, len(form.body), PIECE_BYTES):
        pieces.add(form.body[at : at + PIECE_BYTES])
        assert pieces.scan is not None
        pieces.scan.step(len(pieces))
    try:
        multipart.read_multipart(form.body, content_type)
    except CallError:
        with pytest.raises(CallError):
            multipart.read_multipart(pieces, content_type)
        return None
    multipart.read_multipart(pieces, content_type)
    spans, first, after = multipart._parts(form.body, boundary)
    scan = pieces.scan
    assert isinstance(scan, multipart.FormScan)
    assert (scan.found, scan.first, scan.after) == (spans, first, after)
    return [(_plain(name), form.body[start:end]) for name, start, end in spans]


def count_disagreements(program: Path, client: str, count: int) -> int:
    """Return `forms_disagree` for this number of forms of a client."""
    forms = [written(client, number) for number in range(count)]
    disagree = 0
    for form, by_go in zip(forms, parts_by_go(program, forms), strict=True):
        ours, by_werkzeug = parts_by_gateway(form), parts_by_werkzeug(form)
        accepted = by_go is not None and by_werkzeug is not None
        values = [one.value for one in form.fields]
        if accepted != (ours is not None):
            disagree += 1
        elif ours is not None:
            disagree += not (ours == by_go == by_werkzeug) or [value for _, value in ours] != values
    return disagree


@pytest.mark.standard
@pytest.mark.parametrize("client", CLIENTS)
def test_forms_of_http_clients_parse_the_same_as_with_go_and_werkzeug(go: Path, client: str) -> None:
    assert count_disagreements(go, client, 40) == 0


@pytest.mark.deep
@pytest.mark.parametrize("client", CLIENTS)
def test_two_thousand_forms_per_client_parse_as_with_go_and_werkzeug(go: Path, client: str) -> None:
    assert count_disagreements(go, client, 2_000) == 0
