# SPDX-License-Identifier: MIT
"""Attention through the binding, against softmax in float64; steps, speculation, merging, selection, threads."""
import threading
import time

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, ROOT, World, reference

import tandem

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_smallest_program(world):
    q, k, v = world.qkv(40)
    world.sequence.append(k[:39], v[:39])
    lse = np.full((1, Q_HEADS), np.nan, np.float32)
    o = world.session.attend(world.sequence, q[39:], k[39:], v[39:], lse=lse)
    expected, expected_lse = reference(q[39:], k, v)
    assert o.dtype == np.float32 and o.shape == (1, Q_HEADS, DIM)
    np.testing.assert_allclose(o, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    assert world.sequence.length() == 40


def first_program(page):
    return page.read_text().split("```python\n")[1].split("```")[0]


def test_program_of_the_front_page(capsys):
    exec(first_program(ROOT / "README.md"), {})
    assert capsys.readouterr().out == "(1, 8, 64) 1.0\n"


def test_example_of_the_readme():
    names = {}
    exec(first_program(ROOT / "bindings/python/README.md"), names)
    np.testing.assert_allclose(names["o"], 1, atol=1e-3)  # scales are f16
    assert names["sequence"].length() == 4097


def test_several_sequences_stand_one_after_another(world):
    other = world.cache.create_sequence()
    q, k, v = world.qkv(7)
    o = world.session.attend([world.sequence, other], q, k, v, q_lens=[5, 2])
    np.testing.assert_allclose(o[:5], reference(q[:5], k[:5], v[:5])[0], **CLOSE)
    np.testing.assert_allclose(o[5:], reference(q[5:], k[5:], v[5:])[0], **CLOSE)
    again = world.session.attend([other, world.sequence], q[[6, 4]], q_lens=[1, 1])  # the last tokens of the sequences
    np.testing.assert_allclose(again, o[[6, 4]], **CLOSE)


def test_output_has_the_element_type_of_q(world):
    q, k, v = world.qkv(3, np.float16)
    o = world.session.attend(world.sequence, q, k, v)
    assert o.dtype == np.float16
    np.testing.assert_allclose(o, reference(q, k, v)[0], atol=2e-3)


def test_mla_takes_no_v():
    with tandem.Engine(n_threads=1) as engine:
        layer = tandem.Layer(n_q_heads=2, n_kv_heads=1, k_head_dim=576, v_head_dim=512, v_aliases_k=True)
        cache = tandem.Cache(engine, tandem.Model(layer), k_type="f32")
        random = np.random.default_rng(3)
        q, k = (random.standard_normal((9, heads, 576)).astype(np.float32) for heads in (2, 1))
        sequence = cache.create_sequence()
        o = tandem.Session(cache).attend(sequence, q, k)
        np.testing.assert_allclose(o, reference(q, k, k[:, :, :512])[0], **CLOSE)
        stored, none = sequence.read()
        assert none is None and np.array_equal(stored, k)


def test_layer_options_reach_the_library():
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((6, 2, 64)).astype(np.float32) for _ in range(3))
    with tandem.Engine(n_threads=1) as engine:
        layer = tandem.Layer(n_q_heads=2, n_kv_heads=2, k_head_dim=64, sm_scale=0.25, sinks=[0.5, -1], sliding_window_tokens=3)
        cache = tandem.Cache(engine, tandem.Model(layer), k_type="f32")
        lse = np.empty((6, 2), np.float32)
        o = tandem.Session(cache).attend(cache.create_sequence(), q, k, v, lse=lse)
    at = np.arange(6)
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 3)
    plain, plain_lse = reference(q * 2, k, v, visible)  # 0.25 is twice 1 / sqrt(64)
    joined = np.logaddexp(plain_lse, [0.5, -1])
    np.testing.assert_allclose(lse, joined, **CLOSE)
    np.testing.assert_allclose(o, plain * np.exp(plain_lse - joined)[..., None], **CLOSE)


def test_step_counts_all_layers_or_none():
    world = World(n_layers=2)
    q, k, v = world.qkv(1)
    with world.session.step(world.sequence, np.int64(1)):
        for layer_idx in (0, 1):
            world.session.attend(world.sequence, q, k, v, layer_idx=layer_idx)
    assert [world.sequence.length(i) for i in (0, 1)] == [1, 1]
    with pytest.raises(tandem.InvalidStateError, match="layer"), world.session.step(world.sequence):
        world.session.attend(world.sequence, q, k, v)
    assert [world.sequence.length(i) for i in (0, 1)] == [1, 1]
    with pytest.raises(KeyError), world.session.step([world.sequence], [1]):  # the caller gets the body's exception
        world.session.attend(world.sequence, q, k, v)
        raise KeyError
    assert [world.sequence.length(i) for i in (0, 1)] == [1, 1]


