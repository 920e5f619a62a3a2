# SPDX-License-Identifier: MIT
"""Hidden states, offloaded weights and errors of devices, on a device module that uses host memory.

The module is libtandem-standin.so of the library's tests. $TANDEM_TEST_MODULE has its path. Without it, tests that need it
are skipped.
"""
import ctypes
import os
import threading
import time

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, reference

import tandem
from tandem import _weights

MODULE = os.environ.get("TANDEM_TEST_MODULE")
HIDDEN, WINDOW = 64, 64
CREATE_EVENT = 16


class Controls(ctypes.Structure):
    """A test's controls of the device: the first members of the module's table."""

    _fields_ = [("reset", ctypes.CFUNCTYPE(None)), ("set_delay", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
                ("lose_device", ctypes.CFUNCTYPE(None)),
                ("fail_call", ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32)),
                ("fault", ctypes.CFUNCTYPE(ctypes.c_char_p)), ("create_stream", ctypes.CFUNCTYPE(ctypes.c_void_p)),
                ("destroy_stream", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p))]


@pytest.fixture
def controls():
    if not MODULE:
        pytest.skip("TANDEM_TEST_MODULE is not set")
    find = ctypes.CDLL(MODULE).stand_in_controls
    find.restype = ctypes.POINTER(Controls)
    yield find().contents
    find().contents.reset()


def device_engine():
    return tandem.Engine(n_threads=2, pin_threads=0, backend="standin", backend_path=MODULE)


def short(random, shape, most=1.0):
    """Returns numbers that bf16 can represent, and their bits."""
    numbers = (random.uniform(-most, most, shape).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return numbers, tandem.Tensor((numbers.view(np.uint32) >> 16).astype(np.uint16), "bf16")


class Projected:
    """A layer whose keys and values are made from hidden states."""

    def __init__(self, order="out_in", **changes):
        random = np.random.default_rng(3)
        shape = (KV_HEADS * DIM, HIDDEN) if order == "out_in" else (HIDDEN, KV_HEADS * DIM)
        (self.w_k, w_k), (self.w_v, w_v) = short(random, shape, 0.5), short(random, shape, 0.5)
        if order == "in_out":
            self.w_k, self.w_v = self.w_k.T, self.w_v.T
        self.b_k = random.standard_normal(KV_HEADS * DIM).astype(np.float32)
        arguments = {"hidden_dim": HIDDEN, "w_k": w_k, "w_v": w_v, "w_order": order, "b_k": self.b_k}
        self.layer = tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM,
                                  projection=tandem.Projection(**{**arguments, **changes}))

    def of(self, x):
        x = x.astype(np.float64)
        return [(x @ w.T.astype(np.float64) + bias).astype(np.float32).reshape(-1, KV_HEADS, DIM)
                for w, bias in ((self.w_k, self.b_k), (self.w_v, 0.0))]

    def cache(self, engine):
        return tandem.Cache(engine, tandem.Model(self.layer), k_type="f32", x_type="bf16")


def test_hidden_states_stay_with_their_tokens():
    projected, random = Projected(), np.random.default_rng(4)
    cache = projected.cache(tandem.Engine(n_threads=1))
    sequence, session = cache.create_sequence(), tandem.Session(cache)
    x = short(random, (11, HIDDEN))[0]
    k, v = projected.of(x)
    q = random.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
    sequence.append(k[:10], v[:10], x=x[:10])
    for call in (lambda: session.attend(sequence, q, k[10:], v[10:]), lambda: sequence.append(k, v)):
        with pytest.raises(tandem.InvalidArgumentError, match="x = NULL"):
            call()
    o = session.attend(sequence, q, k[10:], v[10:], x=x[10:])
    assert np.allclose(o, reference(q, k, v)[0], atol=1e-5)
    assert np.array_equal(sequence.read_x(), x) and np.array_equal(sequence.read_x(3, 5), x[3:8])
    given = np.full((4, HIDDEN), np.nan, np.float16)
    assert sequence.read_x(7, x=given) is given and np.array_equal(given, x[7:].astype(np.float16))
    for arguments, field in (((8, 4), ""), ((12,), "first"), ((0, 12), "n_tokens"), ((0, -1), "n_tokens")):
        with pytest.raises(tandem.InvalidArgumentError) as raised:
            sequence.read_x(*arguments)
        assert not field or raised.value.field == field
    assert sequence.length() == 11
    plain = tandem.Cache(tandem.Engine(n_threads=1), tandem.Model(projected.layer)).create_sequence()
    with pytest.raises(tandem.InvalidArgumentError, match="x_type = 0"):
        plain.append(k, v, x=x)


