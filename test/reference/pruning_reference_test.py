# SPDX-License-Identifier: MIT
"""Compares the reference of hierarchical pruning with dense attention and plain loops, and checks rules of every selection."""
import dataclasses

import numpy as np
import pytest
from pruning_records import Record, Stage
from pruning_reference import (DEFAULT, Decoder, Variants, attend, bf16_down, bf16_up, descend, prune_append, prune_block,
                               tokens_of)

SCALE = 0.25
ALL = 1 << 20  # keep_tokens of a stage that keeps every chunk
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SCHEDULES = [(16, 8, 4), (96, 24, 8), (32, 16, 8), (5, 3, 2), (1, 1, 1)]


def world(n_tokens, n_queries=1, heads=4, kv_heads=2, dim=16, seed=7):
    random = np.random.default_rng(seed)
    q = random.standard_normal((n_queries, heads, dim))
    k, v = (random.standard_normal((n_tokens, kv_heads, dim)) for _ in range(2))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def record(*stages, sinks=16, window=128):
    made = Record(sinks, window, stages)
    made.check()
    return made


def three_stages(judge="exact", keep=(ALL, ALL, ALL), intervals=(16, 8, 4), blocks=(16, 16, 16), **last):
    sizes = (16, 8, 4)
    first, second, third = [Stage(judge, *each) for each in zip(blocks, sizes, keep, intervals, strict=True)]
    return record(first, second, dataclasses.replace(third, **last))


def one_stage(judge="exact", chunk=4, keep=32, **options):
    return record(Stage(judge, 16, chunk, keep, **options), sinks=0, window=16)


def block(q, k, rules, **arguments):
    """Prunes for queries that are the last tokens of k, without an overlap."""
    return prune_block(q, k, len(k) - len(q), rules, **{"sm_scale": SCALE, "overlap": 0, **arguments})


