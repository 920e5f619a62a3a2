# SPDX-License-Identifier: MIT
"""The result of a search: a file of head patterns, and a table by layer."""
import json
from collections import Counter
from dataclasses import dataclass, replace

import torch

from ._candidates import Candidate
from ._choice import losses
from ._recall import LayerRecall

_WORDS = {"full": "full", "a_shape": "A-shape", "vertical_slash": "vertical-slash", "block_sparse": "block-sparse", "union": "united"}


@dataclass(frozen=True)
class Found:
    """The patterns of a model's heads.

    Attributes
    ----------
    candidates : list of Candidate
    layers : dict of int to LayerRecall
        The layers that were searched.
    chosen : dict of int to list of int
        For each of these layers, the candidate of each query head.
    n_layers, n_heads : int
        Of the model; query heads of a layer. Heads of layers that were not searched attend all keys of their sliding window.
    """

    candidates: list[Candidate]
    layers: dict[int, LayerRecall]
    chosen: dict[int, list[int]]
    n_layers: int
    n_heads: int

    def pairs(self, layer_idx: int) -> int:
        """Returns the pairs of all heads of a layer."""
        return int(sum(int(row[i]) for row, i in zip(self.layers[layer_idx].pairs, self.chosen[layer_idx], strict=True)))

    def dense_pairs(self, layer_idx: int) -> int:
        """Returns the pairs if all heads of a layer attended all keys."""
        return self.layers[layer_idx].dense_pairs * self.n_heads

    @property
    def share(self) -> float:
        """Share of dense attention's pairs, over all searched layers."""
        return sum(map(self.pairs, self.layers)) / sum(map(self.dense_pairs, self.layers))


def decoding_all_keys(heads: list[Candidate], n_kv_heads: int) -> list[Candidate]:
    """Returns the same patterns, changed so that calls of one query attend all keys.

    If all query heads of a KV head have only an A-shape, the library's decode attends sinks and window. The search judges only
    prompts, so decode must not change: one head of such a group gets a second pattern that names no key, with 0 blocks.
    """
    group, kept = len(heads) // n_kv_heads, list(heads)
    for first in range(0, len(heads), group):
        if all(head.kind == "a_shape" for head in heads[first:first + group]):
            kept[first] = replace(heads[first], block_sparse=0)
    return kept


def file_text(found: Found) -> str:
    """Returns the file's text, a line for each layer. A head's score is the share of its attention in text that it keeps."""
    lines = []
    for layer_idx in range(found.n_layers):
        heads, scores = [Candidate()] * found.n_heads, [1.0] * found.n_heads
        if layer_idx in found.layers:
            chosen, layer = found.chosen[layer_idx], found.layers[layer_idx]
            heads = decoding_all_keys([found.candidates[i] for i in chosen], layer.n_kv_heads)
            lost = torch.cat(layer.text, 1).float().mean(1)
            scores = [1 - float(lost[head, i]) for head, i in enumerate(chosen)]
        lines.append(json.dumps({str(i): head.json(round(score, 4)) for i, (head, score) in enumerate(zip(heads, scores, strict=True))}))
    return "[" + ",\n ".join(lines) + "]\n"


def _row(found: Found, layer_idx: int) -> list[str]:
    layer, chosen = found.layers[layer_idx], found.chosen[layer_idx]
    heads = torch.arange(found.n_heads)
    text = 1 - torch.cat(layer.text, 1).float()[heads, :, torch.tensor(chosen)]  # [n_heads, n_queries]
    kinds = Counter(found.candidates[i].kind for i in chosen)
    questions = ""
    if layer.questions:
        kept = torch.cat([1 - question.float()[heads, :, torch.tensor(chosen)].amax(1, keepdim=True) for question in layer.questions], 1)
        questions = f"{float(kept.mean()):.1%}"
    return [str(layer_idx), ", ".join(f"{kinds[kind]} {words}" for kind, words in _WORDS.items() if kinds[kind]),
            f"{found.pairs(layer_idx) / found.dense_pairs(layer_idx):.1%}", f"{float(text.mean()):.1%}",
            f"{float(text.quantile(0.05)):.1%}", f"{float(text.mean(1).min()):.1%}", questions]


def table(found: Found) -> str:
    """Returns a table of the recall and the cost by layer."""
    heads = ["layer", "heads", "pairs", "recall in text: mean", "of the lowest 5 % of queries", "of the lowest head",
             "recall of questions' worst queries: mean"]
    rows = [_row(found, layer_idx) for layer_idx in sorted(found.layers)]
    loss = sum(float(losses(found.layers[i])[head, one]) for i, chosen in found.chosen.items() for head, one in enumerate(chosen))
    n = sum(map(len, found.chosen.values()))
    lines = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]]
    return "\n".join([*lines, "", f"Pairs attended: {found.share:.1%} of dense attention's. Loss: {loss / n:.4f} a head.", ""])
