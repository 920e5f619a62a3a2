# SPDX-License-Identifier: MIT
"""The keys that a policy keeps, by layer and KV head, and the attention weight of the others, by layer and query head.

Session.selection() before a decode step names the keys that the step's query attends beside its own token. The weights come
from dense attention on the same tokens: softmax over every key. The mass left out is their sum over the keys that the selection
leaves out. Window and sinks are in the selection, so their weight counts as kept.
"""
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transformers import TandemCache
from ._language_model import token_bytes
from ._settings import Setting

_WINDOW, _SINKS = 4096, 64  # the library's defaults for -1

Floats = NDArray[np.float64]


def mass_left_out(weights: Floats, kept: list[NDArray[np.int64]], n_before: int) -> Floats:
    """Returns, for each query head, the weight of the keys that are not kept.

    Parameters
    ----------
    weights : ndarray
        [n_q_heads, n_keys], a softmax over the newest keys. The last key is the query's own.
    kept : list of ndarray
        For each KV head, the indices of the attended keys, among all keys before the query.
    n_before : int
        Number of keys before the query.
    """
    n_q_heads, n_keys = weights.shape
    group, masses = n_q_heads // len(kept), np.empty(n_q_heads)
    for head in range(n_q_heads):
        # A layer with a sliding window has weights only of its newest keys.
        indices = kept[head // group] - (n_before + 1 - n_keys)
        left_out = np.ones(n_keys, bool)
        left_out[-1] = False
        left_out[indices[indices >= 0]] = False
        masses[head] = weights[head, left_out].sum()
    return masses


@dataclass
class Selected:
    """The keys that sampled steps' queries attend. Means over the steps give the maps.

    Attributes
    ----------
    kept : list of ndarray
        [n_layers, n_kv_heads] for each sampled step: attended share of the keys outside window and sinks; 1 if there are none.
    read : list of ndarray
        The same, as a share of all keys.
    mass : list of ndarray
        [n_layers, n_q_heads]: mass left out.
    dense_bytes : list of ndarray
        [n_layers]: bytes that a step reads of a layer that attends every key.
    """

    kept: list[Floats] = field(default_factory=list)
    read: list[Floats] = field(default_factory=list)
    mass: list[Floats] = field(default_factory=list)
    dense_bytes: list[Floats] = field(default_factory=list)

    def add(self, past: TandemCache, setting: Setting, weights: list[Floats] | None) -> None:
        """Records the selection before a step. `weights` are the step's, for each layer [n_q_heads, n_keys]."""
        assert past.cache is not None and past.session is not None
        sequence, layers = past.sequences[0], past.cache.layers
        first, end = _outside(past, setting)
        kept, read, mass = [], [], []
        for layer_idx, layer in enumerate(layers):
            chosen = [past.session.selection(sequence, layer_idx=layer_idx, kv_head_idx=head)[0]
                      for head in range(layer.n_kv_heads)]
            n_keys = sequence.length(layer_idx)
            kept.append([((one >= first) & (one < end)).sum() / (end - first) if end > first else 1.0 for one in chosen])
            read.append([(len(one) + 1) / (n_keys + 1) for one in chosen])
            if weights is not None:
                mass.append(mass_left_out(weights[layer_idx], chosen, n_keys))
        self.kept.append(np.array(kept, np.float64))
        self.read.append(np.array(read, np.float64))
        self.dense_bytes.append(np.array([(sequence.length(layer_idx) + 1) * n_bytes
                                          for layer_idx, n_bytes in enumerate(token_bytes(past))], np.float64))
        if weights is not None:
            self.mass.append(np.array(mass))

    def figures(self) -> dict[str, Any]:
        """Returns means over the sampled steps, as lists by layer, and their summaries for tables."""
        found: dict[str, Any] = {"dense_bytes": np.mean(self.dense_bytes, 0).tolist()} if self.dense_bytes else {}
        for name, maps in (("kept_share", self.kept), ("read_share", self.read), ("mass_left_out", self.mass)):
            if maps:
                mean = np.mean(maps, 0)
                found |= {name: mean.round(6).tolist(), f"{name}_mean": float(mean.mean()), f"{name}_max": float(mean.max()),
                          f"{name}_median": float(np.median(mean))}
        return found


def _outside(past: TandemCache, setting: Setting) -> tuple[int, int]:
    """Returns the range of keys outside sinks and window. The statistics tell where hgca's window begins, as it grows by up to
    an eighth."""
    assert past.cache is not None and past.session is not None
    options, layers = setting.session, past.cache.layers
    sinks, window = options.get("sink_tokens", -1), options.get("window_tokens", -1)
    sinks, window = _SINKS if sinks < 0 else sinks, _WINDOW if window < 0 else window
    # The statistics count only layers that select keys.
    n_heads = sum(layer.n_kv_heads for layer_idx, layer in enumerate(layers) if layer_idx not in setting.dense_layers)
    n_host = past.session.stats().host_keys
    if options.get("policy") == "hgca" and not any(layer.sliding_window_tokens for layer in layers):
        return sinks, sinks + n_host // max(n_heads, 1)
    return sinks, max(past.sequences[0].length(0) - window, sinks)