class AtZero:
    """Half-precision numbers in device memory without an address."""

    __cuda_array_interface__ = {"shape": (KV_HEADS * DIM, HIDDEN), "typestr": "<f2", "data": (0, False), "strides": None, "version": 3}


@pytest.mark.parametrize("changes, kind, field, said", [
    ({"hidden_dim": 72}, tandem.InvalidArgumentError, "projection.w_k", "[128, 64], must be [128, 72]"),
    ({"w_order": "in_out"}, tandem.InvalidArgumentError, "projection.w_k", "must be [64, 128]"),
    ({"w_order": "sideways"}, tandem.InvalidArgumentError, "projection.w_order", "sideways"),
    ({"w_v": np.zeros((128, 64), np.float16)}, tandem.InvalidArgumentError, "projection.w_v", "is f16 on host"),
    ({"w_k": np.zeros((256, 64), np.float16)[::2]}, tandem.InvalidArgumentError, "projection.w_k", "contiguous"),
    ({"w_k": None}, tandem.InvalidArgumentError, "projection.w_k", "= None, but projection.w_v is given"),
    ({"w_v": None}, tandem.InvalidArgumentError, "projection.w_v", "= None, but projection.w_k is given"),
    ({"w_k": None, "w_v": None}, tandem.InvalidArgumentError, "projection.w_type", "= None"),
    ({"w_k": None, "w_v": None, "w_type": "f64"}, tandem.InvalidArgumentError, "projection.w_type", "f64"),
    ({"w_k": None, "w_v": None, "w_type": "f32"}, tandem.UnsupportedError, "layers[0].projection.w_type", "f32"),
    ({"w_type": "f16"}, tandem.InvalidArgumentError, "projection.w_type", "= 'f16', but projection.w_k is bf16"),
    ({"w_k": AtZero(), "w_v": AtZero()}, tandem.InvalidArgumentError, "projection.w_k", "address 0"),
    ({"b_v": [1.0]}, tandem.InvalidArgumentError, "projection.b_v", "must be [128]"),
    ({"norm_weight": np.ones(63)}, tandem.InvalidArgumentError, "projection.norm_weight", "must be [64]"),
    ({"norm": "least"}, tandem.InvalidArgumentError, "projection.norm", "least"),
    ({"norm_eps": float("nan")}, tandem.InvalidArgumentError, "layers[0].projection.norm_eps", "nan"),
    ({"norm": "rms", "norm_bias": np.ones(64)}, tandem.InvalidArgumentError, "layers[0].projection.norm_bias", "TANDEM_NORM_LAYER"),
    ({"w_k": np.zeros((128, 64), np.float32), "w_v": np.zeros((128, 64), np.float32)}, tandem.UnsupportedError,
     "layers[0].projection.w_type", "f32"),
])
def test_projections_that_are_refused(changes, kind, field, said):
    with pytest.raises(kind) as raised:
        tandem.Model(Projected(**changes).layer if "w_order" not in changes else tandem.Layer(
            n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM,
            projection=tandem.Projection(**{**vars(Projected().layer.projection), **changes})))
    assert raised.value.field == field and said in raised.value.message, raised.value


def test_a_projection_is_one():
    with pytest.raises(tandem.InvalidArgumentError, match="is a dict"):
        tandem.Model(tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64, projection={"hidden_dim": 64}))
    with pytest.raises(tandem.InvalidArgumentError, match="no layer has a projection"):
        tandem.Cache(tandem.Engine(n_threads=1), tandem.Model(tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64)), x_type="bf16")


class OnDevice:
    """Device memory with these contents, in resident blocks, as arrays with an interface."""

    def __init__(self, engine, *arrays, stream=None):
        self.weights = tandem.Weights(engine, arrays, resident_bytes=1 << 30)
        assert self.weights.stats().n_resident == len(arrays)
        self.arrays = [self.Array(self.weights.use(i, stream), array) for i, array in enumerate(arrays)]

    class Array:
        def __init__(self, block, like):
            self.block, self.shape = block, like.shape
            self.__cuda_array_interface__ = {**block.__cuda_array_interface__, "shape": like.shape,
                                             "typestr": like.dtype.str}

        def read(self):
            """Returns the values once none of them is NaN. The stand-in's memory is host memory."""
            values = np.frombuffer((ctypes.c_char * self.block.n_bytes).from_address(self.block.data), np.float32)
            end = time.monotonic() + 20
            while np.isnan(values).any() and time.monotonic() < end:
                time.sleep(0.001)
            return values.reshape(self.shape).copy()


