# SPDX-License-Identifier: MIT
"""The cost and the loss of each candidate, by layer and query head.

The cost is exact: pairs of every block of every prompt. The loss is the attention weight on keys that a candidate does not
name. It is measured for sampled queries: in text every 4th query of some equally spaced blocks, in questions every query.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ._candidates import Candidate
from ._prompts import Call, Prompt
from ._rules import BLOCK, CHUNK, ChunkRanks, KeyMeans, Sizes, keys_of_block, weights_of

EVERY = 4  # distance of the sampled queries in a block of text


@dataclass
class LayerRecall:
    """The costs and losses of one layer.

    Attributes
    ----------
    n_kv_heads : int
    pairs : Tensor
        [n_q_heads, n_candidates] of int64.
    dense_pairs : int
        Pairs of one head that attends all keys.
    text : list of Tensor
        For each call's sampled blocks, the weight that is lost, [n_q_heads, n_queries, n_candidates] of f16.
    questions : list of Tensor
        The same for each question.
    """

    n_kv_heads: int
    pairs: torch.Tensor
    dense_pairs: int = 0
    text: list[torch.Tensor] = field(default_factory=list)
    questions: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Head:
    """Queries and keys of one query head, [n_tokens, head_dim] each."""

    q: torch.Tensor
    k: torch.Tensor
    means: KeyMeans
    scale: float


class Recall:
    """Sums over prompts.

    Parameters
    ----------
    candidates : sequence of Candidate
    n_samples : int
        Number of blocks of a prompt's text whose queries are sampled.
    """

    def __init__(self, candidates: Sequence[Candidate], n_samples: int) -> None:
        self.candidates, self._n_samples = list(candidates), n_samples
        self._sizes = Sizes(candidates)
        self.layers: dict[int, LayerRecall] = {}
        self._prompt = Prompt([], [])

    def begin(self, prompt: Prompt) -> None:
        """Sets the prompt that the next layers belong to."""
        self._prompt = prompt

    def add(self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        """Adds a layer's queries and keys, [n_heads, n_tokens, head_dim]."""
        q, k = q.cpu(), k.cpu()
        group, means = len(q) // len(k), [KeyMeans(one) for one in k]
        layer = self.layers.setdefault(layer_idx, LayerRecall(len(k), torch.zeros((len(q), self._sizes.n), dtype=torch.int64)))
        heads = [_Head(one, k[i // group], means[i // group], scale) for i, one in enumerate(q)]
        for call in self._prompt.calls:
            n = call.end - call.first
            layer.dense_pairs += n * call.first + n * (n + 1) // 2
            found = [self._call(layer.pairs[i], head, call) for i, head in enumerate(heads)]
            (layer.questions if call.is_question else layer.text).append(torch.stack(found))

    def _call(self, pairs: torch.Tensor, head: _Head, call: Call) -> torch.Tensor:
        """Adds to the head's pairs. Returns what its sampled queries lose, [n_queries, n_candidates]."""
        begins, lost = range(call.first, call.end, BLOCK), []
        n = min(self._n_samples, len(begins))
        sampled = set(begins) if call.is_question else {begins[(i + 1) * len(begins) // n - 1] for i in range(n)}
        for first in range(call.first, call.end, CHUNK):
            end = min(first + CHUNK, call.end)
            chunk = ChunkRanks(head.q[first:end], head.k, first, head.scale)
            for begin in range(first, end, BLOCK):
                q = head.q[begin:min(begin + BLOCK, end)]
                keys = keys_of_block(self._sizes, q, begin, chunk, head.means)
                pairs += keys.pairs()
                if begin in sampled:
                    tokens = torch.arange(begin, keys.end)[::1 if call.is_question else EVERY]
                    weights = weights_of(head.q[tokens], head.k[:keys.end], tokens, head.scale)
                    lost.append((1 - weights @ keys.tokens().float().T).clamp_(min=0).half())
        return torch.cat(lost)
