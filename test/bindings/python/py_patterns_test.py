# SPDX-License-Identifier: MIT
"""Policy "patterns" against the reference of test/reference: the same keys, and attention over them in double precision."""
import sys

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, ROOT

import tandem
from tandem import HeadPattern, Patterns

sys.path.insert(0, str(ROOT / "test" / "reference"))
patterns_reference = pytest.importorskip("patterns_reference")
from patterns_reference import Pattern  # noqa: E402

SCALE = 1 / np.sqrt(DIM)
GROUP = Q_HEADS // KV_HEADS
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
FULL = Pattern()
A, WIDE_A = Pattern(a_shape=(20, 150)), Pattern(a_shape=(4, 700))
V, FEW_V, WIDE_V = Pattern(vertical_slash=(30, 100)), Pattern(vertical_slash=(0, 0)), Pattern(vertical_slash=(3, 900))
B = Pattern(block_sparse=5)
UNITED = Pattern(a_shape=(9, 40), vertical_slash=(10, 64), block_sparse=2)
LAYERS = {"mixed": (FULL, A, V, B), "a-shapes": (A, WIDE_A, A, WIDE_A), "columns": (V, FEW_V, WIDE_V, V), "united": (UNITED, UNITED, B, FULL)}


def given(pattern):
    """Returns a pattern of the reference in the library's form."""
    kinds, sizes = [], {}
    if pattern.a_shape is not None:
        kinds.append("a_shape")
        sizes |= {"sink_tokens": pattern.a_shape[0], "window_tokens": pattern.a_shape[1]}
    if pattern.vertical_slash is not None:
        kinds.append("vertical_slash")
        sizes |= {"vertical_tokens": pattern.vertical_slash[0], "slash_tokens": pattern.vertical_slash[1]}
    if pattern.block_sparse is not None:
        kinds.append("block_sparse")
        sizes["n_blocks"] = pattern.block_sparse
    return HeadPattern(tuple(kinds), **sizes)


