# SPDX-License-Identifier: MIT
"""Sessions: how a cache is attended."""
from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Several
from ctypes import addressof, byref
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from . import _abi
from ._cache import Cache, Sequence, ids_of, read_stats, stream_pointer
from ._engine import json_report
from ._errors import (CancelledError, InvalidStateError, NotCopied, OutOfMemoryError, call, callable_or_none, invalid, of_type,
                      taken_error)
from ._handle import Handle, Owner, create, pointer_of, refuse_in_callback, telling
from ._library import lib
from ._options import SessionOptions, array_of, integer, listed, session_struct
from ._selection import Selection, SelectionArgument
from ._tensor import TENSOR_BYTES, Tensor, pack
from ._weights import Weights

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # in typing from Python 3.11 on; only type checkers need it

Output = TypeVar("Output")
_attend = lib.tandem_attend
_ARGS_BYTES = ctypes.sizeof(_abi.AttendArgsStruct)
_ARGS = struct.Struct("=IIii14Q")
_Progress = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True)
class SessionStats:
    """Sums since the session was made; sizes in bytes (``_bytes``), times in nanoseconds (``_ns``).

    Attributes
    ----------
    n_attends, n_query_tokens : int
        Calls, and their queries per layer.
    resident_kv_bytes_read, host_kv_bytes_read, dense_kv_bytes : int
        K and V read inside the window, read outside it, and what policy "all" would have read.
    evicted_tokens, n_refreshes : int
        Tokens that left the window, per layer, and selections made.
    selected_keys, host_keys : int
        Keys selected now, and keys outside the window now.
    attend_ns, refresh_ns, refresh_wait_ns : int
        Time in calls, time spent on making selections, and time that calls waited for these.
    n_device_attends : int
        Calls on device tensors.
    n_host_parts, host_part_ns, host_part_tokens : int
        Parts of these calls that the CPU computed, their time, and the keys that the CPU attended.
    n_stream_parts, stream_part_ns, stream_part_tokens, n_joint_parts : int
        Parts outside the window that the device computed, their time, and the keys that crossed the bus. `n_joint_parts` counts
        those of these parts with keys that the CPU attended.
    staged_kv_bytes, filled_kv_bytes, streamed_kv_bytes, streamed_x_bytes : int
        K and V copied to the host store, K and V copied into windows that lacked them, K and V that crossed the bus, and hidden
        states that crossed it.
    judged_kv_bytes : int
        K, and bounds of K, that policy "hip" read to choose keys; on a device an upper bound.
    pattern_pairs, pattern_dense_pairs : int
        (query, key) pairs that appends under "patterns" attended, summed over query heads, and the pairs that "all" would have
        attended.
    n_planned_parts, predicted_part_ns, planned_part_ns : int
        Parts whose time the engine could predict, their predicted time, and their measured time.
    """

    n_attends: int
    n_query_tokens: int
    resident_kv_bytes_read: int
    host_kv_bytes_read: int
    dense_kv_bytes: int
    evicted_tokens: int
    n_refreshes: int
    selected_keys: int
    host_keys: int
    attend_ns: int
    refresh_ns: int
    refresh_wait_ns: int
    n_device_attends: int
    n_host_parts: int
    host_part_ns: int
    staged_kv_bytes: int
    filled_kv_bytes: int
    n_stream_parts: int
    stream_part_ns: int
    streamed_kv_bytes: int
    n_joint_parts: int
    host_part_tokens: int
    stream_part_tokens: int
    n_planned_parts: int
    predicted_part_ns: int
    planned_part_ns: int
    streamed_x_bytes: int
    judged_kv_bytes: int
    pattern_pairs: int
    pattern_dense_pairs: int


