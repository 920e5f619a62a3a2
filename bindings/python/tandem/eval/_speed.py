# SPDX-License-Identifier: MIT
"""Speed: tokens/s of a prefill in one call, and of decode steps. Runners take turns, so that a busy machine slows all alike."""
import statistics
import time
from typing import Any

import torch

from ._language_model import LanguageModel, memory
from ._progress import Progress
from ._settings import Setting

ROUNDS, STEPS = 3, 8
BASELINES = ("eager", "sdpa")  # Transformers' attention implementations
Runner = Setting | str


def measure_speed(model: LanguageModel, ids: torch.Tensor, runners: list[Runner],
                  progress: Progress) -> list[tuple[Runner, dict[str, Any]]]:
    """Prefills ids without the steps' tokens. Then runs one warm-up round and ROUNDS rounds of STEPS decode steps."""
    n_context = len(ids) - (ROUNDS + 1) * STEPS
    runs: list[tuple[Runner, Any, dict[str, str], float]] = []
    times: list[list[float]] = [[] for _ in runners]
    try:
        for runner in runners:
            past = model.new_cache(None if isinstance(runner, str) else runner)
            options = {"attention": runner} if isinstance(runner, str) else {}
            started = time.perf_counter()
            runs.append((runner, past, options, 0.0))
            model.prefill(ids[:n_context], past, **options)
            runs[-1] = (runner, past, options, time.perf_counter() - started)
            progress.prefill(n_context)
        for turn in range(ROUNDS + 1):
            first = n_context + turn * STEPS
            for (_, past, options, _), mine in zip(runs, times, strict=True):
                started = time.perf_counter()
                for i in range(first, first + STEPS):
                    model.step(ids[i:i + 1], past, **options)
                mine.append((time.perf_counter() - started) / STEPS)
                progress.steps(STEPS)
        return [(runner, {"prefill_tokens_per_s": n_context / prefill_s, "decode_tokens_per_s": 1 / statistics.median(mine[1:]),
                          "decode_tokens_per_s_slowest": 1 / max(mine[1:]), "decode_tokens_per_s_fastest": 1 / min(mine[1:]),
                          **memory(past)})
                for (runner, past, _, prefill_s), mine in zip(runs, times, strict=True)]
    finally:
        for runner, past, _, _ in runs:
            if not isinstance(runner, str):
                past.close()
