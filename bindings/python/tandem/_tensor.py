# SPDX-License-Identifier: MIT
"""Arrays of other packages as tensors of the C ABI, without a copy.

Supported are NumPy arrays and objects with __dlpack__ (PyTorch, JAX, CuPy, ...), __cuda_array_interface__ or
__array_interface__, tried in this order, with their strides. This module checks what the C ABI cannot: strides are whole
elements, bytes are in this machine's order, an output is writable. In a dimension of length 0 or 1 producers may write any
stride, as it is never used. It is replaced by the packed stride.
"""
import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _abi
from ._errors import InvalidArgumentError, NotCopied, UnsupportedError, asked_of_owner, invalid, of_type
from ._options import integer, named

TENSOR_BYTES = ctypes.sizeof(_abi.TensorStruct)
# struct_size, dtype, device_type, device_index, data, n_dims, reserved, shape, stride. Padding bytes become 0.
_PACKERS = [struct.Struct("")] + [struct.Struct(f"=IiiiQii{n}q{8 * (4 - n)}x{n}q{8 * (4 - n)}x") for n in (1, 2, 3, 4)]
_F32, _F16, _BF16 = (_abi.DTYPES[name] for name in ("f32", "f16", "bf16"))
_NATIVE = "<" if np.little_endian else ">"
_TYPESTRS = {f"{_NATIVE}f4": _F32, f"{_NATIVE}f2": _F16, f"{_NATIVE}i4": _abi.I32}
_EXTENSION_NAMES = {"bfloat16": _BF16, "float8_e4m3fn": _abi.DTYPES["e4m3"]}  # of ml_dtypes, whose typestr is opaque
# Elements and bytes of the smallest addressable unit of an element type: one element, or a block of codes.
_UNITS = {_F32: (1, 4), _abi.I32: (1, 4), _F16: (1, 2), _BF16: (1, 2), _abi.DTYPES["e4m3"]: (1, 1), _abi.DTYPES["q8_0"]: (32, 34),
          _abi.DTYPES["q4_0"]: (32, 18), _abi.DTYPES["q4_64"]: (64, 36)}
# Element types that an array of plain integers may be declared to hold.
_DECLARED = {"bf16": ("u2", "i2"), "e4m3": ("u1", "i1"), "q8_0": ("u1", "i1"), "q4_0": ("u1", "i1"), "q4_64": ("u1", "i1")}


class Tensor(NotCopied):
    """A view of an array, which calls take instead of the array itself.

    Useful for element types that NumPy cannot name, and before a loop that passes the same array in every call. It keeps the
    array alive. An array that is resized or rebound to other memory needs a new view.

    Parameters
    ----------
    array : array_like
        NumPy array, or an object with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``. The last
        dimension is contiguous; 1 to 4 dimensions.
    dtype : str, optional
        Element type of plain integers: ``"bf16"`` for 16-bit integers; ``"e4m3"`` for bytes; ``"q8_0"``, ``"q4_0"``,
        ``"q4_64"`` for rows of ggml's blocks as bytes. For blocks, ``shape`` counts elements.
    stream : int, optional
        CUDA stream on which an array in device memory will be used. Only calls on this stream may take the view. None: the
        legacy default stream. An object with ``__dlpack__`` makes the stream wait for its own work once, now.
    device_index : int, optional
        Device of an array that has only ``__cuda_array_interface__``, which does not name it.

    Attributes
    ----------
    shape : tuple of int
        In elements.
    dtype : str
        Element type, e.g. ``"f32"``; ``"i32"`` for the indices of a :class:`Selection`, which no other array may be.
    device : str
        ``"host"`` or ``"cuda"``.
    writable : bool
        Whether the view may be an output. An object with only ``__dlpack__`` may if it is PyTorch's or CuPy's. Other packages,
        such as JAX, export immutable arrays without saying that they are read-only. A tensor that PyTorch holds as the negative
        of its memory is copied, so it may not.
    array : object
        The array that was given.

    Raises
    ------
    InvalidArgumentError
        The element type, byte order, strides or number of dimensions is not supported.
    UnsupportedError
        The memory is neither host nor CUDA memory.
    """

    __slots__ = ("_code", "_device", "_packed", "_owner", "_stream", "array", "shape", "writable")

    array: Any
    shape: tuple[int, ...]
    writable: bool
    _stream: int | None  # the stream that waits for the array's producer; None: no wait is needed

    def __init__(self, array: Any, dtype: str | None = None, *, stream: int | None = None, device_index: int = 0) -> None:
        self.array = array
        if stream is not None:
            integer("stream", stream, 65)
        if not isinstance(array, np.ndarray) and asked_of_owner(hasattr, array, "__dlpack__"):
            if dtype is not None:
                raise invalid("dtype", f"= {dtype!r} goes with NumPy arrays; DLPack names its own")
            from ._dlpack import from_dlpack
            view = from_dlpack(array, stream)
        elif asked_of_owner(hasattr, array, "__cuda_array_interface__"):
            view = _from_cuda_interface(array, dtype, stream, integer("device_index", device_index, 32))
        else:
            view = _from_interface(array, dtype)
        self._take(view)
        if self._device != _abi.DEVICE_HOST:
            self._stream = stream or _DEFAULT_STREAM

    def _take(self, view: "View") -> None:
        self._packed, self._code, self._device, self.shape, self.writable, self._owner = view
        self._stream = None

    @property
    def dtype(self) -> str:
        """Element type, e.g. ``"f32"``."""
        return "i32" if self._code == _abi.I32 else next(name for name, code in _abi.DTYPES.items() if code == self._code)

    @property
    def device(self) -> str:
        """``"host"`` or ``"cuda"``."""
        return "host" if self._device == _abi.DEVICE_HOST else "cuda"

    def __repr__(self) -> str:
        return f"<tandem.Tensor {self.dtype} {list(self.shape)} {self.device}>"


