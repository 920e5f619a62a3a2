# SPDX-License-Identifier: MIT
"""Attention over K and V that the caller owns."""
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _abi
from ._engine import Engine
from ._errors import CancelledError, OutOfMemoryError, call, callable_or_none, invalid, of_type
from ._handle import pointer_of, refuse_in_callback
from ._library import lib
from ._options import array_of, integer, listed, real
from ._session import CancelFlag, Listener
from ._tensor import Tensor, TensorArgument, as_tensor


def _numbers(name: str, values: Any, n: int) -> Any:
    """Returns a C array of n floats, one for each query head."""
    values = [real(f"{name}[{i}]", value) for i, value in enumerate(listed(name, values))]
    if len(values) != n:
        raise invalid(name, f"has {len(values)} numbers for {n} query heads")
    return (ctypes.c_float * n)(*values)


def _lengths(name: str, values: Any, n: int) -> Any:
    lens = array_of(name, values, ctypes.c_int64, 64)
    if len(lens) != n:
        raise invalid(name, f"has {len(lens)} numbers for {n} sequences")
    return lens


def _n_sequences(q: Tensor, lens: Any) -> int:
    if len(q.shape) == 4:
        return q.shape[0]
    n = 1 if lens is None else len(listed("q_lens", lens))
    if n == 0:
        raise invalid("n_sequences", "= 0 with packed tensors")
    return n


