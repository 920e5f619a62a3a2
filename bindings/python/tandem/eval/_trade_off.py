# SPDX-License-Identifier: MIT
"""What settings lose against what they read, as an SVG: a point for each setting, a line for each number of dense layers.

A line joins the settings that no other setting of its group beats in both respects. The scale of the losses is logarithmic.
"""
import math
from dataclasses import dataclass
from html import escape
from typing import Any

from ._heat_map import COLORS, text

_WIDTH, _HEIGHT = 720, 440
_LEFT, _END, _TOP, _FLOOR = 72, 530, 76, 384  # edges of the area of points
_LINES = {"light": ("#57606a", "#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989"),
          "dark": ("#9198a1", "#4493f8", "#3fb950", "#f0883e", "#ab7df8", "#f778ba")}


@dataclass(frozen=True)
class Point:
    """A setting.

    Attributes
    ----------
    name : str
    read : float
        Share of the KV bytes that is read.
    loss : float
        KL divergence from dense attention, > 0.
    """

    name: str
    read: float
    loss: float


def best_of(points: list[Point]) -> list[Point]:
    """Returns the points that no other point beats, in the order of the bytes read."""
    best: list[Point] = []
    for point in sorted(points, key=lambda one: (one.read, one.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


@dataclass(frozen=True)
class _Axes:
    """Converts shares, on a scale in steps of 5 %, and losses to coordinates."""

    steps: range
    low: float
    high: float

    def x(self, read: float) -> float:
        share = (read * 20 - self.steps[0]) / max(self.steps[-1] - self.steps[0], 1)
        return round(_LEFT + share * (_END - _LEFT), 1)

    def y(self, loss: float) -> float:
        return round(_FLOOR - math.log(loss / self.low) / math.log(self.high / self.low) * (_FLOOR - _TOP), 1)

    def lines(self, colors: dict[str, Any]) -> list[str]:
        """Returns the grid and its labels: losses of 1, 2 and 5 times a power of ten, and more if the range is small."""
        edge, parts = f'stroke="{colors["edge"]}" stroke-width="0.5"', []
        for step in self.steps:
            x = self.x(step / 20)
            parts += [f'<line x1="{x:g}" y1="{_TOP}" x2="{x:g}" y2="{_FLOOR}" {edge}/>',
                      text(x, _FLOOR + 18, f"{step / 20:.0%}", colors["soft"], 11)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if self.high > 5 * self.low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
        for tick in (round(digit * 10.0 ** power, 12) for power in powers for digit in digits):
            if self.low <= tick <= self.high:
                parts += [f'<line x1="{_LEFT}" y1="{self.y(tick):g}" x2="{_END}" y2="{self.y(tick):g}" {edge}/>',
                          text(_LEFT - 8, self.y(tick) + 4, f"{tick:g}", colors["soft"], 11, "end")]
        return [*parts, text((_LEFT + _END) / 2, _FLOOR + 40, "KV bytes read", colors["soft"], 12)]


def _axes(points: list[Point]) -> _Axes:
    reads, losses = [point.read for point in points], [point.loss for point in points]
    return _Axes(range(math.floor(min(reads) * 20), math.ceil(max(reads) * 20) + 1), min(losses) / 1.15, max(losses) * 1.15)


@dataclass(frozen=True)
class TradeOff:
    """The picture of losses against bytes read.

    Attributes
    ----------
    title : str
    groups : dict of str to list of Point
        The points of each line, by the line's name.
    """

    title: str
    groups: dict[str, list[Point]]

    def svg(self, mode: str) -> str:
        """Returns the picture for a "light" or "dark" page."""
        colors: dict[str, Any] = dict(COLORS[mode])
        axes = _axes([point for group in self.groups.values() for point in group])
        parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="{colors["back"]}"/>',
                 text(16, 30, self.title, colors["ink"], 16, "start", "bold"),
                 text(16, 52, "KL divergence from dense attention in nats, logarithmic, by KV bytes read. Lines join the best settings.",
                      colors["soft"], 12, "start"), *axes.lines(colors)]
        for i, (name, group) in enumerate(self.groups.items()):
            color, row = _LINES[mode][i % len(_LINES[mode])], _TOP + 20 * i + 8
            line = " ".join(f"{axes.x(point.read):g},{axes.y(point.loss):g}" for point in best_of(group))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            parts += [f'<circle cx="{axes.x(point.read):g}" cy="{axes.y(point.loss):g}" r="4" fill="{color}"><title>'
                      f'{escape(point.name)}: {point.read:.1%}, {point.loss:.2g}</title></circle>' for point in group]
            parts += [f'<circle cx="{_END + 24}" cy="{row}" r="4" fill="{color}"/>',
                      text(_END + 36, row + 4, name, colors["ink"], 12, "start")]
        body = "\n".join(parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
                f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n<title>{escape(self.title)}</title>\n{body}\n'
                "</svg>\n")
