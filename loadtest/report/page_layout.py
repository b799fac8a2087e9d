"""The layout of report pages: verdict, tiles of figures, sections and tables, in one self-contained file. Pure.

Defines the style, light and dark. Names and figures are escaped here; sections are already HTML. Pages load no external
resources.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from loadtest.run_verdict import Spread, Verdict


def render_page(
    title: str,
    plan: str,
    target: str,
    verdict: Verdict,
    *,
    said: str,
    figures: Iterable[tuple[str, str]],
    sections: Iterable[tuple[str, str]],
) -> str:
    """Return the whole page. `said` appears below the verdict; figures are (name, value), sections (title, HTML)."""
    tiles = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for name, value in figures)
    body = "".join(f"<section><h2>{html.escape(name)}</h2>{inner}</section>" for name, inner in sections)
    state = "fails" if not verdict.holds else "holds" if verdict.admitted else "none"
    note = f"<p>{html.escape(said)}</p>" if said else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><main><h1>{html.escape(title)}</h1><p>{html.escape(plan)}<br>"
        f"<code>{html.escape(target)}</code></p>"
        f'<p class="verdict {state}">{html.escape(verdict.line())}</p>{note}'
        f'<div class="tiles">{tiles}</div>{body}</main></html>'
    )


def list_outcome_figures(verdict: Verdict, noun: str) -> list[tuple[str, str]]:
    """Return the tiles of a verdict; `noun` names what was counted."""
    counts = {noun: verdict.admitted, "completed": verdict.completed, "failed": verdict.failed}
    counts |= {"abandoned": verdict.abandoned, "lost": verdict.lost}
    return [(name, str(count)) for name, count in counts.items()]


def render_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is text and whose other columns are figures."""
    top = "".join(f"<th>{html.escape(cell)}" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"


def render_spreads(found: Mapping[str, Spread], factor: float) -> str:
    """Return a table of spreads; `factor` converts their values to milliseconds."""
    head = ("milliseconds", "min", "median", "p95", "p99", "max")
    values = {name: (s.min, s.median, s.p95, s.p99, s.max) for name, s in found.items()}
    return render_table(head, ((name, *(f"{factor * value:.1f}" for value in of)) for name, of in values.items()))


def render_errors(verdict: Verdict) -> str:
    """Return tables that count error codes, and reasons for lost requests."""
    return _counts("code", verdict.codes) + _counts("lost because", verdict.broken)


def _counts(name: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return f'<p class="empty">none ({html.escape(name)})</p>'
    return render_table((name, "calls"), ((key, str(count)) for key, count in sorted(counts.items())))


STYLE = """
:root{--ink:#1c2430;--soft:#5b6776;--page:#f6f7f9;--card:#fff;--line:#dfe4ea;
--series-0:#2563a8;--series-1:#c77700;--series-2:#7a869a;--series-3:#c2333a;--series-4:#2a8f6a}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b5;--page:#12161c;--card:#1b212a;--line:#303947;
--series-0:#6aa7ea;--series-1:#f0a63c;--series-2:#9aa6b5;--series-3:#f0696f;--series-4:#55c79b}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:800px;margin:0 auto;padding:32px 16px 64px}h1{font-size:24px;margin:0}h2{font-size:15px;margin:0 0 8px}
p{color:var(--soft);margin:4px 0 12px}.verdict{color:#fff;padding:10px 14px;border-radius:8px;font-weight:600}
.holds{background:#23764f}.fails{background:#b3282f}.none{background:#5b6776}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(100px,1fr));gap:8px}
.tiles div,section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tiles div{color:var(--soft);font-size:13px}.tiles b{display:block;color:var(--ink);font-size:22px}
section{margin-top:12px;overflow-x:auto}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}.grid{stroke:var(--line)}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}.dots{fill:none;stroke-width:4;stroke-linecap:round;opacity:.6}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:4px 0 0;padding:0}
.legend li{color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left}tr:last-child td{border:0}.empty{margin:0}
"""