def _new(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # more bytes than the machine has, or than an array can have
        raise OutOfMemoryError(f"{name}: {error}", status=_abi.STATUS["OUT_OF_MEMORY"], field=name) from None


def _outputs(q: Tensor, k: Tensor, v: Tensor | None, out: Any, lse: Any) -> tuple[Any, Any]:
    """Returns `out` and `lse` as given, or new arrays for them."""
    if len(q.shape) not in (3, 4):
        raise invalid("q.n_dims", f"= {len(q.shape)}, must be 3 (packed) or 4 (padded)")
    if out is None:
        if v is None:
            raise invalid("out", "is None without v: its last dimension says how much of K is V")
        array = q.array
        dtype = array.dtype if isinstance(array, np.ndarray) and array.dtype.kind in "fV" else np.dtype(np.float32)
        out = _new("out", (*q.shape[:-1], v.shape[-1]), dtype)
    if lse is True:
        lse = _new("lse", q.shape[:-1], np.float32)
    return out, None if lse is False else lse


def _attend(engine: Engine, struct: Any, cancel: CancelFlag | None, progress: Callable[[int, int], object] | None) -> None:
    callable_or_none("progress", progress)
    if cancel is not None:
        of_type("cancel", cancel, CancelFlag)
        struct.cancel = ctypes.addressof(cancel._value)
    listener = None if progress is None else Listener(progress, engine._handle)
    struct.progress = None if listener is None else listener.address
    try:
        call(lib.tandem_attend_tensors, engine._handle.pointer, ctypes.byref(struct))
    except CancelledError:
        if listener is None or listener.raised is None:
            raise
    if listener is not None and listener.raised is not None:
        raise listener.raised


def attend_tensors(engine: Engine, q: Any, k: Any, v: Any = None, *, causal: bool = False, sliding_window_tokens: int = 0,
                   mask: Any = None, q_lens: Sequence[int] | None = None, kv_lens: Sequence[int] | None = None,
                   sm_scale: float = 0.0, soft_cap: float = 0.0, sinks: Sequence[float] | None = None,
                   alibi_slopes: Sequence[float] | None = None, out: Any = None, lse: Any = False,
                   cancel: CancelFlag | None = None, progress: Callable[[int, int], object] | None = None) -> Any:
    """Compute ``o = softmax(logits) V`` over the caller's `k` and `v`, without a cache, a session or a copy.

    Arrays of four dimensions are padded, ``[n_sequences, n_tokens, n_heads, head_dim]``: sequence i has the first `q_lens[i]`
    tokens and the first `kv_lens[i]` keys. Arrays of three dimensions are packed: the sequences' tokens follow one another.
    Strides may order tokens and heads either way: pass PyTorch's ``[batch, heads, tokens, dim]`` as ``q.transpose(1, 2)``. Host
    memory only.

    Parameters
    ----------
    engine : Engine
    q : array_like
        [..., n_tokens, n_q_heads, k_head_dim]; f32, f16 or bf16.
    k, v : array_like
        [..., n_keys, n_kv_heads, k_head_dim] and [..., v_head_dim]. Also e4m3, and q8_0 or q4_0 as ggml's blocks, which
        :class:`tandem.Tensor` declares. `v` None: V is the first dims of K, as many as `out` has.
    causal : bool
        The last query of a sequence sees all its keys, each query before it one key less.
    sliding_window_tokens : int
        0: off; else, with `causal`, the number of newest keys that a query sees, its own included.
    mask : array_like, optional
        Added to the logits, f32 or f16; -inf hides a key. [n_tokens, n_columns], or padded
        [1 or n_sequences, 1 or n_q_heads, n_tokens, n_keys]. Not with `causal`.
    q_lens, kv_lens : sequence of int, optional
        Tokens and keys of each sequence. None: all, and one sequence if arrays are packed.
    sm_scale : float
        0: 1 / sqrt(k_head_dim).
    soft_cap : float
        0: off.
    sinks, alibi_slopes : sequence of float, optional
        One value for each query head: learned sink logits, and ALiBi slopes. With a mask, the mask's values are multiplied by
        the slopes.
    out : array_like, optional
        Written: [..., n_tokens, n_q_heads, v_head_dim]; f32, f16 or bf16. None: a NumPy array is made, of q's type if q is a
        NumPy array of floats, else f32. Rows behind `q_lens` are not written; in a new array they are undefined.
    lse : bool or array_like
        Written: [..., n_tokens, n_q_heads] f32, natural log of the sum of exp of the logits. True: a NumPy array is made.
    cancel : CancelFlag, optional
        Stops the call when any thread sets it. Part of the outputs may be written then.
    progress : callable, optional
        As in :meth:`Session.attend`.

    Returns
    -------
    o, or (o, lse) if `lse` is asked for
        The given or the new arrays.

    Raises
    ------
    InvalidArgumentError, UnsupportedError, CapacityError, OutOfMemoryError, CancelledError
    """
    pointer_of("engine", engine, Engine)
    refuse_in_callback(engine._handle)
    queries, keys = as_tensor("q", q), as_tensor("k", k)
    values = None if v is None else as_tensor("v", v)
    out, lse = _outputs(queries, keys, values, out, lse)
    tensors = {"q": queries, "k": keys, "v": values, "mask": None if mask is None else as_tensor("mask", mask),
               "o": as_tensor("out", out, output=True), "lse": None if lse is None else as_tensor("lse", lse, output=True)}
    held = {name: TensorArgument(tensor) for name, tensor in tensors.items() if tensor is not None}
    struct = _abi.AttendTensorsArgsStruct()
    lib.tandem_attend_tensors_args_init(ctypes.byref(struct))
    for name, argument in held.items():
        setattr(struct, name, argument.address)
    n = _n_sequences(queries, kv_lens if q_lens is None else q_lens)
    arrays = {"q_lens": None if q_lens is None else _lengths("q_lens", q_lens, n),
              "kv_lens": None if kv_lens is None else _lengths("kv_lens", kv_lens, n),
              "sinks": None if sinks is None else _numbers("sinks", sinks, queries.shape[-2]),
              "alibi_slopes": None if alibi_slopes is None else _numbers("alibi_slopes", alibi_slopes, queries.shape[-2])}
    for name, array in arrays.items():
        setattr(struct, name, None if array is None else ctypes.addressof(array))
    struct.n_sequences = integer("n_sequences", n, 32)
    struct.flags = _abi.TENSORS_CAUSAL if causal else 0
    struct.sliding_window_tokens = integer("sliding_window_tokens", sliding_window_tokens)
    struct.sm_scale, struct.soft_cap = real("sm_scale", sm_scale), real("soft_cap", soft_cap)
    _attend(engine, struct, cancel, progress)
    return out if lse is None else (out, lse)
