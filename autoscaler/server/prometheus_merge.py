"""Merges Prometheus texts of several processes into one: samples with the same name and labels are added up.

Keeps nothing and reads nothing; it counts as impure because prometheus_client does, whose parser it uses. Adding is
right for counters, histograms and level gauges (waiting, running); a gauge that is an age is not a sum, so families
named in MAXIMA take the largest value instead, and the moments at which counters were made the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import add

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MAXIMA = frozenset({"pilotlight_routes_age_seconds"})


def merge_metrics(texts: Iterable[bytes], *, openmetrics: bool = False) -> bytes:
    """One exposition of all `texts` (text format 0.0.4): in the same format, or in OpenMetrics 1.0.

    OpenMetrics names a counter without `_total`, ends in `# EOF`, and has no place for `_created` as a family.
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
    """How two values of one series become one."""
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
    """Documentation has its quotes escaped in OpenMetrics only, label values in both."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped
