"""A roofline as SVG text: what a chip allows for each number of operations a byte, and where kernels stand below it.

Plain text, one file, no script: both axes are logarithmic, roofs are lines, kernels are marks with their numbers as
tooltips, and the colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 980, 600
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 56, 60
LINE, LETTER = 13, 6.6  # pixels of a label's height, and of a letter
CLOSE = 1.5  # rates of two levels whose names would overlap
COLOURS = {
    "float32": ("#1d4ed8", "#7aa2ff"), "float64": ("#6b7280", "#9ca3af"), "bfloat16": ("#b45309", "#fbbf24"),
    "float16": ("#047857", "#34d399"), "int8": ("#be185d", "#f472b6"),
}  # fmt: skip
MARKS = {"gemm": "circle", "attention": "square", "ops": "diamond"}


@dataclass(frozen=True)
class Roof:
    """A unit's rate (1e9 operations a second), or a memory level's (1e9 bytes a second)."""

    name: str
    rate: float


@dataclass(frozen=True)
class Point:
    """A kernel: operations a byte, 1e9 operations a second; `label` is short, `details` what a tooltip adds."""

    kind: str
    dtype: str
    label: str
    intensity: float
    gflops: float
    details: str = ""


@dataclass(frozen=True)
class Frame:
    """The ranges of both axes as powers: of 2 for operations a byte, of 10 for GFLOP/s."""

    x: tuple[int, int]
    y: tuple[int, float]

    def across(self, intensity: float) -> float:
        """The pixel of a number of operations a byte."""
        low, high = self.x
        return LEFT + (math.log2(intensity) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def down(self, gflops: float) -> float:
        """The pixel of a rate."""
        low, high = self.y
        return HEIGHT - BOTTOM - (math.log10(gflops) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def draw(title: str, units: Sequence[Roof], levels: Sequence[Roof], points: Sequence[Point]) -> str:
    """The picture. `units` and `levels` must not be empty."""
    frame = frame_of(units, levels, points)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title, quote=True)}">',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT, 28, title, "title"),
        *_axes(frame),
        *_levels(frame, levels, max(u.rate for u in units)),
        *_units(frame, units, max(m.rate for m in levels)),
        *_points(frame, points),
        *_legend(points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def frame_of(units: Sequence[Roof], levels: Sequence[Roof], points: Sequence[Point]) -> Frame:
    """Ranges that hold every point, and where the roofs meet."""
    top, slow, fast = max(u.rate for u in units), min(m.rate for m in levels), max(m.rate for m in levels)
    xs = [0.25, top / fast, 2 * top / slow, *(p.intensity for p in points)]
    ys = [min(u.rate for u in units) / 10, top * 1.5, *(p.gflops for p in points)]
    x = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    return Frame(x, (math.floor(math.log10(min(ys))), math.log10(max(ys))))


def _style() -> str:
    def scheme(dark: bool) -> str:
        ink, faint, paper, roof = (
            ("#e5e7eb", "#374151", "#0d1117", "#9ca3af") if dark else ("#1f2937", "#e5e7eb", "#ffffff", "#6b7280")
        )
        rules = [
            f".paper{{fill:{paper}}}",
            f"text{{fill:{ink};stroke:{paper}}}",
            f".grid{{stroke:{faint}}}",
            f".roof{{stroke:{roof}}}",
        ]
        return "".join(rules + [f".{name}{{fill:{pair[dark]};stroke:{paper}}}" for name, pair in COLOURS.items()])

    shared = (
        "text{font:11px system-ui,sans-serif;stroke-width:3px;paint-order:stroke}.title{font-size:15px;font-weight:600}"
        ".roof{stroke-width:1.5;fill:none}.end{text-anchor:end}.middle{text-anchor:middle}"
    )
    return f"{shared}{scheme(False)}@media(prefers-color-scheme:dark){{{scheme(True)}}}"


def _text(x: float, y: float, text: str, kind: str = "", turn: float = 0.0) -> str:
    turned = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{turned}>{escape(text)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _axes(frame: Frame) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for power in range(frame.x[0], frame.x[1] + 1):
        x = frame.across(2.0**power)
        yield _line("grid", x, TOP, x, bottom)
        if power % 2 == 0:
            yield _text(x, bottom + 16, f"{2**power}" if power >= 0 else f"1/{2**-power}", "middle")
    for power in range(frame.y[0], math.floor(frame.y[1]) + 1):
        y = frame.down(10.0**power)
        yield _line("grid", LEFT, y, right, y)
        yield _text(LEFT - 8, y + 4, _plain(10.0**power), "end")
    yield _text((LEFT + right) / 2, HEIGHT - 18, "operations a byte of memory that must be read or written", "middle")
    yield _text(18, (TOP + bottom) / 2, "GFLOP/s", "middle", -90)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _levels(frame: Frame, levels: Sequence[Roof], top: float) -> Iterable[str]:
    """A rising line for each memory level, up to the highest unit; its name stands on the line."""
    floor = 10.0 ** frame.y[0]
    slope = -math.degrees(math.atan2(frame.down(1) - frame.down(2), frame.across(2) - frame.across(1)))
    along, before = 0, math.inf
    for level in sorted(levels, key=lambda v: -v.rate):
        first = max(2.0 ** frame.x[0], floor / level.rate)
        yield _line(
            "roof", frame.across(first), frame.down(first * level.rate), frame.across(top / level.rate), frame.down(top)
        )
        along = (
            along + 1 if before / level.rate < CLOSE else 0
        )  # names on lines that are close stand one after the other
        at = first * 4.0**along
        yield _text(frame.across(at) + 6, frame.down(at * level.rate) - 9, _rate(level), turn=slope)
        before = level.rate


def _rate(level: Roof) -> str:
    return f"{level.name} {level.rate:,.0f} GB/s"


def _units(frame: Frame, units: Sequence[Roof], fastest: float) -> Iterable[str]:
    """A level line for each unit from where the fastest memory feeds it; names at the right, kept apart."""
    right, free = WIDTH - RIGHT, math.inf
    for unit in sorted(units, key=lambda u: u.rate):
        y = frame.down(unit.rate)
        yield _line("roof", frame.across(max(unit.rate / fastest, 2.0 ** frame.x[0])), y, right, y)
        free = min(y + 4, free - LINE)
        yield _text(right + 8, free, f"{unit.name} {unit.rate:,.0f}")


def _points(frame: Frame, points: Sequence[Point]) -> Iterable[str]:
    """A mark for each kernel; a label where there is room for it."""
    places = [(frame.across(p.intensity), frame.down(p.gflops)) for p in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for point, (x, y) in zip(points, places, strict=True):
        shown = f"{point.kind} {point.dtype} {point.label}: {_plain(point.gflops)} GFLOP/s{point.details}"
        yield f"<g><title>{escape(shown)}</title>{_mark(point, x, y)}</g>"
        width = len(point.label) * LETTER
        for at, base, anchor in (
            (x + 8, y + 4, ""),
            (x - 8, y + 4, "end"),
            (x, y - 8, "middle"),
            (x, y + 16, "middle"),
        ):
            left = at - width * {"": 0.0, "middle": 0.5, "end": 1.0}[anchor]
            box = (left, base - LINE + 3, left + width, base + 2)
            inside = left > LEFT and left + width < WIDTH - RIGHT
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield _text(at, base, point.label, anchor)
                break


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _mark(point: Point, x: float, y: float) -> str:
    kind, colour = MARKS.get(point.kind, "circle"), escape(point.dtype, quote=True)
    if kind == "circle":
        return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "diamond" else ""
    return f'<rect class="{colour}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"{turn}/>'


def _legend(points: Sequence[Point]) -> Iterable[str]:
    """What the marks and colours of the points mean, at the lower right."""
    shown = list(dict.fromkeys((p.kind, p.dtype) for p in points))
    for number, (kind, dtype) in enumerate(reversed(shown)):
        x, y = WIDTH - RIGHT + 16, HEIGHT - BOTTOM - 6 - number * (LINE + 5)
        yield _mark(Point(kind, dtype, "", 1, 1), x, y - 4)
        yield _text(x + 12, y, f"{kind} {dtype}")