class Beside:
    """A sequence of the library, and arrays of the same rows."""

    def __init__(self, patterns, seed=1, layer=(), **cache_options):
        self.engine = tandem.Engine(n_threads=2)
        model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM, **dict(layer))])
        self.cache = tandem.Cache(self.engine, model, **{"k_type": "f32", **cache_options})
        self.session = tandem.Session(self.cache, policy="patterns", patterns=Patterns([[given(one) for one in patterns]]))
        self.sequence, self.patterns = self.cache.create_sequence(), patterns
        self.random = np.random.default_rng(seed)
        self.k = self.v = np.zeros((0, KV_HEADS, DIM), np.float32)
        self.n_blocks = self.n_tied = 0

    def rows(self, n):
        q, k, v = (self.random.standard_normal((n, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        return 2 * q, k, v

    def append(self, n, **options):
        q, k, v = self.rows(n)
        o = np.asarray(self.session.attend(self.sequence, q, k, v, **options))
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        for head in range(Q_HEADS):
            self.compare(head, q[:, head], o[:, head])
        return o

    def compare(self, head, q, o):
        k, v = self.k[:, head // GROUP].astype(float), self.v[:, head // GROUP].astype(float)
        p0 = len(k) - len(q)
        for first, sure, maybe in patterns_reference.masks(q.astype(float), k, self.patterns[head], SCALE):
            rows = slice(first, first + patterns_reference.BLOCK)
            self.n_blocks += 1
            if (sure != maybe).any():  # rounding may decide
                self.n_tied += 1
                continue
            expected = patterns_reference.attend(q[rows].astype(float), k, v, sure, p0 + first, SCALE)
            np.testing.assert_allclose(o[rows], expected, **CLOSE, err_msg=f"head {head}, query {first}")

    def keys_of_decode(self):
        """Returns the keys of each KV head, as the header defines them."""
        n, kept = len(self.k), []
        for head in range(KV_HEADS):
            group = self.patterns[head * GROUP:(head + 1) * GROUP]
            if any(one.a_shape is None or one.vertical_slash is not None or one.block_sparse is not None for one in group):
                kept.append(np.ones(n, bool))
                continue
            mask = np.zeros(n, bool)
            mask[:-(-max(one.a_shape[0] for one in group) // 8) * 8] = True
            mask[max(0, n - max(one.a_shape[1] for one in group)):] = True
            kept.append(mask)
        return kept

    def step(self):
        q, k, v = self.rows(1)
        o = np.asarray(self.session.attend(self.sequence, q, k, v))
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        for head, mask in enumerate(np.repeat(np.array(self.keys_of_decode()), GROUP, 0)):
            expected = patterns_reference.attend(q[:, head].astype(float), self.k[:, head // GROUP].astype(float),
                                                 self.v[:, head // GROUP].astype(float), mask, len(self.k) - 1, SCALE)
            np.testing.assert_allclose(o[:, head], expected, **CLOSE)
            token_idx, _ = self.session.selection(self.sequence, kv_head_idx=head // GROUP)
            np.testing.assert_array_equal(token_idx, np.nonzero(mask)[0])


@pytest.mark.parametrize("patterns", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("lengths", [(1000,), (300, 129, 2, 700), (64, 128, 127, 1, 500)], ids=str)
def test_appends_attend_what_the_reference_names(patterns, lengths):
    beside = Beside(patterns, seed=len(lengths))
    for n in lengths:
        if n > 1:
            beside.append(n)
        else:
            beside.step()
    for _ in range(3):
        beside.step()
    assert beside.n_tied <= beside.n_blocks // 10


def test_chunks_have_columns_and_diagonals_of_their_own():
    beside = Beside((V, A, UNITED, B), seed=4)
    beside.append(patterns_reference.CHUNK + 300)
    assert beside.n_tied <= beside.n_blocks // 10


@pytest.mark.parametrize("lengths", [(900, 50), (400, 300)], ids=str)
def test_a_full_mask_is_attention_over_all_keys(lengths):
    every = Pattern(a_shape=(0, 10**6)), Pattern(vertical_slash=(10**6, 0)), Pattern(vertical_slash=(0, 10**6)), FULL
    beside = Beside(every)
    dense = tandem.Session(beside.cache, policy="all")
    other = beside.cache.create_sequence()
    for n in lengths:
        beside.random = np.random.default_rng(n)
        q, k, v = beside.rows(n)
        beside.random = np.random.default_rng(n)
        o = beside.append(n)
        np.testing.assert_allclose(o, np.asarray(dense.attend(other, q, k, v)), rtol=1e-5, atol=1e-5)


def test_keys_that_no_block_names_are_never_read():
    """Keys and values between sinks and windows are NaN."""
    beside = Beside((A, A, A, A))
    q, k, v = beside.rows(2000)
    k[24:1200], v[24:1200] = np.nan, np.nan
    beside.cache.create_sequence()
    beside.sequence.append(k, v)
    q, k, v = beside.rows(500)
    o = np.asarray(beside.session.attend(beside.sequence, q, k, v))
    assert np.isfinite(o).all()
    q, k, v = beside.rows(1)
    assert np.isfinite(np.asarray(beside.session.attend(beside.sequence, q, k, v))).all()


def test_the_last_query_of_an_append_can_be_asked_for():
    beside = Beside((A, WIDE_A, A, A))
    beside.append(100)
    beside.append(640)
    first, n = 740 - 128, 740
    for head, pattern in enumerate(beside.patterns):
        sinks, window = pattern.a_shape
        expected = [t for t in range(n) if t < -(-sinks // 8) * 8 or t >= first + 1 - window]
        token_idx, _ = beside.session.selection(beside.sequence, kv_head_idx=head // GROUP, q_head_idx=head % GROUP)
        assert token_idx.tolist() == expected


@pytest.mark.parametrize("options", [{"soft_cap": 8.0}, {"sinks": [0.5, -1.0, 2.0, 0.0]}], ids=str)
def test_soft_caps_and_learned_sinks(options):
    """A head that names all keys attends them as under policy "all"."""
    beside = Beside((Pattern(a_shape=(0, 10**6)), A, V, B), layer=options)
    dense = tandem.Session(beside.cache, policy="all")
    other = beside.cache.create_sequence()
    q, k, v = beside.rows(700)
    o = np.asarray(beside.session.attend(beside.sequence, q, k, v))
    expected = np.asarray(dense.attend(other, q, k, v))
    np.testing.assert_allclose(o[:, 0], expected[:, 0], **CLOSE)
    assert np.abs(o[600:, 1] - expected[600:, 1]).max() > 1e-3


def test_sequences_of_a_call_with_one_query_and_with_many():
    beside = Beside((A, V, B, FULL))
    beside.append(600)
    other = beside.cache.create_sequence()
    q, k, v = beside.rows(401)
    o = np.asarray(beside.session.attend([beside.sequence, other], q, k, v, q_lens=[1, 400]))
    alone = beside.cache.create_sequence()
    np.testing.assert_allclose(o[1:], np.asarray(beside.session.attend(alone, q[1:], k[1:], v[1:])), **CLOSE)
    assert np.isfinite(o[:1]).all()


def test_pairs_are_counted_by_layer():
    beside = Beside((A, WIDE_A, A, FULL))
    beside.append(300)
    beside.append(500)
    n_attended = n_dense = 0
    for first, n in ((0, 300), (300, 500)):
        k = np.zeros((first + n, DIM))
        for pattern in beside.patterns:
            for at, mask, _ in patterns_reference.masks(np.zeros((n, DIM)), k, pattern, SCALE):
                for token in range(first + at, min(first + n, first + at + patterns_reference.BLOCK)):
                    n_attended += mask[:token + 1].sum()
                    n_dense += token + 1
    assert beside.session.pattern_pairs() == (n_attended, n_dense)
    stats = beside.session.stats()
    assert (stats.pattern_pairs, stats.pattern_dense_pairs) == (n_attended, n_dense)
    beside.step()
    assert beside.session.pattern_pairs() == (n_attended, n_dense)


def test_trees_are_refused_and_guesses_attend_what_a_step_does():
    beside = Beside((A, A, FULL, V))
    beside.append(500)
    q, k, v = beside.rows(3)
    with pytest.raises(tandem.UnsupportedError, match="parent_idx"):
        beside.session.attend(beside.sequence, q, k, v, speculative=True, parent_idx=[-1, 0, 0])
    o = np.asarray(beside.session.attend(beside.sequence, q, k, v, speculative=True))
    assert np.isfinite(o).all()


@pytest.mark.parametrize("patterns, message", [
    (None, "patterns = NULL"),
    (Patterns([[HeadPattern()] * 3]), "patterns.n_heads = 3, the model has 4"),
    (Patterns([[HeadPattern(("a_shape",), sink_tokens=4)] * 4]), r"patterns.heads\[0\].window_tokens = 0"),
    (Patterns([[HeadPattern()] * 3 + [HeadPattern((), n_blocks=1)]]), r"patterns.heads\[3\].n_blocks = 1 and the head has no pattern"),
    (Patterns([[HeadPattern(("block_sparse",), n_blocks=-1)] * 4]), r"patterns.heads\[0\].n_blocks = -1"),
])
def test_bad_patterns(patterns, message):
    with tandem.Engine(n_threads=1) as engine:
        model = tandem.Model([tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)])
        cache = tandem.Cache(engine, model)
        with pytest.raises(tandem.InvalidArgumentError, match=message):
            tandem.Session(cache, policy="patterns", patterns=patterns)
        with pytest.raises(tandem.InvalidArgumentError, match="no layer has a policy that follows them"):
            tandem.Session(cache, policy="all", patterns=Patterns([[HeadPattern()] * 4]))
