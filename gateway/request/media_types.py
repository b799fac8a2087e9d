"""The content type of a request (RFC 9110, 8.3 and 5.6.6), and parameters as in the heads of form parts. Pure.

Parameters are in any order, quoted or not, and may be empty. An engine gets the content type in one of the usual forms,
whatever form the client used, so that it reads the same boundary as the gateway.
"""

from __future__ import annotations

import re

from gateway.http.request_head import TOKEN

_JSON = re.compile(rb'application/json(?:[ \t]*;[ \t]*charset="?utf-?8"?)?', re.IGNORECASE)
_FORM = re.compile(
    rb'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([0-9A-Za-z\'()+_,./:=? -]{0,69}[0-9A-Za-z\'()+_,./:=?-])"'
    rb"|([0-9A-Za-z'+_.-]{1,70}))(?:[ \t]*;[ \t]*charset=\"?utf-8\"?)?",
    re.IGNORECASE,
)
"""The usual forms, which are forwarded unchanged."""
_TYPE = re.compile(rb"[ \t]*(" + TOKEN + rb"++/" + TOKEN + rb"++)[ \t]*+(?=;|\Z)")
_PLAIN = rb"[!#-+\-./0-:<-\[\]-~]"
_PARAMETER = re.compile(  # no possessive groups: Python before 3.11.5 matches them wrongly (gh-106052)
    rb"[ \t]*+;[ \t]*+(?:(" + TOKEN + rb"++)[ \t]*+="
    rb"(?:[ \t]*+\"((?:[^\"\\]|\\.)*)\"|(" + _PLAIN + rb"++)|[ \t]++(" + TOKEN + rb"++)))?[ \t]*+(?=;|\Z)"
)
"""One parameter: name, and quoted or plain value. A plain value may have characters that need quotes, such as `=`,
unless space precedes it: in `filename= filename*=x`, some parsers find no value and another parameter.
"""
_ESCAPED = re.compile(rb"\\(.)")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?!#$%&*^`|~{} -]{0,69}[0-9A-Za-z'()+_,./:=?!#$%&*^`|~{}-]")
"""RFC 2046, 5.1.1, and the other characters of tokens."""
_PLAIN_BOUNDARY = re.compile(rb"[0-9A-Za-z'+_.-]++")


def is_json(content_type: bytes) -> bool:
    """Return whether the type is application/json, with any parameters."""
    if content_type == b"application/json" or _JSON.fullmatch(content_type) is not None:
        return True
    match = _TYPE.match(content_type)
    return (
        match is not None
        and match[1].lower() == b"application/json"
        and parse_parameters(content_type, match.end()) is not None
    )


def is_form(content_type: bytes) -> bool:
    """Return whether the type is multipart/form-data, even if its parameters are malformed."""
    return content_type[:19].lower() == b"multipart/form-data"


def parse_boundary(content_type: bytes) -> bytes | None:
    """Return the boundary of a form; None if there is not exactly one, or it is invalid."""
    match = _FORM.fullmatch(content_type)
    if match is not None:
        return match[1] or match[2]
    match = _TYPE.match(content_type)
    if match is None or match[1].lower() != b"multipart/form-data":
        return None
    found = parse_parameters(content_type, match.end())
    boundary = None if found is None else found.get(b"boundary")
    return boundary if boundary is not None and _BOUNDARY.fullmatch(boundary) is not None else None


def for_engine(content_type: bytes) -> bytes:
    """Return the content type that an engine gets. A body that is not a form is JSON."""
    if content_type == b"application/json":
        return content_type
    if _JSON.fullmatch(content_type) is not None or _FORM.fullmatch(content_type) is not None:
        return content_type
    boundary = parse_boundary(content_type) if is_form(content_type) else None
    if boundary is None:
        return b"application/json"
    plain = _PLAIN_BOUNDARY.fullmatch(boundary) is not None
    return (b"multipart/form-data; boundary=%b" if plain else b'multipart/form-data; boundary="%b"') % boundary


def parse_parameters(text: bytes, at: int, end: int = -1) -> dict[bytes, bytes] | None:
    """Return the parameters in text[at:end] by lower-case name; None if one is malformed or occurs twice."""
    end = len(text) if end < 0 else end
    found: dict[bytes, bytes] = {}
    while at < end:
        match = _PARAMETER.match(text, at, end)
        if match is None:
            return None
        at = match.end()
        name = match[1]
        if name is None:
            continue
        name = name.lower()
        if name in found:
            return None
        quoted = match[2]
        if quoted is None:
            found[name] = match[3] or match[4]
        else:
            found[name] = _ESCAPED.sub(rb"\1", quoted) if b"\\" in quoted else quoted
    return found