def test_speculative_tree_and_commit(world):
    q, k, v = world.qkv(10)
    world.session.attend(world.sequence, q[:6], k[:6], v[:6])
    parents = [-1, 0, 0, 2]
    o = world.session.attend(world.sequence, q[6:], k[6:], v[6:], speculative=True, parent_idx=parents)
    visible = np.zeros((4, 10), bool)
    visible[:, :6] = True
    for i, ancestors in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
        visible[i, [6 + each for each in ancestors]] = True
    np.testing.assert_allclose(o, reference(q[6:], k, v, visible)[0], **CLOSE)
    assert world.sequence.length() == 6
    with pytest.raises(tandem.InvalidArgumentError):
        world.session.commit(world.sequence, [1, 3])  # not a chain
    world.session.commit(world.sequence, [0, 2])
    kept, _ = world.sequence.read()
    assert np.array_equal(kept, k[[*range(7), 8]])
    with pytest.raises(tandem.InvalidStateError):
        world.session.commit(world.sequence, [])


def test_merge_joins_states_over_disjoint_keys(world):
    q, k, v = world.qkv(50)
    parts = [reference(q[49:], k[part], v[part], np.ones((1, 1), bool)) for part in (slice(0, 20), slice(20, 50))]
    o, lse = ([np.float32(part[i]) for part in parts] for i in (0, 1))
    whole, whole_lse = reference(q[49:], k, v)
    merged, merged_lse = tandem.merge(world.engine, o, lse)
    np.testing.assert_allclose(merged, whole, **CLOSE)
    np.testing.assert_allclose(merged_lse, whole_lse, **CLOSE)
    out, sums = tandem.merge(world.engine, o, lse, out=o[0], lse_out=lse[0])
    assert out is o[0] and sums is lse[0] and np.array_equal(o[0], merged)
    with pytest.raises(tandem.InvalidArgumentError):
        tandem.merge(world.engine, o, lse[:1])
    with pytest.raises(tandem.InvalidArgumentError):
        tandem.merge(world.engine, [], [])


def test_hgca_selects_and_counts(world):
    session = tandem.Session(world.cache, policy="hgca", window_tokens=64, sink_tokens=4, beta=2.0, halo_tokens=0)
    q, k, v = world.qkv(700)
    k[200] = 3 * q[699, 0]
    session.attend(world.sequence, q, k, v)
    token_idx, maw = session.selection(world.sequence, q_head_idx=0)
    assert token_idx.shape == maw.shape and np.all(np.diff(token_idx) > 0)
    assert set(range(4)) <= set(token_idx) and set(range(700 - 64, 700)) <= set(token_idx) and 200 in token_idx
    chosen = maw > 0
    assert abs(maw[chosen].sum() - 1) < 1e-5 and maw[list(token_idx).index(200)] == maw.max()
    o = session.attend(world.sequence, q[699:])
    visible = np.zeros((1, 700), bool)
    visible[0, token_idx] = True
    group = Q_HEADS // KV_HEADS  # the selection above is that of the first KV head
    np.testing.assert_allclose(o[:, :group], reference(q[699:], k, v, visible)[0][:, :group], **CLOSE)
    stats = session.stats()
    assert stats.n_attends == 2 and stats.n_query_tokens == 701 and 0 < stats.host_kv_bytes_read
    assert stats.selected_keys > 0 and KV_HEADS * 560 < stats.host_keys <= KV_HEADS * (700 - 64 - 4)


def test_streaming_sees_sinks_and_window(world):
    session = tandem.Session(world.cache, policy="streaming", window_tokens=16, sink_tokens=2)
    q, k, v = world.qkv(100)
    session.attend(world.sequence, q[:98], k[:98], v[:98])
    session.attend(world.sequence, q[98:99], k[98:99], v[98:99])
    kept, _ = session.selection(world.sequence)
    assert {0, 1, *range(84, 99)} <= set(kept) and len(kept) < 25
    o = session.attend(world.sequence, q[99:], k[99:], v[99:])
    seen = [*kept, 99]
    np.testing.assert_allclose(o, reference(q[99:], k[seen], v[seen])[0], **CLOSE)


