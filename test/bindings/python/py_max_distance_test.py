# SPDX-License-Identifier: MIT
"""Patterns.max_distance against a reference in double precision. It rotates nothing and uses the distance of each query and
key."""
import dataclasses
import sys

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, ROOT

import tandem
from tandem import HeadPattern, Patterns

sys.path.insert(0, str(ROOT / "test" / "reference"))
reference = pytest.importorskip("patterns_reference")

SCALE = 1 / np.sqrt(DIM)
GROUP = Q_HEADS // KV_HEADS
CLOSE = {"rtol": 3e-5, "atol": 3e-5}
NARROW, WIDE, NO_SINKS = (20, 100), (5, 400), (0, 60)
HEADS = {"alike": (NARROW, NARROW, WIDE, WIDE), "by query head": (NARROW, WIDE, NO_SINKS, NARROW)}


def a_shapes(heads, n_layers=1):
    return [[HeadPattern("a_shape", sink_tokens=sinks, window_tokens=window) for sinks, window in heads]] * n_layers


@dataclasses.dataclass
class Case:
    heads: tuple = HEADS["alike"]
    max_distance: int = 150
    lengths: tuple = (600,)
    layer: dict = dataclasses.field(default_factory=dict)
    cache: dict = dataclasses.field(default_factory=dict)
    close: dict = dataclasses.field(default_factory=lambda: CLOSE)