@dataclass(frozen=True)
class RoutePlan:
    """Which processor will attend the keys of a call on device tensors, and how long that takes.

    Attributes
    ----------
    resident_tokens, host_tokens, stream_tokens : int
        Keys in windows, keys that the CPU attends, keys whose K and V cross the bus.
    host_bytes, stream_bytes : int
        K and V of `host_tokens` and of `stream_tokens`.
    host_ns : int
        Time of the CPU. Times run from the arrival of the call's queries to the end of a processor's work. They include the
        slowdown of CPU and bus by each other. 0: nothing is known.
    bus_ns : int
        Time of the bus, with transfers before the queries arrive, as in the session's last such calls.
    device_ns : int
        Time of the device for rebuilt keys and long appends (by a trial of their kernels); 0 if hidden behind the bus.
    total_ns : int
        The end of the last one, without transfers before the queries arrive.
    host_alone_ns, stream_alone_ns : int
        Times if the CPU attended all keys outside the windows, and if all these keys crossed the bus.
    recompute_tokens, recompute_bytes, recompute_alone_ns : int
        Keys whose hidden states cross the bus, the bytes of these, and the time if the device made all keys outside the windows
        (of the bus alone if making them has not been measured); 0 without hidden states.
    """

    resident_tokens: int
    host_tokens: int
    stream_tokens: int
    host_bytes: int
    stream_bytes: int
    host_ns: int
    bus_ns: int
    device_ns: int
    total_ns: int
    host_alone_ns: int
    stream_alone_ns: int
    recompute_tokens: int
    recompute_bytes: int
    recompute_alone_ns: int

    def report(self) -> dict[str, Any]:
        """Return the plan as the library's JSON report."""
        struct = _abi.RoutePlanStruct(struct_size=ctypes.sizeof(_abi.RoutePlanStruct), **asdict(self))
        return json_report(lib.tandem_route_report, byref(struct))


def _lens(n_sequences: int, q_lens: Several[int] | None, n_tokens: int) -> Any:
    if q_lens is None:
        if n_sequences != 1:
            raise invalid("q_lens", f"is None with {n_sequences} sequences")
        return ctypes.c_int64(n_tokens)
    lens = array_of("q_lens", q_lens, ctypes.c_int64, 64)
    if len(lens) != n_sequences:
        raise invalid("q_lens", f"has {len(lens)} numbers for {n_sequences} sequences")
    return lens


def _parents(parent_idx: Several[int], n_tokens: int) -> Any:
    parents = array_of("parent_idx", parent_idx, ctypes.c_int32, 32)
    if len(parents) != n_tokens:
        raise invalid("parent_idx", f"has {len(parents)} numbers, must be one for each of {n_tokens} tokens")
    return parents


