# SPDX-License-Identifier: MIT
"""Hierarchical pruning of keys (InfiniteHiP, arXiv 2502.08910) in NumPy and double precision.

A query attends the first tokens of its sequence (sinks), its newest tokens (the window), and a list of chunks between them.
Stages make the list. Each stage splits the chunks that the stage before kept into smaller chunks, gives every chunk a score and
keeps the chunks with the highest scores:

    tokens   0 ... S ........................ E ......... P0 ... P
             sinks | candidates of stage 1    |
                   | [      ] [      ]        |   kept by stage 1, chunks of l(1) tokens
                   | [ ] [  ]     [  ]        |   kept by stage 2, chunks of l(2) tokens
                                         | window, from P0 + 1 - W to P |

P0 is the first query of a block. All queries of a block share the lists: one list for each KV head, or one for all.
Decode runs stage i every R(i) tokens and keeps the list in between. Therefore candidates overlap the window by
max(R) - 1 tokens: without the overlap a key would leave the window before a stage could see it.

Logits are scaled, and no soft cap is applied to them before attention. Arrays: q [n_queries, H, d], k and v [n_tokens, G, d],
rotated as attention uses them. Query head h belongs to KV head h // (H / G).
"""
import copy
import dataclasses
from collections.abc import Callable

import numpy as np
from pruning_records import Record, Stage, require

DENSE_BLOCK = 64  # queries in a block of an append without active stages


@dataclasses.dataclass(frozen=True)
class Variants:
    """Forms of the method that the paper or its public code has and the library lacks. The defaults are the library's forms."""
    representative: str = "first"     # the descent compares the first keys of two halves; "middle": the middle keys
    chunk_score: str = "last"         # the descent's score: the logit of the last key; "running_max": of the best winner
    queries: str = "all"              # all stages but the last judge by "mean4": means of 4 queries; "strided4": each 4th query
    positions: str = "true"           # of pruning: "relative", "chunk", "infllm"; q and k are not rotated then, rope rotates them
    rope: Callable | None = None      # rope(rows [..., d], positions that broadcast to [...]) -> rotated rows
    pooling: str = "minus_lse"        # "raw": the last exact stage compares the logits of several heads as they are
    window: str = "block"             # "query": each query has the window of W tokens up to itself, candidates end at P1 + 1 - W
    append_window: str = "outer"      # of a block of the last stage: from P0 of the first stage's block; "own": from its own P0

    def __post_init__(self):
        allowed = {"representative": ("first", "middle"), "chunk_score": ("last", "running_max"), "pooling": ("minus_lse", "raw"),
                   "queries": ("all", "mean4", "strided4"), "positions": ("true", "relative", "chunk", "infllm"),
                   "window": ("block", "query"), "append_window": ("own", "outer")}
        for name, values in allowed.items():
            require(getattr(self, name) in values, f"{name}: {getattr(self, name)} is none of {values}")
        require(self.positions == "true" or self.rope, "positions need rope")


DEFAULT = Variants()


@dataclasses.dataclass
class StageResult:
    """One stage of one block. Each list has one entry for each list head."""
    stage: Stage
    kept: list                    # chunk indices, ascending
    end: int = -1                 # E, the exclusive end of the candidates; -1 for a cached list
    looked_at: list | None = None  # chunk indices, ascending; None for a cached list
    scores: list | None = None    # of the chunks in looked_at; an entry is None if all of them are kept without a score
    best: list | None = None      # chunk indices chosen by their score, ascending: `kept` without the chunks of plus_next
    doubts: list | None = None    # descent: the least relative difference between two logits that a chunk's search compared

    def gap(self, list_idx):
        """Returns the relative difference between the lowest kept score and the highest score not kept, inf without one.

        A small gap is a tie: another order of additions may keep another chunk.
        """
        if self.scores is None or self.scores[list_idx] is None:
            return np.inf
        chosen = np.isin(self.looked_at[list_idx], self.best[list_idx])
        scores = self.scores[list_idx]
        return relative_gap(scores[chosen].min(), scores[~chosen].max())


