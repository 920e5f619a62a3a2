# SPDX-License-Identifier: MIT
"""Sequences, statistics, plans and capabilities."""
import json

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, World

import tandem


def test_fork_shares_and_truncate_parts(world):
    _, k, v = world.qkv(300)
    world.sequence.append(k, v)
    fork = world.sequence.fork()
    assert fork.id != world.sequence.id and fork.digest() == world.sequence.digest()
    assert world.cache.stats().n_pages_shared == 2 and world.cache.stats().n_sequences == 2
    fork.truncate(100)
    assert (fork.length(), world.sequence.length()) == (100, 300) and fork.digest() != world.sequence.digest()
    assert np.array_equal(fork.read()[0], k[:100]) and np.array_equal(world.sequence.read(250, 50)[1], v[250:])


def test_remove():
    with tandem.Engine(n_threads=1) as engine:
        layer = tandem.Layer(n_q_heads=KV_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM, rope="halves", rope_theta=1e5)
        cache = tandem.Cache(engine, tandem.Model(layer), k_type="f32")
        k = np.random.default_rng(2).standard_normal((20, KV_HEADS, DIM)).astype(np.float32)
        shifted, kept, short = (cache.create_sequence() for _ in range(3))
        for sequence in (shifted, kept):
            sequence.append(k, k)
        rest = np.concatenate([k[:5], k[8:]])
        short.append(rest, rest)
        shifted.remove(5, 3, shift_positions=True)
        kept.remove(5, 3)
        assert shifted.digest() == short.digest() != kept.digest()
        assert np.array_equal(kept.read()[0], rest)


def test_caller_rotated_keys_are_not_shifted(world):
    world.sequence.append(*world.qkv(9)[1:])
    with pytest.raises(tandem.UnsupportedError):
        world.sequence.remove(0, 3, shift_positions=True)
    world.sequence.remove(0, 3)
    assert world.sequence.length() == 6


def test_read_into_parts(world):
    _, k, v = world.qkv(10)
    world.sequence.append(k, v)
    half = np.zeros((3, KV_HEADS, DIM), np.float16)
    got_k, got_v = world.sequence.read(4, v=half)
    assert got_k is None and got_v is half and np.array_equal(half, v[4:7].astype(np.float16))
    empty, _ = world.sequence.read(10)
    assert empty.shape == (0, KV_HEADS, DIM)


@pytest.mark.parametrize("options, row", [({}, 2 * 2 * DIM), ({"k_type": "q8_0", "v_type": "q4_0"}, None),
                                          ({"k_type": "q4_0", "k_rotation": "hadamard"}, None),
                                          ({"layer_k_types": ["e4m3"], "layer_v_types": ["f32"], "page_tokens": 16}, 5 * DIM)])
def test_storage_options(world, options, row):
    cache = tandem.Cache(world.engine, world.model, **options)
    sequence = cache.create_sequence()
    _, k, v = world.qkv(40)
    sequence.append(k, v)
    stored = sequence.read()
    assert 0.97 < np.corrcoef(stored[0].ravel(), k.ravel())[0, 1] and 0.97 < np.corrcoef(stored[1].ravel(), v.ravel())[0, 1]
    plan = tandem.plan_memory(world.engine, world.model, [40], cache=options)
    types = [options.get("k_type", "bf16")] * 2
    types[1] = options.get("v_type", types[1])
    expected = row if row is not None else sum(tandem.dtype_row_bytes(name, DIM) for name in types)
    assert plan.kv_token_bytes == KV_HEADS * expected
    assert plan.host_kv_bytes == cache.stats().host_kv_bytes
    assert plan.report()["kv_token_bytes"] == plan.kv_token_bytes if "kv_token_bytes" in plan.report() else plan.report()


def test_keys_of_4_bits_are_rotated_by_default(world):
    digests = []
    _, k, v = world.qkv(40)
    for options in ({}, {"k_rotation": "default"}, {"k_rotation": "hadamard"}, {"k_rotation": "none"}):
        sequence = tandem.Cache(world.engine, world.model, k_type="q4_0", **options).create_sequence()
        sequence.append(k, v)
        digests.append(sequence.digest())
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_plan_refuses_as_create_does(world):
    with pytest.raises(tandem.CapacityError):
        tandem.plan_memory(world.engine, world.model, [1 << 24], cache={"host_cap_bytes": 1 << 22})
    assert tandem.plan_memory(world.engine, world.model, [1 << 24, 5], session={"policy": "hgca"}).selection_max_bytes > 0


def test_supports(world):
    assert tandem.supports(world.engine, world.layer, cache={"k_type": "q8_0"}, session={"policy": "hgca"}) == (True, None)
    odd = tandem.supports(world.engine, tandem.Layer(n_q_heads=1, n_kv_heads=1, k_head_dim=72))
    assert not odd and isinstance(odd.why, tandem.UnsupportedError)
    unknown = tandem.supports(world.engine, session={"policy": "x"})
    assert not unknown and isinstance(unknown.why, tandem.NotFoundError) and unknown.why.field == "policy"


def test_reports_and_names(world):
    report = world.engine.report()
    assert report["version"] == "0.2.0" and report["backends"][0]["state"] == "ready"
    json.dumps(report)
    assert tandem.policies() == ["all", "streaming", "hgca", "hip", "patterns"]
    assert any(tandem.cpu_isas().values()) and tandem.version()[:2] == (0, 2)
    usable = [name for name, there in tandem.cpu_isas().items() if there][-1]
    with tandem.Engine(n_threads=1, cpu_isa=usable, spin_ns=0, pin_threads=0, matmul_rows=9) as engine:
        assert usable in json.dumps(engine.report())


def test_several_layers_are_apart():
    world = World(n_layers=3)
    _, k, v = world.qkv(5)
    world.sequence.append(k, v, layer_idx=2)
    assert [world.sequence.length(i) for i in range(3)] == [0, 0, 5]
    with pytest.raises(tandem.InvalidStateError):
        world.sequence.fork()
    world.sequence.truncate(0)
    assert world.sequence.length(2) == 0
