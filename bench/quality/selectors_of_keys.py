# SPDX-License-Identifier: MIT
"""Ways to choose keys for one query of one layer, each with the number of rows that it reads.

A query attends the first tokens (sinks), the newest (window), and keys that a selector chooses between them:

    tokens   0 ... S ................... E ......... P
             sinks | candidates          | window, W tokens up to the query's own, P

A selector gets a Question and returns a Choice: the candidates that each query head attends, and the number of rows of a key (d
numbers in bf16) that it has read for each KV head. Query heads of a KV head share a list, except in `Staged` with lists "head".

`Staged` is the library's rule (docs/pruning.md), which recall_check.py compares with the library and its reference. The others
are from the literature, with true positions.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from pruning_records import Record, Stage

Tensor = torch.Tensor
WINDOW, SINKS = 1024, 64


@dataclass(frozen=True)
class Question:
    """One query of a layer.

    Attributes
    ----------
    q : Tensor
        [H, d].
    k : Tensor
        [n, G, d], all keys up to the query's own.
    representatives : dict
        InfLLM's representatives in the layer: by block size and number, indices of keys [G, n_blocks, n].
    """

    q: Tensor
    k: Tensor
    representatives: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def n_keys(self) -> int:
        """Number of keys, the query's own included."""
        return len(self.k)

    @property
    def end(self) -> int:
        """First token of the window."""
        return self.n_keys - WINDOW

    @property
    def group(self) -> int:
        """Number of query heads of a KV head."""
        return self.q.shape[0] // self.k.shape[1]

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.q.shape[1] ** -0.5)

    def keys(self) -> Tensor:
        """Returns each query head's keys, [H, n, d]."""
        return self.k.transpose(0, 1).repeat_interleave(self.group, 0)

    def logits(self) -> Tensor:
        """Returns the logits of all keys, [H, n]."""
        by_kv_head = self.q.unflatten(0, (-1, self.group))  # [G, group, d]
        return (by_kv_head @ self.k.permute(1, 2, 0) * self.scale).flatten(0, 1)


@dataclass(frozen=True)
class Choice:
    """The keys that a query attends between sinks and window.

    Attributes
    ----------
    chosen : Tensor
        [H, E - S], bool.
    rows : float
        Rows of a key in bf16 that were read for each KV head.
    """

    chosen: Tensor
    rows: float


Selector = Callable[[Question], Choice]


