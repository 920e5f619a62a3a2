# SPDX-License-Identifier: MIT
"""Draws the picture of the front page: where keys are, which processor attends them, what crosses the bus.

draw_tandem.py           writes tandem-light.svg and tandem-dark.svg beside itself
draw_tandem.py --check   writes nothing; exits 1 where a file is not what it would write
"""
import pathlib
import sys

WIDTH, HEIGHT = 900, 440
PALETTES = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "box": "#f6f8fa", "edge": "#afb8c1", "cpu": "#0969da", "cpu_fill": "#b6dcff",
              "gpu": "#1a7f37", "gpu_fill": "#aceebb", "merge": "#8250df", "merge_fill": "#ecd8ff", "back": "#ffffff"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "box": "#151b23", "edge": "#3d444d", "cpu": "#58a6ff", "cpu_fill": "#0c2d6b",
             "gpu": "#3fb950", "gpu_fill": "#0f5323", "merge": "#bc8cff", "merge_fill": "#3c1e70", "back": "#0d1117"},
}


class Picture:
    def __init__(self, colors):
        self.colors, self.parts = colors, []

    def box(self, x, y, width, height, fill, edge, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{self.colors[fill]}" '
                          f'stroke="{self.colors[edge]}" stroke-width="1.5"{dashes}/>')

    def text(self, x, y, words, color="ink", size=14, anchor="middle", weight="normal"):
        self.parts.append(f'<text x="{x}" y="{y}" fill="{self.colors[color]}" font-size="{size}" font-weight="{weight}" '
                          f'text-anchor="{anchor}">{words}</text>')

    def arrow(self, color, *points, dash=""):
        """A line through points, with a head at its end; its last part is horizontal or vertical."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        (from_x, from_y), (x, y) = points[-2:]
        step_x, step_y = (x > from_x) - (x < from_x), (y > from_y) - (y < from_y)
        line = " ".join(f"{px},{py}" for px, py in [*points[:-1], (x - 8 * step_x, y - 8 * step_y)])
        side_x, side_y = 5 * step_y, 5 * step_x
        back_x, back_y = x - 10 * step_x, y - 10 * step_y
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{self.colors[color]}" stroke-width="2"{dashes}/>')
        self.parts.append(f'<polygon points="{x},{y} {back_x + side_x},{back_y + side_y} {back_x - side_x},{back_y - side_y}" '
                          f'fill="{self.colors[color]}"/>')

    def cells(self, x, y, n_cells, fill, edge, dash=""):
        for i in range(n_cells):
            self.box(x + 20 * i, y, 17, 34, fill, edge, dash)

    def svg(self):
        body = "\n".join(self.parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
                f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
                "<!-- Written by draw_tandem.py. -->\n"
                "<title>The GPU attends the window of newest tokens, the CPU the older keys in host memory; the states are merged"
                f"</title>\n{body}\n</svg>\n")


def draw(colors):
    picture = Picture(colors)
    picture.box(0.75, 0.75, WIDTH - 1.5, HEIGHT - 1.5, "back", "back")

    # The host: every key is stored here.
    picture.box(20, 20, 400, 400, "box", "edge")
    picture.text(220, 46, "Host", weight="bold", size=16)
    picture.text(40, 80, "host memory: K and V of every token", "soft", anchor="start")
    picture.cells(40, 92, 14, "cpu_fill", "cpu")
    picture.cells(320, 92, 4, "box", "cpu")
    picture.text(120, 146, "older tokens", "cpu", 13)
    picture.text(400, 146, "newest, also on the GPU", "soft", 13, "end")
    picture.arrow("cpu", (120, 156), (120, 206))
    picture.box(40, 208, 360, 62, "cpu_fill", "cpu")
    picture.text(220, 234, "CPU pool attends the older keys:", weight="bold")
    picture.text(220, 255, "all of them, or those that a policy keeps")

    # The GPU: the newest tokens again, the merge, the answer.
    picture.box(590, 20, 290, 400, "box", "edge")
    picture.text(735, 46, "GPU", weight="bold", size=16)
    picture.text(735, 80, "device memory: the window", "soft")
    picture.cells(696, 92, 4, "gpu_fill", "gpu")
    picture.text(735, 146, "newest tokens", "gpu", 13)
    picture.arrow("gpu", (735, 156), (735, 206))
    picture.box(620, 208, 230, 62, "gpu_fill", "gpu")
    picture.text(735, 234, "GPU attends the window", weight="bold")
    picture.text(735, 255, "and keys that crossed the bus")
    picture.arrow("gpu", (735, 270), (735, 318))
    picture.text(745, 300, "(o, lse)", "gpu", 13, "start")
    picture.box(620, 320, 230, 44, "merge_fill", "merge")
    picture.text(735, 347, "merge: exact, in any order", weight="bold")
    picture.arrow("merge", (735, 364), (735, 394))
    picture.text(735, 411, "attention output", "merge", 13)

    # What crosses the bus.
    picture.text(505, 46, "bus", "soft", 16, weight="bold")
    picture.arrow("gpu", (620, 239), (402, 239))
    picture.text(505, 213, "queries and", "gpu", 13)
    picture.text(505, 230, "new K, V rows", "gpu", 13)
    picture.arrow("cpu", (220, 270), (220, 342), (618, 342))
    picture.text(505, 332, "a state (o, lse)", "cpu", 13)
    picture.text(505, 362, "per query and head", "cpu", 13)
    picture.arrow("cpu", (226, 128), (226, 176), (660, 176), (660, 206), dash="6 4")
    picture.text(505, 151, "or, by another route,", "soft", 13)
    picture.text(505, 168, "the keys themselves", "soft", 13)
    return picture.svg()


def main():
    here, n_stale = pathlib.Path(__file__).resolve().parent, 0
    for name, colors in PALETTES.items():
        path, svg = here / f"tandem-{name}.svg", draw(colors)
        if "--check" not in sys.argv[1:]:
            path.write_text(svg)
        elif not path.is_file() or path.read_text() != svg:
            print(f"{path.name} is not what {pathlib.Path(__file__).name} writes")
            n_stale += 1
    return n_stale != 0


if __name__ == "__main__":
    sys.exit(main())
