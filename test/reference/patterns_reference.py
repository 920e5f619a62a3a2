# SPDX-License-Identifier: MIT
"""Head patterns (include/tandem/patterns.h) in NumPy and double precision: the keys that the queries of an append
attend, and attention over them.

Arrays: q [n_queries, H, d], k and v [n_tokens, G, d], rotated as attention uses them. The queries are the last
n_queries tokens. Query head h belongs to KV head h // (H / G).
"""
import dataclasses

import numpy as np

BLOCK, CHUNK, UNIT = 128, 8192, 8
PROBED, BAND, KEY_BLOCK = 64, 16, 64


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The pattern of one query head. None: the head does not have this kind. A head without any kind is full."""
    a_shape: tuple | None = None          # (sinks, window)
    vertical_slash: tuple | None = None   # (columns, diagonals)
    block_sparse: int | None = None       # blocks of keys


@dataclasses.dataclass
class Choice:
    """The n choices with the best scores, and the scores of all candidates."""
    scores: np.ndarray
    n: int

    def certain(self, tie):
        """Returns (choices that no rounding changes, choices that are possible)."""
        n = min(self.n, len(self.scores))
        if n == 0:
            return set(), set()
        scores = np.where(np.isnan(self.scores), -np.inf, self.scores)
        order = np.argsort(-scores, kind="stable")
        last = scores[order[n - 1]]
        after = scores[order[n]] if n < len(scores) else -np.inf
        margin = tie * max(abs(last), 1e-30) if np.isfinite(last) else 0.0
        sure = {int(i) for i in order[:n] if scores[i] > after + margin or n == len(scores)}
        maybe = {int(i) for i in range(len(scores)) if scores[i] >= last - margin and np.isfinite(scores[i])} | {int(i) for i in order[:n]}
        return sure, maybe


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def columns_and_bands(q, k, first, scale):
    """Sums the weights of the chunk's last queries for each token and for each band of diagonals. q: of one head, from `first` on."""
    n = min(PROBED, len(q))
    tokens = first + len(q) - n + np.arange(n)
    end = first + len(q)
    logits = np.where(np.arange(end)[None] <= tokens[:, None], q[-n:] @ k[:end].T * scale, -np.inf)
    weights = softmax(logits)
    bands = np.zeros((end - 1) // BAND + 1)
    distances = tokens[:, None] - np.arange(end)[None]
    np.add.at(bands, distances[distances >= 0] // BAND, weights[distances >= 0])
    bands[0] = np.inf
    return weights.sum(0), bands


def block_means(q, k, begin, scale):
    """Returns the mean logits of the blocks of keys that end before token `begin`, with the mean of q, the queries of a block."""
    n = begin // KEY_BLOCK
    return (k[:n * KEY_BLOCK] @ q.mean(0) * scale).reshape(n, KEY_BLOCK).mean(1)


def with_units(mask):
    """Extends a mask to whole units: a unit is named if any of its tokens is."""
    units = np.pad(mask, (0, -len(mask) % UNIT)).reshape(-1, UNIT).any(1)
    return np.repeat(units, UNIT)[:len(mask)]


def masks(q, k, pattern, scale, tie=1e-5):
    """Returns for each block of queries of one head: (first query, tokens that are certainly named, tokens that may be
    named). The tokens are masks over all tokens, before causality. q [n_queries, d], k [n_tokens, d]."""
    n_tokens, p0 = len(k), len(k) - len(q)
    found = []
    for first in range(0, len(q), CHUNK):
        of_chunk = q[first:first + CHUNK]
        choices = []
        if pattern.vertical_slash is not None:
            columns, bands = columns_and_bands(of_chunk, k, p0 + first, scale)
            n_columns, n_diagonals = pattern.vertical_slash
            choices = [Choice(columns, n_columns).certain(tie), Choice(bands, max(1, -(-n_diagonals // BAND))).certain(tie)]
        for at in range(0, len(of_chunk), BLOCK):
            begin, end = p0 + first + at, min(p0 + first + at + BLOCK, p0 + first + len(of_chunk))
            sides = [block_mask(pattern, n_tokens, begin, end, [choice[side] for choice in choices],
                                of_chunk[at:at + BLOCK], k, scale, tie, side) for side in (0, 1)]
            found.append((begin - p0, *sides))
    return found


def block_mask(pattern, n_tokens, begin, end, chosen, q, k, scale, tie, side):
    named, newest = np.zeros(n_tokens, bool), np.zeros(n_tokens, bool)
    newest[begin:] = True
    if pattern == Pattern():
        newest[:] = True
    if pattern.a_shape is not None:
        sinks, window = pattern.a_shape
        named[:sinks] = True
        newest[max(0, begin + 1 - window):] = True
    if chosen:
        columns, bands = chosen
        named[[token for token in columns if token < begin]] = True
        for band in bands:
            named[max(0, begin - (band + 1) * BAND + 1):max(0, min(end - band * BAND, begin))] = True
    if pattern.block_sparse is not None:
        for block in Choice(block_means(q, k, begin, scale), pattern.block_sparse).certain(tie)[side]:
            named[block * KEY_BLOCK:(block + 1) * KEY_BLOCK] = True
        newest[begin // KEY_BLOCK * KEY_BLOCK:] = True
    return with_units(named) | newest


@dataclasses.dataclass(frozen=True)
class Rope:
    """The library's rotation of keys and queries: radians per position for each pair of the leading dims."""
    frequencies: np.ndarray
    interleaved: bool = False
    factor: float = 1.0


def relative_logits(q, k, distances, rope):
    """Returns q . k for queries that are `distances` [n, m] positions after the key, 0 or more. q [n, d] and k [m, d]
    are not rotated, and this function rotates neither: a pair of dims, as a complex number, turns by the distance
    alone."""
    n_pairs = len(rope.frequencies)

    def pairs(rows):
        if rope.interleaved:
            return rows[:, 0:2 * n_pairs:2] + 1j * rows[:, 1:2 * n_pairs:2]
        return rows[:, :n_pairs] + 1j * rows[:, n_pairs:2 * n_pairs]

    a, b, each = pairs(q), pairs(k).conj(), np.arange(distances.max() + 1)
    turned = np.zeros(distances.shape)
    for i, frequency in enumerate(rope.frequencies):
        turned += (np.outer(a[:, i], b[:, i]) * np.exp(1j * each * frequency)[distances]).real
    return turned * rope.factor**2 + q[:, 2 * n_pairs:] @ k[:, 2 * n_pairs:].T


def attend_within(q, k, v, seen, positions, rope, scale, max_distance=None, soft_cap=0.0, sink=-np.inf):
    """Returns (o, lse) of one head's queries. q [n, d] and k are not rotated. seen: [n, n_tokens]. positions: of the
    queries and of all tokens. A key beyond max_distance is attended as if it were at that distance. sink: a logit
    without a key."""
    distances = np.maximum(positions[0][:, None] - positions[1][None], 0)  # queries do not see tokens after them
    if max_distance is not None:
        distances = np.minimum(distances, max_distance)
    logits = relative_logits(q, k, distances, rope) * scale
    if soft_cap > 0:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(seen, logits, -np.inf)
    most = np.maximum(logits.max(-1, keepdims=True), sink)
    weights = np.exp(logits - most)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - most)
    return weights @ v / total, (most + np.log(total))[:, 0]


def attend(q, k, v, mask, first_query, scale):
    """Attends one head's block of queries. q: [n, d], starting with token first_query. mask: over tokens."""
    tokens = np.arange(len(k))
    seen = mask[None] & (tokens[None] <= first_query + np.arange(len(q))[:, None])
    return softmax(np.where(seen, q @ k.T * scale, -np.inf)) @ v