@dataclasses.dataclass
class Pruned:
    """The keys that the queries p0 .. p0 + n_queries - 1 attend. These queries are one block of the last stage."""
    p0: int
    n_queries: int
    record: Record
    stages: list               # [StageResult] of the active stages; empty: the queries attend everything
    window_p0: int | None      # the window begins at window_p0 + 1 - W; None: at P + 1 - W for each query P
    run_from: int = 0          # the first active stage that ran, their number if none ran

    @property
    def lists(self):
        """Returns the chunk indices of each list head, in chunks of chunk_tokens."""
        return self.stages[-1].kept

    @property
    def chunk_tokens(self):
        return self.stages[-1].stage.chunk_tokens

    def attended(self, query, kv_head):
        """Returns the tokens that a query of the block attends, ascending."""
        p = self.p0 + query
        if not self.stages:
            return np.arange(p + 1)
        first = max(0, (p if self.window_p0 is None else self.window_p0) + 1 - self.record.window_tokens)
        listed = tokens_of(self.lists[min(kv_head, len(self.lists) - 1)], self.chunk_tokens).ravel()
        tokens = np.unique(np.concatenate([np.arange(self.record.sink_tokens), listed, np.arange(first, p + 1)]))
        return tokens[tokens <= p]


@dataclasses.dataclass
class _Block:
    """Consecutive queries of one call, with the data that a stage needs to judge chunks for them."""
    q: np.ndarray        # [n_queries, H, d]
    k: np.ndarray        # [n_tokens, G, d]
    p0: int
    record: Record
    sm_scale: float
    overlap: int
    shared: bool
    options: Variants

    @property
    def n_kv_heads(self):
        return self.k.shape[1]

    @property
    def group(self):
        return self.q.shape[1] // self.n_kv_heads

    @property
    def end(self):
        """Returns the end of the candidates: chunks that begin before this token."""
        last = self.p0 + len(self.q) - 1
        return (self.p0 if self.options.window == "block" else last) + 1 - self.record.window_tokens + self.overlap

    def kv_heads(self):
        """Returns the KV heads of each list."""
        return [range(self.n_kv_heads)] if self.shared else [[g] for g in range(self.n_kv_heads)]

    def pruned(self, stages, window_p0, run_from=0):
        per_query = self.options.window == "query"
        return Pruned(self.p0, len(self.q), self.record, stages, None if per_query else window_p0, run_from)


# --- Numbers ---


def bf16_down(x):
    """Returns the largest bf16 number that is not above x, for f32 or f64 x."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        f32 = np.asarray(x.astype(np.float32))
    f32 = np.where(f32 > x, np.nextafter(f32, np.float32(-np.inf)), f32)
    bits = f32.view(np.uint32)
    cut = bits & np.uint32(0xFFFF0000)  # toward zero, which is down for positive numbers
    steps_away = (f32 < 0) & np.isfinite(f32) & (cut != bits)
    down = (cut + (steps_away * np.uint32(0x10000)).astype(np.uint32)).view(np.float32)
    return np.where(np.isnan(x), np.nan, down.astype(np.float64))


def bf16_up(x):
    """Returns the smallest bf16 number that is not below x."""
    return -bf16_down(-np.asarray(x, np.float64))


def log_sum_exp(x, axis=-1):
    most = np.max(x, axis=axis, keepdims=True)
    most = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(x - most), axis=axis)) + np.squeeze(most, axis)


def relative_gap(a, b):
    """Returns |a - b| divided by the larger of |a| and |b|."""
    largest = np.maximum(np.abs(a), np.abs(b))
    return np.abs(a - b) / np.where(largest == 0, 1.0, largest)


def tokens_of(chunks, chunk_tokens):
    """Returns the tokens of chunks, [n_chunks, chunk_tokens]."""
    return np.asarray(chunks, np.int64)[:, None] * chunk_tokens + np.arange(chunk_tokens)


# --- Rows and logits ---


def _query_position(block, p, n_chunks):
    """Returns the position that pruning gives a query of token p in a style without true positions."""
    w = block.record.window_tokens
    return {"relative": w + 1, "infllm": w, "chunk": np.minimum(p, n_chunks + w)}[block.options.positions]


def _query_rows(block, g, n_chunks, reduce):
    """Returns the queries of a KV head, as pruning rotates them. [n_rows, group, d]"""
    q = block.q[:, g * block.group:(g + 1) * block.group].astype(np.float64)
    if block.options.positions != "true":
        p = block.p0 + np.arange(len(q))[:, None]
        q = block.options.rope(q, _query_position(block, p, n_chunks))
    if reduce and block.options.queries == "strided4":
        return q[::4]
    if reduce and block.options.queries == "mean4":
        return np.stack([q[i:i + 4].mean(0) for i in range(0, len(q), 4)])
    return q


def _key_rows(block, g, chunks, chunk_tokens, role=1):
    """Returns the keys of chunks, as pruning rotates them. role: 0 for the left key of a comparison, else 1. [n_chunks, chunk_tokens, d]"""
    k = block.k[tokens_of(chunks, chunk_tokens), g].astype(np.float64)
    if block.options.positions == "true":
        return k
    position = {"relative": role, "infllm": 0, "chunk": np.arange(len(chunks))[:, None]}[block.options.positions]
    return block.options.rope(k, position)


def _logits(block, q, k):
    """Multiplies q [n_rows, group, d] and k [n_chunks, chunk_tokens, d]. Returns [n_rows, group, n_chunks, chunk_tokens]."""
    return (q.reshape(-1, q.shape[-1]) @ k.reshape(-1, k.shape[-1]).T * block.sm_scale).reshape(*q.shape[:2], *k.shape[:2])


def _lse(block, g, q, chunks, logits):
    """Returns the log-sum-exp of each row over the chunks' logits, the sinks and the window before p0, each token once. [n_rows, group]"""
    sinks, w, p0 = block.record.sink_tokens, block.record.window_tokens, block.p0
    chunk_tokens = logits.shape[-1]
    others = np.concatenate([np.arange(min(sinks, p0 + 1)), np.arange(max(sinks, p0 + 1 - w), p0 + 1)])
    others = np.setdiff1d(others, tokens_of(chunks, chunk_tokens))
    k = block.k[others, g].astype(np.float64)
    if block.options.positions != "true":  # sinks are placed like candidates, the window at its true distance
        in_window = _query_position(block, p0, len(chunks)) - (p0 - others)
        k = block.options.rope(k, np.where(others < sinks, int(block.options.positions == "relative"), in_window))
    other_logits = _logits(block, q, k[None])[:, :, 0]
    return log_sum_exp(np.concatenate([logits.reshape(*logits.shape[:2], -1), other_logits], -1))