_DEFAULT_STREAM = 1  # the legacy default stream, as both DLPack and __cuda_array_interface__ number it
View = tuple[bytes, int, int, tuple[int, ...], bool, object]  # the slots of a Tensor


def packed_view(place: tuple[int, int, int], code: int, shape: Sequence[int], strides: Sequence[int] | None) -> bytes:
    """Returns a tandem_tensor as bytes. place: device type, device index, address. strides: in elements; None: contiguous."""
    n_dims = len(shape)
    if not 1 <= n_dims <= 4:
        raise invalid("n_dims", f"= {n_dims}, must be 1 to 4")
    if n_dims == 3 and strides is None:
        _, heads, dim = shape
        steps = [max(heads, 1) * max(dim, 1), max(dim, 1), 1]
    else:
        steps, packed = [1] * n_dims, 1
        for i in range(n_dims - 1, -1, -1):
            steps[i] = strides[i] if strides is not None and shape[i] > 1 else packed
            packed = max(packed, steps[i]) * max(shape[i], 1)
    if min(shape) < 0:
        raise invalid("shape", f"= {list(shape)} is negative")
    if not 0 < steps[0] < 1 << 63 or (strides is not None and min(steps) <= 0):
        raise invalid("strides", f"= {steps} elements, must be positive")
    device_type, device_index, address = place
    try:
        return _PACKERS[n_dims].pack(TENSOR_BYTES, code, device_type, device_index, address, n_dims, 0, *shape, *steps)
    except struct.error:
        raise invalid("shape", f"= {list(shape)} with strides {steps} at {address:#x} does not fit 64 bits") from None


def made(array: Any, view: View) -> Tensor:
    """Makes a Tensor from a view that the caller has already checked."""
    tensor = Tensor.__new__(Tensor)
    tensor.array = array
    tensor._take(view)
    return tensor


def _code_of(array: Any, typestr: str, dtype: str | None) -> int:
    """Returns the element type of an array: its own, or the declared one."""
    own = _TYPESTRS.get(typestr)
    if own is None:
        own = _EXTENSION_NAMES.get(str(getattr(array, "dtype", "")))
        order = getattr(getattr(array, "dtype", None), "byteorder", "=")
        if own is not None and order not in ("=", "|", _NATIVE):
            own = None
    if dtype is None:
        if own is None:
            raise invalid("dtype", f"of the array is {typestr}, not f32, f16 or int32 of this machine's byte order or bf16 or e4m3 "
                          "of ml_dtypes; plain integers are declared by Tensor(array, dtype=...)")
        return own
    code = named("dtype", dtype, _abi.DTYPES)
    if code != own and not (typestr[1:] in _DECLARED.get(dtype, ()) and typestr[0] in ("|", _NATIVE)):
        raise invalid("dtype", f"= {dtype!r}, but the array holds {typestr}")
    return code


