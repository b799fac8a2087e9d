"""Strict YAML for configuration: constructs that hide mistakes are errors with a line number.

Reads YAML into plain values: mappings with text keys, lists, text, numbers, booleans and null. Rejects duplicate keys,
keys that are not text, `.nan` and `.inf`. Dates stay text; numbers in JSON syntax (`1e-05`) are accepted. The expansion
of aliases is limited, so that a small text cannot exhaust the memory. Raises YamlError, whose text is one line that
begins with the line number; it also knows the document and the key path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, NoReturn

import yaml

from autoscaler.spec.decode import Path, format_path
from autoscaler.text import one_line

TEXT_CHARS_MAX = 4 << 20
"""The maximum length of a text: documents are written by people."""

NODES_MAX = 100_000
"""The maximum number of values in a text, after the expansion of aliases."""
NUMBER_CHARS_MAX = 100
"""The maximum length of a number: PyYAML reads numbers to the base 60, such as `1:59:59`, in quadratic time."""
DEPTH_MAX = 100
"""The maximum depth of nesting. It is more than documents need, and low enough for recursive readers."""
REASON_CHARACTERS_MAX = 200
"""The maximum length of an error text from PyYAML or Python."""

PATH_PARTS_MAX, KEY_CHARS_MAX = 10, 60
"""The maximum number of keys in the path of an error, and of characters of a key."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_PREFIX = "tag:yaml.org,2002:"
_MAP, _MERGE, _NULL, _INT, _FLOAT, _TIMESTAMP = (
    f"{_PREFIX}{name}" for name in ("map", "merge", "null", "int", "float", "timestamp")
)
_INTERNAL_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""PyYAML raises these for values that do not match their tag, such as `!!bool x` or `0b_`, for escapes of nonexistent
characters, and for long version numbers.
"""
_NOT_JSON = [_TIMESTAMP, *(f"{_PREFIX}{name}" for name in ("binary", "omap", "pairs", "set"))]
"""Tags whose values would be dates, bytes, tuples or sets."""


class YamlError(Exception):
    """The text is not valid YAML, or it hides a mistake."""

    def __init__(self, message: str, document: int = 0, path: Path = ()) -> None:
        """`document`: its number in the text, without empty ones; 0 if unknown. `path`: of the value or its mapping."""
        super().__init__(one_line(message))
        self.document, self.path = document, path[:PATH_PARTS_MAX]

    def in_file(self, name: str) -> str:
        """Return one line: FILE: document N: KEY PATH: line L: the problem."""
        document = f"document {self.document}" if self.document else ""
        return one_line(": ".join(part for part in (name, document, format_path(self.path), str(self)) if part))


class _Loader(yaml.SafeLoader):
    """A stricter SafeLoader."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rows if tag != _TIMESTAMP]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    at: yaml.Mark | None = None
    """The start of the value that is being constructed; None while a document is composed."""

    composed = 0
    """The number of nodes so far, without aliases."""

    document = 0
    """The number of the document, without empty ones."""
    root: yaml.Node | None = None
    """The document, when it is composed."""

    def __init__(self, text: str) -> None:
        self.branch: list[yaml.ScalarNode | int | None] = []
        """The key or index of the last composed node and of each node around it. None: the root, or in a key."""
        self.depth = 0
        """The number of nodes that are being composed."""
        super().__init__(text)

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        """Limit the depth: the time of SafeLoader grows with its square."""
        if self.flow_level >= DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Count nodes and levels, so that a large text is rejected before it is in memory."""
        self.composed += 1
        if self.composed > NODES_MAX:
            raise yaml.MarkedYAMLError(problem=f"more than {NODES_MAX} values", problem_mark=self.get_mark())
        self.branch[self.depth :] = [index]
        self.depth += 1
        if self.depth > DEPTH_MAX:
            next_event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs have no type for it
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=next_event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def nodes(self) -> Iterator[yaml.Node]:
        """Compose the documents that are not empty."""
        self.document = 1
        while self.check_node():
            self.root = self.get_node()
            if self.root is not None and self.root.tag != _NULL:
                yield self.root
                self.document += 1
            self.root = self.at = None
            self.branch.clear()
        self.document = max(1, self.document - 1)

    def path(self, mark: yaml.Mark | None) -> Path:
        """Return the path of the value at this mark; while a document is composed, that of the node being composed."""
        if self.root is not None and mark is not None:
            return _find_path(self.root, mark.index)
        keys = self.branch[: self.depth]
        return tuple(_key(one) if isinstance(one, yaml.Node) else one for one in keys if one is not None)

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

    def text(self, node: yaml.ScalarNode) -> str:
        """Construct a text."""
        return str(node.value)

    def whole(self, node: yaml.ScalarNode) -> int:
        """Construct a whole number of limited length."""
        _limit_number(node)
        return int(self.construct_yaml_int(node))

    def finite(self, node: yaml.ScalarNode) -> float:
        """Construct a finite number of limited length."""
        _limit_number(node)
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
_Loader.add_constructor(_INT, _Loader.whole)
_Loader.add_constructor(_FLOAT, _Loader.finite)
_Loader.add_constructor(f"{_PREFIX}value", _Loader.text)
for _tag in (None, *_NOT_JSON):  # None: any other tag
    _Loader.add_constructor(_tag, _Loader.refused)


def parse_yaml(text: str) -> list[object]:
    """Parse all YAML documents of `text` to plain values, without empty ones. Raises YamlError."""
    if len(text) > TEXT_CHARS_MAX:
        raise YamlError(f"longer than {TEXT_CHARS_MAX} characters")
    if found := _SURROGATE.search(text):
        raise _character_error(text, found.start(), "an unpaired surrogate is not a character")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return _values(loader)
    except yaml.reader.ReaderError as error:
        raise _character_error(
            text, error.position, f"character #x{ord(text[error.position]):04x} is not allowed"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _error(
            loader, error.problem_mark or error.context_mark, str(error.problem or error.context or "not YAML")
        ) from error
    except RecursionError:
        raise _error(loader, None if loader is None else loader.get_mark(), "nested too deeply") from None
    except (yaml.YAMLError, *_INTERNAL_ERRORS) as error:
        said = isinstance(error, yaml.YAMLError)  # other messages describe the internals of PyYAML
        unfit = "it does not match its YAML type; if it is text, put it in quotes"
        reason = one_line(str(error), REASON_CHARACTERS_MAX) if said else unfit
        mark = None if loader is None else loader.at or loader.get_mark()
        raise _error(loader, mark, f"a value cannot be read: {reason}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _error(loader: _Loader | None, mark: yaml.Mark | None, problem: str) -> YamlError:
    if loader is None:
        return YamlError(problem)
    where = f"line {mark.line + 1}: " if mark else ""
    return YamlError(f"{where}{problem}", loader.document, loader.path(mark))


def _character_error(text: str, index: int, problem: str) -> YamlError:
    """Make the error for a character that PyYAML does not read; the text without such characters shows where it is."""
    loader = _Loader(yaml.reader.Reader.NON_PRINTABLE.sub("x", text))
    path: Path = ()
    document, end = 1, 0
    try:
        for root in loader.nodes():
            if root.start_mark.index <= index:
                document, path, end = loader.document, _find_path(root, index), root.end_mark.index
    except (yaml.YAMLError, RecursionError, *_INTERNAL_ERRORS):
        if end < index:
            document, path = loader.document, ()
    line = text.count("\n", 0, index) + 1
    return YamlError(f"line {line}: {problem}", document, path)


def _key(node: yaml.Node) -> str:
    return str(node.value)[:KEY_CHARS_MAX] if isinstance(node, yaml.ScalarNode) else "?"


def _find_path(root: yaml.Node, index: int) -> Path:
    """Return the path of the last value that begins at or before this character; of a key, that of its mapping."""
    left, seen = list[tuple[yaml.Node, Path]]([(root, ())]), set[int]()
    found: Path = ()
    begin = -1
    while left:
        node, path = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if begin < node.start_mark.index <= index:
            begin, found = node.start_mark.index, path
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                left += [(value, (*path, _key(key))), (key, path)]
        elif isinstance(node, yaml.SequenceNode):
            left += [(one, (*path, number)) for number, one in enumerate(node.value)]
    return found


class _Size(NamedTuple):
    """The size of a node, after the expansion of aliases."""

    nodes: int
    height: int
    """Levels of nesting; 0 while it is being measured."""


def _values(loader: _Loader) -> list[object]:
    values, nodes = list[object](), 0
    for document in loader.nodes():
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


def _limit_number(node: yaml.ScalarNode) -> None:
    if len(node.value) > NUMBER_CHARS_MAX:
        _refuse(node, f"a number has more than {NUMBER_CHARS_MAX} characters")


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
