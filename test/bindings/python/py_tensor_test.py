# SPDX-License-Identifier: MIT
"""Arrays as tensors: arrays that are used without a copy, and arrays that are refused before a call."""
import ctypes
import weakref

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, World, reference

import tandem
from tandem import _abi, _tensor

ml_dtypes = None
try:
    import ml_dtypes
except ImportError:
    pass
try:
    import torch
except ImportError:
    torch = None
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def struct_of(view):
    return _abi.TensorStruct.from_buffer_copy(view._packed)


class Interface:
    """An object that has only __array_interface__ or __cuda_array_interface__."""

    def __init__(self, array, name="__array_interface__", **changes):
        self.held = array
        setattr(self, name, {**array.__array_interface__, **changes})


class Dlpack:
    """An object that has only __dlpack__, of the oldest form if `old`."""

    def __init__(self, array, old=False, device=None):
        self.array, self.old, self.device, self.asked = array, old, device, []

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if self.old and "max_version" in arguments:
            raise TypeError("max_version")
        return self.array.__dlpack__(**{} if self.old else arguments)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


class OfCupy(Dlpack):
    """An object of a package whose arrays may be written."""

    __module__ = "cupy.of_a_test"


def attended(world, wrap, out=None):
    """Attends the same numbers in arrays made by `wrap`, and compares the output with the reference."""
    q, k, v = world.qkv(5)
    sequence = world.cache.create_sequence()
    o = world.session.attend(sequence, wrap(q), wrap(k), wrap(v), out=out)
    np.testing.assert_allclose(np.asarray(o), reference(q, k, v)[0], **CLOSE)
    stored_k, stored_v = sequence.read()
    assert np.array_equal(stored_k, k) and np.array_equal(stored_v, v)


def spread(array):
    """The same numbers with gaps between tokens and heads. The gaps are NaN."""
    wide = np.full((2 * array.shape[0], 3 * array.shape[1], array.shape[2] + 8), np.nan, array.dtype)
    view = wide[::2, ::3, 4:-4]
    view[...] = array
    return view


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("wrap", [lambda a: a, spread, read_only, tandem.Tensor, Interface, Dlpack,
                                  lambda a: Dlpack(a, old=True), lambda a: tandem.Tensor(spread(a)),
                                  lambda a: Dlpack(spread(a)), lambda a: Interface(spread(a)),
                                  lambda a: a.view(np.recarray)],
                         ids=["array", "strided", "read-only", "Tensor", "interface", "dlpack", "old dlpack", "Tensor strided",
                              "dlpack strided", "interface strided", "subclass"])
def test_taken(world, wrap):
    attended(world, wrap)
    attended(world, wrap)  # the second time from what the first call has stored


@pytest.mark.parametrize("wrap", [lambda a: a, tandem.Tensor, Interface, OfCupy, lambda a: OfCupy(a, old=True)])
def test_outputs_are_written_in_place(world, wrap):
    for whole in (np.full((5, Q_HEADS, DIM), np.nan, np.float32), spread(np.zeros((5, Q_HEADS, DIM), np.float32))):
        out = wrap(whole)
        q, k, v = world.qkv(5)
        assert world.session.attend(world.cache.create_sequence(), q, k, v, out=out) is out
        np.testing.assert_allclose(whole, reference(q, k, v)[0], **CLOSE)
        if whole.base is not None:
            gaps = whole.base.copy()
            gaps[::2, ::3, 4:-4] = np.nan
            assert np.isnan(gaps).all()


@pytest.mark.parametrize("wrap", [read_only, lambda a: tandem.Tensor(read_only(a)), lambda a: Interface(read_only(a)),
                                  lambda a: OfCupy(read_only(a)), Dlpack, lambda a: Dlpack(a, old=True),
                                  lambda a: tandem.Tensor(Dlpack(a))])
