# SPDX-License-Identifier: MIT
"""Streams passed by DLPack and __cuda_array_interface__, with objects that look like CuPy's and PyTorch's.

Who waits: an object with __dlpack__ makes the given stream wait for the object's work. An object with only
__cuda_array_interface__ names a stream, for which the caller would have to wait. That takes the CUDA runtime, so such a call
has to be on that stream.
"""
import ctypes

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, reference
from py_hidden_test import OnDevice, controls, device_engine  # noqa: F401

import tandem
from tandem._dlpack import _DlTensor, _Versioned

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
CUDA, CUDA_HOST, CUDA_MANAGED = 2, 3, 13


class Exporter:
    """Acts like a GPU package's array, over any memory. `ready` is its producer's work, done when a stream is made to wait."""

    __module__ = "cupy"  # this package's arrays may be written

    def __init__(self, address, shape, device_type=CUDA, versioned=True, ready=None, code=2):
        self.streams, self.versioned, self.ready, self.device_type, self.shape = [], versioned, ready, device_type, shape
        self.dims = (ctypes.c_int64 * len(shape))(*shape)
        tensor = _DlTensor(data=address, device_type=device_type, ndim=len(shape), code=code, bits=32, lanes=1, shape=self.dims)
        self.managed = _Versioned(major=1, tensor=tensor) if versioned else tensor

    def __dlpack__(self, **arguments):
        if "max_version" in arguments and not self.versioned:
            raise TypeError("max_version is unknown")
        self.streams.append(arguments.get("stream", "none given"))
        if self.ready is not None:
            self.ready()
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned" if self.versioned else b"dltensor", None)

    def __dlpack_device__(self):
        return self.device_type, 0

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("__dlpack__ comes first")


