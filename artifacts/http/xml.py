"""Parses XML from services without a JSON API, without XML's dangerous features. Pure.

Document types, and so custom entities, are rejected. Depth, size and number of elements are bounded, and parsing
takes linear time. Namespaces are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

BYTES_MAX = 8 << 20
DEPTH_MAX = 16
ELEMENTS_MAX = 100_000
"""A page of 1,000 objects has about 10 elements per object."""


class BadXmlError(ValueError):
    """The document cannot be parsed."""


@dataclass(slots=True)
class Element:
    """An element with its content."""

    name: str
    texts: list[str] = field(default_factory=list)
    """Its own text before, between and after child elements."""
    within: list[Element] = field(default_factory=list)

    def all(self, name: str) -> Iterator[Element]:
        """Yield the direct children with this name."""
        return (one for one in self.within if one.name == name)

    def one(self, *way: str) -> str:
        """Return the text at a path of names, following the first child of each name; empty if it is missing."""
        at = self
        for name in way:
            found = next(at.all(name), None)
            if found is None:
                return ""
            at = found
        return "".join(at.texts).strip()


def parse_xml(body: bytes) -> Element:
    """Parse a document and return its root element. Raises BadXmlError."""
    if len(body) > BYTES_MAX:
        raise BadXmlError(f"it is larger than {BYTES_MAX >> 20} MiB")
    root, parser = Element(""), expat.ParserCreate()
    open_, begun = [root], 0

    def begin(name: str, _attributes: dict[str, str]) -> None:
        if len(open_) > DEPTH_MAX:
            raise BadXmlError("it is nested too deeply")
        nonlocal begun
        begun += 1
        if begun > ELEMENTS_MAX:
            raise BadXmlError(f"it has more than {ELEMENTS_MAX} elements")
        made = Element(name.rpartition(":")[2])
        open_[-1].within.append(made)
        open_.append(made)

    def end(_name: str) -> None:
        open_.pop()

    def text(data: str) -> None:
        open_[-1].texts.append(data)

    def refuse(*_: object) -> None:
        raise BadXmlError("it has a document type declaration (DOCTYPE), which is not allowed")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = begin, end, text
    parser.StartDoctypeDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(body, True)
    except expat.ExpatError:
        raise BadXmlError("it is not XML") from None
    return root.within[0]