class Rebuilt:
    """A sequence whose keys outside the window are rebuilt from hidden states. The store has NaN in their place, which is
    not attended."""

    def __init__(self, engine, projected):
        random = np.random.default_rng(4)
        self.cache = projected.cache(engine)
        self.sequence = self.cache.create_sequence()
        n = 301
        x = short(random, (n, HIDDEN))[0]
        k, v = projected.of(x)
        stored = [k[:-1].copy(), v[:-1].copy()]
        for array in stored:
            array[:n - 1 - WINDOW - 8] = np.nan
        self.sequence.append(*stored, x=x[:-1])
        self.session = tandem.Session(self.cache, window_tokens=WINDOW, route="recompute")
        q = random.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
        self.memory = OnDevice(engine, q, k[-1:], v[-1:], x[-1:], np.full_like(q, np.nan))
        self.expected = reference(q, k, v)[0]

    def attend(self):
        q, k, v, x, o = self.memory.arrays
        assert self.session.attend(self.sequence, q, k, v, x=x, out=o) is o

    def check(self):
        assert np.allclose(self.memory.arrays[-1].read(), self.expected, atol=1e-4)
        stats = self.session.stats()
        assert stats.streamed_x_bytes > 0 and stats.n_host_parts == 0


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_keys_are_made_of_hidden_states(controls, order):
    engine = device_engine()
    rebuilt = Rebuilt(engine, Projected(order))
    rebuilt.attend()
    rebuilt.check()
    with pytest.raises(tandem.InvalidArgumentError, match="recompute_share"):
        tandem.Session(rebuilt.cache, route="recompute", recompute_share=2.0)
    with pytest.raises(tandem.UnsupportedError, match="has no projection"):
        plain = tandem.Model(tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM))
        tandem.Session(tandem.Cache(engine, plain), route="recompute")


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_keys_are_made_by_offloaded_weights(controls, order):
    """The matrices cross the bus themselves. The session keeps them."""
    engine, own = device_engine(), Projected(order)
    matrices = [getattr(own.layer.projection, name).array for name in ("w_k", "w_v")]
    weights = tandem.Weights(engine, [*matrices, bytes(1000)])
    rebuilt = Rebuilt(engine, Projected(order, w_k=None, w_v=None, w_type="bf16"))
    with pytest.raises(tandem.InvalidStateError, match="its projection has no w_k and w_v") as raised:
        rebuilt.attend()
    assert raised.value.field == "layer_idx"
    others = tandem.Weights(device_engine(), [*matrices, bytes(1000)])
    owns = tandem.Session(own.cache(engine), route="recompute")
    for session, arguments, kind, field, said in (
            (rebuilt.session, (1, weights, 0, 1), tandem.InvalidArgumentError, "layer_idx", "layer_idx = 1"),
            (rebuilt.session, (0, weights, 3, 1), tandem.InvalidArgumentError, "w_k_block", "w_k_block = 3 is not in [0, 2]"),
            (rebuilt.session, (0, weights, 0, 2), tandem.InvalidArgumentError, "w_v_block", "w_v_block = 2 has 1000 bytes"),
            (rebuilt.session, (0, weights, 0, 1.5), tandem.InvalidArgumentError, "w_v_block", "1.5 is not an integer"),
            (rebuilt.session, (0, matrices, 0, 1), tandem.InvalidArgumentError, "weights", "is a list"),
            (rebuilt.session, (0, others, 0, 1), tandem.InvalidArgumentError, "weights", "another engine"),
            (owns, (0, weights, 0, 1), tandem.UnsupportedError, "layer_idx", "layer_idx = 0")):
        with pytest.raises(kind) as raised:
            session.use_weights(*arguments)
        assert raised.value.field == field and said in raised.value.message, raised.value
    rebuilt.session.use_weights(0, weights, 0, 1)
    weights.close()
    with pytest.raises(tandem.InvalidHandleError):
        rebuilt.session.use_weights(0, weights, 0, 1)
    rebuilt.attend()
    rebuilt.check()


def test_plans_of_calls(controls):
    layer = tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)
    session = tandem.Session(tandem.Cache(device_engine(), tandem.Model(layer)), window_tokens=WINDOW, route="stream")
    plan = session.plan([100_000], [1])
    assert plan.stream_tokens > 0 and plan.host_tokens == 0 and plan.resident_tokens + plan.stream_tokens == 100_000
    assert plan.report()["stream_tokens"] == plan.stream_tokens
    for arguments, field in ((([10, 10], [1]), "q_lens"), (([10], [11]), "q_lens[0]"), (([1.5],), "kv_lens[0]")):
        with pytest.raises(tandem.InvalidArgumentError) as raised:
            session.plan(*arguments)
        assert raised.value.field == field
    with pytest.raises(tandem.UnsupportedError, match="device"):
        tandem.Session(tandem.Cache(tandem.Engine(n_threads=1), tandem.Model(layer))).plan([10])