def exporters(n, **options):
    """Objects over memory that no call reads, because an engine without a device refuses it."""
    arrays = [np.zeros((n, heads, DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)]
    made = [Exporter(array.ctypes.data, array.shape, **options) for array in arrays]
    return made, arrays


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("device_type", [CUDA, CUDA_MANAGED])
@pytest.mark.parametrize("stream, seen", [(None, 1), (0, 1), (1, 1), (2, 2), (0x7FFF12345678, 0x7FFF12345678),
                                          (np.uint64(77), 77)])
def test_each_argument_is_asked_once_for_the_stream_of_the_call(world, stream, seen, device_type, versioned):
    (q, k, v, o), _ = exporters(3, device_type=device_type, versioned=versioned)
    with pytest.raises(tandem.UnsupportedError) as raised:
        world.session.attend(world.sequence, q, k, v, out=o, stream=stream)
    assert raised.value.field == "q.device_type"
    assert [each.streams for each in (q, k, v, o)] == [[seen]] * 4


def test_pinned_memory_is_the_hosts(world):
    """The exporter has waited, so no stream is named."""
    (q, k, v, o), arrays = exporters(3, device_type=CUDA_HOST)
    for array, source in zip(arrays, world.qkv(3)):
        array[...] = source
    assert world.session.attend(world.sequence, q, k, v, out=o) is o
    np.testing.assert_allclose(arrays[3], reference(*arrays[:3])[0], rtol=1e-5, atol=1e-5)
    assert q.streams == ["none given"]


def test_what_a_producer_refuses_is_seen(world):
    (q, k, v, o), _ = exporters(3)
    q.ready = lambda: (_ for _ in ()).throw(BufferError("another device"))
    with pytest.raises(tandem.InvalidArgumentError, match="is not exported by its owner: another device"):
        world.session.attend(world.sequence, q, k, v, out=o)
    q.ready = lambda: (_ for _ in ()).throw(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        world.session.attend(world.sequence, q, k, v, out=o)


@pytest.mark.parametrize("stream", ["x", 1.5, -1, 1 << 64])
def test_streams_that_are_none(world, stream):
    (q, k, v, o), _ = exporters(3)
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        world.session.attend(world.sequence, q, k, v, out=o, stream=stream)
    assert raised.value.field in ("stream", "q.stream")


def test_a_view_is_of_the_stream_that_it_was_made_for(world):
    """Only that stream has waited for its producer."""
    (q, k, v, o), _ = exporters(3)
    for made, called, fits in ((None, None, True), (None, 0, True), (1, None, True), (0x55, 0x55, True), (0x55, None, False),
                               (None, 0x55, False), (0x55, 0x66, False)):
        view = tandem.Tensor(q, stream=made)
        with pytest.raises(tandem.UnsupportedError) as raised:
            world.session.attend(world.sequence, view, k, v, out=o, stream=called)
        assert raised.value.field == ("q.device_type" if fits else "q.stream"), raised.value
    assert q.streams == [made or 1 for made in (None, None, 1, 0x55, 0x55, None, 0x55)]
    host = tandem.Tensor(world.qkv(3)[0], stream=0x55)  # nothing is waited for
    assert np.isfinite(world.session.attend(world.sequence, host, *world.qkv(3)[1:])).all()


def dlpack_of(array, ready):
    return Exporter(array.block.data, array.shape, ready=ready)


def interface_of(array, _):
    return array  # OnDevice's arrays have a __cuda_array_interface__ that names the stream of their block


@pytest.mark.parametrize("export", [dlpack_of, interface_of])
@pytest.mark.parametrize("is_default", [True, False])
def test_attends_what_is_ready_on_the_stream(controls, export, is_default):  # noqa: F811
    """On a device in host memory: q is NaN until its producer is asked to let the stream wait."""
    engine = device_engine()
    stream = None if is_default else controls.create_stream()
    cache = tandem.Cache(engine, tandem.Model(tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)), k_type="f32")
    session, random = tandem.Session(cache, window_tokens=64), np.random.default_rng(8)
    q, k, v = (random.standard_normal((5, heads, DIM)).astype(np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    late = export is dlpack_of
    memory = OnDevice(engine, np.full_like(q, np.nan) if late else q, k, v, np.full_like(q, np.nan), stream=stream)
    engine.drain()

    def write():
        ctypes.memmove(memory.arrays[0].block.data, q.ctypes.data, q.nbytes)

    given = [export(array, write if i == 0 else None) for i, array in enumerate(memory.arrays)]
    sequence = cache.create_sequence()
    if not is_default and not late:
        with pytest.raises(tandem.UnsupportedError, match="the array is used on stream"):
            session.attend(sequence, *given[:3], out=given[3])
    assert session.attend(sequence, *given[:3], out=given[3], stream=stream) is given[3]
    np.testing.assert_allclose(memory.arrays[3].read(), reference(q, k, v)[0], rtol=1e-4, atol=1e-4)
    if late:
        assert [each.streams for each in given] == [[stream or 1]] * 4
    assert session.stats().n_device_attends == 1 and controls.fault() == b""
    for array in memory.arrays:
        array.block.done()
    for owner in (session, sequence, cache, memory.weights, engine):
        owner.close()
    assert stream is None or controls.destroy_stream(stream)


def test_indices_are_read_on_the_stream_of_the_call(controls):  # noqa: F811
    """The indices name no key until their producer is asked to let the stream wait."""
    engine, stream, random = device_engine(), controls.create_stream(), np.random.default_rng(9)
    cache = tandem.Cache(engine, tandem.Model(tandem.Layer(n_q_heads=Q_HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM)), k_type="f32")
    session, sequence = tandem.Session(cache, window_tokens=64), cache.create_sequence()
    q, k, v = (random.standard_normal((n, heads, DIM)).astype(np.float32)
               for n, heads in ((1, Q_HEADS), (300, KV_HEADS), (300, KV_HEADS)))
    sequence.append(k, v)
    idx = np.array([[[3, 40, 290]] * KV_HEADS], np.int32)  # outside the window and in it
    memory = OnDevice(engine, q, np.full_like(q, np.nan), np.full_like(idx, -1), stream=stream)
    engine.drain()
    block = memory.arrays[2].block
    given = Exporter(block.data, idx.shape, ready=lambda: ctypes.memmove(block.data, idx.ctypes.data, idx.nbytes), code=0)
    session.attend(sequence, memory.arrays[0], out=memory.arrays[1], stream=stream, selection=tandem.Selection(given))
    np.testing.assert_allclose(memory.arrays[1].read(), reference(q, k[idx[0, 0]], v[idx[0, 0]])[0], rtol=1e-4, atol=1e-4)
    assert given.streams == [stream] and session.stats().n_device_attends == 1 and controls.fault() == b""
    for array in memory.arrays:
        array.block.done()
    for owner in (session, sequence, cache, memory.weights, engine):
        owner.close()
    assert controls.destroy_stream(stream)