def dense(q, k, v, soft_cap=0.0, sink_logits=None):
    """Computes causal attention by plain loops. Returns o and lse."""
    group = q.shape[1] // k.shape[1]
    o, lse = np.empty((*q.shape[:2], v.shape[2])), np.empty(q.shape[:2])
    for i, h in np.ndindex(*q.shape[:2]):
        n = len(k) - len(q) + i + 1
        logits = np.array([np.dot(q[i, h].astype(float), k[t, h // group].astype(float)) * SCALE for t in range(n)])
        if soft_cap:
            logits = soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits)
        total = weights.sum() + (0 if sink_logits is None else np.exp(sink_logits[h]))
        o[i, h], lse[i, h] = weights @ v[:n, h // group].astype(float) / total, np.log(total)
    return o, lse


def half_rope(rows, positions):
    """Applies rotary embedding by halves."""
    rows = np.asarray(rows, float)
    half = rows.shape[-1] // 2
    angle = np.asarray(positions, float)[..., None] * 100.0 ** (-np.arange(half) / half)
    a, b = rows[..., :half], rows[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


# --- Numbers ---


def test_bf16_is_rounded_outward_to_the_next_number():
    random = np.random.default_rng(1)
    any_bits = random.integers(0, 1 << 32, 20000, np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf], np.float32)
    x = np.concatenate([any_bits[~np.isnan(any_bits)], special])
    down, up = bf16_down(x), bf16_up(x)
    assert np.all(down <= x) and np.all(x <= up)
    for rounded in (down, up):
        assert not np.any(rounded.astype(np.float32).view(np.uint32) & 0xFFFF)
    exact = down == x
    assert np.array_equal(exact, (x.view(np.uint32) & 0xFFFF) == 0) and np.array_equal(exact, up == x)
    # There is no bf16 number between the two: their bits differ by one step.
    steps = np.abs(np.abs(up).astype(np.float32).view(np.uint32).astype(int) - np.abs(down).astype(np.float32).view(np.uint32))
    assert np.all(steps[~exact] == 1 << 16)
    assert np.isnan(bf16_down(np.nan)) and bf16_down(1 - 2.0**-40) < 1 - 2.0**-40 < bf16_up(1 - 2.0**-40) == 1


# --- Keeping everything is dense attention ---


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n_queries", [1, 5, 40])
def test_everything_kept_is_dense(n_queries, shared):
    q, k, v = world(260, n_queries)
    options = {"soft_cap": 3.0, "sink_logits": np.array([0.5, -1.0, 2.0, 0.0])}
    rules = three_stages(blocks=(16, 8, 8))
    blocks = prune_append(q, k, len(k) - n_queries, rules, sm_scale=SCALE, shared=shared)
    for given in ({}, options):
        o, lse = attend(q, k, v, blocks, sm_scale=SCALE, **given)
        expected_o, expected_lse = dense(q, k, v, **given)
        np.testing.assert_allclose(o, expected_o, **CLOSE)
        np.testing.assert_allclose(lse, expected_lse, **CLOSE)


def test_without_an_active_stage_attention_is_dense():
    q, k, v = world(260, 3)
    rules = record(Stage("exact", 16, 16, 16, from_tokens=259))
    blocks = prune_append(q, k, 257, rules, sm_scale=SCALE)
    assert [len(each.stages) for each in blocks] == [0]  # the block's first query sees 258 tokens
    np.testing.assert_allclose(attend(q, k, v, blocks, sm_scale=SCALE)[0], dense(q, k, v)[0], **CLOSE)


# --- What a stage looks at and keeps ---


def test_candidates_and_parts():
    q, k, _ = world(203)
    k[80] = 5 * q[0, ::2]
    rules = three_stages(keep=(32, ALL, ALL))
    first, second, third = block(q, k, rules, overlap=13).stages
    assert first.end == 88 and first.looked_at[0].tolist() == [1, 2, 3, 4, 5]  # chunk 5, tokens 80..95, straddles the end
    assert 5 in first.kept[1] and second.looked_at[1][-1] == 10  # its second half begins at the end
    for each, parent in ((second, first), (third, second)):
        parts = tokens_of(parent.kept[1], parent.stage.chunk_tokens // each.stage.chunk_tokens).ravel()
        assert each.looked_at[1].tolist() == [c for c in parts if c * each.stage.chunk_tokens < 88]
        assert each.scores[1] is None and np.array_equal(each.kept[1], each.looked_at[1])


def test_a_stage_is_skipped_up_to_keep_tokens():
    q, k, _ = world(16 + 64)
    assert block(q, k, one_stage(keep=64)).stages[0].scores == [None, None]
    judged = block(q, k, one_stage(keep=60)).stages[0]
    assert all(len(kept) == 15 and len(scores) == 16 for kept, scores in zip(judged.kept, judged.scores, strict=True))
    assert block(q[:, :, :4], k[:10, :, :4], one_stage()).stages[0].looked_at[0].size == 0  # the window holds all tokens


def test_plus_next_keeps_the_chunk_after():
    q, k, _ = world(16 + 32)  # E = 32: chunk 7, tokens 28..31, is the last candidate
    k[:, :, :] = 0
    for token in (9, 12, 30):  # chunks 2, 3 and 7
        k[token] = q[0, ::2]
    result = block(q, k, one_stage(keep=24, plus_next=True), options=Variants(pooling="raw")).stages[0]
    assert result.best[0].tolist() == [2, 3, 7] and result.kept[0].tolist() == [2, 3, 4, 7]
    assert np.isfinite(result.gap(0)) and result.gap(0) > 0.1


def loop_scores(q, k, rules, p0, judge, heads, minus_lse):
    """Computes the scores of a single stage by loops over numbers, for the query heads of one list."""
    stage, group, end = rules.stages[0], q.shape[1] // k.shape[1], p0 + 1 - rules.window_tokens
    chunks = [c for c in range(len(k)) if rules.sink_tokens <= c * stage.chunk_tokens < end]
    candidates = {c * stage.chunk_tokens + i for c in chunks for i in range(stage.chunk_tokens)}
    scores = dict.fromkeys(chunks, -np.inf)
    for h in heads:
        logit = q[:, h].astype(float) @ k[:, h // group].astype(float).T * SCALE  # [n_queries, n_tokens]
        seen = sorted(candidates | set(range(rules.sink_tokens)) | set(range(max(0, end), p0 + 1)))
        shift = np.log(np.exp(logit[:, seen]).sum(1)) if minus_lse else np.zeros(len(q))
        for c in chunks:
            first, length = c * stage.chunk_tokens, stage.chunk_tokens
            if judge == "exact":
                score = (logit[:, first:first + length] - shift[:, None]).max()
            elif judge == "descent":
                while length > 1:
                    length //= 2
                    if logit[:, first + length].max() > logit[:, first].max():
                        first += length
                score = logit[:, first].max()
            else:
                rows = k[first:first + length, h // group]
                low, high = bf16_down(rows.min(0)), bf16_up(rows.max(0))
                score = max(np.maximum(each * low, each * high).sum() for each in q[:, h].astype(float)) * SCALE
            scores[c] = max(scores[c], score)
    return np.array(list(scores.values()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("judge", ["descent", "bounds", "exact"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_scores_are_those_of_plain_loops(judge, shared, kv_heads):
    q, k, _ = world(150, 3, kv_heads=kv_heads)
    rules = record(Stage(judge, 16, 8, 32), sinks=8, window=40)
    result = block(q, k, rules, shared=shared).stages[0]
    lists = [range(4)] if shared else np.split(np.arange(4), kv_heads)
    assert len(result.scores) == len(lists)
    for heads, scores, kept, looked_at in zip(lists, result.scores, result.kept, result.looked_at, strict=True):
        expected = loop_scores(q, k, rules, 147, judge, heads, minus_lse=len(heads) > 1)
        np.testing.assert_allclose(scores, expected, **CLOSE)
        assert kept.tolist() == sorted(looked_at[np.argsort(-expected)[:4]])


def test_ties_go_to_the_lower_index():
    q, k, _ = world(16 + 64)
    k[:] = k[0]
    for judge in ("descent", "bounds", "exact"):
        result = block(q, k, one_stage(judge)).stages[0]
        assert all(kept.tolist() == list(range(8)) for kept in result.kept) and result.gap(0) == 0
    assert descend(np.zeros((1, 8)), np.zeros((1, 8)))[0] == 0
    logits = np.array([[1, 0, 3, 0, 1, 0, 3, 0]])  # keys 0 and 4 tie: the left half; there key 2 wins
    assert descend(logits, logits)[0] == 2 and descend(logits, logits)[2] == 0


# --- What the judges find ---


def test_exact_finds_the_top_key():
    """With one query head per list, the chunk of the largest logit is kept in every block, for any keep_tokens."""
    for seed in range(20):
        q, k, _ = world(200, 4, heads=2, seed=seed)
        result = block(q, k, one_stage(keep=4)).stages[0]
        for g in range(2):
            logits = (q[:, g] @ k[:, g].T)[:, :4 * len(result.looked_at[g])].max(0)
            assert result.kept[g].tolist() == [np.argmax(logits) // 4]


def test_bounds_keep_a_chunk_unless_enough_bounds_reach_its_top_logit():
    """A bound is at least each logit of its chunk. A chunk with largest logit m is kept if at most keep_tokens /
    chunk_tokens chunks, itself included, have a bound of m or more. If more chunks have such a bound, bounds can miss
    the top key."""
    missed = 0
    for seed in range(60):
        q, k, _ = world(16 + 128, dim=8, seed=seed)
        result = block(q, k, one_stage("bounds", keep=16)).stages[0]
        exact = block(q, k, one_stage(keep=16), options=Variants(pooling="raw")).stages[0]
        for g in range(2):
            bounds, top = result.scores[g], exact.scores[g]
            assert np.all(bounds >= top)
            for c in range(32):
                assert c in result.kept[g] or np.sum(bounds >= top[c]) > 4
            missed += np.argmax(top) not in result.kept[g]
    assert missed  # shows that the condition is needed


@pytest.mark.parametrize("judge", ["bounds", "exact"])
def test_a_planted_key_is_found(judge):
    """All stages find a logit that exceeds every bound of the other chunks, wherever the key is."""
    rules = record(Stage(judge, 16, 16, 32), Stage(judge, 16, 8, 16), Stage(judge, 16, 4, 8), sinks=16, window=64)
    for token in (16, 100, 101, 255, 331):
        q, k, _ = world(400, heads=2)
        k = np.clip(k, -1, 1)
        k[token] = 40 * q[0] / np.linalg.norm(q[0], axis=-1, keepdims=True)
        assert (q[0] * k[token]).sum(-1).min() > (np.abs(q[0]) * 1.01).sum(-1).max()
        pruned = block(q, k, rules)
        assert all(token in pruned.attended(0, g) for g in range(2))
        assert all(token // 16 in kept for kept in pruned.stages[0].kept)


@pytest.mark.parametrize("chunk", [1, 2, 8, 256])
def test_descent_finds_the_end_of_a_slope_and_can_miss_a_peak(chunk):
    slope = np.arange(chunk, dtype=float)[None]
    for logits, found in ((slope, chunk - 1), (-slope, 0)):
        representative, score, _ = descend(logits, logits)
        assert representative == found and score == logits.max()
    if chunk > 2:
        peak = -slope
        peak[0, -1] = chunk
        assert descend(peak, peak)[0] == 0


def test_descent_keeps_the_steepest_chunk():
    q, k, _ = world(16 + 128, heads=1, kv_heads=1)
    rise = np.arange(144) % 16 * np.where(np.arange(144) // 16 == 5, 0.2, 0.1)
    k[:, 0] = rise[:, None] * q[0, 0]
    result = block(q, k, record(Stage("descent", 16, 16, 16), Stage("descent", 16, 4, 4), sinks=0, window=33)).stages
    assert result[0].kept[0].tolist() == [5] and result[1].kept[0].tolist() == [23]
    np.testing.assert_allclose(result[0].scores[0], [(q[0, 0] @ k[16 * c + 15, 0]) * SCALE for c in range(7)], rtol=1e-6)


def loud_and_quiet():
    """Two query heads of one KV head: 32 chunks have logits of 10 for the loud head, chunk 50 has 5 for the quiet one."""
    q, k, _ = world(16 + 256, heads=2, kv_heads=1)
    q[:], k[:] = 0, 0
    q[0, 0, 0], q[0, 1, 1] = 10 / SCALE, 5 / SCALE
    k[:128, 0, 0], k[201, 0, 1] = 1, 1
    return q, k


def test_a_loud_head_does_not_take_the_list():
    q, k = loud_and_quiet()
    raw = block(q, k, one_stage(), options=Variants(pooling="raw"))
    assert raw.lists[0].tolist() == list(range(8))
    less_lse = block(q, k, one_stage())
    assert 50 in less_lse.lists[0]
    scores = less_lse.stages[0].scores[0]
    np.testing.assert_allclose(scores[0], 10 - np.log(128 * np.exp(10) + 144), rtol=1e-12)
    np.testing.assert_allclose(scores[50], 5 - np.log(np.exp(5) + 271), rtol=1e-12)
    # An exact stage that is followed by another compares unmodified logits.
    two = record(Stage("exact", 16, 4, 32), Stage("exact", 16, 2, 32), sinks=0, window=16)
    assert block(q, k, two).stages[0].kept[0].tolist() == list(range(8))


# --- Appends ---


def test_small_blocks_inherit_the_list_of_the_block_around_them():
    q, k, _ = world(300, 21)
    rules = three_stages("bounds", keep=(32, 24, 8), blocks=(16, 8, 4))
    blocks = prune_append(q, k, 279, rules, sm_scale=SCALE)
    assert [(each.p0 - 279, each.n_queries) for each in blocks] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 1)]
    for i, each in enumerate(blocks):
        first = i // 4 * 16
        outer = block(q[first:first + 16], k[:279 + first + len(q[first:first + 16])], rules)
        for g in range(2):
            assert np.array_equal(each.stages[0].kept[g], outer.stages[0].kept[g])
        assert each.stages[1].end == 279 + i // 2 * 8 + 1 - 128 and each.stages[2].end == each.p0 + 1 - 128
        alone = prune_block(q[4 * i:4 * i + 4], k, each.p0, rules, sm_scale=SCALE, overlap=0,
                            kept=[stage.kept for stage in each.stages], run_from=2)
        assert all(np.array_equal(a, b) for a, b in zip(each.lists, alone.lists, strict=True))
    assert blocks[0].stages[1] is blocks[1].stages[1] and blocks[0].stages[0] is blocks[3].stages[0]


def unseen(blocks):
    """Returns the number of tokens that some query of a block should see and does not."""
    return sum(each.p0 + i + 1 - len(each.attended(i, 0)) for each in blocks for i in range(each.n_queries))


def test_appends_lose_no_key():
    q, k, _ = world(400, 150, heads=1, kv_heads=1)
    for options in (DEFAULT, Variants(window="query")):
        assert unseen(prune_append(q, k, 250, three_stages(), sm_scale=SCALE, options=options)) == 0
    blocks = prune_append(q, k, 250, three_stages(), sm_scale=SCALE)
    # Windows that begin at P + 1 - W for each query need candidates up to P1 + 1 - W, not P0 + 1 - W.
    assert unseen([dataclasses.replace(each, window_p0=None) for each in blocks]) > 0


def test_windows_of_smaller_blocks():
    """Their windows begin where the window of the first stage's block begins. The candidates of stage 1 end there."""
    q, k, _ = world(400, 64, heads=1, kv_heads=1)
    rules = record(Stage("exact", 64, 8, ALL), Stage("exact", 8, 4, ALL))
    assert unseen(prune_append(q, k, 336, rules, sm_scale=SCALE)) == 0
    assert unseen(prune_append(q, k, 336, rules, sm_scale=SCALE, options=Variants(append_window="own"))) > 0


def test_stages_are_active_by_the_first_query_of_a_block():
    q, k, _ = world(300, 40, heads=1, kv_heads=1)
    rules = record(Stage("exact", 16, 8, 16, to_tokens=270), Stage("exact", 8, 4, 16, from_tokens=270))
    blocks = prune_append(q, k, 260, rules, sm_scale=SCALE)
    assert [(each.n_queries, each.chunk_tokens) for each in blocks] == [(16, 8), (8, 4), (8, 4), (8, 4)]


# --- Decode ---


def steps(decoder, q, k, tokens):
    """Returns [Pruned] of the single queries at these tokens."""
    return [decoder.step(q[p % len(q)], k[:p + 1]) for p in tokens]


@pytest.mark.parametrize("intervals", SCHEDULES)
def test_no_schedule_loses_a_key(intervals):
    """Each key up to P is a sink, is in the window, or was a candidate of every stage when the stage last ran."""
    q, k, _ = world(440, 3, heads=1, kv_heads=1, dim=4)
    rules = three_stages(intervals=intervals)
    assert unseen(steps(Decoder(rules, sm_scale=SCALE), q, k, range(130, 440))) == 0
    if max(intervals) > 16:  # shorter intervals are covered by chance: the last chunk is whole, and it straddles E
        assert unseen(steps(Decoder(rules, sm_scale=SCALE, overlap=0), q, k, range(130, 440))) > 0


def test_without_an_overlap_short_schedules_have_holes_too():
    q, k, _ = world(440, 3, heads=1, kv_heads=1, dim=4)
    rules = record(Stage("exact", 16, 1, ALL, 16), sinks=16, window=24)
    assert unseen(steps(Decoder(rules, sm_scale=SCALE, overlap=0), q, k, range(130, 440))) > 0
    assert unseen(steps(Decoder(rules, sm_scale=SCALE), q, k, range(130, 440))) == 0


def test_candidates_have_no_hole_where_little_is_kept():
    q, k, _ = world(440, 3, heads=1, kv_heads=1, dim=4)
    decoder, looked_at = Decoder(three_stages(keep=(32, 16, 8), intervals=(96, 24, 8)), sm_scale=SCALE), None
    for p in range(200, 440):
        first = decoder.step(q[0], k[:p + 1]).stages[0]
        looked_at = tokens_of(first.looked_at[0], 16).ravel() if first.looked_at is not None else looked_at
        assert looked_at.max() <= p and set(range(16, p + 1 - 128)) <= set(looked_at)


@pytest.mark.parametrize("intervals, runs", [((16, 8, 4), (12, 24, 48)), ((96, 24, 8), (2, 8, 24)), ((5, 3, 2), None)])
def test_stages_run_by_their_intervals(intervals, runs):
    q, k, _ = world(500, 3, heads=1, kv_heads=1, dim=4)
    pruned = steps(Decoder(three_stages(keep=(64, 32, 16), intervals=intervals), sm_scale=SCALE), q, k, range(300, 492))
    ran_at, expected = [-ALL] * 3, []
    for p in range(300, 492):
        first = next((i for i in range(3) if p - ran_at[i] >= intervals[i]), 3)
        ran_at[first:] = [p] * (3 - first)
        expected.append(first)
    assert [each.run_from for each in pruned] == expected
    if runs:
        assert tuple(sum(first <= i for first in expected) for i in range(3)) == runs


def test_cached_lists_are_used_as_they_are():
    q, k, _ = world(400, 3)
    rules = three_stages(keep=(64, 32, 16))
    pruned = steps(Decoder(rules, sm_scale=SCALE), q, k, range(300, 320))
    for i in (1, 2, 3):  # no stage runs
        assert all(np.array_equal(a, b) for a, b in zip(pruned[i].lists, pruned[0].lists, strict=True))
    for i in (4, 12):  # only stage 3 runs, on the list that stage 2 made at step 0 or 8
        p, before = 300 + i, pruned[i // 8 * 8]
        again = prune_block(q[p % 3:p % 3 + 1], k[:p + 1], p, rules, sm_scale=SCALE, overlap=15,
                            kept=[stage.kept for stage in before.stages], run_from=2)
        assert all(np.array_equal(a, b) for a, b in zip(pruned[i].lists, again.lists, strict=True))
    attended = [set(each.attended(0, 0)) for each in pruned[:2]]
    assert 301 in attended[1] - attended[0]  # the window still moves


def test_another_set_of_active_stages_runs_at_once():
    q, k, _ = world(400, 1, heads=1, kv_heads=1)
    rules = record(Stage("exact", 16, 8, 16, 16, from_tokens=305), Stage("exact", 16, 4, 16, 8))
    pruned = steps(Decoder(rules, sm_scale=SCALE), q, k, range(300, 330))
    assert [300 + i for i, each in enumerate(pruned) if each.run_from == 0] == [300, 304, 320]
    assert len(pruned[3].stages) == 1 and len(pruned[4].stages) == 2
    assert pruned[0].stages[0].end == 301 - 128 + 7 and pruned[4].stages[0].end == 305 - 128 + 15  # active intervals count


def test_resets_and_forks():
    q, k, _ = world(400, 3)
    decoder = Decoder(three_stages(keep=(64, 32, 16)), sm_scale=SCALE)
    assert [each.run_from for each in steps(decoder, q, k, range(300, 303))] == [0, 3, 3]
    fork = decoder.fork()
    decoder.reset()
    assert decoder.step(q[0], k[:304]).run_from == 0 and fork.step(q[0], k[:304]).run_from == 3
    assert [each.run_from for each in steps(decoder, q, k, range(304, 308))] == [3, 3, 3, 2]
    assert [each.run_from for each in steps(fork, q, k, range(304, 309))] == [2, 3, 3, 3, 1]


def test_no_key_after_the_query_is_attended():
    q, k, _ = world(400)
    decoder = Decoder(three_stages(intervals=(96, 24, 8)), sm_scale=SCALE)
    assert decoder.step(q[0], k[:6]).attended(0, 0).tolist() == [0, 1, 2, 3, 4, 5]  # there are 16 sinks
    steps(decoder, q, k, range(300, 320))
    revisit = decoder.step(q[0], k[:200], commit=False)  # lists of later tokens
    assert revisit.run_from == 3 and revisit.attended(0, 0).tolist() == list(range(200))


def test_calls_that_commit_nothing_store_nothing():
    q, k, _ = world(400, 3)
    decoder = Decoder(three_stages(keep=(64, 32, 16)), sm_scale=SCALE)
    steps(decoder, q, k, range(300, 303))
    guesses = decoder.step(q, k[:306], commit=False)  # tokens 303..305: stage 3 is not due at 303
    assert guesses.run_from == 3 and (guesses.p0, guesses.n_queries) == (303, 3)
    due = decoder.step(q, k[:307], commit=False)      # tokens 304..306
    assert due.run_from == 2 and due.stages[2].end == 305 - 128 + 15
    assert decoder.step(q[0], k[:304]).run_from == 3 and decoder.step(q[0], k[:305]).run_from == 2
    with pytest.raises(ValueError, match="append"):
        decoder.step(q, k[:308])


# --- Attention ---


def test_keys_that_are_not_attended_change_nothing():
    q, k, v = world(400, 8)
    rules = three_stages(keep=(64, 32, 16), blocks=(8, 4, 4))
    for shared in (False, True):
        blocks = prune_append(q, k, 392, rules, sm_scale=SCALE, shared=shared)
        for each in blocks:
            here = slice(each.p0 - 392, each.p0 - 392 + each.n_queries)
            o, lse = attend(q[here], k, v, each, sm_scale=SCALE)
            poisoned_k, poisoned_v = k.copy(), v.copy()
            for g in range(2):
                unattended = np.setdiff1d(np.arange(400), each.attended(each.n_queries - 1, g))
                assert len(unattended) > 100
                poisoned_k[unattended, g], poisoned_v[unattended, g] = np.nan, np.nan
            again_o, again_lse = attend(q[here], poisoned_k, poisoned_v, each, sm_scale=SCALE)
            assert np.array_equal(o, again_o) and np.array_equal(lse, again_lse)


def test_selected_keys_are_attended_alone():
    q, k, v = world(400)
    pruned = block(q, k, three_stages(keep=(64, 32, 16)))
    o, lse = attend(q, k, v, pruned, sm_scale=SCALE)
    for g in range(2):
        tokens = pruned.attended(0, g)
        assert len(tokens) == 16 + 16 + 128 and np.all(np.diff(tokens) > 0)
        heads = slice(2 * g, 2 * g + 2)
        expected_o, expected_lse = dense(q[:, heads], k[tokens, g:g + 1], v[tokens, g:g + 1])
        np.testing.assert_allclose(o[:, heads], expected_o, **CLOSE)
        np.testing.assert_allclose(lse[:, heads], expected_lse, **CLOSE)


# --- Variants ---


def test_middle_keys_and_running_maximum():
    logits = np.array([[9.0, 0, 1, 0, 0, 5, 4, 3]])
    assert descend(logits, logits)[:2] == (0, 9.0)
    representative, score, _ = descend(logits, logits, Variants(representative="middle"))
    assert representative == 5 and score == 5  # keys 2 and 6, then 5 and 7, then 4 and 5
    falling = np.array([[0.0, 0, 0, 0, 1, 2, 7, 3]])
    for kind, expected in (("last", 3), ("running_max", 7)):
        options = Variants(representative="middle", chunk_score=kind)
        representative, score, _ = descend(falling, falling, options)  # keys 2 and 6, then 5 and 7, then 6 and 7
        assert score == 7 and representative == 6
        climbing = np.array([[0.0, 0, 0, 0, 0, 1, 7, 6]])
        climbing[0, 5] = 6.5                                           # keys 5 and 7: to the left, away from key 6
        assert descend(climbing, climbing, options)[1] == {3: 6.5, 7: 7}[expected]


def test_fewer_queries_judge_all_stages_but_the_last():
    q, k, _ = world(400, 6, heads=2)
    rules = three_stages(keep=(64, 32, 16))
    for kind, rows in (("mean4", np.stack([q[:4].mean(0), q[4:].mean(0)])), ("strided4", q[::4])):
        pruned = block(q, k, rules, options=Variants(queries=kind))
        fewer = prune_block(rows, k, 394, rules, sm_scale=SCALE, overlap=0)
        for i in range(2):
            np.testing.assert_allclose(pruned.stages[i].scores[0], fewer.stages[i].scores[0], rtol=1e-6)
        last = prune_block(q, k, 394, rules, sm_scale=SCALE, overlap=0, kept=[each.kept for each in fewer.stages], run_from=2)
        np.testing.assert_allclose(pruned.stages[2].scores[0], last.stages[2].scores[0], rtol=1e-12)


@pytest.mark.parametrize("style, query_at, key_at", [
    ("relative", lambda p, n: 17, lambda c: 1),
    ("chunk", lambda p, n: min(p, n + 16), lambda c: c),
    ("infllm", lambda p, n: 16, lambda c: 0),
])
def test_positions_of_pruning(style, query_at, key_at):
    q, k, _ = world(16 + 64, 2, heads=2)
    result = block(q, k, one_stage(), options=Variants(positions=style, rope=half_rope, pooling="raw")).stages[0]
    n = len(result.looked_at[0])
    for g in range(2):
        for c in result.looked_at[g]:
            expected = max(half_rope(q[i, g], query_at(78 + i, n)) @ half_rope(k[4 * c + j, g], key_at(c)) * SCALE
                           for i in range(2) for j in range(4))
            np.testing.assert_allclose(result.scores[g][c], expected, **CLOSE)


def test_the_descent_rotates_left_and_right_keys_apart():
    """In relative style equal keys do not tie, because the right key is nearer to the query."""
    q, k, _ = world(16 + 64, heads=1, kv_heads=1)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1, 1
    result = block(q, k, one_stage("descent"), options=Variants(positions="relative", rope=half_rope)).stages[0]
    left, right = (half_rope(q[0, 0], 17) @ half_rope(k[0, 0], role) * SCALE for role in (0, 1))
    np.testing.assert_allclose(result.scores[0], right, **CLOSE)
    np.testing.assert_allclose(result.doubts[0], abs(left - right) / max(abs(left), abs(right)), **CLOSE)


@pytest.mark.parametrize("style", ["relative", "chunk", "infllm"])
def test_log_sum_exp_of_other_positions(style):
    q, k, _ = world(120, heads=2, kv_heads=1)
    result = block(q, k, record(Stage("exact", 16, 4, 16), sinks=8, window=16), options=Variants(positions=style, rope=half_rope))
    looked_at, scores = result.stages[0].looked_at[0], result.stages[0].scores[0]
    n = len(looked_at)
    base = {"relative": 17, "chunk": min(119, n + 16), "infllm": 16}[style]
    position = [{"relative": 1, "chunk": max(0, t // 4 - 2), "infllm": 0}[style] for t in range(104)]
    position += [base - (119 - t) for t in range(104, 120)]
    rotated_q, rotated_k = half_rope(q[0], base), half_rope(k[:, 0], np.array(position))
    logits = rotated_q @ rotated_k.T * SCALE
    expected = logits - np.log(np.exp(logits).sum(1))[:, None]
    np.testing.assert_allclose(scores, [expected[:, 4 * c:4 * c + 4].max() for c in looked_at], **CLOSE)


def test_variants_are_checked():
    for wrong in ({"representative": "last"}, {"positions": "relative"}, {"window": "none"}):
        with pytest.raises(ValueError):
            Variants(**wrong)
