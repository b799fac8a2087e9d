"""Names of models as clients of Ollama's API see them."""

from __future__ import annotations

import pytest

from autoscaler.contract import ModelEntry, ModelName
from gateway.request.model_names import ModelNames


@pytest.mark.parametrize(
    ("aliases", "name", "listed"),
    [
        ((), "ada", "ada:latest"),
        ((), "lab/ada", "lab/ada:latest"),
        ((), "ada:lora", "ada:lora"),
        (("ada:latest",), "ada", "ada"),
    ],
)
def test_name_without_a_tag_is_listed_with_latest_unless_a_model_has_that_name(
    aliases: tuple[str, ...], name: str, listed: str
) -> None:
    names = ModelNames()
    names.index([ModelEntry(name=ModelName("other"), served_name="other", aliases=aliases)])
    assert names.with_tag(name) == listed
