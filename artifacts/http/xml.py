"""XML of services that speak no JSON: bytes -> elements, without what makes XML dangerous. Pure.

Owns the reading. Promises: a document type, and so every entity of its own, is refused; depth, size and the
number of elements are bounded, and so is the time that reading takes: it grows as the size does.
Namespaces are passed by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

BYTES_MAX = 8 << 20
DEPTH_MAX = 16
ELEMENTS_MAX = 100_000
"""A page of 1,000 objects has about 10 for each."""


class BadXmlError(ValueError):
    """It cannot be read."""


@dataclass(slots=True)
class Element:
    """One, with what is in it."""

    name: str
    texts: list[str] = field(default_factory=list)
    """Its own, before, between and after its elements."""
    within: list[Element] = field(default_factory=list)

    def all(self, name: str) -> Iterator[Element]:
        """Those of this name, right below it."""
        return (one for one in self.within if one.name == name)

    def one(self, *way: str) -> str:
        """The text at the end of a way of names, each the first of its name; empty: there is none."""
        at = self
        for name in way:
            found = next(at.all(name), None)
            if found is None:
                return ""
            at = found
        return "".join(at.texts).strip()


def parse_xml(body: bytes) -> Element:
    """The outermost element. Raises BadXmlError."""
    if len(body) > BYTES_MAX:
        raise BadXmlError(f"it is larger than {BYTES_MAX >> 20} MiB")
    root, parser = Element(""), expat.ParserCreate()
    open_, begun = [root], 0

    def begin(name: str, _attributes: dict[str, str]) -> None:
        if len(open_) > DEPTH_MAX:
            raise BadXmlError("it is too deep")
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
        raise BadXmlError("it has a document type")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = begin, end, text
    parser.StartDoctypeDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(body, True)
    except expat.ExpatError:
        raise BadXmlError("it is no XML") from None
    return root.within[0]
