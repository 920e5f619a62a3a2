# SPDX-License-Identifier: MIT
"""Computes the keys that many candidates name for a block of queries, by the rules of tandem/patterns.h.

A candidate names the k best columns, bands or blocks. So each of these is ranked once, and a unit of 8 tokens gets the best
rank within it. A candidate names the units whose rank is below its size. One comparison serves all candidates:

    column ranks of tokens   7 . 2 . . 0 9 1 | ...        size 2 names the unit: it holds rank 0
    unit's rank                      0       | ...

In addition, all tokens from some token on are named: windows, and the block itself.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ._candidates import Candidate

BLOCK, CHUNK, UNIT = 128, 8192, 8
PROBED, BAND, KEY_BLOCK = 64, 16, 64
_NEVER = 1 << 30  # rank of units that no candidate names


class Sizes:
    """Sizes of all candidates as columns, [n_candidates, 1] each; 0 if a candidate does not have the pattern.

    Parameters
    ----------
    candidates : sequence of Candidate
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)[:, None]

        shapes = [one.a_shape or (0, 0) for one in candidates]
        self.n = len(candidates)
        self.is_full = torch.tensor([one.is_full for one in candidates])
        self.sink_units = column([-(-sinks // UNIT) for sinks, _ in shapes])
        self.windows = torch.tensor([window for _, window in shapes])
        self.columns = column([one.vertical_slash[0] if one.vertical_slash else 0 for one in candidates])
        self.bands = column([max(1, -(-one.vertical_slash[1] // BAND)) if one.vertical_slash else 0 for one in candidates])
        self.blocks = column([one.block_sparse or 0 for one in candidates])
        self.has_blocks = torch.tensor([one.block_sparse is not None for one in candidates])


@dataclass(frozen=True)
class BlockKeys:
    """The keys that each candidate names for a block of queries.

    Attributes
    ----------
    begin, end : int
        Range of the tokens of the block's queries.
    units : Tensor
        [n_candidates, n_units] of bool: the named units of 8 tokens.
    newest : Tensor
        [n_candidates]: all tokens from this one on are named; at most `begin`.
    """

    begin: int
    end: int
    units: torch.Tensor
    newest: torch.Tensor

    def tokens(self) -> torch.Tensor:
        """Returns [n_candidates, end] of bool, the named tokens before causality applies."""
        named = self.units.repeat_interleave(UNIT, dim=1)[:, :self.end]
        return named | (torch.arange(self.end)[None] >= self.newest[:, None])

    def pairs(self) -> torch.Tensor:
        """Returns [n_candidates], the attended (query, key) pairs as the library counts them."""
        n_queries, cut = self.end - self.begin, self.newest // UNIT
        is_below = torch.arange(self.units.shape[1])[None] < cut[:, None]
        named = (self.units & is_below).sum(1) * UNIT
        last = self.units.gather(1, cut.clamp(max=self.units.shape[1] - 1)[:, None])[:, 0]
        named += last * (self.newest - cut * UNIT)
        first_sees = self.begin + 1 - self.newest
        return named * n_queries + first_sees * n_queries + n_queries * (n_queries - 1) // 2


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Returns the places in the order of falling scores. The first of equal scores comes first."""
    order = scores.argsort(descending=True, stable=True)
    placed = torch.empty(len(scores), dtype=torch.int32)
    placed[order] = torch.arange(len(scores), dtype=torch.int32)
    return placed


def weights_of(q: torch.Tensor, k: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the attention weights [n, n_keys] of queries [n, head_dim] at `tokens` over keys [n_keys, head_dim]."""
    logits = (q @ k.T).mul_(scale)
    logits.masked_fill_(torch.arange(len(k))[None] > tokens[:, None], float("-inf"))
    return logits.softmax(-1)


def _per_unit(token_ranks: torch.Tensor, size: int = UNIT) -> torch.Tensor:
    padded = torch.nn.functional.pad(token_ranks, (0, -len(token_ranks) % size), value=_NEVER)
    return padded.view(-1, size).amin(1)


class ChunkRanks:
    """Columns and bands of diagonals of a chunk of one head's queries, ranked by the weights of its last queries.

    Parameters
    ----------
    q : Tensor
        [n_queries, head_dim], the chunk's queries.
    k : Tensor
        [n_tokens, head_dim], at least up to the chunk's last token.
    first : int
        Token of the first query.
    scale : float
        Factor of the logits.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, first: int, scale: float) -> None:
        end = first + len(q)
        n_probed = min(PROBED, len(q))
        tokens = torch.arange(end - n_probed, end)
        weights = weights_of(q[-n_probed:], k[:end], tokens, scale)
        bands = torch.zeros((end - 1) // BAND + 1)
        distances = tokens[:, None] - torch.arange(end)[None]
        is_seen = distances >= 0
        bands.index_add_(0, distances[is_seen] // BAND, weights[is_seen])
        bands[0] = torch.inf
        self.columns, self.bands = ranks(weights.sum(0)), ranks(bands)

    def units(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ranks of units by columns and by bands, for tokens before the block [begin, end)."""
        if begin == 0:
            return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
        tokens = torch.arange(begin)
        # A token's distances from the block's queries fall into the bands from `first` to `last`.
        first, last = (begin - tokens) // BAND, (end - 1 - tokens) // BAND
        best = self.bands[first]
        for step in range(1, (end - begin - 1) // BAND + 2):
            best = torch.minimum(best, self.bands[torch.minimum(first + step, last)])
        return _per_unit(self.columns[:begin]), _per_unit(best)


class KeyMeans:
    """Means of blocks of 64 keys of a KV head, [n_tokens, head_dim]. A mean logit is a product with a block's mean."""

    def __init__(self, k: torch.Tensor) -> None:
        n = len(k) // KEY_BLOCK
        self._means = k[:n * KEY_BLOCK].view(n, KEY_BLOCK, -1).mean(1)

    def units(self, q: torch.Tensor, begin: int) -> torch.Tensor:
        """Returns ranks of units, for the key blocks that end before the queries q, which begin at token `begin`."""
        return ranks(self._means[:begin // KEY_BLOCK] @ q.mean(0)).repeat_interleave(KEY_BLOCK // UNIT)


def keys_of_block(sizes: Sizes, q: torch.Tensor, begin: int, chunk: ChunkRanks, means: KeyMeans) -> BlockKeys:
    """Returns the keys that each candidate names for the queries q of one head, which begin at token `begin`."""
    end = begin + len(q)
    n_units = -(-end // UNIT)

    def named(unit_ranks: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(unit_ranks, (0, n_units - len(unit_ranks)), value=_NEVER)
        return padded[None] < counts

    columns, bands = chunk.units(begin, end)
    units = named(torch.arange(n_units, dtype=torch.int32), sizes.sink_units)
    units |= named(columns, sizes.columns) | named(bands, sizes.bands) | named(means.units(q, begin), sizes.blocks)
    newest = (begin + 1 - sizes.windows).clamp(min=0, max=begin)
    newest = torch.where(sizes.has_blocks, newest.clamp(max=begin // KEY_BLOCK * KEY_BLOCK), newest)
    return BlockKeys(begin, end, units, torch.where(sizes.is_full, 0, newest))
