# SPDX-License-Identifier: MIT
"""Heat maps side by side as an SVG, for a light and for a dark page. Needs only the standard library."""
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

COLORS = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "edge": "#afb8c1", "back": "#ffffff",
              "scale": ("#f0f4f8", "#a5cdf7", "#3c86d9", "#12499a", "#061d47"),
              "above": ("#fbf1ea", "#f6b98a", "#dc6b2f", "#93330d", "#451303")},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "edge": "#3d444d", "back": "#0d1117",
             "scale": ("#1a212b", "#174a8c", "#2f81f7", "#8cc4ff", "#e6f3ff"),
             "above": ("#2b1f1a", "#8a4013", "#f0772b", "#ffba8c", "#fff0e6")},
}
_LEFT, _GAP, _TOP, _PANEL_TOP, _LEGEND = 64, 22, 66, 46, 74


@dataclass(frozen=True)
class Panel:
    """One map.

    Attributes
    ----------
    title, subtitle : str
    rows : list of list of float or None
        Values from 0; None: not measured.
    """

    title: str
    subtitle: str
    rows: list[list[float | None]]


@dataclass(frozen=True)
class HeatMap:
    """Panels with the same rows. The row labels stand once, on the left.

    Attributes
    ----------
    title : str
    row_name, column_name : str
        What rows and columns are.
    row_labels, column_labels : list of str
        "" for a label that is left out.
    panels : list of Panel
    most : float
        The value at the scale's end.
    cell : tuple of int
        Width and height of a cell.
    middle : float or None
        The value between two scales, one down to 0 and one up to `most`. None: one scale.
    """

    title: str
    row_name: str
    column_name: str
    row_labels: list[str]
    column_labels: list[str]
    panels: list[Panel]
    most: float
    cell: tuple[int, int]
    middle: float | None = None

    def svg(self, mode: str) -> str:
        """Returns the picture for a "light" or "dark" page."""
        colors = COLORS[mode]
        cell_x, cell_y = self.cell
        panel_width = max(cell_x * len(self.column_labels), 150)
        left = max(_LEFT, 16 + max((7 * len(label) for label in self.row_labels), default=0))
        width = max(left + len(self.panels) * (panel_width + _GAP), 32 + 10 * len(self.title))
        bottom = _TOP + _PANEL_TOP + cell_y * len(self.row_labels)
        parts = [f'<rect width="{width}" height="{bottom + _LEGEND}" fill="{colors["back"]}"/>',
                 text(16, 30, self.title, colors["ink"], 16, "start", "bold"),
                 text(16, 52, f"Rows: {self.row_name}. Columns: {self.column_name}.", colors["soft"], 12, "start")]
        for i, label in enumerate(self.row_labels):
            y = _TOP + _PANEL_TOP + cell_y * i + cell_y / 2 + 4
            parts.append(text(left - 8, y, label, colors["soft"], 11, "end"))
        for i, panel in enumerate(self.panels):
            parts += self._panel(panel, left + i * (panel_width + _GAP), colors)
        parts += self._legend(left, bottom + 40, colors)
        body = "\n".join(parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + _LEGEND}" width="{width}" '
                f'height="{bottom + _LEGEND}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
                f"<title>{escape(self.title)}</title>\n{body}\n</svg>\n")

    def _panel(self, panel: Panel, x: int, colors: Mapping[str, object]) -> list[str]:
        cell_x, cell_y = self.cell
        parts = [text(x, _TOP + 18, panel.title, colors["ink"], 13, "start", "bold"),
                 text(x, _TOP + 35, panel.subtitle, colors["soft"], 11, "start")]
        for i, row in enumerate(panel.rows):
            for j, value in enumerate(row):
                place = f'x="{x + j * cell_x}" y="{_TOP + _PANEL_TOP + i * cell_y}" width="{cell_x - 1}" height="{cell_y - 1}"'
                if value is None:
                    parts.append(f'<rect {place} fill="none" stroke="{colors["edge"]}" stroke-dasharray="2 2"/>')
                else:
                    parts.append(f'<rect {place} fill="{self._color(value, colors)}"><title>{value:.1%}</title></rect>')
        y = _TOP + _PANEL_TOP + cell_y * len(panel.rows) + 14
        parts += [text(x + j * cell_x + cell_x / 2, y, label, colors["soft"], 11)
                  for j, label in enumerate(self.column_labels) if label]
        return parts

    def _color(self, value: float, colors: Mapping[str, object]) -> str:
        is_above = self.middle is not None and value > self.middle
        scale = colors["above" if is_above else "scale"]
        assert isinstance(scale, tuple)
        if self.middle is None:
            share = value / self.most
        else:
            share = abs(value - self.middle) / (self.most - self.middle if is_above else self.middle)
        at = min(max(share, 0.0), 1.0) * (len(scale) - 1)
        low = min(int(at), len(scale) - 2)
        ends = [[int(color[k:k + 2], 16) for k in (1, 3, 5)] for color in scale[low:low + 2]]
        return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*ends, strict=True))

    def _legend(self, x: int, y: int, colors: Mapping[str, object]) -> list[str]:
        n_steps, step = 40, 5
        parts = [f'<rect x="{x + i * step}" y="{y - 12}" width="{step}" height="12" '
                 f'fill="{self._color(self.most * (i + 0.5) / n_steps, colors)}"/>' for i in range(n_steps)]
        parts.append(f'<rect x="{x}" y="{y - 12}" width="{n_steps * step}" height="12" fill="none" stroke="{colors["edge"]}"/>')
        middle = self.most / 2 if self.middle is None else self.middle
        parts += [text(x + value / self.most * n_steps * step, y + 15, f"{value:.0%}", colors["soft"], 11)
                  for value in (0, middle, self.most)]
        values = [value for panel in self.panels for row in panel.rows for value in row]
        notes = ["and more"] * any(value is not None and value > self.most for value in values)
        notes += ["dashed: not measured"] * (None in values)
        return parts + [text(x + n_steps * step + 24, y + 15, "; ".join(notes), colors["soft"], 11, "start")] * bool(notes)


def text(x: float, y: float, words: str, color: object, size: int, anchor: str = "middle", weight: str = "normal") -> str:
    """Returns the SVG text element for words at a place."""
    return (f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(words)}</text>')