def test_blocks_are_what_was_given(controls):
    """Resident blocks and blocks that cross the bus, round after round, from a late device, in two threads."""
    blocks = [(np.arange(3000 + 100 * i) % 256 ^ i).astype(np.uint8) for i in range(7)]
    given = [blocks[0], blocks[1].tobytes(), bytearray(blocks[2].tobytes()), memoryview(blocks[3]), *blocks[4:]]
    engine = device_engine()
    weights = tandem.Weights(engine, given, resident_bytes=8000)
    engine.close()  # the weights keep the engine
    controls.set_delay(50_000)
    failed = []

    def go_round(first):
        try:
            for i in range(first, first + 20):
                with weights.use(i % 7) as block:
                    assert block.data % 256 == 0 and block.n_bytes == blocks[i % 7].nbytes
                    assert block.__cuda_array_interface__["data"] == (block.data, False)
                    seen = np.frombuffer((ctypes.c_char * block.n_bytes).from_address(block.data), np.uint8)
                    end = time.monotonic() + 20
                    while not np.array_equal(seen, blocks[i % 7]):
                        assert time.monotonic() < end, i
                        time.sleep(0.0001)
                with pytest.raises(tandem.InvalidArgumentError, match="not in use"):
                    block.__cuda_array_interface__  # noqa: B018
                block.done()
        except BaseException as error:
            failed.append(error)

    go_round(0)
    thread = threading.Thread(target=go_round, args=(3,))
    thread.start()
    thread.join()
    assert not failed, failed
    stats = weights.stats()
    assert (stats.n_blocks, stats.n_uses) == (7, 40) and 0 < stats.n_resident < 7 and stats.resident_bytes <= 8000
    assert stats.n_streamed_uses > 0 and stats.streamed_bytes > 0
    assert list(vars(stats)) == list(_weights.WeightsStats.__dataclass_fields__)
    block = weights.use(0)
    weights.close()
    assert weights.closed and "closed" in repr(weights)
    with pytest.raises(tandem.InvalidHandleError):
        block.done()
    with pytest.raises(tandem.InvalidHandleError):
        weights.use(0)


def test_weights_that_are_refused(controls):
    one, engine = bytes(1000), device_engine()
    with pytest.raises(tandem.UnsupportedError, match="has no device"):
        tandem.Weights(tandem.Engine(n_threads=1), [one])
    for blocks, options, kind, field in (
            ([], {}, tandem.InvalidArgumentError, "n_blocks"), ([one, b""], {}, tandem.InvalidArgumentError, "n_bytes[1]"),
            ([one, 3], {}, tandem.InvalidArgumentError, "blocks[1]"),
            ([np.zeros((4, 4))[:, ::2]], {}, tandem.InvalidArgumentError, "blocks[0]"),
            ([memoryview(one)[::2]], {}, tandem.InvalidArgumentError, "blocks[0]"),
            ([one], {"buffer_bytes": -1}, tandem.InvalidArgumentError, "buffer_bytes"),
            ([one], {"buffer_bytes": 1 << 64}, tandem.InvalidArgumentError, "buffer_bytes"),
            ([one], {"device_cap_bytes": 9}, tandem.CapacityError, "device_cap_bytes")):
        with pytest.raises(kind) as raised:
            tandem.Weights(engine, blocks, **options)
        assert raised.value.field == field, raised.value
    weights = tandem.Weights(engine, [one] * 3, buffer_bytes=2048)
    with pytest.raises(tandem.InvalidArgumentError, match="block_idx = 3"):
        weights.use(3)
    with weights.use(0) as first, weights.use(1):
        with pytest.raises(tandem.InvalidStateError, match=r"in use \(0, 1\)"):
            weights.use(2)
        first.done()
        weights.use(2).done()


def test_what_a_device_answers(controls):
    """The caller gets the device's status, and then the same call succeeds. Some of these statuses come from no other
    source."""
    engine = device_engine()
    for kind in (tandem.IoError, tandem.CorruptError, tandem.SystemError, tandem.InternalError, tandem.OutOfMemoryError):
        status = next(code for code, made in tandem._errors.ERROR_CLASSES.items() if made is kind)
        controls.fail_call(CREATE_EVENT, 1, status)
        with pytest.raises(tandem.TandemError) as raised:
            tandem.Weights(engine, [bytes(1000)])
        assert type(raised.value) is kind and raised.value.status == status and raised.value.underlying == 999
        tandem.Weights(engine, [bytes(1000)]).close()
    weights = tandem.Weights(engine, [bytes(1000)])
    controls.lose_device()
    with pytest.raises(tandem.TandemError) as raised:
        weights.use(0)
    assert type(raised.value) is tandem.DeviceLostError