def _in_elements(code: int, shape: Sequence[int], strides: Sequence[int] | None) -> tuple[tuple[int, ...], list[int] | None]:
    """Returns shape and strides in elements of the declared type. `strides` is given in bytes."""
    elements, unit = _UNITS[code]
    counted = tuple(shape)
    if elements > 1:
        if not counted or counted[-1] % unit:
            raise invalid("shape", f"= {list(shape)}: rows are not whole blocks of {unit} bytes")
        if strides is not None and counted[-1] > 1 and strides[-1] != 1:
            raise invalid("strides", f"= {list(strides)} bytes: the last dimension is not contiguous")
        counted = (*counted[:-1], counted[-1] // unit * elements)
    if strides is None:
        return counted, None
    steps = [1] * len(counted)
    for i, step in enumerate(strides):
        if elements > 1 and i == len(counted) - 1:
            continue
        if counted[i] > 1:
            if step % unit:
                raise invalid("strides", f"= {list(strides)} bytes are not whole elements of {unit} bytes")
            steps[i] = step // unit * elements
    return counted, steps


def _dims(name: str, values: Any) -> tuple[int, ...]:
    of_type(name, values, tuple)
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def _described(array: Any, interface: Any, dtype: str | None, place: tuple[int, int]) -> View:
    """Reads either array interface. Its contents are checked, because any code may have written them. place: device type and
    index."""
    of_type("array", interface, dict)
    if interface.get("mask") is not None or np.ma.isMaskedArray(array):
        raise invalid("array", "has a mask, which attention does not know: fill it, or take what is under it")
    data, typestr, strides = interface.get("data"), interface.get("typestr"), interface.get("strides")
    if not isinstance(data, tuple) or len(data) != 2:
        raise invalid("array", f"has an interface with data = {data!r}, not address and read-only flag")
    address = integer("data", data[0] or 0, 65)
    if not 0 <= address < 1 << 64:
        raise invalid("data", f"= {address} is not an address")
    of_type("typestr", typestr, str)
    dims = _dims("shape", interface.get("shape"))
    steps = None if strides is None else _dims("strides", strides)
    if steps is not None and len(steps) != len(dims):
        raise invalid("strides", f"= {list(steps)} are not one for each dimension of {list(dims)}")
    code = _code_of(array, str(typestr), dtype)
    shape, strides = _in_elements(code, dims, steps)
    packed = packed_view((*place, address), code, shape, strides)
    return packed, code, place[0], shape, not data[1], (array, interface)


def _from_interface(array: Any, dtype: str | None) -> View:
    interface = asked_of_owner(getattr, array, "__array_interface__", None)
    if interface is None:
        raise invalid("array", f"is a {type(array).__name__}, which has neither __dlpack__, __cuda_array_interface__ nor "
                      "__array_interface__")
    return _described(array, interface, dtype, (_abi.DEVICE_HOST, 0))


def _from_cuda_interface(array: Any, dtype: str | None, stream: int | None, device_index: int) -> View:
    interface = asked_of_owner(getattr, array, "__cuda_array_interface__")
    view = _described(array, interface, dtype, (_abi.DEVICE_CUDA, device_index))
    # Waiting for another stream's running work would need the CUDA run time.
    theirs = interface.get("stream")
    ours = stream or _DEFAULT_STREAM
    if theirs is not None and integer("stream", theirs, 65) != ours:
        raise UnsupportedError(f"stream: the array is used on stream {theirs:#x}, the call is on {ours:#x}: pass "
                               "that stream, or an object with __dlpack__, which waits by itself",
                               status=_abi.STATUS["UNSUPPORTED"], field="stream")
    return view


def as_tensor(name: str, array: Any, stream: int | None = None, output: bool = False, in_order: bool = True) -> Tensor:
    """Turns an argument of a call into a Tensor. Refuses a read-only output. The message names the argument.

    in_order: the argument is used on `stream`, so a view of device memory must have been made for that stream.
    """
    if isinstance(array, Tensor):
        tensor = array
        if in_order and tensor._stream is not None and tensor._stream != (stream or _DEFAULT_STREAM):
            raise UnsupportedError(f"{name}.stream: the view was made for stream {tensor._stream:#x}, the call is on "
                                   f"{stream or _DEFAULT_STREAM:#x}: Tensor(array, stream=...)",
                                   status=_abi.STATUS["UNSUPPORTED"], field=f"{name}.stream")
    else:
        try:
            tensor = Tensor(array, stream=stream)
        except (UnsupportedError, InvalidArgumentError) as error:
            raise type(error)(f"{name}: {error}", status=error.status,
                              field=name if error.field == "array" else f"{name}.{error.field}") from None
    if output and not tensor.writable:
        kind = type(tensor.array)
        raise invalid(name, f"is an output, but the {kind.__module__}.{kind.__qualname__} is read-only or does not say that it may be "
                      "written: outputs are arrays of NumPy, PyTorch or CuPy, which from_dlpack() makes of others, and are not "
                      "negative views")
    return tensor


# Fast path for C-contiguous, writable NumPy arrays, which are the most common. The bytes before and after the address depend
# only on element type and shape, and are cached. The address comes from the buffer protocol, which refuses all other arrays.
_around_address: dict[tuple[Any, tuple[int, ...]], tuple[bytes, bytes]] = {}
_MOST_KEPT = 4096
_ADDRESS = slice(16, 24)
_byte = ctypes.c_char


def pack(name: str, array: Any, stream: int | None, output: bool = False) -> tuple[bytes, object]:
    """Returns the bytes of an argument's tandem_tensor, and the object that keeps its memory alive. Refuses as
    :func:`as_tensor` does."""
    is_plain = type(array) is np.ndarray
    if is_plain:
        around = _around_address.get((array.dtype, array.shape))
        if around is not None:
            try:
                held = _byte.from_buffer(array)
            except (BufferError, TypeError, ValueError):
                pass  # read-only, not contiguous, or empty
            else:
                return around[0] + ctypes.addressof(held).to_bytes(8, sys.byteorder) + around[1], held
    tensor = as_tensor(name, array, stream, output)
    packed = tensor._packed
    if is_plain and array.flags.c_contiguous and len(_around_address) < _MOST_KEPT:
        _around_address[array.dtype, array.shape] = packed[:_ADDRESS.start], packed[_ADDRESS.stop:]
    return packed, tensor


class TensorArgument:
    """A tandem_tensor in C memory, for calls that do not need a reusable buffer."""

    __slots__ = ("_struct", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._struct = _abi.TensorStruct.from_buffer_copy(tensor._packed)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)