def _mask(question: Question, keys: Tensor) -> Tensor:
    """Returns a mask [H, E - S] of the tokens in keys [n_lists, n]. Ignores tokens that are not candidates."""
    n_heads, n = question.q.shape[0], question.n_keys
    marks = torch.zeros(len(keys), n + 512, dtype=torch.bool, device=keys.device)
    marks.scatter_(1, keys.clamp(0, n + 511), True)
    return marks[:, SINKS:question.end].repeat_interleave(n_heads // len(keys), 0)


def _pooled(scores: Tensor, n_lists: int) -> Tensor:
    """Returns the largest score over the query heads of a list. scores [H, n] -> [n_lists, n]"""
    return scores.unflatten(0, (n_lists, -1)).amax(1)


def _best_keys(question: Question, scores: Tensor, n: int) -> Tensor:
    """Returns a mask of the n candidates with the best scores. scores: [n_lists, E - S]."""
    best = scores.topk(min(n, scores.shape[1]), dim=1).indices
    return _mask(question, best + SINKS)


# --- The library's rule ---


def bf16_down(x: Tensor) -> Tensor:
    """Returns the largest bf16 number that is not above x, as f32."""
    bits = x.float().contiguous().view(torch.int32)
    cut = bits & -65536
    return torch.where((x < 0) & (cut != bits), cut + 65536, cut).view(torch.float32)


@dataclass(frozen=True)
class Staged:
    """Runs stages as the library does in decode, all in one step.

    Attributes
    ----------
    record : Record
    lists : str
        "kv head", "shared" (one for all heads) or "head" (one for each query head).
    representative, chunk_score : str
        For a descent: "first" and "last", or as in the paper's public code, "middle" and "running_max".
    pooling : str
        For an exact last stage: "minus_lse" or "raw".
    """

    record: Record
    lists: str = "kv head"
    representative: str = "first"
    chunk_score: str = "last"
    pooling: str = "minus_lse"

    def __call__(self, question: Question) -> Choice:
        chunks, size, rows = self.chunks(question)
        chosen = _mask(question, (chunks[:, :, None] * size + torch.arange(size, device=chunks.device)).flatten(1))
        chosen[:, :max(self.record.sink_tokens - SINKS, 0)] = True
        return Choice(chosen, rows)

    def n_lists(self, question: Question) -> int:
        """Returns the number of lists of a layer."""
        return {"kv head": question.k.shape[1], "shared": 1, "head": question.q.shape[0]}[self.lists]

    def chunks(self, question: Question) -> tuple[Tensor, int, float]:
        """Returns kept chunks [n_lists, n], padded with numbers that are too large; their size; rows read for each KV head."""
        active = self.record.active(question.n_keys - 1)
        end = question.n_keys - self.record.window_tokens + max(stage.refresh_interval for stage in active) - 1
        n_lists, kept, rows = self.n_lists(question), None, 0.0
        for i, stage in enumerate(active):
            size, n_chunks = stage.chunk_tokens, -(-end // stage.chunk_tokens)
            if kept is None:
                looked_at = torch.arange(self.record.sink_tokens // size, n_chunks, device=question.k.device).repeat(n_lists, 1)
            else:
                parts = active[i - 1].chunk_tokens // size
                looked_at = (kept[:, :, None] * parts + torch.arange(parts, device=kept.device)).flatten(1)
            most = int((looked_at < n_chunks).sum(1).amax())
            if most * size <= stage.keep_tokens:
                kept = looked_at
                continue
            rows += most * _rows_of(stage) * (1 if self.lists != "head" else question.group)
            kept = self._kept(question, stage, looked_at, n_chunks, i == len(active) - 1)
        assert kept is not None
        return kept, active[-1].chunk_tokens, rows

    def _kept(self, question: Question, stage: Stage, looked_at: Tensor, n_chunks: int, is_last: bool) -> Tensor:
        valid = looked_at < n_chunks
        scores = self._scores(question, stage, looked_at.clamp(max=n_chunks - 1), valid, is_last)
        n_best = stage.keep_tokens // stage.chunk_tokens // (2 if stage.plus_next else 1)
        order = torch.sort(scores.masked_fill(~valid, -math.inf), dim=1, descending=True, stable=True).indices[:, :n_best]
        best = torch.where(valid.gather(1, order), looked_at.gather(1, order), n_chunks)
        best = best.sort(1).values
        if not stage.plus_next:
            return best
        return torch.cat([best, torch.where(best + 1 < n_chunks, best + 1, n_chunks)], 1)

    def _scores(self, question: Question, stage: Stage, chunks: Tensor, valid: Tensor, is_last: bool) -> Tensor:
        """Scores chunks: chunks [n_lists, n] -> scores [n_lists, n]."""
        n_heads, n_lists, size = question.q.shape[0], len(chunks), stage.chunk_tokens
        by_head = chunks.repeat_interleave(n_heads // n_lists, 0)  # [H, n]
        kv_head = torch.arange(n_heads, device=chunks.device)[:, None, None] // question.group
        tokens = by_head[:, :, None] * size + torch.arange(size, device=chunks.device)
        k = question.k[tokens, kv_head]  # [H, n, size, d]
        if stage.judge == "bounds":
            low, high = bf16_down(k.amin(2)), -bf16_down(-k.amax(2))
            scores = (high @ question.q.clamp(min=0)[:, :, None] + low @ question.q.clamp(max=0)[:, :, None])[..., 0]
            return _pooled(scores * question.scale, n_lists)
        logits = (k @ question.q[:, None, :, None])[..., 0] * question.scale  # [H, n, size]
        if stage.judge == "descent":
            return _pooled(self._descend(logits), n_lists)
        if is_last and self.pooling == "minus_lse" and n_heads > n_lists:
            logits = logits - self._lse(question, logits, tokens, valid)[:, None, None]
        return _pooled(logits.amax(2), n_lists)

    def _descend(self, logits: Tensor) -> Tensor:
        """Returns the score of each chunk by descent: logits [H, n, size] -> [H, n]."""
        middle, first = self.representative == "middle", torch.zeros_like(logits[..., 0], dtype=torch.long)
        best, length = torch.full_like(logits[..., 0], -math.inf), logits.shape[-1]
        while length > (0 if middle else 1):
            half, offset = length // 2, length // 4 if middle else 0
            a, b = (logits.gather(2, (first + shift)[..., None])[..., 0] for shift in (offset, half + offset))
            best, first = torch.maximum(best, torch.maximum(a, b)), first + torch.where(b > a, half, 0)
            length = half
        running = self.chunk_score == "running_max" and (middle or logits.shape[-1] > 1)
        return best if running else logits.gather(2, first[..., None])[..., 0]

    def _lse(self, question: Question, logits: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Returns each head's log-sum-exp over the chunks, sinks and window, each key once, [H]."""
        n_heads, n = question.q.shape[0], question.n_keys
        seen = torch.zeros(n_heads, n + 512, dtype=torch.bool, device=tokens.device)
        by_head = valid.repeat_interleave(n_heads // len(valid), 0)
        seen.scatter_(1, torch.where(by_head[..., None], tokens, n).flatten(1), True)
        seen = seen[:, :n]
        seen[:, :self.record.sink_tokens] = True
        seen[:, max(n - self.record.window_tokens, 0):] = True
        return question.logits().masked_fill(~seen, -math.inf).logsumexp(1)


def _rows_of(stage: Stage) -> float:
    """Returns the rows that a judge reads of a chunk."""
    return {"bounds": 2.0, "exact": float(stage.chunk_tokens), "descent": 1 + math.log2(stage.chunk_tokens)}[stage.judge]


# --- Of the literature ---


@dataclass(frozen=True)
class Scan:
    """Chooses the best keys by the scores of all candidates, computed from keys of `bits` bits, or from exact keys (16).

    Attributes
    ----------
    pooling : str
        How query heads are joined: "sum" of weights, "minus_lse" or "raw".
    """

    n: int
    bits: int = 16
    pooling: str = "minus_lse"

    def __call__(self, question: Question) -> Choice:
        coded = question if self.bits == 16 else replace(question, k=coded_keys(question.k, self.bits))
        logits, n_lists = coded.logits(), question.k.shape[1]
        candidates = logits[:, SINKS:question.end]
        if self.pooling == "sum":
            scores = logits.softmax(1)[:, SINKS:question.end].unflatten(0, (n_lists, -1)).sum(1)
        else:
            minus = logits.logsumexp(1, keepdim=True) if self.pooling == "minus_lse" else 0.0
            scores = _pooled(candidates - minus, n_lists)
        d = question.q.shape[1]
        code_bytes = d * self.bits / 8 + {1: d / 32 * 2, 2: d / 32 * 4, 4: d / 32 * 4, 16: 0}[self.bits]
        return Choice(_best_keys(question, scores, self.n), candidates.shape[1] * code_bytes / (2 * d))


def coded_keys(k: Tensor, bits: int) -> Tensor:
    """Returns keys after coding 32 numbers at a time with a scale and a smallest value in f16; 1 bit: signs and mean size."""
    parts = k.unflatten(-1, (-1, 32))
    if bits == 1:
        return (parts.sign() * parts.abs().mean(-1, keepdim=True).half().float()).flatten(-2)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = ((high - low) / (2 ** bits - 1)).half().float().clamp(min=1e-8)
    low = low.half().float()
    return (((parts - low) / step).round().clamp(0, 2 ** bits - 1) * step + low).flatten(-2)


@dataclass(frozen=True)
class Pages:
    """Chooses whole pages by their mean key's logit plus `radius` times the query's norm times the farthest key's distance."""

    size: int
    n: int
    radius: float = 0.0

    def __call__(self, question: Question) -> Choice:
        size, n_pages = self.size, -(-question.end // self.size)
        pages = question.k[SINKS // size * size:n_pages * size].unflatten(0, (-1, size))  # [n, size, G, d]
        mean, by_kv_head = pages.mean(1), question.q.unflatten(0, (-1, question.group))
        scores = torch.einsum("ghd,ngd->ghn", by_kv_head, mean)
        if self.radius:
            farthest = (pages - mean[:, None]).norm(dim=-1).amax(1)  # [n, G]
            scores = scores + self.radius * by_kv_head.norm(dim=-1)[:, :, None] * farthest.T[:, None]
        best = scores.amax(1).topk(min(self.n // size, len(pages)), dim=1).indices + SINKS // size
        tokens = (best[:, :, None] * size + torch.arange(size, device=best.device)).flatten(1)
        d = question.q.shape[1]
        return Choice(_mask(question, tokens), len(pages) * (1 + (1 / d if self.radius else 0)))


@dataclass(frozen=True)
class Halving:
    """HiP's heuristic (arXiv 2406.09827). Keeps as many nodes as blocks. Halves each node and keeps the better halves, judged
    by their first keys."""

    n: int
    block: int = 8

    def __call__(self, question: Question) -> Choice:
        n_nodes, n_candidates = self.n // self.block, question.end - SINKS
        length = self.block
        while n_nodes * length < n_candidates:
            length *= 2
        n_lists, device = question.k.shape[1], question.k.device
        starts = (SINKS + torch.arange(0, n_candidates, length, device=device)).repeat(n_lists, 1)
        logits, rows = question.logits(), 0
        while length > self.block:
            length //= 2
            starts = torch.cat([starts, starts + length], 1)
            scores = _pooled(logits, n_lists).gather(1, starts.clamp(max=question.end - 1))
            scores = scores.masked_fill(starts >= question.end, -math.inf)
            rows += int((starts < question.end).sum(1).amax())
            starts = starts.gather(1, scores.topk(min(n_nodes, starts.shape[1]), dim=1).indices)
        tokens = (starts[:, :, None] + torch.arange(self.block, device=device)).flatten(1)
        return Choice(_mask(question, tokens), rows)


@dataclass(frozen=True)
class Representatives:
    """InfLLM (arXiv 2402.04617). Chooses whole blocks by the logits of a few fixed keys, which later queries attended most.

    Attributes
    ----------
    score : str
        Score of a block: "sum" of its representatives' logits, or "max".
    """

    block: int
    n_representatives: int
    n: int
    score: str = "sum"

    def __call__(self, question: Question) -> Choice:
        # Only blocks of the text, as the question's tokens are in the window.
        keys = question.representatives[self.block, self.n_representatives]  # [G, n_blocks, n]
        first, n_blocks = SINKS // self.block, -(-question.end // self.block)
        keys = keys[:, first:n_blocks]
        flat = keys.flatten(1).repeat_interleave(question.group, 0)  # [H, n]
        logits = question.logits().gather(1, flat).unflatten(1, (-1, self.n_representatives))
        scores = logits.sum(-1) if self.score == "sum" else logits.amax(-1)
        best = _pooled(scores, len(keys)).topk(min(self.n // self.block, keys.shape[1]), dim=1).indices + first
        tokens = (best[:, :, None] * self.block + torch.arange(self.block, device=best.device)).flatten(1)
        return Choice(_mask(question, tokens), keys.shape[1] * self.n_representatives)


def representatives(q: Tensor, k: Tensor, block: int, n: int, horizon: int = WINDOW) -> Tensor:
    """Returns each block's n keys with the largest mean logit for the next `horizon` queries or fewer, [G, n_blocks, n].

    q [n_tokens, H, d], k [n_tokens, G, d]. Tokens behind the last whole block are in no block.
    """
    n_tokens, n_kv_heads = k.shape[:2]
    sums = torch.cat([torch.zeros_like(q[:1], dtype=torch.float64), q.double().cumsum(0)])
    last = (torch.arange(n_tokens, device=q.device) + 1 + horizon).clamp(max=n_tokens)
    first = (torch.arange(n_tokens, device=q.device) + 1).clamp(max=n_tokens)
    mean = (sums[last] - sums[first]) / (last - first).clamp(min=1)[:, None, None]
    means = mean.unflatten(1, (n_kv_heads, -1)).mean(2)  # [n_tokens, G, d]
    scores = (means * k).sum(-1)  # [n_tokens, G]
    n_blocks = n_tokens // block
    best = scores[:n_blocks * block].unflatten(0, (n_blocks, block)).topk(n, dim=1).indices  # [n_blocks, n, G]
    tokens = best + torch.arange(n_blocks, device=q.device)[:, None, None] * block
    return tokens.permute(2, 0, 1).contiguous()
