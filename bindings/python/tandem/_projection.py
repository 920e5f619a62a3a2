# SPDX-License-Identifier: MIT
"""How keys and values of a layer are made of hidden states."""
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import _abi
from ._errors import invalid, of_type
from ._library import lib
from ._options import fill, integer, named
from ._tensor import Tensor, as_tensor


@dataclass(frozen=True, kw_only=True)
class Projection:
    """How keys and values of a layer come from the hidden states x of its tokens, for the route ``"recompute"``.

    ``k = rotate(norm(x) w_k + b_k)``, ``v = norm(x) w_v + b_v``. It must match the caller's model, because K and V made of x
    replace given ones and the other way round.

    Parameters
    ----------
    hidden_dim : int
        Length of x; a multiple of 8 up to 65,536.
    w_k, w_v : array_like, optional
        f16 or bf16, contiguous. In host memory the model copies them; in device memory they are used in place. Both None: they
        are blocks of :class:`tandem.Weights`, and :meth:`tandem.Session.use_weights` says which.
    w_type : str, optional
        ``"f16"`` or ``"bf16"`` if both matrices are None; else None, or their type.
    w_order : str
        ``"in_out"``: [hidden_dim, n_kv_heads * head_dim]; ``"out_in"``: transposed, as checkpoints have them.
    norm : str
        ``"none"``, ``"rms"`` or ``"layer"``.
    norm_eps : float
        0: 1e-5.
    k_rope : str
        How the caller rotates keys, by the layer's `rope_dims`, `rope_theta`, ...: ``"caller"``: not at all; ``"halves"``,
        ``"interleaved"``.
    b_k, b_v : array_like, optional
        [n_kv_heads * head_dim] each.
    norm_weight, norm_bias : array_like, optional
        [hidden_dim]; None: ones, and no bias.
    """

    hidden_dim: int
    w_k: Any = None
    w_v: Any = None
    w_type: str | None = None
    w_order: str = "in_out"
    norm: str = "none"
    norm_eps: float = 0.0
    k_rope: str = "caller"
    b_k: ArrayLike | None = None
    b_v: ArrayLike | None = None
    norm_weight: ArrayLike | None = None
    norm_bias: ArrayLike | None = None


def floats(name: str, values: Any, length: int) -> Any:
    """Returns a C array of `length` f32 values."""
    try:
        array = np.ascontiguousarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise invalid(name, f"= {values!r} is not an array of numbers: {error}") from None
    if array.shape != (length,):
        raise invalid(name, f"has shape {list(array.shape)}, must be [{length}]")
    return (ctypes.c_float * length)(*array.tolist())


def _matrices(projection: Projection, shapes: tuple[tuple[int, int], tuple[int, int]]) -> list[Tensor]:
    """Returns W_K and W_V, or no tensors if both are blocks of weights."""
    tensors: list[Tensor] = []
    given = {"w_k": projection.w_k, "w_v": projection.w_v}
    for (name, array), shape in zip(given.items(), shapes):
        if array is None:
            continue
        tensor = as_tensor(f"projection.{name}", array, in_order=False)
        raw = _abi.TensorStruct.from_buffer_copy(tensor._packed)
        if tensor.shape != shape or raw.stride[0] != max(shape[1], 1):
            raise invalid(f"projection.{name}", f"has shape {list(tensor.shape)}, must be {list(shape)} and contiguous")
        if not raw.data and 0 not in shape:
            raise invalid(f"projection.{name}", "has its data at address 0")
        if tensors and (tensor._code, tensor._device) != (tensors[0]._code, tensors[0]._device):
            raise invalid("projection.w_v", f"is {tensor.dtype} on {tensor.device}, projection.w_k is {tensors[0].dtype} on "
                          f"{tensors[0].device}")
        tensors.append(tensor)
    if len(tensors) == 1:
        missing, other = sorted(given, key=lambda name: given[name] is not None)
        raise invalid(f"projection.{missing}", f"= None, but projection.{other} is given: both are, or neither")
    return tensors


def _w_type(w_type: str | None, tensors: list[Tensor]) -> int:
    if w_type is None:
        if not tensors:
            raise invalid("projection.w_type", "= None, but projection.w_k and w_v are None: nothing says of what type they are")
        return tensors[0]._code
    code = named("projection.w_type", w_type, _abi.DTYPES)
    if tensors and code != tensors[0]._code:
        raise invalid("projection.w_type", f"= {w_type!r}, but projection.w_k is {tensors[0].dtype}")
    return code


def projection_struct(projection: Any, n_k: int, n_v: int) -> Any:
    """Returns tandem_layer_projection of a layer with n_k columns of K and n_v of V. It keeps alive what it points to."""
    of_type("projection", projection, Projection)
    struct = _abi.LayerProjectionStruct()
    lib.tandem_layer_projection_init(ctypes.byref(struct))
    n_hidden = max(integer("projection.hidden_dim", projection.hidden_dim, 32), 0)
    order = named("projection.w_order", projection.w_order, _abi.WEIGHTS)
    is_in_out = order == _abi.WEIGHTS["in_out"]
    tensors = _matrices(projection, ((n_hidden, n_k), (n_hidden, n_v)) if is_in_out else ((n_k, n_hidden), (n_v, n_hidden)))
    struct.held = tensors
    struct.w_type, struct.w_order = _w_type(projection.w_type, tensors), order
    if tensors:
        struct.w_k, struct.w_v = (_abi.TensorStruct.from_buffer_copy(tensor._packed).data for tensor in tensors)
        struct.device_type = tensors[0]._device
    fill(struct, {name: getattr(projection, name) for name in ("hidden_dim", "norm", "norm_eps", "k_rope", "b_k", "b_v",
                                                               "norm_weight", "norm_bias")}, {
        "norm": lambda name, value: named(f"projection.{name}", value, _abi.NORMS),
        "k_rope": lambda name, value: named(f"projection.{name}", value, _abi.ROPES),
        "b_k": lambda name, value: floats(f"projection.{name}", value, n_k),
        "b_v": lambda name, value: floats(f"projection.{name}", value, n_v),
        "norm_weight": lambda name, value: floats(f"projection.{name}", value, n_hidden),
        "norm_bias": lambda name, value: floats(f"projection.{name}", value, n_hidden)}, "a projection")
    return struct