# --- Judges: a score for each chunk, for the query heads of one KV head ---


def _bounds_scores(block, g, stage, chunks, q):
    """Returns an upper bound of the logits of a chunk.

    In each dimension it uses the smallest and the largest key number, rounded outward to bf16.
    """
    k = _key_rows(block, g, chunks, stage.chunk_tokens)
    low, high = bf16_down(k.min(1)), bf16_up(k.max(1))  # [n_chunks, d]
    rows = q.reshape(-1, q.shape[-1])
    bounds = np.maximum(rows, 0) @ high.T + np.minimum(rows, 0) @ low.T  # the larger of q * low and q * high, summed
    return bounds.max(0) * block.sm_scale


def _exact_scores(block, g, stage, chunks, q, minus_lse):
    """Returns the largest logit of a chunk's keys.

    minus_lse: subtracts the row's log-sum-exp, so that heads with large logits do not dominate.
    """
    logits = _logits(block, q, _key_rows(block, g, chunks, stage.chunk_tokens))
    if minus_lse:
        logits = logits - _lse(block, g, q, chunks, logits)[:, :, None, None]
    return logits.max((0, 1, 3))


def descend(left, right, options=DEFAULT):
    """Goes from each chunk to a representative key by halving. Returns its index, the chunk's score and doubt, each [n].

    left, right: logits of a chunk's keys as left and as right key of a comparison, [n, chunk_tokens]. The left key wins ties.
    """
    middle = options.representative == "middle"
    at, first = np.arange(len(left)), np.zeros(len(left), np.int64)
    best, doubt = np.full(len(left), -np.inf), np.full(len(left), np.inf)
    length = left.shape[1]
    while length > (0 if middle else 1):  # the public code's last comparison compares a key with itself
        half, offset = length // 2, length // 4 if middle else 0
        a, b = left[at, first + offset], right[at, first + half + offset]
        if half:
            doubt = np.minimum(doubt, relative_gap(a, b))
        best = np.maximum(best, np.maximum(a, b))
        first = first + np.where(b > a, half, 0)
        length = half
    running = options.chunk_score == "running_max" and (middle or left.shape[1] > 1)
    return first, best if running else right[at, first], doubt


