# SPDX-License-Identifier: MIT
"""The parameters of hierarchical pruning: records of stages, the rules for valid records, and the presets.

A layer has one record for decode calls and one for appends. pruning_reference.py describes the stages.
"""
import dataclasses
import itertools

JUDGES = ("descent", "bounds", "exact")


@dataclasses.dataclass(frozen=True)
class Stage:
    judge: str                  # how a chunk gets its score: one of JUDGES
    query_block: int            # queries of an append that share a list
    chunk_tokens: int           # l
    keep_tokens: int            # k
    refresh_interval: int = 1   # R: tokens from one run to the next in decode
    plus_next: bool = False     # keep half as many chunks by score, and the chunk after each
    from_tokens: int = 0        # the stage is active for queries that see at least this many tokens
    to_tokens: int = 0          # and fewer than this many; 0: no limit

    def active(self, n_seen):
        return self.from_tokens <= n_seen and (self.to_tokens == 0 or n_seen < self.to_tokens)


@dataclasses.dataclass(frozen=True)
class Record:
    """The pruning of one layer, in decode calls or in appends."""
    sink_tokens: int    # S
    window_tokens: int  # W
    stages: tuple

    def active(self, p0):
        """Returns the stages of a block whose first query is token p0."""
        return tuple(stage for stage in self.stages if stage.active(p0 + 1))

    def check(self):
        """Raises ValueError if the record is not valid."""
        require(self.stages, "there are no stages")
        for stage in self.stages:
            _check_stage(stage)
        for upper, lower in itertools.pairwise(self.stages):
            require(upper.chunk_tokens % lower.chunk_tokens == 0, "chunk_tokens: a stage's chunks must hold those of the next")
            require(upper.query_block % lower.query_block == 0, "query_block: a stage's block must hold those of the next")
        first = self.stages[0].chunk_tokens
        require(self.sink_tokens >= 0 and self.sink_tokens % first == 0, f"sink_tokens must be a multiple of {first}")
        least = max(stage.refresh_interval for stage in self.stages) - 1 + 2 * first
        require(self.window_tokens >= least, f"window_tokens must be at least {least}")
        limits = {n_seen for stage in self.stages for n_seen in (stage.from_tokens, stage.to_tokens)}
        for n_seen in limits:  # between two limits the same stages are active
            not_last = self.active(n_seen - 1)[:-1]
            require(not any(stage.plus_next for stage in not_last), "plus_next: of the last active stage only")


def require(condition, message):
    if not condition:
        raise ValueError(message)


def _check_stage(stage):
    require(stage.judge in JUDGES, f"judge: {stage.judge} is none of {JUDGES}")
    for name, most in (("query_block", 64), ("chunk_tokens", 256)):
        value = getattr(stage, name)
        require(1 <= value <= most and value & (value - 1) == 0, f"{name}: {value} is no power of two up to {most}")
    kept_together = stage.chunk_tokens * (2 if stage.plus_next else 1)
    require(stage.keep_tokens >= kept_together and stage.keep_tokens % kept_together == 0,
             f"keep_tokens: {stage.keep_tokens} is no multiple of {kept_together}")
    require(stage.refresh_interval >= 1, "refresh_interval must be at least 1")
    require(stage.from_tokens >= 0 and stage.to_tokens >= 0, "from_tokens and to_tokens must not be negative")


_K = 1024
_FIRST_LAYERS = 3  # the paper keeps more keys in these layers


def _paper(sizes, keeps, intervals, window_tokens=_K):
    """Returns sinks of 256 tokens, and descents for blocks of 64 queries."""
    stages = zip(sizes, keeps, intervals, strict=True)
    return Record(256, window_tokens, tuple(Stage("descent", 64, *stage) for stage in stages))


def _3k(layer_idx, intervals):
    last = (4 if layer_idx < _FIRST_LAYERS else 2) * _K
    return _paper((256, 32, 8), (32 * _K, 8 * _K, last), intervals)


def _5k():
    """The paper does not print refresh intervals for this preset. Those of 3k are assumed."""
    return _paper((64, 32, 16), (32 * _K, 16 * _K, 4 * _K), (16, 8, 4))


def _16k_shallow(layer_idx):
    """The paper only prints the chunk size and the windows. The rest is assumed."""
    return _paper((32,), (16 * _K,), (16,), 128 * _K if layer_idx < _FIRST_LAYERS else _K)


def _small(kind):
    """Our preset, for small models. Bounds find keys whose neighbours have low scores.

    From 32K tokens on, three stages read less than one stage of 8.
    """
    far, near = {"from_tokens": 32 * _K}, {"to_tokens": 32 * _K}
    if kind == "decode":
        return Record(64, _K, (
            Stage("bounds", 64, 64, 24 * _K, 16, **far), Stage("bounds", 64, 16, 7 * _K, 8, **far),
            Stage("bounds", 64, 8, 3 * _K, 4, **near), Stage("exact", 64, 8, 5 * _K // 2, 4, plus_next=True)))
    return Record(64, _K, (
        Stage("bounds", 64, 64, 16 * _K, 16, **far), Stage("bounds", 64, 16, 4 * _K, 8, **far),
        Stage("exact", 64, 8, 2 * _K, 4, plus_next=True, **far), Stage("bounds", 64, 8, 2 * _K, 4, **near)))


# All windows of the paper are long enough: check() requires at most 95 + 2 * 256 = 607 tokens (3k-flash).
PRESETS = {
    "3k": lambda layer_idx, kind: _3k(layer_idx, (16, 8, 4)),
    "3k-fast": lambda layer_idx, kind: _3k(layer_idx, (32, 16, 8)),
    "3k-flash": lambda layer_idx, kind: _3k(layer_idx, (96, 24, 8)),
    "5k": lambda layer_idx, kind: _5k(),
    "3k-5k": lambda layer_idx, kind: _5k() if kind == "decode" else _3k(layer_idx, (16, 8, 4)),
    "16k-shallow": lambda layer_idx, kind: _16k_shallow(layer_idx),
    "small": lambda layer_idx, kind: _small(kind),
}


def preset(name, layer_idx, kind):
    """Returns the Record of a preset for a layer, counted from 0. kind: "decode" or "append"."""
    require(name in PRESETS, f"{name} is none of {', '.join(PRESETS)}")
    require(kind in ("decode", "append"), f'kind: {kind} is neither "decode" nor "append"')
    return PRESETS[name](layer_idx, kind)
