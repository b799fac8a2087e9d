"""YAML as configuration: what PyYAML lets pass and a person would not want is an error with its line.

Owns reading YAML text into plain values: mappings with text keys, lists, text, numbers, true and false, null. Refuses
what hides mistakes: a key that occurs twice, a key that is not text, `.nan` and `.inf`. Dates stay text; numbers are
also read as JSON writes them (`1e-05`). It knows nothing of documents. Raises YamlError, whose text is one line and
begins with the line number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import yaml

TEXT_CHARS_MAX = 16 << 20
"""A longer text is refused: these are documents written by people, not data."""

_MAP = "tag:yaml.org,2002:map"
_MERGE = "tag:yaml.org,2002:merge"
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class YamlError(Exception):
    """The text is not YAML, or YAML that hides a mistake."""


class _Loader(yaml.SafeLoader):
    """SafeLoader, stricter."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rows if tag != _TIMESTAMP]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def keys_once(self, node: yaml.MappingNode) -> Iterator[dict[object, object]]:
        """A mapping whose keys are text and differ; a generator, as PyYAML wants it for anchors."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            name = self.construct_object(key)
            if not isinstance(name, str):
                raise yaml.MarkedYAMLError(problem="a key must be text: put it in quotes", problem_mark=key.start_mark)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key `{name}` occurs twice", problem_mark=key.start_mark)
            seen.add(name)
        mapping: dict[object, object] = {}
        yield mapping
        mapping.update(self.construct_mapping(node))

    def finite(self, node: yaml.ScalarNode) -> float:
        """A number that is one."""
        number = float(self.construct_yaml_float(node))
        if not math.isfinite(number):
            raise yaml.MarkedYAMLError(problem="expected a finite number", problem_mark=node.start_mark)
        return number


_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][-+][0-9]+"), list("-0123456789")
)
"""As JSON writes it, and YAML 1.2 reads it: YAML 1.1 wants a point, too. One without a sign (`12e4`) stays text."""
_Loader.add_constructor(_MAP, _Loader.keys_once)
_Loader.add_constructor(_FLOAT, _Loader.finite)


def read(text: str) -> list[object]:
    """All YAML documents of `text` as plain values, empty ones left out. Raises YamlError."""
    if len(text) > TEXT_CHARS_MAX:
        raise YamlError(f"longer than {TEXT_CHARS_MAX} characters")
    try:
        return [value for value in yaml.load_all(text, Loader=_Loader) if value is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem or error.context or 'not YAML'}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except RecursionError:
        raise YamlError("nested too deeply") from None
    except ValueError as error:  # PyYAML lets int() and float() speak, for example of 0x_
        raise YamlError(f"a value cannot be read: {error}") from error