def _descent_scores(block, g, stage, chunks, q):
    """Each query head descends separately. Returns the highest score and the least doubt of the heads."""
    roles = (0, 1) if block.options.positions == "relative" else (1,)
    logits = [_logits(block, q, _key_rows(block, g, chunks, stage.chunk_tokens, role)).max(0) for role in roles]
    flat = [each.reshape(-1, stage.chunk_tokens) for each in logits]  # [group * n_chunks, chunk_tokens]
    _, score, doubt = descend(flat[0], flat[-1], block.options)
    return score.reshape(block.group, -1).max(0), doubt.reshape(block.group, -1).min(0)


def _score_chunks(block, stage, chunks, kv_heads, is_last):
    """Returns the highest score over the KV heads of a list, and the least doubt, each [n_chunks]."""
    pools = block.group * len(kv_heads) > 1
    minus_lse = is_last and pools and block.options.pooling == "minus_lse"
    scores, doubts = np.full(len(chunks), -np.inf), np.full(len(chunks), np.inf)
    for g in kv_heads:
        q = _query_rows(block, g, len(chunks), reduce=not is_last)
        if stage.judge == "descent":
            score, doubt = _descent_scores(block, g, stage, chunks, q)
            doubts = np.minimum(doubts, doubt)
        elif stage.judge == "bounds":
            score = _bounds_scores(block, g, stage, chunks, q)
        else:
            score = _exact_scores(block, g, stage, chunks, q, minus_lse)
        scores = np.maximum(scores, score)
    return scores, doubts


# --- Stages, blocks, appends, decode ---


def keep_best(chunks, scores, stage, end):
    """Returns the chunks chosen by score, and all that are kept. With plus_next the chunk after each is kept too. Both ascend."""
    n_best = stage.keep_tokens // stage.chunk_tokens // (2 if stage.plus_next else 1)
    best = np.sort(chunks[np.argsort(-scores, kind="stable")[:n_best]])  # a stable sort prefers the lower chunk
    if not stage.plus_next:
        return best, best
    after = best + 1
    return best, np.union1d(best, after[after * stage.chunk_tokens < end])