class Beside:
    """A sequence of the library, and arrays of the same rows and their positions."""

    def __init__(self, case, seed=1):
        layer = {"rope": "halves", "rope_theta": 500.0, **case.layer}
        dims = layer.get("rope_dims", 0) or DIM
        frequencies = np.float64(layer["rope_theta"]) ** (-2 * np.arange(dims // 2) / dims) / layer.get("rope_position_scale", 1.0)
        self.rope = reference.Rope(frequencies, layer["rope"] == "interleaved", layer.get("rope_attn_factor", 1.0))
        self.case, self.soft_cap, self.sinks = case, layer.get("soft_cap", 0.0), layer.get("sinks", [-np.inf] * Q_HEADS)
        model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM, **layer)])
        self.cache = tandem.Cache(tandem.Engine(n_threads=2), model, **{"k_type": "f32", **case.cache})
        self.session = self.new_session(case.max_distance)
        self.sequence, self.random = self.cache.create_sequence(), np.random.default_rng(seed)
        self.k = self.v = np.zeros((0, KV_HEADS, DIM), np.float32)
        self.positions = np.zeros(0, int)

    def new_session(self, max_distance):
        return tandem.Session(self.cache, policy="patterns", patterns=Patterns(a_shapes(self.case.heads), max_distance))

    def rows(self, n):
        q, k, v = (self.random.standard_normal((n, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        return 2 * q, k, v

    def take(self, n, k, v):
        first = self.positions[-1] + 1 if len(self.positions) else 0
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        self.positions = np.concatenate([self.positions, first + np.arange(n)])

    def remove(self, first, n, shift):
        self.sequence.remove(first, n, shift_positions=shift)
        kept = np.delete(np.arange(len(self.k)), np.s_[first:first + n])
        positions = self.positions - (n if shift else 0) * (np.arange(len(self.positions)) >= first)
        self.k, self.v, self.positions = self.k[kept], self.v[kept], positions[kept]

    def call(self, n, **options):
        q, k, v = self.rows(n)
        lse = np.empty((n, Q_HEADS), np.float32)
        o = np.asarray(self.session.attend(self.sequence, q, k, v, lse=lse, **options))
        self.take(n, k, v)
        self.compare(q, o, lse)
        return o

    def seen(self, head, first, n):
        """Returns the tokens that queries [first, first + n) of the newest call attend. A single query attends its KV head's
        sinks and window."""
        tokens, masks = np.arange(len(self.k)), []
        for t in range(first, first + n):
            begin = first + (t - first) // reference.BLOCK * reference.BLOCK if n > 1 else t
            of_group = self.case.heads[head // GROUP * GROUP:(head // GROUP + 1) * GROUP]
            sinks, window = self.case.heads[head] if n > 1 else map(max, zip(*of_group, strict=True))
            mask = (tokens < -(-sinks // reference.UNIT) * reference.UNIT) | (tokens >= begin + 1 - window)
            masks.append(mask & (tokens <= t))
        return np.array(masks)

    def expected(self, head, q, max_distance):
        first = len(self.k) - len(q)
        k, v = (rows[:, head // GROUP].astype(float) for rows in (self.k, self.v))
        positions = self.positions[first:], self.positions
        return reference.attend_within(q.astype(float), k, v, self.seen(head, first, len(q)), positions, self.rope, SCALE, max_distance,
                                       self.soft_cap, self.sinks[head])

    def compare(self, q, o, lse):
        for head in range(Q_HEADS):
            expected_o, expected_lse = self.expected(head, q[:, head], self.case.max_distance)
            np.testing.assert_allclose(o[:, head], expected_o, **self.case.close, err_msg=f"head {head}")
            np.testing.assert_allclose(lse[:, head], expected_lse, **self.case.close, err_msg=f"lse of head {head}")


CASES = {
    "across the limit": Case(),
    "query heads with keys of their own": Case(heads=HEADS["by query head"]),
    "calls": Case(lengths=(140, 1, 1, 3, 1, 140, 129, 1, 256, 1, 1)),
    "calls, query heads with keys of their own": Case(heads=HEADS["by query head"], lengths=(151, 1, 90, 1, 400, 1)),
    "the limit inside of the window": Case(max_distance=30, lengths=(500, 1, 90, 1)),
    "a limit of 1": Case(max_distance=1, lengths=(2, 1, 1, 130, 1)),
    "a limit that is never met": Case(max_distance=2**31 - 1, lengths=(300, 1)),
    "scattered pages": Case(cache={"page_tokens": 16}, lengths=(300, 1, 257, 1)),
    "interleaved pairs of some dims, scaled": Case(
        layer={"rope": "interleaved", "rope_dims": 32, "rope_attn_factor": 1.3, "rope_position_scale": 4.0},
        lengths=(600, 1, 1)),
    "an attention factor": Case(layer={"rope_attn_factor": 0.8}, lengths=(600, 1)),
    "a soft cap": Case(layer={"soft_cap": 5.0}, lengths=(500, 1)),
    "learned sinks": Case(layer={"sinks": [0.5, -1.0, 6.0, 0.0]}, lengths=(100, 500, 1)),
    "f16": Case(cache={"k_type": "f16"}, lengths=(400, 1, 1), close={"rtol": 4e-3, "atol": 4e-3}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_attend_as_the_reference_says(case):
    beside, other = Beside(case), None
    for n in case.lengths:
        if case.cache.get("page_tokens"):  # puts pages of another sequence between
            other = other or beside.cache.create_sequence()
            other.append(*beside.rows(40)[1:])
        beside.call(n)


def test_the_reference_tells_a_limit_from_none():
    """The comparisons above would notice a missing limit: without it the answers differ widely."""
    beside = Beside(Case(max_distance=150))
    unlimited = beside.new_session(0)
    beside.call(600)
    for n in (200, 1):
        q, k, v = beside.rows(n)
        o = np.asarray(unlimited.attend(beside.sequence, q, k, v))
        beside.take(n, k, v)
        differences = [np.abs(o[:, head] - beside.expected(head, q[:, head], 150)[0]).max() for head in range(Q_HEADS)]
        assert min(differences) > 100 * CLOSE["atol"]
        np.testing.assert_allclose(o[:, 1], beside.expected(1, q[:, 1], None)[0], **CLOSE)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_positions_with_gaps(heads, shift):
    """After tokens have been removed, distances are those of positions."""
    beside = Beside(Case(heads=heads, max_distance=250))
    beside.call(300)
    beside.remove(8, 5, shift)  # among the sinks
    beside.remove(200, 60, shift)
    for n in (1, 200, 1, 130, 3, 1):
        beside.call(n)


def test_chunks_of_whole_blocks_give_what_one_call_gives():
    chunked, whole = Beside(Case()), Beside(Case())
    expected = whole.call(640)
    q, k, v = Beside(Case()).rows(640)
    for first, n in ((0, 128), (128, 256), (384, 256)):
        rows = slice(first, first + n)
        o = np.asarray(chunked.session.attend(chunked.sequence, q[rows], k[rows], v[rows], partial=first + n < 640))
        np.testing.assert_allclose(o, expected[rows], **CLOSE)


def test_sequences_of_a_call_of_different_lengths():
    """One is beyond the limit, one is not, and one crosses it."""
    for heads in HEADS.values():
        each = [Beside(Case(heads=heads), seed=3) for _ in range(3)]
        for one, n in zip(each, (700, 10, 100), strict=True):
            one.call(n)
        together = [each[0].cache.create_sequence() for _ in each]
        for one, sequence in zip(each, together, strict=True):
            each[0].session.attend(sequence, np.zeros((len(one.k), Q_HEADS, DIM), np.float32), one.k, one.v)
        lens = [200, 20, 200]
        rows = [one.rows(n) for one, n in zip(each, lens, strict=True)]
        q, k, v = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        o = np.asarray(each[0].session.attend(together, q, k, v, q_lens=lens))
        for one, (own_q, own_k, own_v), begin in zip(each, rows, (0, 200, 220), strict=True):
            expected = np.asarray(one.session.attend(one.sequence, own_q, own_k, own_v))
            np.testing.assert_allclose(o[begin:begin + len(own_q)], expected, **CLOSE)


def test_guesses_and_queries_of_tokens_that_are_there():
    beside = Beside(Case())
    beside.call(500)
    q, k, v = beside.rows(4)
    guessed = np.asarray(beside.session.attend(beside.sequence, q, k, v, speculative=True))
    beside.session.commit(beside.sequence, [])
    again = Beside(Case())
    again.call(500)
    np.testing.assert_allclose(guessed[0], np.asarray(again.session.attend(again.sequence, q[:1], k[:1], v[:1]))[0], **CLOSE)
    asked = np.asarray(beside.session.attend(beside.sequence, q[:1]))  # the query of the last token
    k, v = beside.k, beside.v
    beside.compare(q[:1], asked, np.stack([beside.expected(h, q[:1, h], 150)[1] for h in range(Q_HEADS)], 1))
    assert len(k) == len(v) == beside.sequence.length()


def test_a_query_attends_sinks_at_the_limit_however_far_it_is():
    """Keys and values repeat, so beyond the limit every query gets the same answer."""
    beside = Beside(Case(heads=((8, 16),) * Q_HEADS, max_distance=64))
    q, k, v = beside.rows(1)
    sinks = beside.rows(8)
    beside.sequence.append(*sinks[1:])
    beside.sequence.append(np.repeat(k, 200, 0), np.repeat(v, 200, 0))
    first = np.asarray(beside.session.attend(beside.sequence, q, k, v))
    beside.sequence.append(np.repeat(k, 4000, 0), np.repeat(v, 4000, 0))
    np.testing.assert_allclose(np.asarray(beside.session.attend(beside.sequence, q, k, v)), first, rtol=1e-4, atol=1e-4)


A, FULL = HeadPattern("a_shape", sink_tokens=4, window_tokens=8), HeadPattern()
BOTH = HeadPattern(("a_shape", "block_sparse"), sink_tokens=4, window_tokens=8, n_blocks=2)
REFUSED = {
    "negative": (tandem.InvalidArgumentError, r"patterns.max_distance = -1 is not from 0", [[A] * 4], -1, {}),
    "too large": (tandem.InvalidArgumentError, r"patterns.max_distance = 2147483648", [[A] * 4], 2**31, {}),
    "RoPE by the caller": (tandem.UnsupportedError, r"patterns.max_distance = 9: the keys of layer 0 were rotated by the caller",
                           [[A] * 4], 9, {"rope": "caller"}),
    "a full head": (tandem.UnsupportedError, r"patterns.heads\[2\].kinds = 1 with max_distance = 9", [[A, A, FULL, A]], 9, {}),
    "another pattern beside": (tandem.UnsupportedError, r"patterns.heads\[1\].kinds = 10 with max_distance = 9, which is for A_SHAPE",
                               [[A, BOTH, A, A]], 9, {}),
}


@pytest.mark.parametrize("error, message, heads, max_distance, layer", REFUSED.values(), ids=REFUSED)
def test_refusals(error, message, heads, max_distance, layer):
    model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM, **{"rope": "halves", **layer})])
    with pytest.raises(error, match=message) as refused:
        tandem.Session(tandem.Cache(tandem.Engine(n_threads=1), model), policy="patterns", patterns=Patterns(heads, max_distance))
    assert refused.value.field == message.split(" ")[0].replace("\\", "")


def test_layers_that_follow_no_patterns_are_not_asked():
    layer = {"n_q_heads": Q_HEADS, "n_kv_heads": KV_HEADS, "k_head_dim": DIM}
    model = tandem.Model([tandem.Layer(**layer), tandem.Layer(**layer, rope="halves")])
    cache = tandem.Cache(tandem.Engine(n_threads=1), model)
    tandem.Session(cache, layer_policies=["all", "patterns"], patterns=Patterns([[FULL] * 4, [A] * 4], 9))
    with pytest.raises(tandem.InvalidArgumentError, match="max_distance"):
        tandem.Session(cache, policy="patterns", patterns=Patterns([[A] * 4] * 2, 1.5))
