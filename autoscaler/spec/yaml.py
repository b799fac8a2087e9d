"""Strict YAML for configuration: constructs that hide mistakes are errors with a line number.

Reads YAML into plain values: mappings with text keys, lists, text, numbers, booleans and null. Rejects duplicate keys,
keys that are not text, `.nan` and `.inf`. Dates stay text; numbers in JSON syntax (`1e-05`) are accepted. The expansion
of aliases is limited, so that a small text cannot exhaust the memory. Raises YamlError, whose text is one line that
begins with the line number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, NoReturn

import yaml

from autoscaler.text import one_line

TEXT_CHARS_MAX = 16 << 20
"""The maximum length of a text: documents are written by people."""

NODES_MAX = 100_000
"""The maximum number of values in a text, after the expansion of aliases."""
DEPTH_MAX = 100
"""The maximum depth of nesting. It is more than documents need, and low enough for recursive readers."""
REASON_CHARACTERS_MAX = 200
"""The maximum length of an error text from PyYAML or Python."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_PREFIX = "tag:yaml.org,2002:"
_MAP, _MERGE, _FLOAT, _TIMESTAMP = (f"{_PREFIX}{name}" for name in ("map", "merge", "float", "timestamp"))
_NOT_JSON = [_TIMESTAMP, *(f"{_PREFIX}{name}" for name in ("binary", "omap", "pairs", "set"))]
"""Tags whose values would be dates, bytes, tuples or sets."""


class YamlError(Exception):
    """The text is not valid YAML, or it hides a mistake."""


class _Loader(yaml.SafeLoader):
    """A stricter SafeLoader."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rows if tag != _TIMESTAMP]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    at: yaml.Mark | None = None
    """The start of the value that is being constructed."""

    composed = 0
    """The number of nodes so far, without aliases."""

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        """Limit the depth: the time of SafeLoader grows with its square."""
        if self.flow_level >= DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Count nodes, so that a long text is rejected before it is in memory."""
        self.composed += 1
        if self.composed > NODES_MAX:
            raise yaml.MarkedYAMLError(problem=f"more than {NODES_MAX} values", problem_mark=self.get_mark())
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Record the position of the value for error messages."""
        self.at = node.start_mark
        return super().construct_object(node, deep=deep)

    def keys_once(self, node: yaml.MappingNode) -> Iterator[dict[object, object]]:
        """Construct a mapping with unique text keys. PyYAML requires a generator for anchors."""
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
        """Construct a finite number."""
        number = float(self.construct_yaml_float(node))
        if not math.isfinite(number):
            raise yaml.MarkedYAMLError(problem="expected a finite number", problem_mark=node.start_mark)
        return number

    def refused(self, node: yaml.Node) -> NoReturn:
        """Reject a value that JSON cannot represent."""
        _refuse(node, f"remove the tag {node.tag.replace(_PREFIX, '!!')}")


_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][-+][0-9]+"), list("-0123456789")
)
"""Accept numbers in JSON and YAML 1.2 syntax; YAML 1.1 also requires a decimal point. An exponent without a sign
(`12e4`) stays text.
"""
_Loader.add_constructor(_MAP, _Loader.keys_once)
_Loader.add_constructor(_FLOAT, _Loader.finite)
for _tag in _NOT_JSON:
    _Loader.add_constructor(_tag, _Loader.refused)


def parse_yaml(text: str) -> list[object]:
    """Parse all YAML documents of `text` to plain values, without empty ones. Raises YamlError."""
    if len(text) > TEXT_CHARS_MAX:
        raise YamlError(f"longer than {TEXT_CHARS_MAX} characters")
    if found := _SURROGATE.search(text):
        line = text.count("\n", 0, found.start())
        raise YamlError(f"line {line + 1}: an unpaired surrogate is not a character")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return _values(loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(one_line(f"{where}{error.problem or error.context or 'not YAML'}")) from error
    except yaml.YAMLError as error:
        raise YamlError(one_line(str(error))) from error
    except RecursionError:
        raise YamlError("nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML's constructors raise these for values that do not match an explicit tag, such as `!!bool x` or `!!int
        # ""`
        where = f"line {loader.at.line + 1}: " if loader and loader.at else ""
        # int() and float() raise these; messages of other errors describe PyYAML's internals
        said = isinstance(error, ArithmeticError | ValueError)
        reason = one_line(str(error), REASON_CHARACTERS_MAX) if said else "it does not fit its tag"
        raise YamlError(f"{where}a value cannot be read: {reason}") from error
    finally:
        if loader is not None:
            loader.dispose()


class _Size(NamedTuple):
    """The size of a node, after the expansion of aliases."""

    nodes: int
    height: int
    """Levels of nesting; 0 while it is being measured."""


def _values(loader: _Loader) -> list[object]:
    values, nodes = list[object](), 0
    while loader.check_node():
        document = loader.get_node()
        if document is None:
            continue
        size = _measure(document, {})
        nodes += size.nodes
        if nodes > NODES_MAX:
            _refuse(document, f"more than {NODES_MAX} values after alias expansion")
        value = loader.construct_document(document)
        if value is not None:
            values.append(value)
    return values


def _measure(node: yaml.Node, known: dict[int, _Size]) -> _Size:
    """Measure a node. Raises yaml.MarkedYAMLError for deep nesting, recursive aliases and unpaired surrogates.

    `known`: sizes of visited nodes, by identity.
    """
    size = known.get(id(node))
    if size is not None:
        if not size.height:
            _refuse(node, "an alias refers to a node that contains it")
        return size
    known[id(node)] = _Size(0, 0)
    inner: Iterable[yaml.Node] = ()
    if isinstance(node, yaml.MappingNode):
        inner = chain.from_iterable(node.value)
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif _SURROGATE.search(node.value):
        try:  # JSON escapes a character above U+FFFF as a pair, which PyYAML does not combine
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            _refuse(node, "an unpaired surrogate is not a character")
    sizes = [_measure(one, known) for one in inner]
    size = known[id(node)] = _Size(
        1 + sum(one.nodes for one in sizes), 1 + max((one.height for one in sizes), default=0)
    )
    if size.height > DEPTH_MAX:
        _refuse(node, "nested too deeply")
    return size


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
