# SPDX-License-Identifier: MIT
"""Perplexity and divergence from dense attention: of a prefill, and of decode steps with the text's own tokens.

A prefill is measured under policy "all" and shows what a storage type loses. Calls of one token show what a policy loses.
"""
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._language_model import LanguageModel, close, memory, pattern_pairs
from ._mass import Floats, Selected
from ._progress import Progress
from ._scores import Scores
from ._settings import Setting
from ._start import Start

_CHUNK = 512  # tokens whose logits are in memory at once


def measure_prefill(model: LanguageModel, ids: torch.Tensor, settings: list[Setting],
                    progress: Progress) -> Iterator[tuple[Setting | None, dict[str, Any]]]:
    """Runs all settings in parallel over ids[:-1], chunk by chunk, so that no chunk's logits are kept after the comparison."""
    runs = [(setting, model.new_cache(setting), Scores()) for setting in [None, *settings]]
    n_tokens = len(ids) - 1
    for first in range(0, n_tokens, _CHUNK):
        chunk, targets = ids[first:min(first + _CHUNK, n_tokens)], ids[first + 1:first + 1 + _CHUNK]
        targets = targets[:len(chunk)]
        dense = None
        for _, past, scores in runs:
            logits = model.forward(chunk, past).logits[0].float()
            dense = logits if dense is None else dense
            scores.add(logits, dense, targets)
            progress.prefill(len(chunk))
    for setting, past, scores in runs:
        yield setting, {**scores.figures(), **memory(past)}
        close(past)


@dataclass(frozen=True)
class Dense:
    """Dense attention's decode, to compare with.

    Attributes
    ----------
    logits : Tensor
        [n_steps, vocabulary].
    weights : dict of int to list of ndarray
        For each sampled step, one array for each layer, [n_q_heads, n_keys].
    figures : dict
        The figures of dense attention's own line.
    """

    logits: torch.Tensor
    weights: dict[int, list[Floats]]
    figures: dict[str, Any]


def sampled(n_steps: int, n_samples: int) -> list[int]:
    """Returns equally spaced steps, the last step included."""
    n_samples = min(n_samples, n_steps)  # may be 0
    return [(i + 1) * n_steps // n_samples - 1 for i in range(n_samples)]


def _read(stats: Any) -> dict[str, int]:
    """Returns the KV bytes so far: attended, judged by the stages of "hip", and those that dense attention would have read."""
    return {"read": stats.resident_kv_bytes_read + stats.host_kv_bytes_read, "judged": stats.judged_kv_bytes, "dense": stats.dense_kv_bytes}


def decode_dense(start: Start, ids: torch.Tensor, n_context: int, with_weights: list[int]) -> Dense:
    """Decodes after ids[:n_context], one step for each further token but the last. Keeps the weights of the steps in
    `with_weights`."""
    past = start.cache(None)
    logits, weights = [], {}
    for i in range(len(ids) - n_context - 1):
        wanted = {"output_attentions": True} if i in with_weights else {}
        output = start.model.forward(ids[n_context + i:n_context + i + 1], past, 1, **wanted)
        logits.append(output.logits[0, -1].float())
        if wanted:
            weights[i] = [layer[0, :, -1].double().cpu().numpy() for layer in output.attentions]
        start.progress.steps()
    scores, stacked = Scores(), torch.stack(logits)
    scores.add(stacked, stacked, ids[n_context + 1:])
    figures = {**scores.figures(), **memory(past)}
    close(past)
    return Dense(stacked, weights, figures)


def decode_setting(start: Start, ids: torch.Tensor, setting: Setting, dense: Dense, samples: list[int]) -> dict[str, Any]:
    """Decodes the same steps under a setting, and records its selections at the sampled steps."""
    n_steps = len(dense.logits)
    n_context = len(ids) - n_steps - 1
    past, scores, selected = start.cache(setting), Scores(), Selected()
    try:
        before, passed = _read(past.session.stats()), 0.0
        for i in range(n_steps):
            if i in samples:
                selected.add(past, setting, dense.weights.get(i))
            started = time.perf_counter()
            logits = start.model.step(ids[n_context + i:n_context + i + 1], past)
            passed += time.perf_counter() - started
            scores.add(logits[None], dense.logits[i:i + 1], ids[n_context + i + 1:n_context + i + 2])
            start.progress.steps()
        after = _read(past.session.stats())
        made = {name: after[name] - before[name] for name in after}
        host = past.cache.stats()
        return {**scores.figures(), **selected.figures(), "kv_bytes_read_per_step": made["read"] / n_steps,
                "kv_bytes_read_share": made["read"] / made["dense"], "kv_bytes_judged_share": made["judged"] / made["dense"],
                **pattern_pairs(past), **memory(past), "session_bytes": host.host_session_bytes + host.selection_bytes, "s_per_step": passed / n_steps}
    finally:
        past.close()
