# SPDX-License-Identifier: MIT
"""The model: the geometry of its layers."""
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from . import _abi
from ._handle import Handle, Owner, create
from ._library import lib
from ._errors import of_type
from ._options import fill, integer, listed, named
from ._projection import Projection, floats, projection_struct


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Geometry of a layer: ``logit(q, k) = cap(sm_scale * q.k)``, ``cap(x) = soft_cap * tanh(x / soft_cap)``.

    Parameters
    ----------
    n_q_heads : int
        A multiple of `n_kv_heads`.
    n_kv_heads : int
        `n_q_heads`: MHA; 1: MQA.
    k_head_dim, v_head_dim : int
        64, 80, 96, 112, 128, 192 or 256 elements; 576 with 512 that alias it (MLA). `v_head_dim` 0: `k_head_dim`.
    v_aliases_k : bool
        V is the first `v_head_dim` dims of K, stored once.
    sm_scale : float
        0: ``1 / sqrt(k_head_dim)``.
    soft_cap : float
        0: off.
    sliding_window_tokens : int
        0: off; else a query at position p sees keys at positions > p - `sliding_window_tokens`.
    sinks : array_like, optional
        [n_q_heads] learned sink logits.
    rope : str
        ``"caller"``: keys and queries arrive ready for use; ``"halves"``, ``"interleaved"``: the library rotates them.
    rope_dims : int
        Rotated leading dims, even; 0: `k_head_dim`.
    rope_theta, rope_position_scale : float
        0: 10,000 and 1.
    rope_inv_freq : array_like, optional
        [rope_dims / 2] frequencies, instead of those from `rope_theta`.
    rope_attn_factor : float
        0: 1.
    projection : Projection, optional
        How K and V are made of hidden states. None: they are not.
    """

    n_q_heads: int
    n_kv_heads: int
    k_head_dim: int
    v_head_dim: int = 0
    v_aliases_k: bool = False
    sm_scale: float = 0.0
    soft_cap: float = 0.0
    sliding_window_tokens: int = 0
    sinks: ArrayLike | None = None
    rope: str = "caller"
    rope_dims: int = 0
    rope_theta: float = 0.0
    rope_position_scale: float = 0.0
    rope_inv_freq: ArrayLike | None = None
    rope_attn_factor: float = 0.0
    projection: Projection | None = None

    @property
    def v_dim(self) -> int:
        """`v_head_dim` with its default applied."""
        return self.v_head_dim or self.k_head_dim


def layer_struct(layer: Layer) -> Any:
    """Returns tandem_layer_options, which keeps alive what it points to."""
    of_type("layer", layer, Layer)
    struct = _abi.LayerOptionsStruct()
    lib.tandem_layer_options_init(ctypes.byref(struct))
    n_sinks = max(integer("n_q_heads", layer.n_q_heads, 32), 0)
    k_head_dim = integer("k_head_dim", layer.k_head_dim, 32)
    n_frequencies = max(integer("rope_dims", layer.rope_dims or 0, 32) or k_head_dim, 0) // 2
    n_kv_heads = integer("n_kv_heads", layer.n_kv_heads, 32)
    n_k, n_v = (max(n_kv_heads * integer(name, dim, 32), 0) for name, dim in (("k_head_dim", k_head_dim),
                                                                              ("v_head_dim", layer.v_dim)))
    fill(struct, {name: getattr(layer, name) for name in layer.__dataclass_fields__}, {
        "v_aliases_k": lambda _, value: int(bool(value)),
        "rope": lambda name, value: named(name, value, _abi.ROPES),
        "sinks": lambda name, value: floats(name, value, n_sinks),
        "rope_inv_freq": lambda name, value: floats(name, value, n_frequencies),
        "projection": lambda _, value: ctypes.pointer(projection_struct(value, n_k, n_v))}, "a layer")
    return struct


class Model(Owner):
    """The layers of a model. Any thread may use it. Caches do not need it after they are made.

    Parameters
    ----------
    layers : Layer or sequence of Layer

    Attributes
    ----------
    layers : tuple of Layer

    Raises
    ------
    InvalidArgumentError
        The message names layer and member.
    UnsupportedError
        A head_dim or a combination without kernels.
    """

    def __init__(self, layers: Layer | Sequence[Layer]) -> None:
        self.layers: tuple[Layer, ...] = (layers,) if isinstance(layers, Layer) else tuple(listed("layers", layers))
        structs = [layer_struct(layer) for layer in self.layers]
        array = (_abi.LayerOptionsStruct * len(structs))(*structs)
        pointer = create(lib.tandem_model_create, ctypes.byref(array), integer("n_layers", len(structs), 32))
        self._own(Handle(pointer, lib.tandem_model_release))

    def __repr__(self) -> str:
        return self._repr(f"of {len(self.layers)} layers")
