# SPDX-License-Identifier: MIT
"""DLPack capsules (0.6 to 1.x) as views.

A capsule is never marked as used. Instead the view keeps the capsule, whose destructor frees the producer's tensor when the
view goes. So the producer's own code calls the deleter exactly once.
"""
import ctypes
import sys
from typing import Any

from . import _abi
from ._errors import UnsupportedError, asked_of_owner, invalid
from ._options import integer
from ._tensor import _DEFAULT_STREAM, View, packed_view

_HOST_DEVICES, _CUDA_DEVICES = (1, 3), (2, 13)  # host and pinned host; CUDA and CUDA managed
_CODES = {(0, 32): _abi.I32, (2, 32): _abi.DTYPES["f32"], (2, 16): _abi.DTYPES["f16"], (4, 16): _abi.DTYPES["bf16"],
          (10, 8): _abi.DTYPES["e4m3"]}  # 10: float8_e4m3fn
_READ_ONLY, _IS_COPIED = 1, 2
# Packages whose arrays are writable unless the export says read-only. Others, such as JAX, do not set the flag although their
# arrays are immutable and may share memory.
_WRITABLE_PACKAGES = frozenset(("numpy", "torch", "cupy"))


class _DlTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DlTensor)]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def _capsule(array: Any, device_type: int, stream: int | None) -> Any:
    """Asks for the newest DLPack version first. Producers of CUDA memory make `stream` wait for their own work."""
    arguments: dict[str, Any] = {}
    if device_type in _CUDA_DEVICES:
        arguments["stream"] = stream or _DEFAULT_STREAM
    try:
        return array.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer from before version 1
        return array.__dlpack__(**arguments)


def _parse(capsule: Any) -> tuple[Any, int]:
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise UnsupportedError(f"array: DLPack {managed.major}.{managed.minor} is not known",
                                   status=_abi.STATUS["UNSUPPORTED"], field="array")
        return managed.tensor, int(managed.flags)
    if _is_valid(capsule, b"dltensor"):
        return _DlTensor.from_address(_get_pointer(capsule, b"dltensor")), 0
    raise invalid("array", "gives a DLPack capsule that is neither 'dltensor' nor 'dltensor_versioned'")


def _device_type(array: Any) -> int:
    device = asked_of_owner(lambda: array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else None)
    if not isinstance(device, tuple) or len(device) != 2:
        raise invalid("array", f"has __dlpack__, and __dlpack_device__ gives {device!r}, not device type and index")
    return integer("array", device[0], 32)


def _may_be_written(array: Any) -> bool:
    """Returns whether the exporter's class, or one of its bases, is of a package that exports writable memory."""
    return any(kind.__module__.partition(".")[0] in _WRITABLE_PACKAGES for kind in type(array).__mro__)


def _resolved(array: Any) -> Any:
    """Returns a copy of a tensor that PyTorch holds as the negative of its memory, because the export does not say so.

    PyTorch itself refuses to export conjugates.
    """
    is_neg = getattr(array, "is_neg", None)
    return array.resolve_neg() if callable(is_neg) and _may_be_written(array) and is_neg() else array


def _bytes_of(array: Any) -> tuple[Any, int | None]:
    """Returns PyTorch's 8-bit floats as bytes, with their type, because its older versions do not export them. Returns other
    arrays unchanged."""
    if str(getattr(array, "dtype", None)) == "torch.float8_e4m3fn" and _may_be_written(array):
        return array.view(sys.modules["torch"].uint8), _abi.DTYPES["e4m3"]
    return array, None


def from_dlpack(array: Any, stream: int | None) -> View:
    """Returns a view of what `array` exports. The view's last member keeps the export alive."""
    resolved = asked_of_owner(_resolved, array)
    exported, code = asked_of_owner(_bytes_of, resolved)
    device_type = _device_type(exported)
    if device_type not in _HOST_DEVICES + _CUDA_DEVICES:
        raise UnsupportedError(f"array: DLPack device type {device_type} is neither host nor CUDA memory",
                               status=_abi.STATUS["UNSUPPORTED"], field="array")
    capsule = asked_of_owner(_capsule, exported, device_type, stream)
    tensor, flags = _parse(capsule)
    if int(tensor.device_type) != device_type:
        raise invalid("array", f"says DLPack device type {device_type} and exports {int(tensor.device_type)}")
    if code is None and tensor.lanes == 1:
        code = _CODES.get((tensor.code, tensor.bits))
    if code is None:
        raise invalid("dtype", f"of the array is DLPack's ({tensor.code}, {tensor.bits}, {tensor.lanes}), not f32, f16, bf16, "
                      "float8_e4m3fn or int32")
    n_dims = int(tensor.ndim)
    if not 1 <= n_dims <= 4:
        raise invalid("n_dims", f"= {n_dims}, must be 1 to 4")
    if not tensor.shape:
        raise invalid("array", "gives a DLPack tensor without a shape")
    shape = tuple(tensor.shape[:n_dims])
    strides = tensor.strides[:n_dims] if tensor.strides else None
    device = _abi.DEVICE_HOST if device_type in _HOST_DEVICES else _abi.DEVICE_CUDA
    index = int(tensor.device_id) if device == _abi.DEVICE_CUDA else 0
    address = (tensor.data or 0) + tensor.byte_offset if tensor.data else 0
    packed = packed_view((device, index, address), code, shape, strides)
    writable = not flags & (_READ_ONLY | _IS_COPIED) and resolved is array and _may_be_written(array)
    return packed, code, device, shape, writable, (array, capsule)
