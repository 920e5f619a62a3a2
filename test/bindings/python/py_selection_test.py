# SPDX-License-Identifier: MIT
"""Attention over keys that the caller names, against attention over these keys alone."""
import dataclasses
import gc

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, reference

import tandem

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
N = 300
GROUP = Q_HEADS // KV_HEADS


class Exported:
    """An array that has only __dlpack__."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.fixture
def full(world):
    """A world with N tokens, and q of the last two."""
    world.q, world.k, world.v = world.qkv(N)
    world.sequence.append(world.k, world.v)
    world.q = world.q[:2]
    return world


def attends_named(world, selection, named):
    """Asserts that each query of each KV head gets attention over its named keys. named(query, kv_head): returns these keys."""
    session = tandem.Session(world.cache, window_tokens=64, sink_tokens=16)
    o = session.attend(world.sequence, world.q, selection=selection)
    for i in range(2):
        for head in range(KV_HEADS):
            keys, heads = list(named(i, head)), slice(head * GROUP, (head + 1) * GROUP)
            expected = reference(world.q[i:i + 1], world.k[keys], world.v[keys])[0]
            np.testing.assert_allclose(o[i:i + 1, heads], expected[:, heads], **CLOSE)


IDX = np.array([[[3, 40, 298], [7, 8, -1]], [[5, 6, 299], [0, -1, -1]]], np.int32)


@pytest.mark.parametrize("given", [
    lambda idx: idx,
    lambda idx: np.concatenate([idx, np.full((2, KV_HEADS, 2), 9999, np.int32)], 2)[:, :, :3],
    tandem.Tensor,
    Exported,
], ids=["array", "strided", "tensor", "dlpack"])
def test_named_keys_are_attended_alone(full, given):
    attends_named(full, tandem.Selection(given(IDX)), lambda i, head: IDX[i, head][IDX[i, head] >= 0])


def test_units_order_and_window(full):
    pages = np.array([[[9, 2]], [[2, 9]]], np.int32)  # the same for all KV heads
    selection = tandem.Selection(pages, unit_tokens=32, any_order=True)
    attends_named(full, selection, lambda i, _: [*range(64, 96), *range(288, 299 + i)])  # no key after the query's own token
    selection = dataclasses.replace(selection, plus_window=True)
    attends_named(full, selection, lambda i, _: [*range(16), *range(64, 96), *range(235 + i, 299 + i)])


def test_a_query_without_named_keys_gives_nothing(full):
    lse = np.full((1, Q_HEADS), np.nan, np.float32)
    last = full.q[1:]
    o = full.session.attend(full.sequence, last, lse=lse, selection=tandem.Selection(np.full((1, 1, 1), -1, np.int32)))
    assert not o.any() and np.all(lse == -np.inf)
    o = full.session.attend(full.sequence, last)  # the next call has no selection
    np.testing.assert_allclose(o, reference(last, full.k, full.v)[0], **CLOSE)


def test_appends_and_callbacks_go_with_a_selection(world):
    q, k, v = world.qkv(8)
    heard = []
    idx = np.array([0, 1, 1, 3, 0, 5, 6, 7], np.int32).reshape(8, 1, 1)
    o = world.session.attend(world.sequence, q, k, v, selection=tandem.Selection(idx), progress=lambda *done: heard.append(done))
    for head in range(Q_HEADS):
        np.testing.assert_allclose(o[:, head], v[idx[:, 0, 0], head // GROUP], **CLOSE)  # one key gets all of the attention
    assert world.sequence.length() == 8 and heard


def test_indices_live_as_long_as_the_call(full):
    def selection():
        return tandem.Selection(IDX.copy())

    first = full.session.attend(full.sequence, full.q, selection=selection())
    gc.collect()
    assert np.array_equal(first, full.session.attend(full.sequence, full.q, selection=selection()))


def test_a_selection_is_not_changed():
    selection = tandem.Selection(IDX)
    with pytest.raises(dataclasses.FrozenInstanceError):
        selection.unit_tokens = 2
    assert selection.idx is IDX and selection == selection and selection != tandem.Selection(IDX)


def idx_of(*rows):
    """Returns the indices of one query."""
    return np.array([rows], np.int32)


@pytest.mark.parametrize("selection, field, message", [
    (tandem.Selection(idx_of([0, 1], [2, 300])), "selection.idx", r"selection.idx\[0, 1, 1\] = 300 names no token"),
    (tandem.Selection(idx_of([4, 3])), "selection.idx", r"selection.idx\[0, 0, 1\] = 3 is less"),
    (tandem.Selection(idx_of([4, 2, 4]), any_order=True), "selection.idx", "= 4 stands there twice"),
    (tandem.Selection(idx_of([-1, 3])), "selection.idx", "stands behind a pad of -1"),
    (tandem.Selection(idx_of([0], [1], [2])), "selection.idx.shape[1]", "= 3, must be 1 or n_kv_heads = 2"),
    (tandem.Selection(np.zeros((2, 1, 1), np.int32)), "selection.idx.shape[0]", "2"),
    (tandem.Selection(np.zeros((1, 1), np.int32)), "selection.idx.n_dims", "2"),
    (tandem.Selection(np.zeros((1, 1, 1), np.int64)), "selection.idx.dtype", "<i8"),
    (tandem.Selection(Exported(np.zeros((1, 1, 1), np.int64))), "selection.idx.dtype", r"\(0, 64, 1\)"),
    (tandem.Selection(np.zeros((1, 1, 1), np.float32)), "selection.idx.dtype", "must be TANDEM_I32"),
    (tandem.Selection(np.zeros((1, 1, 4), np.int32)[:, :, ::2]), "selection.idx.stride[2]", "2"),
    (tandem.Selection([[[0]]]), "selection.idx", "is a list"),
    (tandem.Selection(None), "selection.idx", "is a NoneType"),
    (tandem.Selection(idx_of([0]), unit_tokens=3), "selection.unit_tokens", "= 3 is no power of two"),
    (tandem.Selection(idx_of([0]), unit_tokens=512), "selection.unit_tokens", "512"),
    (tandem.Selection(idx_of([0]), unit_tokens=1 << 64), "selection.unit_tokens", "18446744073709551616"),
    (tandem.Selection(idx_of([0]), unit_tokens="64"), "selection.unit_tokens", "64"),
    (idx_of([0]), "selection", "ndarray"),
])
def test_refusals(full, selection, field, message):
    out = np.full((1, Q_HEADS, DIM), np.nan, np.float32)
    with pytest.raises(tandem.InvalidArgumentError, match=message) as caught:
        full.session.attend(full.sequence, full.q[1:], out=out, selection=selection)
    assert caught.value.field == field and np.isnan(out).all()


def test_other_policies_take_none(full):
    session = tandem.Session(full.cache, policy="hgca")
    with pytest.raises(tandem.UnsupportedError, match="hgca") as caught:
        session.attend(full.sequence, full.q[1:], selection=tandem.Selection(idx_of([0])))
    assert caught.value.field == "selection"


def test_indices_are_no_queries(full):
    assert repr(tandem.Tensor(IDX)) == "<tandem.Tensor i32 [2, 2, 3] host>"
    with pytest.raises(tandem.InvalidArgumentError, match="for the indices of a selection alone") as caught:
        full.session.attend(full.sequence, np.zeros((1, Q_HEADS, DIM), np.int32))
    assert caught.value.field == "q.dtype"
