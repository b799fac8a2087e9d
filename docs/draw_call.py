"""Draws docs/call-from-zero.svg: one request from zero and back. Run it after a change: `python docs/draw_call.py`.

The diagram shows what ARCHITECTURE.md describes under "Life of a request". Colours are in one style sheet inside the
file, for light and dark mode, on an opaque background, so that it is readable on any page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

LANES = {"client": 80, "gateway": 330, "autoscaler": 600, "engine": 850}
ROW, TOP, WIDTH = 42, 96, 940

Arrow = tuple[str, str, str]
"""(from, to, words); from and to are equal for a step inside one component."""

WAKE: tuple[Arrow, ...] = (
    ("client", "gateway", "POST /v1/chat/completions"),
    ("gateway", "gateway", "key, limits, model; it is queued"),
    ("gateway", "autoscaler", "report: ada, 1 waiting (at once)"),
    ("autoscaler", "autoscaler", "plan: 1 wanted, gpu0 has room"),
    ("autoscaler", "engine", "start the process"),
    ("engine", "autoscaler", "200 (probed every 5, then 2.5 ms)"),
    ("autoscaler", "gateway", "routes: ready, 4 slots allocated"),
    ("gateway", "engine", "the request is forwarded"),
    ("engine", "gateway", "first byte: the commit point"),
    ("gateway", "client", "the response, byte by byte"),
)
REST: tuple[Arrow, ...] = (
    ("autoscaler", "gateway", "routes: draining, no new requests"),
    ("gateway", "autoscaler", "report: acknowledged, 0 running"),
    ("autoscaler", "engine", "SIGTERM, then SIGKILL after 10 s"),
    ("autoscaler", "autoscaler", "proven clean: gpu0 is free"),
)

STYLE = """
svg { --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #c8d1da; --box: #f6f8fa; --wake: #bc4c00;
      --rest: #0969da; --band: #fff8f2; --calm: #f3f8ff }
@media (prefers-color-scheme: dark) {
svg { --ground: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --box: #151b23; --wake: #f0883e;
      --rest: #58a6ff; --band: #1b1510; --calm: #0f1824 } }
text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink) }
.name { font-weight: 600; text-anchor: middle } .what { font-size: 12px; fill: var(--soft); text-anchor: middle }
.said { font-size: 13px; text-anchor: middle } .part { font-size: 12px; fill: var(--soft) }
.ground { fill: var(--ground) } .lane { stroke: var(--line); stroke-dasharray: 3 4 }
.box { fill: var(--box); stroke: var(--line) } .band { fill: var(--band) } .calm { fill: var(--calm) }
.wake { stroke: var(--wake); stroke-width: 1.6 } .rest { stroke: var(--rest); stroke-width: 1.6 }
.tipwake { fill: var(--wake) } .tiprest { fill: var(--rest) }
"""
ROLES = {
    "client": "any OpenAI client",
    "gateway": "always on; one or more",
    "autoscaler": "decides; one leads",
    "engine": "only while needed",
}


def arrow(step: Arrow, y: int, kind: str) -> list[str]:
    """One row: an arrow with its words, or a box for a step inside one component."""
    begin, end, words = step
    said = escape(words)
    if begin == end:
        x, wide = LANES[begin], 8 + 7 * len(words)
        return [
            f'<rect class="box" x="{x - wide / 2:.0f}" y="{y - 14}" width="{wide}" height="26" rx="6"/>',
            f'<text class="said" x="{x}" y="{y + 4}">{said}</text>',
        ]
    start, stop = LANES[begin], LANES[end]
    back = -1 if stop > start else 1
    middle = (start + stop) // 2
    if {begin, end} == {"gateway", "engine"}:  # left of the autoscaler's lane, not across it
        middle = (LANES["gateway"] + LANES["autoscaler"]) // 2
    tip = f"{stop},{y} {stop + 9 * back},{y - 4} {stop + 9 * back},{y + 4}"
    return [
        f'<line class="{kind}" x1="{start}" y1="{y}" x2="{stop + 6 * back}" y2="{y}"/>',
        f'<polygon class="tip{kind}" points="{tip}"/>',
        f'<text class="said" x="{middle}" y="{y - 7}">{said}</text>',
    ]


def band(kind: str, y: int, rows: int, words: str) -> list[str]:
    """The background of some rows, with their title."""
    height = rows * ROW + 26
    return [
        f'<rect class="{kind}" x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="8"/>',
        f'<text class="part" x="20" y="{y + 19}">{escape(words)}</text>',
    ]


def picture() -> str:
    """The whole SVG."""
    first, second = TOP, TOP + len(WAKE) * ROW + 26 + 12
    height = second + len(REST) * ROW + 26 + 12
    parts = [
        *band("band", first, len(WAKE), "a request for a model at zero"),
        *band("calm", second, len(REST), "after the idle timeout"),
    ]
    for name, x in LANES.items():
        parts += [
            f'<line class="lane" x1="{x}" y1="{TOP - 18}" x2="{x}" y2="{height - 12}"/>',
            f'<rect class="box" x="{x - 72}" y="14" width="144" height="54" rx="8"/>',
            f'<text class="name" x="{x}" y="37">{name}</text>',
            f'<text class="what" x="{x}" y="56">{ROLES[name]}</text>',
        ]
    for begin, steps, kind in ((first, WAKE, "wake"), (second, REST, "rest")):
        for row, step in enumerate(steps):
            parts += arrow(step, begin + 26 + row * ROW + ROW // 2, kind)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{LABEL}">'
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="10"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>"]) + "\n"


LABEL = "A request from zero: client, gateway, autoscaler and engine, from the first request to a free device"

if __name__ == "__main__":
    Path(__file__).with_name("call-from-zero.svg").write_text(picture())
