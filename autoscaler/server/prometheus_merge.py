"""Merges Prometheus texts of several processes into one: samples with the same name and labels are added up.

Stateless; it counts as impure because it uses the parser of prometheus_client. Addition is right for counters,
histograms and level gauges (waiting, running). Gauges of ages (families in MAXIMA) use the largest value, creation
times of counters the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import add

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MAXIMA = frozenset({"pilotlight_routes_age_seconds"})


def merge_metrics(texts: Iterable[bytes], *, openmetrics: bool = False) -> bytes:
    """Merge `texts` (text format 0.0.4) into one exposition, in the same format or in OpenMetrics 1.0.

    In OpenMetrics the family of a counter has no `_total`, the text ends in `# EOF`, and `_created` is not a family.
    """
    kinds: dict[str, tuple[str, str]] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            if openmetrics and family.name.endswith("_created"):
                continue
            kinds.setdefault(family.name, (family.type, family.documentation))
            into = samples.setdefault(family.name, {})
            for sample in family.samples:
                _put(into, sample, _rule(family.name))
    lines: list[str] = []
    for name, (kind, documentation) in sorted(kinds.items()):
        shown = f"{name}_total" if kind == "counter" and not openmetrics else name
        lines += (f"# HELP {shown} {_escape(documentation, quotes=openmetrics)}", f"# TYPE {shown} {kind}")
        lines += (_line(sample, labels, value) for (sample, labels), value in samples[name].items())
    return "".join(f"{line}\n" for line in (*lines, *(["# EOF"] if openmetrics else []))).encode()


def _rule(family: str) -> Callable[[float, float], float]:
    """Return the function that combines two values of a series."""
    if family in MAXIMA:
        return max
    return min if family.endswith("_created") else add


def _put(
    into: dict[tuple[str, tuple[tuple[str, str], ...]], float], sample: Sample, rule: Callable[[float, float], float]
) -> None:
    key = (sample.name, tuple(sorted(sample.labels.items())))
    known = into.get(key)
    into[key] = sample.value if known is None else rule(known, sample.value)


def _line(name: str, labels: tuple[tuple[str, str], ...], value: float) -> str:
    inside = ",".join(f'{k}="{_escape(v, quotes=True)}"' for k, v in labels)
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escape(text: str, *, quotes: bool) -> str:
    """Escape a text. Quotes in documentation are escaped only in OpenMetrics, those in label values in both formats."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