def test_streaming_heads_see_sinks_and_window(world):
    flags = [[h == 1 for h in range(KV_HEADS)]]
    session = tandem.Session(world.cache, window_tokens=16, sink_tokens=2, streaming_heads=flags)
    q, k, v = world.qkv(100)
    session.attend(world.sequence, q[:99], k[:99], v[:99])
    kept, _ = session.selection(world.sequence, kv_head_idx=1)
    assert list(kept) == [0, 1, *range(84, 99)]
    assert len(session.selection(world.sequence, kv_head_idx=0)[0]) == 99
    o = session.attend(world.sequence, q[99:], k[99:], v[99:])
    group = Q_HEADS // KV_HEADS
    for head, seen in ((0, list(range(100))), (1, [*kept, 99])):
        heads = slice(head * group, (head + 1) * group)
        np.testing.assert_allclose(o[:, heads], reference(q[99:], k[seen], v[seen])[0][:, heads], **CLOSE)
    for bad, field in (([[2] * KV_HEADS] * len(flags), "streaming_heads[0][0]"), ([[0]], "n_streaming_heads"),
                       (3, "streaming_heads"), ([1], "streaming_heads[0]"), ([["x"]], "streaming_heads[0][0]")):
        with pytest.raises(tandem.InvalidArgumentError) as caught:
            tandem.Session(world.cache, streaming_heads=bad)
        assert caught.value.field == field
    with pytest.raises(TypeError, match="n_streaming_heads"):
        tandem.Session(world.cache, n_streaming_heads=3)


def test_layers_have_policies_of_their_own(world):
    session = tandem.Session(world.cache, window_tokens=16, sink_tokens=2, layer_policies=["streaming"])
    q, k, v = world.qkv(100)
    session.attend(world.sequence, q[:99], k[:99], v[:99])
    assert list(session.selection(world.sequence)[0]) == [0, 1, *range(84, 99)]
    for bad, field, kind in ((["nothing"], "layer_policies[0]", tandem.NotFoundError), (["all"] * 2, "n_layer_policies", None),
                             ("all", "layer_policies", None), ([3], "layer_policies[0]", None)):
        with pytest.raises(kind or tandem.InvalidArgumentError) as caught:
            tandem.Session(world.cache, layer_policies=bad)
        assert caught.value.field == field


def test_eight_threads_on_one_engine(world):
    failures = []

    def work(seed):
        try:
            random = np.random.default_rng(seed)
            with tandem.Session(world.cache) as session, world.cache.create_sequence() as sequence:
                q, k, v = (random.standard_normal((60, heads, DIM)).astype(np.float32)
                           for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
                for i in range(60):
                    o = session.attend(sequence, q[i:i + 1], k[i:i + 1], v[i:i + 1])
                    np.testing.assert_allclose(o, reference(q[i:i + 1], k[:i + 1], v[:i + 1])[0], **CLOSE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures


def test_threads_on_one_session_wait_for_each_other(world):
    """The C ABI leaves this to the caller. Here no thread's arrays may get into another thread's call."""
    sequences = [world.cache.create_sequence() for _ in range(4)]
    q, k, v = world.qkv(30)
    failures = []

    def work(sequence, first):
        try:
            sequence.append(k[first:first + 20], v[first:first + 20])
            expected = reference(q[:1], k[first:first + 20], v[first:first + 20])[0]
            for _ in range(200):
                np.testing.assert_allclose(world.session.attend(sequence, q[:1]), expected, **CLOSE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(sequence, 2 * i)) for i, sequence in enumerate(sequences)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures


def test_other_threads_run_during_a_call(world):
    """A long call releases the interpreter's lock: another thread notes the time during it."""
    noted, stop = [], threading.Event()

    def note():
        while not stop.wait(0.001):
            noted.append(time.perf_counter())

    noting = threading.Thread(target=note)
    noting.start()
    try:
        n_tokens, n_long, was_noted = 4000, 0, False
        while n_long < 8 and not was_noted:  # the other thread may have to wait for a core
            q, k, v = world.qkv(n_tokens)
            sequence = world.cache.create_sequence()
            start = time.perf_counter()
            world.session.attend(sequence, q, k, v)
            took = time.perf_counter() - start
            if took < 0.1:  # not long compared with the interval at which threads are switched
                n_tokens *= 2
                continue
            n_long += 1
            was_noted = any(start + 0.2 * took < at < start + 0.8 * took for at in noted)
    finally:
        stop.set()
        noting.join()
    assert was_noted
