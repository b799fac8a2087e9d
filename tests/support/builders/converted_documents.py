"""Documents that an importer converted from another format."""

from __future__ import annotations

from autoscaler.importers.result import ConversionResult


def spec_of(result: ConversionResult) -> dict[str, object]:
    """Returns the spec of the converted document."""
    assert result.document is not None, result.refused
    found = result.document["spec"]
    assert isinstance(found, dict)
    return found
