# SPDX-License-Identifier: MIT
"""Finds the layers that are best left dense, by the mass that a setting leaves out in each.

A layer that attends every key gains the mass that it left out before, and costs the bytes that it did not read before. The
layers are ordered by gain per byte. The mass does not tell how a layer's error affects the model: measure the resulting
settings.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ._pictures import Line, label

LEAST_GAIN = 1e-4  # mean mass left out, below which a dense layer gains nothing measurable


@dataclass(frozen=True)
class DenseLayer:
    """A layer, with the gain and the cost of attending all its keys.

    Attributes
    ----------
    layer_idx : int
    mass_left_out : float
        Mean over the layer's query heads.
    read_bytes : float
        K and V that a step reads of the layer under the setting.
    more_bytes : float
        K and V that a step reads in addition when the layer is dense.
    """

    layer_idx: int
    mass_left_out: float
    read_bytes: float
    more_bytes: float


def best_dense_layers(figures: dict[str, Any]) -> list[DenseLayer]:
    """Returns the layers that leave mass out, best first, from a decode line's figures."""
    found = []
    for layer_idx, n_bytes in enumerate(figures["dense_bytes"]):
        masses, shares = figures["mass_left_out"][layer_idx], figures["read_share"][layer_idx]
        mass, share = sum(masses) / len(masses), sum(shares) / len(shares)
        if mass >= LEAST_GAIN and share < 1:
            found.append(DenseLayer(layer_idx, mass, n_bytes * share, n_bytes * (1 - share)))
    return sorted(found, key=lambda one: (-one.mass_left_out / one.more_bytes, one.layer_idx))


def _table(line: Line) -> list[str]:
    figures = line["figures"]
    all_bytes, read = sum(figures["dense_bytes"]), figures["kv_bytes_read_share"]
    out = [f"## Layers best left dense: {label(line)}, {line['what']['context']:,} tokens", "",
           "| layer | mass left out, mean | KV read a step, MB | more when dense, MB | KV bytes read with it and those above |",
           "|---|---|---|---|---|"]
    best = best_dense_layers(figures)
    for one in best:
        read += one.more_bytes / all_bytes
        out.append(f"| {one.layer_idx} | {one.mass_left_out:.2%} | {one.read_bytes * 1e-6:.3f} | {one.more_bytes * 1e-6:.3f} | "
                   f"{read:.1%} |")
    if not best:
        return [*out[:2], "No layer leaves out mass that shows.", ""]
    first = "+".join(str(one.layer_idx) for one in sorted(best[:3], key=lambda one: one.layer_idx))
    return [*out, "", f"To measure the first {min(len(best), 3)}, add `dense_layers={first}` to the setting.", ""]


def write_dense_layers(lines: Iterable[Line]) -> str:
    """Returns a table for each setting that selects keys and has no dense layers yet."""
    out: list[str] = []
    for line in lines:
        what, figures = line["what"], line["figures"]
        if (what["measurement"] == "decode" and {"mass_left_out", "dense_bytes"} <= figures.keys()
                and what["setting"].get("policy", "all") != "all" and "dense_layers" not in what["setting"]):
            out += _table(line)
    return "\n".join(out)
