"""XML from services, parsed without the dangerous features of XML."""

from __future__ import annotations

import pytest

from artifacts.http import xml
from artifacts.http.xml import BadXmlError

LIST = b"""<?xml version="1.0" encoding="UTF-8"?>
<s3:List xmlns:s3="http://s3.amazonaws.com/doc/2006-03-01/"><s3:Key>a &amp; b</s3:Key><Owner><ID>x</ID></Owner>
<Contents><Key>1</Key></Contents><Contents><Key>2</Key></Contents></s3:List>"""


def test_xml_elements_are_found_by_name_in_any_xml_namespace() -> None:
    found = xml.parse_xml(LIST)
    assert found.name == "List"
    assert found.one("Key") == "a & b"
    assert found.one("Owner", "ID") == "x"
    assert [one.one("Key") for one in found.all("Contents")] == ["1", "2"]
    assert found.one("Owner", "Name") == found.one("Nobody") == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "document type"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "document type"),
        (b"<a><b></a>", "not XML"),
        (b"", "not XML"),
        (b"{}", "not XML"),
        (b"<a>" * 20 + b"</a>" * 20, "nested too deeply"),
        (b" " * (xml.BYTES_MAX + 1), "larger than"),
        (b"<a>" + b"x<b/>" * xml.ELEMENTS_MAX + b"</a>", "more than 100000 elements"),
    ],
)
def test_xml_with_a_doctype_bad_syntax_or_excessive_size_is_rejected(body: bytes, message: str) -> None:
    with pytest.raises(BadXmlError, match=message):
        xml.parse_xml(body)
