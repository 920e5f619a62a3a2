# SPDX-License-Identifier: MIT
"""Functions beside the objects: merging of attention states, memory plans, and what an engine supports."""
import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from . import _abi
from ._cache import stream_pointer
from ._engine import Engine, json_report
from ._errors import TandemError, call, invalid, taken_error
from ._handle import pointer_of, refuse_in_callback
from ._library import lib
from ._model import Layer, Model, layer_struct
from ._options import CacheOptions, SessionOptions, array_of, cache_struct, listed, session_struct
from ._tensor import TensorArgument, as_tensor


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a cache with one session will hold, in bytes.

    Attributes
    ----------
    host_kv_bytes, host_session_bytes : int
        Pages; MAW and selection tables.
    selection_max_bytes : int
        Compacted copies of selected keys. This is an upper bound; the other members are exact.
    device_window_bytes, device_work_bytes, device_stream_bytes, device_weights_bytes : int
        In device memory, as in :class:`tandem.CacheStats`; 0 without a device.
    device_window_max_bytes : int
        Windows once every sequence has filled its window, however long it becomes.
    judged_kv_bytes, judged_first_bytes, judged_max_bytes : int
        Not held, but read by the stages of policy "hip" in a decode step: on average, the first stages' part of that, and in a
        step in which all stages run.
    kv_token_bytes, x_token_bytes : int
        K and V of one token in all layers, and its hidden states.
    shared_bytes : int
        Pinned host memory for the handshake of device and host, and to fill windows.
    """

    host_kv_bytes: int
    host_session_bytes: int
    selection_max_bytes: int
    device_window_bytes: int
    device_work_bytes: int
    kv_token_bytes: int
    shared_bytes: int
    device_stream_bytes: int
    device_weights_bytes: int
    x_token_bytes: int
    device_window_max_bytes: int
    judged_kv_bytes: int
    judged_first_bytes: int
    judged_max_bytes: int

    def report(self) -> dict[str, Any]:
        """Return the plan as the library's JSON report."""
        struct = _abi.MemoryPlanStruct(struct_size=ctypes.sizeof(_abi.MemoryPlanStruct), **asdict(self))
        return json_report(lib.tandem_plan_report, ctypes.byref(struct))


class Support(NamedTuple):
    """The answer of :func:`tandem.supports`, usable as a bool.

    Attributes
    ----------
    supported : bool
    why : TandemError or None
        The error that the create call would raise.
    """

    supported: bool
    why: TandemError | None

    def __bool__(self) -> bool:
        return self.supported


def plan_memory(engine: Engine, model: Model, kv_lens: Sequence[int], *, cache: CacheOptions | None = None,
                session: SessionOptions | None = None) -> MemoryPlan:
    """Return the memory that a cache with one session will take, without allocating it.

    Parameters
    ----------
    engine : Engine
    model : Model
    kv_lens : sequence of int
        Tokens of each sequence.
    cache : CacheOptions, optional
    session : SessionOptions, optional

    Raises
    ------
    CapacityError
        A cap would be exceeded.
    TandemError
        The errors of creating the cache and the session.
    """
    handles = pointer_of("engine", engine, Engine), pointer_of("model", model, Model)
    struct = _abi.MemoryPlanStruct(struct_size=ctypes.sizeof(_abi.MemoryPlanStruct))
    lens = array_of("kv_lens", kv_lens, ctypes.c_int64, 64)
    cache_options, session_options = cache_struct(cache or {}, len(model.layers)), session_struct(session or {})
    call(lib.tandem_plan_memory, ctypes.byref(struct), *handles, ctypes.byref(cache_options), ctypes.byref(session_options),
         ctypes.byref(lens), len(lens))
    return MemoryPlan(**{field.name: getattr(struct, field.name) for field in fields(MemoryPlan)})


def supports(engine: Engine, layer: Layer | None = None, *, cache: CacheOptions | None = None,
             session: SessionOptions | None = None) -> Support:
    """Return whether an engine can serve such a layer, cache and session.

    Parameters
    ----------
    engine : Engine
    layer : Layer, optional
        None, here and below: not checked.
    cache : CacheOptions, optional
    session : SessionOptions, optional
    """
    handle = pointer_of("engine", engine, Engine)
    layer_options = None if layer is None else layer_struct(layer)
    cache_options = None if cache is None else cache_struct(cache, 1)
    session_options = None if session is None else session_struct(session)
    error = ctypes.c_void_p()
    status = lib.tandem_supports(handle, *(
        None if struct is None else ctypes.byref(struct) for struct in (layer_options, cache_options, session_options)),
        ctypes.byref(error))
    return Support(False, taken_error(status, error)) if status else Support(True, None)


def merge(engine: Engine, o: Sequence[Any], lse: Sequence[Any], *, out: Any = None, lse_out: Any = None,
          stream: int | None = None) -> tuple[Any, Any]:
    """Merge states over disjoint keys, exactly, in the given order.

    Parameters
    ----------
    engine : Engine
    o : sequence of array_like
        Each [n_tokens, n_heads, head_dim]; f32, f16 or bf16.
    lse : sequence of array_like
        Each [n_tokens, n_heads] f32; -inf is the empty state.
    out, lse_out : array_like, optional
        Written; may be ``o[0]`` and ``lse[0]``. None: NumPy arrays of f32 are made.
    stream : int, optional
        CUDA stream of arrays in device memory.

    Returns
    -------
    o, lse
        The given or the new arrays.
    """
    handle = pointer_of("engine", engine, Engine)
    refuse_in_callback(engine._handle)
    o, lse = listed("o", o), listed("lse", lse)
    if len(o) != len(lse):
        raise invalid("lse", f"has {len(lse)} states, o has {len(o)}")
    outputs = [TensorArgument(as_tensor(f"o[{i}]", array, stream)) for i, array in enumerate(o)]
    sums = [TensorArgument(as_tensor(f"lse[{i}]", array, stream)) for i, array in enumerate(lse)]
    if out is None or lse_out is None:
        if not outputs or outputs[0].tensor.device != "host":
            raise invalid("out", "is None, and there is no o[0] in host memory to make it like")
        shape = outputs[0].tensor.shape
        out = np.empty(shape, np.float32) if out is None else out
        lse_out = np.empty(shape[:2], np.float32) if lse_out is None else lse_out
    results = [TensorArgument(as_tensor(name, array, stream, output=True)) for name, array in (("o_out", out),
                                                                                               ("lse_out", lse_out))]
    pointers = [(ctypes.c_void_p * len(each))(*(argument.address for argument in each)) for each in (outputs, sums)]
    call(lib.tandem_merge, results[0].address, results[1].address, ctypes.byref(pointers[0]), ctypes.byref(pointers[1]),
         len(outputs), handle, stream_pointer(stream))
    return out, lse_out