def _looked_at(block, stage, parent, list_idx):
    """Returns the candidates of a stage: all chunks between sinks and E, or the parts of the chunks that the previous stage kept."""
    size = stage.chunk_tokens
    if parent is None:
        return np.arange(block.record.sink_tokens // size, max(0, -(-block.end // size)))
    parts = tokens_of(parent.kept[list_idx], parent.stage.chunk_tokens // size).ravel()
    return parts[parts * size < block.end]


def _run_stage(block, stage, parent, is_last):
    """Runs a stage. parent: the result of the previous active stage, or None."""
    result = StageResult(stage, [], block.end, [], [], [], [])
    for list_idx, kv_heads in enumerate(block.kv_heads()):
        chunks = _looked_at(block, stage, parent, list_idx)
        scores, doubts, best, kept = None, None, chunks, chunks
        if len(chunks) * stage.chunk_tokens > stage.keep_tokens:
            scores, doubts = _score_chunks(block, stage, chunks, kv_heads, is_last)
            best, kept = keep_best(chunks, scores, stage, block.end)
        result.looked_at.append(chunks)
        result.scores.append(scores)
        result.doubts.append(doubts)
        result.best.append(best)
        result.kept.append(kept)
    return result


def prune_block(q, k, p0, record, *, sm_scale, overlap, kept=None, run_from=0, shared=False, options=DEFAULT):
    """Prunes for one block of queries p0 .. p0 + len(q) - 1; q may be shorter than k, which has at least all tokens before E.

    kept: for each active stage before run_from its cached lists, which are used as they are. overlap: tokens of the window
    that are candidates too. Returns Pruned.
    """
    block = _Block(q, k, p0, record, sm_scale, overlap, shared, options)
    active, results = record.active(p0), []
    for i, stage in enumerate(active):
        if i < run_from:
            results.append(StageResult(stage, kept[i]))
        else:
            results.append(_run_stage(block, stage, results[-1] if results else None, i == len(active) - 1))
    return block.pruned(results, p0, run_from)


def prune_append(q, k, p0, record, *, sm_scale, shared=False, options=DEFAULT):
    """Prunes for the queries p0 .. p0 + len(q) - 1 of one append. Returns [Pruned], the blocks of the last stage in order.

    Blocks of the first active stage begin at the call's first query. The stages that are active for a block's first query are
    active for all of it. A smaller block of a later stage starts from the list of the block that holds it.
    """
    found, first = [], 0
    while first < len(q):
        active = record.active(p0 + first)
        size = active[0].query_block if active else DENSE_BLOCK
        block = _Block(q[first:first + size], k, p0 + first, record, sm_scale, 0, shared, options)
        found += _prune_parts(block, active, [], block.p0)
        first += size
    return found


def _prune_parts(block, active, results, outer_p0):
    """Runs the stages that have no result yet, for each of their blocks within this block."""
    if len(results) == len(active):
        return [block.pruned(results, block.p0 if block.options.append_window == "own" else outer_p0)]
    stage, found = active[len(results)], []
    for first in range(0, len(block.q), stage.query_block):
        part = dataclasses.replace(block, q=block.q[first:first + stage.query_block], p0=block.p0 + first)
        result = _run_stage(part, stage, results[-1] if results else None, len(results) == len(active) - 1)
        found += _prune_parts(part, active, [*results, result], outer_p0)
    return found


class Decoder:
    """The lists of one layer and sequence, kept from one decode call to the next.

    overlap: by default the longest refresh interval of the active stages - 1. Call reset() after every append,
    truncation or other change of the sequence, and fork() when the sequence is forked.
    """

    def __init__(self, record, *, sm_scale, shared=False, options=DEFAULT, overlap=None):
        self.record, self.sm_scale, self.shared, self.options, self.overlap = record, sm_scale, shared, options, overlap
        self.reset()

    def reset(self):
        """Makes all stages run at the next step."""
        self._active, self._kept, self._ran_at = None, [], []

    def fork(self):
        return copy.deepcopy(self)

    def step(self, q, k, commit=True):
        """Prunes for the newest token of k, q [H, d]. Returns Pruned.

        commit=False: for queries that commit nothing, q [n_queries, H, d] of the newest tokens of k. Their lists are
        not stored.
        """
        q = q if q.ndim == 3 else q[None]
        require(len(q) == 1 or not commit, "several committed queries are an append: prune_append() and reset()")
        p0 = len(k) - len(q)
        active = self.record.active(p0)
        overlap = self.overlap
        if overlap is None:
            overlap = max((stage.refresh_interval for stage in active), default=1) - 1
        run_from = 0
        if active == self._active:
            due = [p0 - ran_at >= stage.refresh_interval for stage, ran_at in zip(active, self._ran_at, strict=True)]
            run_from = due.index(True) if True in due else len(active)
        pruned = prune_block(q, k, p0, self.record, sm_scale=self.sm_scale, overlap=overlap, kept=self._kept, run_from=run_from,
                             shared=self.shared, options=self.options)
        if commit:
            self._active, self._kept = active, [result.kept for result in pruned.stages]
            self._ran_at = self._ran_at[:run_from] + [p0] * (len(active) - run_from)
        return pruned


# --- Attention ---


def attend(q, k, v, pruned, *, sm_scale, soft_cap=0.0, sink_logits=None):
    """Softmax over the keys that each query attends. Returns o [n_queries, H, d_v] and lse [n_queries, H], natural logarithms.

    pruned: Pruned, or the blocks of an append in order. soft_cap: 0, or logits x become soft_cap * tanh(x / soft_cap).
    sink_logits: a learned logit for each query head, which takes weight and has no value, [H].
    """
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    group = n_heads // n_kv_heads
    o, lse = np.empty((len(q), n_heads, v.shape[2])), np.empty((len(q), n_heads))
    row = 0
    for block in [pruned] if isinstance(pruned, Pruned) else pruned:
        for query in range(block.n_queries):
            for g in range(n_kv_heads):
                tokens = block.attended(query, g)
                heads = slice(g * group, (g + 1) * group)
                logits = q[row, heads].astype(np.float64) @ k[tokens, g].astype(np.float64).T * sm_scale  # [group, n]
                if soft_cap:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                total = log_sum_exp(logits)
                if sink_logits is not None:
                    total = np.logaddexp(total, np.asarray(sink_logits, np.float64)[heads])
                o[row, heads] = np.exp(logits - total[:, None]) @ v[tokens, g].astype(np.float64)
                lse[row, heads] = total
            row += 1
    require(row == len(q), f"{len(q)} queries, but lists for {row}")
    return o, lse
