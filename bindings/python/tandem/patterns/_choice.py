# SPDX-License-Identifier: MIT
"""Chooses a candidate for each head, so that all heads together stay within a budget of pairs and lose least.

For each head, only the candidates on the lower convex hull of (pairs, loss) are worth their pairs:

    loss  *
          |  *   .            from the cheapest on, each step costs pairs and takes loss away, and
          |    ` * .          the steps' gain for a pair falls
          +----------- * pairs

So the steps of all heads are taken in the order of their gain for a pair until the budget is used. This gives the least loss,
except for the last step, which may not fit. Later steps that fit are still taken.
"""
from dataclasses import dataclass

import torch

from ._recall import LayerRecall

WORST_WEIGHT = 1.0  # weight of questions' worst query, beside the mean over the text's queries


class BudgetError(ValueError):
    """No choice stays within the budget."""


@dataclass(frozen=True)
class Step:
    """A step from one candidate of a head to the next on its hull."""

    gain: float  # loss that the step removes for a pair
    head: int
    candidate: int
    pairs: int


def losses(layer: LayerRecall, worst_weight: float = WORST_WEIGHT) -> torch.Tensor:
    """Returns each candidate's loss, [n_q_heads, n_candidates]: the mean over the text's queries, and the mean over questions
    of their worst query."""
    text = torch.cat(layer.text, 1).float()
    loss = text.mean(1)
    if layer.questions:
        worst = torch.stack([question.float().amax(1) for question in layer.questions])
        loss = loss + worst_weight * worst.mean(0)
    return loss


def hull(pairs: list[int], loss: list[float]) -> list[int]:
    """Returns the indices of the lower convex hull, cheapest first, each with less loss than the one before."""
    kept: list[int] = []
    for i in sorted(range(len(pairs)), key=lambda i: (pairs[i], loss[i], i)):
        if kept and loss[i] >= loss[kept[-1]]:
            continue
        while len(kept) > 1 and (loss[kept[-2]] - loss[kept[-1]]) * (pairs[i] - pairs[kept[-1]]) <= (
                loss[kept[-1]] - loss[i]) * (pairs[kept[-1]] - pairs[kept[-2]]):
            kept.pop()
        kept.append(i)
    return kept


def choose(pairs: torch.Tensor, loss: torch.Tensor, budget: int) -> list[int]:
    """Chooses a candidate for each head.

    Parameters
    ----------
    pairs, loss : Tensor
        [n_heads, n_candidates].
    budget : int
        Pairs of all heads together.

    Raises
    ------
    BudgetError
        The cheapest candidates need more pairs.
    """
    costs, lost = pairs.tolist(), loss.tolist()
    chosen, steps = [], []
    for head, (cost, loses) in enumerate(zip(costs, lost, strict=True)):
        kept = hull(cost, loses)
        chosen.append(kept[0])
        steps += [Step((loses[a] - loses[b]) / (cost[b] - cost[a]), head, b, cost[b] - cost[a])
                  for a, b in zip(kept, kept[1:], strict=False)]
    used = sum(cost[i] for cost, i in zip(costs, chosen, strict=True))
    if used > budget:
        raise BudgetError(f"budget = {budget} pairs, the cheapest patterns attend {used}")
    stopped = set()  # heads whose step did not fit: their later steps start from it
    for step in sorted(steps, key=lambda step: (-step.gain, step.head, step.pairs)):
        if step.head in stopped or used + step.pairs > budget:
            stopped.add(step.head)
            continue
        chosen[step.head], used = step.candidate, used + step.pairs
    return chosen
