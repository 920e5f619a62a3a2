# SPDX-License-Identifier: MIT
"""Attention over the caller's own arrays, against softmax in float64; refused and cancelled calls."""
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, reference

import tandem

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
QUERIES, KEYS = 3, 50


@pytest.fixture(scope="module")
def engine():
    with tandem.Engine(n_threads=2) as made:
        yield made


@pytest.fixture
def qkv():
    random = np.random.default_rng(5)
    return [random.standard_normal((n, heads, DIM)).astype(np.float32)
            for n, heads in ((QUERIES, Q_HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))]


def test_every_query_sees_every_key(engine, qkv):
    o, lse = tandem.attend_tensors(engine, *qkv, lse=True)
    expected, expected_lse = reference(*qkv, visible=np.ones((QUERIES, KEYS), bool))
    np.testing.assert_allclose(o, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    assert o.dtype == lse.dtype == np.float32


def test_causal_window_and_scale(engine, qkv):
    np.testing.assert_allclose(tandem.attend_tensors(engine, *qkv, causal=True), reference(*qkv)[0], **CLOSE)
    near = np.arange(KEYS)[None] - np.arange(QUERIES)[:, None] - (KEYS - QUERIES)
    o = tandem.attend_tensors(engine, *qkv, causal=True, sliding_window_tokens=7)
    np.testing.assert_allclose(o, reference(*qkv, visible=(near <= 0) & (near > -7))[0], **CLOSE)
    o = tandem.attend_tensors(engine, *qkv, causal=True, sm_scale=0.25)
    np.testing.assert_allclose(o, reference(qkv[0] * (0.25 * np.sqrt(DIM)), *qkv[1:])[0], **CLOSE)


def test_mask_hides_keys(engine, qkv):
    visible = np.random.default_rng(6).random((QUERIES, KEYS)) < 0.4
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    for given in (mask, mask.astype(np.float16)):
        np.testing.assert_allclose(tandem.attend_tensors(engine, *qkv, mask=given), reference(*qkv, visible=visible)[0], **CLOSE)


def test_padded_arrays_in_head_major_order(engine, qkv):
    """[batch, heads, tokens, dim] as in PyTorch, transposed, with lengths. Rows after the lengths stay as they are."""
    arrays = [np.ascontiguousarray(np.stack([each, 2 * each]).transpose(0, 2, 1, 3)) for each in qkv]
    q, k, v = (each.transpose(0, 2, 1, 3) for each in arrays)
    out = np.full((2, Q_HEADS, QUERIES, DIM), 7, np.float32).transpose(0, 2, 1, 3)
    lse = np.full((2, QUERIES, Q_HEADS), 7, np.float32)
    got = tandem.attend_tensors(engine, q, k, v, causal=True, q_lens=[3, 1], kv_lens=[KEYS, 20], out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    np.testing.assert_allclose(out[0], reference(*qkv)[0], **CLOSE)
    np.testing.assert_allclose(out[1, :1], reference(q[1, :1], k[1, :20], v[1, :20])[0], **CLOSE)
    assert (out[1, 1:] == 7).all() and (lse[1, 1:] == 7).all()


def test_packed_sequences(engine, qkv):
    q, k, v = qkv
    o = tandem.attend_tensors(engine, q, k, v, causal=True, q_lens=(1, 2), kv_lens=np.array([20, 30]))
    np.testing.assert_allclose(o[:1], reference(q[:1], k[:20], v[:20])[0], **CLOSE)
    np.testing.assert_allclose(o[1:], reference(q[1:], k[20:], v[20:])[0], **CLOSE)


@pytest.mark.parametrize("dtype, codes", [("q8_0", 32), ("q4_0", 16)])
def test_blocks(engine, qkv, dtype, codes):
    """Blocks with a scale of 1 and codes of 1: every V is 1, so the output is 1 for any weights."""
    one = np.array([1], np.float16).view(np.uint8).tolist()
    block = np.array(one + [1 if dtype == "q8_0" else 0x99] * codes, np.uint8)
    rows = np.tile(block, DIM // 32)
    v = np.broadcast_to(rows, (KEYS, KV_HEADS, rows.size)).copy()
    o = tandem.attend_tensors(engine, qkv[0], tandem.Tensor(v, dtype), tandem.Tensor(v, dtype))
    np.testing.assert_allclose(o, 1, rtol=1e-5)


def test_sinks_and_v_inside_k(engine, qkv):
    q, k, _ = qkv
    out = np.full_like(q, np.nan)
    tandem.attend_tensors(engine, q, k, causal=True, out=out)
    np.testing.assert_allclose(out, reference(q, k, k)[0], **CLOSE)
    plain, lse = tandem.attend_tensors(engine, *qkv, lse=True)
    with_sinks = tandem.attend_tensors(engine, *qkv, sinks=[0.5] * Q_HEADS)
    np.testing.assert_allclose(with_sinks, plain / (1 + np.exp(0.5 - lse))[..., None], **CLOSE)


def test_half_precision_gives_its_own_type(engine, qkv):
    o = tandem.attend_tensors(engine, *(each.astype(np.float16) for each in qkv), causal=True)
    assert o.dtype == np.float16
    np.testing.assert_allclose(o, reference(*qkv)[0], atol=4e-3)


def test_torch_tensors(engine, qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(each).transpose(0, 1).contiguous().unsqueeze(0).transpose(1, 2) for each in qkv)
    out = torch.empty_like(q)
    tandem.attend_tensors(engine, q, k, v, causal=True, out=out)
    np.testing.assert_allclose(out[0].numpy(), reference(*qkv)[0], **CLOSE)


@pytest.mark.parametrize("change, field, message", [
    ({"q_lens": []}, "n_sequences", "= 0 with packed"),
    ({"q_lens": [1, 2]}, "kv_lens", "NULL with n_sequences = 2"),
    ({"q_lens": [1, 2], "kv_lens": [KEYS]}, "kv_lens", "has 1 numbers for 2 sequences"),
    ({"kv_lens": [-1]}, "kv_lens[0]", "-1 is not from 0"),
    ({"kv_lens": [1 << 63]}, "kv_lens[0]", "does not fit 64 bits"),
    ({"sinks": [0.0]}, "sinks", "has 1 numbers for 4"),
    ({"alibi_slopes": [np.nan] * Q_HEADS}, "alibi_slopes[0]", "not finite"),
    ({"sm_scale": "x"}, "sm_scale", "not a number"),
    ({"sliding_window_tokens": 5}, "sliding_window_tokens", "without TANDEM_TENSORS_CAUSAL"),
    ({"mask": np.zeros((QUERIES, KEYS), np.float32), "causal": True}, "mask", "with TANDEM_TENSORS_CAUSAL"),
    ({"mask": np.zeros((QUERIES, KEYS - 1), np.float32)}, "mask.shape[1]", "49 is less than the 50"),
    ({"mask": np.zeros((QUERIES, KEYS), bool)}, "mask.dtype", "|b1"),
    ({"out": None, "v": None}, "out", "is None without v"),
    ({"cancel": True}, "cancel", "CancelFlag"),
    ({"progress": 3}, "progress", "3"),
])
def test_refusals(engine, qkv, change, field, message):
    q, k, v = qkv
    arguments = {"v": v, "out": np.full_like(q, 7), "lse": np.full((QUERIES, Q_HEADS), 7, np.float32), **change}
    with pytest.raises(tandem.InvalidArgumentError) as caught:
        tandem.attend_tensors(engine, q, k, **arguments)
    assert caught.value.field == field and message in str(caught.value), caught.value
    assert (arguments["lse"] == 7).all() and (arguments["out"] is None or (arguments["out"] == 7).all())


def test_other_refusals(engine, qkv):
    q, k, v = qkv
    with pytest.raises(tandem.InvalidArgumentError, match="q.n_dims = 2"):
        tandem.attend_tensors(engine, q[0], k, v)
    with pytest.raises(tandem.InvalidArgumentError, match="o.data.*overlaps q"):
        tandem.attend_tensors(engine, q, k, v, out=q)
    with pytest.raises(tandem.InvalidArgumentError, match="engine"):
        tandem.attend_tensors(None, q, k, v)
    closed = tandem.Engine(n_threads=1)
    closed.close()
    with pytest.raises(tandem.InvalidHandleError):
        tandem.attend_tensors(closed, q, k, v)


def test_cancel_and_progress(engine, qkv):
    flag, said = tandem.CancelFlag(), []
    flag.set()
    with pytest.raises(tandem.CancelledError):
        tandem.attend_tensors(engine, *qkv, cancel=flag)
    flag.clear()
    tandem.attend_tensors(engine, *qkv, cancel=flag, progress=lambda done, total: said.append((done, total)))
    assert said and said[-1][0] == said[-1][1]

    def stop(done, total):
        raise KeyError("as the test wants")
    with pytest.raises(KeyError, match="as the test wants"):
        tandem.attend_tensors(engine, *qkv, progress=stop)

    def again(done, total):
        tandem.attend_tensors(engine, *qkv)
    with pytest.raises(tandem.InvalidStateError, match="progress"):
        tandem.attend_tensors(engine, *qkv, progress=again)