class CancelFlag(NotCopied):
    """A flag that stops calls of :meth:`Session.attend`, to which it is passed. Any thread may set it."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)

    def set(self) -> None:
        """Stop running calls, and later ones until :meth:`clear`."""
        self._value.value = 1

    def clear(self) -> None:
        """Let calls run again."""
        self._value.value = 0

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._value.value != 0


class Listener:
    """A progress callback in the form that the library calls. An exception in it stops the call, which then raises it."""

    def __init__(self, progress: Callable[[int, int], object], engine: Handle) -> None:
        self._progress = progress
        self._engine = engine
        self._function = _Progress(self._hear)
        self.address: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.raised: BaseException | None = None

    def _hear(self, done: int, total: int, _: int | None) -> int:
        thread = threading.get_ident()
        try:
            outer = telling.get(thread)  # a callback of another engine's call may be running
            telling[thread] = self._engine
            try:
                self._progress(done, total)
            finally:
                if outer is None:
                    del telling[thread]
                else:
                    telling[thread] = outer
        except BaseException as error:  # KeyboardInterrupt too, because no exception may unwind into the library
            self.raised = error
            return 1
        return 0


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _unlock_child() -> None:
    """Replaces the locks in a child of fork(), where a thread of the parent may hold one. The library refuses calls there
    anyway."""
    for session in list(_sessions):
        session._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)


class Session(Owner):
    """A policy and its memory of what was attended. Only one thread's call runs at a time; others wait.

    Parameters
    ----------
    cache : Cache
        The cache to attend. Several sessions may read one cache.
    **options
        :class:`tandem.SessionOptions`.

    Raises
    ------
    NotFoundError
        `policy` is unknown.
    UnsupportedError
        The policy does not support the model.
    CapacityError
    """

    def __init__(self, cache: Cache, **options: Unpack[SessionOptions]) -> None:
        parent = pointer_of("cache", cache, Cache)
        self.cache = cache
        options_struct = session_struct(options)
        pointer = create(lib.tandem_session_create, parent, ctypes.byref(options_struct))
        self._own(Handle(pointer, lib.tandem_session_release, cache._handle))
        # Memory for the arguments of attend: six tensors, and the struct that points to them. Each call writes them anew. The
        # lock keeps one thread's tensors out of another thread's call.
        self._lock = threading.Lock()
        _sessions.add(self)
        self._memory = ctypes.create_string_buffer(6 * TENSOR_BYTES + _ARGS_BYTES)
        self._bytes = memoryview(self._memory).cast("B")
        start = ctypes.addressof(self._memory)
        self._places = [start + i * TENSOR_BYTES for i in range(7)]

    @overload
    def attend(self, sequences: Sequence | Several[Sequence], q: Any, k: Any = None, v: Any = None, *, layer_idx: int = 0,
               q_lens: Several[int] | None = None, out: None = None, lse: Any = None, x: Any = None, speculative: bool = False,
               partial: bool = False, parent_idx: Several[int] | None = None, stream: int | None = None,
               cancel: CancelFlag | None = None, progress: Callable[[int, int], object] | None = None,
               selection: Selection | None = None) -> NDArray[Any]: ...

    @overload
    def attend(self, sequences: Sequence | Several[Sequence], q: Any, k: Any = None, v: Any = None, *, layer_idx: int = 0,
               q_lens: Several[int] | None = None, out: Output, lse: Any = None, x: Any = None, speculative: bool = False,
               partial: bool = False, parent_idx: Several[int] | None = None, stream: int | None = None,
               cancel: CancelFlag | None = None, progress: Callable[[int, int], object] | None = None,
               selection: Selection | None = None) -> Output: ...

    def attend(self, sequences: Sequence | Several[Sequence], q: Any, k: Any = None, v: Any = None, *, layer_idx: int = 0,
               q_lens: Several[int] | None = None, out: Any = None, lse: Any = None, x: Any = None, speculative: bool = False,
               partial: bool = False, parent_idx: Several[int] | None = None, stream: int | None = None,
               cancel: CancelFlag | None = None, progress: Callable[[int, int], object] | None = None,
               selection: Selection | None = None) -> Any:
        """Append `k` and `v` to one layer, then compute ``o = softmax(logits) V`` over the keys that the policy selects.

        In every array the sequences' tokens follow one another. n_tokens is the sum of `q_lens`.

        Parameters
        ----------
        sequences : Sequence or sequence of Sequence
            Each once, of this session's cache.
        q : array_like
            [n_tokens, n_q_heads, k_head_dim], f32, f16 or bf16.
        k, v : array_like, optional
            [n_tokens, n_kv_heads, k_head_dim] and [n_tokens, n_kv_heads, v_head_dim], of any element type. Both None: nothing
            is appended, and the queries are the last tokens of the sequence. `v` None alone: V aliases K.
        layer_idx : int
        q_lens : sequence of int, optional
            Tokens of each sequence. None: one sequence, with all tokens of `q`.
        out : array_like, optional
            Written: [n_tokens, n_q_heads, v_head_dim]; f32, f16 or bf16. None: a NumPy array is made, of q's type if q is a
            NumPy array of floats, else f32. Must be given if `q` is in device memory.
        lse : array_like, optional
            Written: [n_tokens, n_q_heads] f32, natural log of the sum of exp of the logits.
        x : array_like, optional
            [n_tokens, hidden_dim] hidden states of the appended tokens. Needed if the layer keeps hidden states.
        speculative : bool
            The appended tokens are a guess, kept apart until :meth:`commit`.
        partial : bool
            A chunk of a longer append. The last chunk, without this flag, re-evaluates all keys.
        parent_idx : sequence of int, optional
            [n_tokens] the parents of speculative tokens, counted within the token's sequence in this call. -1: the last token
            before.
        stream : int, optional
            CUDA stream, for arrays in device memory; None or 0: the legacy default stream. The arrays must live until the
            stream has passed the call. A stream-ordered allocator, such as PyTorch's, ensures that for memory that it took on
            this stream.
        cancel : CancelFlag, optional
            Stops the call when any thread sets it. The call has changed nothing then. For arrays in host memory.
        progress : callable, optional
            Called by this thread with the work done and the work in all, in units of no fixed size. An exception in it stops
            the call, as `cancel` does, and the call raises it. It must not use this session, nor its engine to attend, append
            or merge.
        selection : Selection, optional
            The keys that queries attend, instead of those of the session's policy. For layers of policy "all" without streaming
            heads.

        Returns
        -------
        o : `out`, or the new array

        Raises
        ------
        InvalidArgumentError, NotFoundError, BusyError, CapacityError, OutOfMemoryError, UnsupportedError, DeviceLostError
        CancelledError
            `cancel` was set.
        InvalidStateError
            Speculative tokens are pending; q_lens exceed what the step declared; the call comes from a progress callback."""
        if isinstance(sequences, Sequence):
            ids = sequences._id_array if sequences.cache is self.cache else ids_of(self.cache, (sequences,))
        else:
            ids = ids_of(self.cache, sequences)
        packed_q, held_q = pack("q", q, stream)
        if out is None:
            out = self._new_output(held_q if isinstance(held_q, Tensor) else q, layer_idx)
        packed = [(packed_q, held_q), *(
            None if array is None else pack(name, array, stream, output)
            for name, array, output in (("k", k, False), ("v", v, False), ("o", out, True), ("lse", lse, True), ("x", x, False)))]
        n_tokens = (held_q if isinstance(held_q, Tensor) else q).shape[0]
        lens = _lens(len(ids), q_lens, n_tokens)
        parents = None if parent_idx is None else _parents(parent_idx, n_tokens)
        named = None if selection is None else SelectionArgument(selection, stream)
        flags = (_abi.ATTEND_SPECULATIVE if speculative else 0) | (_abi.ATTEND_PARTIAL if partial else 0)
        numbers = flags, integer("layer_idx", layer_idx, 32), len(ids)
        pointer = stream and stream_pointer(stream)
        if cancel is None and progress is None:
            self._attend(numbers, (ids, lens, parents, named), packed, pointer)
            return out
        callable_or_none("progress", progress)
        if cancel is not None:
            of_type("cancel", cancel, CancelFlag)
        listener = None if progress is None else Listener(progress, self.cache._engine)
        watch = 0 if cancel is None else addressof(cancel._value), 0 if listener is None else listener.address
        try:
            self._attend(numbers, (ids, lens, parents, named), packed, pointer, watch)
        except CancelledError:
            if listener is None or listener.raised is None:
                raise
        if listener is not None and listener.raised is not None:
            raise listener.raised
        return out

    def _attend(self, numbers: tuple[int, int, int], arrays: tuple[Any, Any, Any, SelectionArgument | None],
                packed: list[tuple[bytes, object] | None], stream: int | None, watch: tuple[int, int] = (0, 0)) -> None:
        ids, lens, parents, named = arrays
        error = ctypes.c_void_p()
        if telling:
            refuse_in_callback(self.cache._engine)
        with self._lock:
            memory, places, at = self._bytes, [0] * 6, 0
            for i, tensor in enumerate(packed):
                if tensor is not None:
                    memory[at:at + TENSOR_BYTES] = tensor[0]
                    places[i] = self._places[i]
                at += TENSOR_BYTES
            _ARGS.pack_into(memory, at, _ARGS_BYTES, *numbers, addressof(ids), addressof(lens), *places[:5],
                            0 if parents is None else addressof(parents), stream or 0, *watch, 0, places[5],
                            0 if named is None else named.address)
            status = _attend(self._handle.pointer, self._places[6], byref(error))
        if status:
            raise taken_error(status, error)

    def _free(self) -> threading.Lock:
        """Returns the lock of a call, unless the caller is in a progress callback of this engine."""
        refuse_in_callback(self.cache._engine)
        return self._lock

    def _new_output(self, q: Any, layer_idx: int) -> NDArray[Any]:
        """Makes an output array for the queries q, a Tensor or an array."""
        if isinstance(q, Tensor) and q.device != "host":
            raise invalid("out", "is None: where q is in device memory the output is the caller's")
        layer = self.cache.layer(layer_idx)
        array = q.array if isinstance(q, Tensor) else q
        dtype = array.dtype if isinstance(array, np.ndarray) and array.dtype.kind in "fV" else np.dtype(np.float32)
        try:
            return np.empty((q.shape[0], layer.n_q_heads, layer.v_dim), dtype)
        except (MemoryError, ValueError) as error:  # more bytes than the machine has, or than an array can have
            raise OutOfMemoryError(f"out: {error}", status=_abi.STATUS["OUT_OF_MEMORY"], field="out") from None

    def commit(self, sequence: Sequence, kept_idx: Several[int]) -> None:
        """End speculation in one sequence.

        Parameters
        ----------
        sequence : Sequence
        kept_idx : sequence of int
            The speculative tokens that stay, ascending, a chain of the tree. The others are dropped, in every layer.

        Raises
        ------
        InvalidStateError
            Nothing is speculative, or layers are uneven.
        InvalidArgumentError
            The tokens are not a chain.
        """
        ids = ids_of(self.cache, (sequence,))
        kept = array_of("kept_idx", kept_idx, ctypes.c_int64, 64)
        with self._free():
            call(lib.tandem_session_commit, self._handle.pointer, ids[0], ctypes.byref(kept), len(kept))

    def step(self, sequences: Sequence | Several[Sequence], q_lens: int | Several[int] = 1, *,
             stream: int | None = None) -> "Step":
        """Return a step for ``with``: `q_lens` tokens will be appended to `sequences` in every layer.

        Parameters
        ----------
        sequences : Sequence or sequence of Sequence
        q_lens : int or sequence of int
            Tokens of each sequence. One number counts for all.
        stream : int, optional
            Plans the step for device tensors on this CUDA stream.
        """
        ours = (sequences,) if isinstance(sequences, Sequence) else tuple(listed("sequences", sequences))
        given: Any = q_lens
        lens = [given] * len(ours) if np.ndim(given) == 0 else list(given)
        if len(lens) != len(ours):
            raise invalid("q_lens", f"has {len(lens)} numbers for {len(ours)} sequences")
        return Step(self, ours, lens, stream)

    def pattern_pairs(self, layer_idx: int = 0) -> tuple[int, int]:
        """Return, for one layer, the (query, key) pairs that appends under "patterns" attended, summed over query heads, and
        the pairs that policy "all" would have attended.

        Parameters
        ----------
        layer_idx : int
        """
        pairs, dense = ctypes.c_int64(), ctypes.c_int64()
        with self._free():
            call(lib.tandem_session_pattern_pairs, ctypes.byref(pairs), ctypes.byref(dense), self._handle.pointer,
                 integer("layer_idx", layer_idx, 32))
        return pairs.value, dense.value

    def selection(self, sequence: Sequence, *, layer_idx: int = 0, kv_head_idx: int = 0,
                  q_head_idx: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the keys that the next decode query of one KV head would attend.

        Parameters
        ----------
        sequence : Sequence
        layer_idx, kv_head_idx : int
        q_head_idx : int
            Query head of the group whose MAW is returned.

        Returns
        -------
        token_idx : ndarray of int64
            Ascending, sinks and window included.
        maw : ndarray of float32
            Weight share of each selected key outside window and sinks; 0 for other keys.
        """
        ids = ids_of(self.cache, (sequence,))
        where = [integer(name, value, 32) for name, value in
                 (("layer_idx", layer_idx), ("kv_head_idx", kv_head_idx), ("q_head_idx", q_head_idx))]
        n_kept = ctypes.c_int64(sequence.length(layer_idx))
        while True:
            capacity = n_kept.value
            token_idx, maw = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
            with self._free():
                call(lib.tandem_session_selection, token_idx.ctypes.data, maw.ctypes.data, capacity, ctypes.byref(n_kept),
                     self._handle.pointer, ids[0], *where)
            if n_kept.value <= capacity:
                return token_idx[:n_kept.value], maw[:n_kept.value]

    def plan(self, kv_lens: Several[int], q_lens: Several[int] | None = None, *, layer_idx: int = 0) -> RoutePlan:
        """Return the plan of the next call on device tensors. The engine measures what it has not measured yet.

        Parameters
        ----------
        kv_lens : sequence of int
            Tokens of each sequence, the call's included.
        q_lens : sequence of int, optional
            The call's own tokens of each sequence. None: 1 each.
        layer_idx : int

        Raises
        ------
        UnsupportedError
            The engine has no device, or the policy does not attend all keys.
        InvalidArgumentError, CapacityError, OutOfMemoryError
        """
        keys = array_of("kv_lens", kv_lens, ctypes.c_int64, 64)
        queries = None if q_lens is None else array_of("q_lens", q_lens, ctypes.c_int64, 64)
        if queries is not None and len(queries) != len(keys):
            raise invalid("q_lens", f"has {len(queries)} numbers for {len(keys)} sequences")
        made = _abi.RoutePlanStruct(struct_size=ctypes.sizeof(_abi.RoutePlanStruct))
        with self._free():
            call(lib.tandem_plan, byref(made), self._handle.pointer, integer("layer_idx", layer_idx, 32), keys, queries,
                 len(keys))
        return RoutePlan(**{name: getattr(made, name) for name in RoutePlan.__dataclass_fields__})

    def use_weights(self, layer_idx: int, weights: Weights, w_k_block: int, w_v_block: int) -> None:
        """Give W_K and W_V of a layer whose projection has none. From the next call on they are blocks of `weights`.

        Route ``"recompute"`` uses the blocks while it makes keys, and ``"auto"`` does if that saves time. Without this call,
        ``"recompute"`` raises :class:`InvalidStateError` and ``"auto"`` makes no keys. May be called again.

        Parameters
        ----------
        layer_idx : int
        weights : Weights
            Weights of the session's engine. The session keeps them alive after they are closed.
        w_k_block, w_v_block : int
            Block indices of the matrices, which have the projection's `w_type` and `w_order`.

        Raises
        ------
        UnsupportedError
            The layer has no projection, or one with its own weights.
        InvalidArgumentError
            A block is missing or has another size, or the weights are of another engine.
        """
        given = pointer_of("weights", weights, Weights)
        blocks = [integer(name, value, 32) for name, value in (("w_k_block", w_k_block), ("w_v_block", w_v_block))]
        with self._free():
            call(lib.tandem_session_use_weights, self._handle.pointer, integer("layer_idx", layer_idx, 32), given, *blocks)

    def stats(self) -> SessionStats:
        """Return sums since the session was made. Waits for refreshes, and for the device's calls, that are under way."""
        with self._free():
            return read_stats(SessionStats, _abi.SessionStatsStruct(), lib.tandem_session_get_stats, self._handle.pointer)

    def __repr__(self) -> str:
        return self._repr("open")


class Step(NotCopied):
    """One step of a session, from :meth:`Session.step`. Between entering and leaving, every layer gets the same tokens.

    Raises
    ------
    InvalidStateError
        On entering: another step is open. On leaving: a layer got fewer tokens than declared. The step's sequences are then
        rolled back. An exception of the body hides this one.
    CapacityError, OutOfMemoryError, BusyError
        On entering.
    """

    def __init__(self, session: Session, sequences: tuple[Sequence, ...], q_lens: list[int], stream: int | None) -> None:
        self._session = session
        self._sequences = sequences
        self._ids = ids_of(session.cache, sequences)
        self._lens = array_of("q_lens", q_lens, ctypes.c_int64, 64)
        self._stream = stream_pointer(stream)

    def __enter__(self) -> Self:
        with self._session._free():
            call(lib.tandem_step_begin, self._session._handle.pointer, ctypes.byref(self._ids), ctypes.byref(self._lens),
                 len(self._ids), self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._session._free():
                call(lib.tandem_step_end, self._session._handle.pointer, self._stream)
        except InvalidStateError:
            if kind is None:  # else the body's exception is why the step is incomplete
                raise