def test_outputs_must_be_writable(world, wrap):
    q, k, v = world.qkv(5)
    world.session.attend(world.sequence, q, k, v, out=np.empty_like(q))  # the fast path knows the shape
    for name, shape in (("out", q.shape), ("lse", q.shape[:2])):
        kept = np.zeros(shape, np.float32)
        with pytest.raises(tandem.InvalidArgumentError, match="read-?only") as raised:
            world.session.attend(world.sequence, q, k, v, **{name: wrap(kept)})
        assert raised.value.field == {"out": "o"}.get(name, name) and not kept.any()
    with pytest.raises(tandem.InvalidArgumentError, match="read-?only"):
        world.sequence.read(k=wrap(k))
    assert world.sequence.length() == 5


def f4(shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("q, field", [
    (f4((5, Q_HEADS, DIM)).astype(">f4"), "q.dtype"), (np.zeros((5, Q_HEADS, DIM)), "q.dtype"),
    (np.zeros((5, Q_HEADS, DIM), np.uint16), "q.dtype"), (f4((5, Q_HEADS)), "q.n_dims"), (f4(5), "q.n_dims"),
    (f4(()), "q.n_dims"), (f4((1, 1, 5, Q_HEADS, DIM)), "q.n_dims"), (f4((5, DIM, Q_HEADS)).transpose(0, 2, 1), None),
    (f4((Q_HEADS, 5, DIM)).transpose(1, 0, 2), None), (f4((5, Q_HEADS, 2 * DIM))[:, :, ::2], None),
    (np.asfortranarray(f4((5, Q_HEADS, DIM))), None), (f4((5, Q_HEADS, DIM))[::-1], "q.strides"),
    (np.broadcast_to(f4((1, Q_HEADS, DIM)), (5, Q_HEADS, DIM)), "q.strides"), (f4((4, Q_HEADS, DIM)), "k.shape[0]"),
    (f4((5, Q_HEADS, DIM - 1)), None), (f4((5, Q_HEADS + 1, DIM)), None), ([[1.0]], "q"), ("text", "q"), (3, "q"),
    (np.frombuffer(b"\0" * (5 * Q_HEADS * DIM * 4 + 1), np.uint8)[1:].view(np.float32).reshape(5, Q_HEADS, DIM), None),
    (np.lib.stride_tricks.as_strided(f4(5 * Q_HEADS * DIM * 2), (5, Q_HEADS, DIM), (1025, 256, 4)), "q.strides"),
])
def test_refused(world, q, field):
    _, k, v = world.qkv(5)
    world.session.attend(world.cache.create_sequence(), *world.qkv(5))
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        world.session.attend(world.sequence, q, k, v, q_lens=[5])
    assert raised.value.field == field or field is None and raised.value.field.startswith("q"), raised.value.message
    assert world.sequence.length() == 0


def test_overlapping_outputs_are_refused(world):
    q, k, v = world.qkv(5)
    with pytest.raises(tandem.InvalidArgumentError, match="overlaps"):
        world.session.attend(world.sequence, q, k, v, out=q)


def bf16_bits(array):
    """Returns the nearest bf16, ties to even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def test_bf16_as_declared_integers(world):
    q, k, v = world.qkv(5)
    bits = [bf16_bits(array) for array in (q, k, v)]
    rounded = [(array.astype(np.uint32) << 16).view(np.float32) for array in bits]
    o = world.session.attend(world.sequence, *(tandem.Tensor(array, "bf16") for array in bits))
    assert o.dtype == np.float32
    np.testing.assert_allclose(o, reference(*rounded)[0], **CLOSE)
    out = tandem.Tensor(np.zeros_like(bits[1]), "bf16")
    world.sequence.read(k=out)
    assert np.array_equal(out.array, bits[1]) and out.dtype == "bf16" and out.device == "host"


@pytest.mark.skipif(ml_dtypes is None, reason="no ml_dtypes")
def test_ml_dtypes(world):
    q, k, v = (array.astype(ml_dtypes.bfloat16) for array in world.qkv(5))
    o = world.session.attend(world.sequence, q, k, v)
    assert o.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(o.astype(np.float32), reference(q, k, v)[0], atol=0.02)
    eight = np.zeros(k.shape, ml_dtypes.float8_e4m3fn)
    world.sequence.read(k=eight)
    assert np.array_equal(eight, k.astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
    swapped = q.astype(q.dtype.newbyteorder(">")) if q.dtype.newbyteorder(">").byteorder == ">" else None
    if swapped is not None:
        with pytest.raises(tandem.InvalidArgumentError):
            tandem.Tensor(swapped)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_of_codes_go_out_and_in(name):
    world = World(k_type=name, k_rotation="none")  # rotated keys are rounded again when they are read
    elements, unit = 32, {"q8_0": 34, "q4_0": 18}[name]
    world.sequence.append(*world.qkv(6)[1:])
    row = DIM // elements * unit
    blocks = [np.zeros((6, KV_HEADS, row + 4 * unit), np.uint8)[:, :, :row] for _ in range(2)]
    views = [tandem.Tensor(array, name) for array in blocks]
    assert views[0].shape == (6, KV_HEADS, DIM)
    world.sequence.read(k=views[0], v=views[1])
    again = world.cache.create_sequence()
    again.append(*views)
    assert again.digest() == world.sequence.digest() and blocks[0].any()
    with pytest.raises(tandem.InvalidArgumentError, match="blocks"):
        tandem.Tensor(np.zeros((6, KV_HEADS, row + 1), np.uint8), name)
    with pytest.raises(tandem.InvalidArgumentError, match="elements"):
        tandem.Tensor(np.zeros((6, KV_HEADS, row + 1), np.uint8)[:, :, :row], name)
    with pytest.raises(tandem.InvalidArgumentError):
        tandem.Tensor(np.zeros((6, KV_HEADS, row), np.float32), name)


def test_dlpack_export_lives_as_long_as_the_view():
    class Exporter:
        """Exports a new array each time. Only the export holds it."""

        def __dlpack__(self, **_):
            made = f4((3, 2, 64))
            self.made = weakref.ref(made)
            return made.__dlpack__()

        def __dlpack_device__(self):
            return 1, 0

    exporter = Exporter()
    view = tandem.Tensor(exporter)
    assert struct_of(view).data == exporter.made().ctypes.data
    del view
    assert exporter.made() is None


def test_dlpack_refuses(world):
    for array in (np.zeros((1, 2, 64)), np.zeros((1, 2, 64), np.int16), f4((1, 1, 1, 1, 1)), f4(())):
        with pytest.raises(tandem.InvalidArgumentError):
            tandem.Tensor(Dlpack(array))
    with pytest.raises(tandem.UnsupportedError):
        tandem.Tensor(Dlpack(f4((1, 2, 64)), device=(10, 0)))  # ROCm
    with pytest.raises(tandem.InvalidArgumentError):
        tandem.Tensor(Dlpack(f4((1, 2, 64)), old=True, device=(2, 0)))  # exports host memory although it names a device


def test_jax_arrays_are_not_written(world):
    """They never change and may share memory, but their exports do not say so."""
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    attended(world, jnp.asarray)
    q, k, v = world.qkv(5)
    out, lse = jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:2], jnp.float32)
    for given in ({"out": out}, {"lse": lse}, {"out": tandem.Tensor(out)}):
        with pytest.raises(tandem.InvalidArgumentError, match="outputs are arrays of NumPy, PyTorch or CuPy"):
            world.session.attend(world.sequence, q, k, v, **given)
    with pytest.raises(tandem.InvalidArgumentError, match="k is an output"):
        world.sequence.read(k=jnp.asarray(k))
    assert not np.asarray(out).any() and not np.asarray(lse).any() and world.sequence.length() == 0


@pytest.mark.skipif(torch is None, reason="no torch")
def test_negative_views_of_torch(world):
    """Their memory has the opposite sign: inputs are copied, outputs are refused."""
    attended(world, lambda a: torch._neg_view(torch.from_numpy(-a)))
    attended(world, lambda a: tandem.Tensor(torch._neg_view(torch.from_numpy(-a))))
    q, k, v = world.qkv(5)
    held = torch.full(q.shape, 7.0)
    with pytest.raises(tandem.InvalidArgumentError, match="negative views"):
        world.session.attend(world.sequence, q, k, v, out=torch._neg_view(held))
    assert bool((held == 7).all()) and world.sequence.length() == 0
    with pytest.raises(tandem.InvalidArgumentError):  # complex numbers, conjugated or not
        tandem.Tensor(torch.zeros((1, 2, 64), dtype=torch.complex64).conj())


@pytest.mark.skipif(torch is None, reason="no torch")
def test_torch(world):
    attended(world, torch.from_numpy)
    out = torch.full((5, Q_HEADS, DIM), float("nan"))
    attended(world, torch.from_numpy, out)
    q, k, v = (torch.from_numpy(array).bfloat16() for array in world.qkv(5))
    out = torch.empty_like(q)
    world.session.attend(world.sequence, q, k, v, out=out)
    np.testing.assert_allclose(out.float().numpy(), reference(*(each.float().numpy() for each in (q, k, v)))[0], atol=0.02)


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("k_type", ["e4m3", "f32"])
def test_eight_bit_floats_of_torch(k_type):
    """Read, written, and attended without a copy. Types of other packages that have the name and are not e4m3 are refused."""
    world = World(k_type=k_type)
    q, k, v = (torch.from_numpy(array) for array in world.qkv(6))
    eight = [array.to(torch.float8_e4m3fn) for array in (k, v)]
    padded = torch.zeros(12, *k.shape[1:]).to(torch.float8_e4m3fn)
    padded[::2] = eight[0]
    world.sequence.append(padded[::2], eight[1])
    for read, array in zip(world.sequence.read(), eight):
        assert np.array_equal(read, array.float().numpy())
    out = torch.zeros(k.shape).to(torch.float8_e4m3fn)
    world.sequence.read(k=out)
    assert torch.equal(out.float(), eight[0].float())
    assert tandem.Tensor(eight[0]).dtype == "e4m3" and tandem.Tensor(eight[0]).writable
    o = tandem.attend_tensors(world.engine, q, *eight, causal=True)
    assert np.array_equal(o, tandem.attend_tensors(world.engine, q, *(tandem.Tensor(array.view(torch.uint8).numpy(), "e4m3")
                                                                      for array in eight), causal=True))
    for other in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8):
        with pytest.raises(tandem.InvalidArgumentError, match="not f32, f16, bf16, float8_e4m3fn or int32"):
            tandem.Tensor(k.to(other))


def test_eight_bit_floats_of_jax(world):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    k, v = (jnp.asarray(array).astype(jnp.float8_e4m3fn) for array in world.qkv(6)[1:])
    world.sequence.append(k, v)
    for read, array in zip(world.sequence.read(), (k, v)):
        assert np.array_equal(read, np.asarray(array.astype(jnp.float32)))


def test_wrong_axes_are_named(world):
    """The most frequent wrong shape is [heads, tokens, dim], which other libraries use."""
    q, k, v = world.qkv(6)
    swapped = [np.ascontiguousarray(array.transpose(1, 0, 2)) for array in (q, k, v)]
    for call, axes in ((lambda: world.sequence.append(*swapped[1:]), r"k.shape\[1\] = 6.*\[n_tokens, n_kv_heads, k_head_dim\]"),
                       (lambda: world.session.attend(world.sequence, *swapped), r"q.*the axes are \[n_tokens, n_q_heads, k_head_dim\]"),
                       (lambda: world.session.attend(world.sequence, q[None], k[None], v[None]), r"q.n_dims = 4, must be 3: the axes are"),
                       (lambda: tandem.attend_tensors(world.engine, q, swapped[1][:, :5], v),
                        r"n_q_heads = 4 is not a multiple of n_kv_heads = 5: the axes of q are \[n_tokens, n_q_heads, k_head_dim\]"),
                       (lambda: tandem.attend_tensors(world.engine, q[None], k[None], swapped[2][None]),
                        r"v.shape\[1\] = 2.*the axes are \[n_sequences, n_keys, n_kv_heads, v_head_dim\]")):
        with pytest.raises(tandem.InvalidArgumentError, match=axes):
            call()
    assert world.sequence.length() == 0


class CudaDlpack:
    """Exports a hand-made capsule that claims device memory. The library refuses the device before it reads the memory."""

    __module__ = "cupy"  # this package's arrays may be written

    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    def __init__(self, array, index):
        from tandem._dlpack import _DlTensor
        self.array, self.index, self.streams = array, index, []
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.managed = _DlTensor(data=array.ctypes.data, device_type=2, device_id=index, ndim=array.ndim, code=2, bits=32,
                                 lanes=1, shape=self.shape, byte_offset=128)

    def __dlpack__(self, *, stream):
        self.streams.append(stream)
        return self.new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return 2, self.index


def test_device_tensors_are_passed_on(world):
    """Device, address and stream reach the library. An engine without a device refuses them."""
    array = f4((1, Q_HEADS, DIM))
    given = CudaDlpack(array, 3)
    view = tandem.Tensor(given, stream=0x55)
    struct = struct_of(view)
    assert (struct.device_type, struct.device_index, struct.data) == (_abi.DEVICE_CUDA, 3, array.ctypes.data + 128)
    assert list(struct.shape[:3]) == [1, Q_HEADS, DIM] and list(struct.stride[:3]) == [Q_HEADS * DIM, DIM, 1]
    assert view.device == "cuda"
    for stream, seen in ((None, 1), (0, 1), (0x77, 0x77)):
        with pytest.raises(tandem.UnsupportedError) as raised:
            world.session.attend(world.sequence, given, out=given, stream=stream)
        assert raised.value.field == "q.device_type" and given.streams[-1] == seen
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        world.session.attend(world.sequence, given)
    assert raised.value.field == "out"
    with pytest.raises(tandem.InvalidArgumentError) as raised:  # a stream reaches the library
        world.session.attend(world.sequence, *world.qkv(1), stream=0x77)
    assert raised.value.field == "stream"


def test_cuda_array_interface():
    array = f4((4, 6, DIM))
    make = lambda **changes: Interface(array, "__cuda_array_interface__", version=3, **changes)
    struct = struct_of(tandem.Tensor(make(), device_index=2))
    assert (struct.device_type, struct.device_index, struct.data) == (_abi.DEVICE_CUDA, 2, array.ctypes.data)
    strides = (6 * DIM * 8, DIM * 4, 4)
    struct = struct_of(tandem.Tensor(make(shape=(2, 6, DIM), strides=strides)))
    assert list(struct.stride[:3]) == [12 * DIM, DIM, 1]
    assert not tandem.Tensor(make(data=(array.ctypes.data, True))).writable
    for theirs, ours, taken in ((None, None, True), (1, None, True), (1, 0, True), (9, 9, True), (9, None, False), (2, 9, False)):
        if taken:
            tandem.Tensor(make(stream=theirs), stream=ours)
        else:
            with pytest.raises(tandem.UnsupportedError, match="stream"):
                tandem.Tensor(make(stream=theirs), stream=ours)


def test_packed_bytes_are_the_struct():
    for shape in ((3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 1, 1), (0, 2, 3), (2, 0, 3)):
        struct = struct_of(tandem.Tensor(f4(shape)))
        steps = [int(np.prod([max(each, 1) for each in shape[i + 1:]])) for i in range(len(shape))]
        assert struct.struct_size == ctypes.sizeof(_abi.TensorStruct) == _tensor.TENSOR_BYTES
        assert (struct.dtype, struct.n_dims, struct.reserved, struct.device_index) == (1, len(shape), 0, 0)
        assert list(struct.shape) == [*shape, *[0] * (4 - len(shape))]
        assert list(struct.stride) == [*steps, *[0] * (4 - len(shape))]
