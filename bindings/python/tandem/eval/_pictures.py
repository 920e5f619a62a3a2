# SPDX-License-Identifier: MIT
"""The pictures of a results folder: what heads keep and leave out, what settings lose, and which facts are found."""
import math
import pathlib
from collections.abc import Iterable
from typing import Any

from ._heat_map import COLORS, HeatMap, Panel
from ._settings import Setting
from ._trade_off import Point, TradeOff

Line = dict[str, Any]


def label(line: Line) -> str:
    """Returns the name of a line's setting in tables and pictures."""
    setting = line["what"]["setting"]
    return setting if isinstance(setting, str) else Setting(tuple(sorted(setting.items()))).label


def _model(lines: list[Line]) -> str:
    return pathlib.PurePath(lines[0]["what"]["model"]).name


def _sparse(n: int) -> list[str]:
    """Returns labels 0 to n - 1. If there are more than 12, only every fifth is not empty."""
    return [str(i) if n <= 12 or i % 5 == 0 else "" for i in range(n)]


def _by_head(lines: list[Line], name: str, title: str, column_name: str) -> HeatMap | None:
    panels = []
    for line in lines:
        figures = line["figures"]
        if name in figures and figures["kept_share_mean"] < 1:
            mean, most = figures[f"{name}_mean"], figures[f"{name}_max"]
            panels.append(Panel(label(line), f"mean {mean:.1%}, most {most:.1%}", figures[name]))
    if not panels:
        return None
    rows = panels[0].rows
    largest = max(value or 0.0 for panel in panels for row in panel.rows for value in row)
    scale = max(math.ceil(largest * 10) / 10, 0.1)  # its half is then a whole number of per cent
    cell = (16 if len(rows[0]) > 6 else 24, 14 if len(rows) > 12 else 22)
    return HeatMap(f"{_model(lines)}: {title}", "layers", column_name, _sparse(len(rows)), _sparse(len(rows[0])), panels, scale, cell)


def _of_retrieval(lines: list[Line], kind: str, way: str) -> HeatMap:
    lines = [line for line in lines if line["what"]["kind"] == kind
             and (line["what"]["question"] == way or line["what"]["setting"] == "dense")]
    where = sorted({line["what"]["depth"] for line in lines})
    contexts = sorted({line["what"]["context"] for line in lines})
    panels = []
    for name in dict.fromkeys(label(line) for line in lines):
        mine = {(line["what"]["depth"], line["what"]["context"]): float(line["figures"]["right"])
                for line in lines if label(line) == name}
        rows = [[mine.get((depth, context)) for context in contexts] for depth in where]
        panels.append(Panel(name, f"{sum(mine.values()):.0f} of {len(mine)} found", rows))
    return HeatMap(f"{_model(lines)}: {kind}s found, question {way}", "depth in the text", "tokens of context",
                   [f"{depth:.0%}" for depth in where], [str(context) for context in contexts], panels, 1.0, (56, 24))


def _trade_off(lines: list[Line]) -> TradeOff | None:
    """Compares settings that select keys. Returns None for fewer than three, which give no line."""
    groups: dict[int, list[Point]] = {}
    for line in lines:
        setting, figures = line["what"]["setting"], line["figures"]
        if isinstance(setting, dict) and setting.get("policy", "all") != "all" and figures["kl_divergence"] > 0:
            groups.setdefault(len(setting.get("dense_layers", ())), []).append(
                Point(label(line), figures["kv_bytes_read_share"], figures["kl_divergence"]))
    if sum(map(len, groups.values())) < 3:
        return None
    named = {f"{n} dense layer{'' if n == 1 else 's'}" if n else "no dense layer": groups[n] for n in sorted(groups)}
    return TradeOff(f"{_model(lines)}: what settings lose and read, {lines[0]['what']['context']:,} tokens", named)


def maps(lines: Iterable[Line]) -> dict[str, HeatMap | TradeOff]:
    """Returns all pictures by file name."""
    lines, found = list(lines), dict[str, HeatMap | TradeOff | None]()
    decode = [line for line in lines if line["what"]["measurement"] == "decode"]
    for context in sorted({line["what"]["context"] for line in decode}):
        mine = [line for line in decode if line["what"]["context"] == context]
        found[f"trade-off-{context}"] = _trade_off(mine)
        found[f"mass-{context}"] = _by_head(mine, "mass_left_out", f"attention mass left out, {context:,} tokens", "query heads")
        found[f"kept-{context}"] = _by_head(mine, "kept_share", f"keys kept outside window and sinks, {context:,} tokens",
                                            "KV heads")
    retrieval = [line for line in lines if line["what"]["measurement"] == "retrieval"]
    for kind, way in dict.fromkeys((line["what"]["kind"], line["what"]["question"]) for line in retrieval):
        found[f"{kind.replace(' ', '-')}-{way}"] = _of_retrieval(retrieval, kind, way)
    return {name: picture for name, picture in found.items() if picture is not None}


def draw(lines: Iterable[Line], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes NAME-light.svg and NAME-dark.svg of each picture."""
    written = []
    for name, picture in maps(lines).items():
        for mode in COLORS:
            written.append(folder / f"{name}-{mode}.svg")
            written[-1].write_text(picture.svg(mode))
    return written
