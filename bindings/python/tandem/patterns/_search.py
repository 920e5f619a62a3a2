# SPDX-License-Identifier: MIT
"""A search, from a model to the patterns of its heads."""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..eval._language_model import LanguageModel, ModelError
from ._candidates import Candidate, grid
from ._capture import watch
from ._choice import WORST_WEIGHT, choose, losses
from ._prompts import Prompt
from ._recall import Recall
from ._report import Found


@dataclass(frozen=True)
class Budget:
    """The pairs that may be attended, and the weights of losses.

    Attributes
    ----------
    share : float
        Share of dense attention's pairs, over all prompts, layers and heads.
    worst_weight : float
        Weight of each question's worst query, beside the mean over the text's queries.
    """

    share: float
    worst_weight: float = WORST_WEIGHT


def measure(model: LanguageModel, prompts: list[Prompt], n_samples: int, said: Callable[[str], None],
            candidates: list[Candidate] | None = None) -> Recall:
    """Runs all prompts and measures every candidate of every head.

    Raises
    ------
    ModelError
        The model has layers that cannot be searched, or none that can.
    """
    recall = Recall(grid() if candidates is None else candidates, n_samples)
    for i, prompt in enumerate(prompts):
        said(f"prompt {i + 1} of {len(prompts)}: {len(prompt.ids)} tokens")
        recall.begin(prompt)
        watch(model, prompt.ids, recall.add)
    if not recall.layers:
        raise ModelError(f"{model.name}: no layer attends beyond a sliding window")
    return recall


def assign(model: LanguageModel, recall: Recall, budget: Budget) -> Found:
    """Chooses a candidate for each head.

    Raises
    ------
    BudgetError
    """
    indices, n_heads = sorted(recall.layers), model.n_heads
    layers = [recall.layers[i] for i in indices]
    dense = sum(layer.dense_pairs for layer in layers) * n_heads
    chosen = choose(torch.cat([layer.pairs for layer in layers]), torch.cat([losses(layer, budget.worst_weight) for layer in layers]),
                    math.floor(dense * budget.share))
    of_layer = {layer_idx: chosen[i * n_heads:(i + 1) * n_heads] for i, layer_idx in enumerate(indices)}
    return Found(recall.candidates, recall.layers, of_layer, model.n_layers, n_heads)
