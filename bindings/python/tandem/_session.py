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
    from typing_extensions import Self, Unpack  # of typing from Python 3.11 on; not needed at run time

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
        K and V read inside the window, outside it, and what policy "all" would have read.
    evicted_tokens, n_refreshes : int
        Tokens that left the window, per layer, and selections made.
    selected_keys, host_keys : int
        Now: keys selected, and what they were selected from.
    attend_ns, refresh_ns, refresh_wait_ns : int
        In calls, in making selections, in calls that wait for these.
    n_device_attends : int
        Calls on device tensors.
    n_host_parts, host_part_ns, host_part_tokens : int
        Parts of these that the CPU computed, their time, and the keys that it attended.
    n_stream_parts, stream_part_ns, stream_part_tokens, n_joint_parts : int
        Parts that the device computed over keys outside the window, their time, the keys that crossed the bus, and of these parts
        those of which the CPU computed some keys.
    staged_kv_bytes, filled_kv_bytes, streamed_kv_bytes, streamed_x_bytes : int
        K and V that went to the host store, to windows that lacked them, across the bus; hidden states that crossed it.
    judged_kv_bytes : int
        K, and bounds of K, that policy "hip" read to choose keys; on a device at most.
    pattern_pairs, pattern_dense_pairs : int
        Pairs of a query and a key, query head by query head, that appends under "patterns" attended, and what policy "all" would have.
    n_planned_parts, predicted_part_ns, planned_part_ns : int
        Parts of which the engine knew what they would take, that, and what they took.
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
    """Who will compute over the keys of a call on device tensors, and what that takes.

    Attributes
    ----------
    resident_tokens, host_tokens, stream_tokens : int
        In windows; attended by the CPU; that cross the bus.
    host_bytes, stream_bytes : int
        K and V of the latter two.
    host_ns : int
        When the CPU has ended. Times count from when the call's queries are there, with CPU and bus as slow as they make each
        other; 0 where nothing is known.
    bus_ns : int
        When the bus has, with what it brings before the queries are there, as in the session's last such calls.
    device_ns : int
        When the device has, of rebuilt keys and long appends (by a trial of their kernels); 0 where it hides behind the bus.
    total_ns : int
        The last of them, without what the bus brings before.
    host_alone_ns, stream_alone_ns : int
        If the CPU, or the bus, had all keys outside the windows.
    recompute_tokens, recompute_bytes, recompute_alone_ns : int
        Whose hidden states cross the bus, these, and if the device made all keys outside the windows (the bus alone where making
        them has not been measured); 0 without hidden states.
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
        """The same as the library says it in JSON."""
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
    """What stops calls of :meth:`Session.attend` that it is given to; any thread may set it."""

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)

    def set(self) -> None:
        """Stop them, and those that come until :meth:`clear`."""
        self._value.value = 1

    def clear(self) -> None:
        """Stop no more."""
        self._value.value = 0

    def is_set(self) -> bool:
        """Whether it stops them."""
        return self._value.value != 0


class Listener:
    """A progress callback as the library calls it. An exception stops the call, which raises it."""

    def __init__(self, progress: Callable[[int, int], object], engine: Handle) -> None:
        self._progress = progress
        self._engine = engine
        self._function = _Progress(self._hear)
        self.address: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.raised: BaseException | None = None

    def _hear(self, done: int, total: int, _: int | None) -> int:
        thread = threading.get_ident()
        try:
            outer = telling.get(thread)  # of another engine
            telling[thread] = self._engine
            try:
                self._progress(done, total)
            finally:
                if outer is None:
                    del telling[thread]
                else:
                    telling[thread] = outer
        except BaseException as error:  # KeyboardInterrupt too: nothing may unwind into the library
            self.raised = error
            return 1
        return 0


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _unlock_child() -> None:
    """In a child made by fork() a lock may be held by a thread that stayed behind; the library refuses calls there, at once."""
    for session in list(_sessions):
        session._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)


class Session(Owner):
    """A policy and its memory of what was attended. Calls of several threads wait for each other.

    Parameters
    ----------
    cache : Cache
        Several sessions may read one.
    **options
        :class:`tandem.SessionOptions`.

    Raises
    ------
    NotFoundError
        `policy` is unknown.
    UnsupportedError
        The policy cannot serve the model.
    CapacityError
    """

    def __init__(self, cache: Cache, **options: Unpack[SessionOptions]) -> None:
        parent = pointer_of("cache", cache, Cache)
        self.cache = cache
        options_struct = session_struct(options)
        pointer = create(lib.tandem_session_create, parent, ctypes.byref(options_struct))
        self._own(Handle(pointer, lib.tandem_session_release, cache._handle))
        # The arguments of attend, written anew in each call: six tensors and the struct that points to them. The lock is
        # what keeps one thread's tensors out of another's call.
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
        """Append `k` and `v` to one layer, then ``o = softmax(logits) V`` over the keys that the policy selects.

        Tokens of all sequences stand one after another; n_tokens is the sum of `q_lens`.

        Parameters
        ----------
        sequences : Sequence or sequence of Sequence
            Each once, of this session's cache.
        q : array_like
            [n_tokens, n_q_heads, k_head_dim], f32, f16 or bf16.
        k, v : array_like, optional
            [n_tokens, n_kv_heads, k_head_dim] and [n_tokens, n_kv_heads, v_head_dim], of any element type. Both None: nothing
            is appended and the queries are the last tokens already there. `v` None alone: V aliases K.
        layer_idx : int
        q_lens : sequence of int, optional
            Tokens of each sequence; None: with one sequence all of `q`.
        out : array_like, optional
            Written: [n_tokens, n_q_heads, v_head_dim]; f32, f16 or bf16. None: a NumPy array is made, of q's type where q is one
            of floats, else f32. Needed where `q` is in device memory.
        lse : array_like, optional
            Written: [n_tokens, n_q_heads] f32, natural log of the sum of exp of the logits.
        x : array_like, optional
            [n_tokens, hidden_dim] hidden states of the appended tokens, where the layer keeps them.
        speculative : bool
            The appended tokens are a guess, kept apart until :meth:`commit`.
        partial : bool
            A chunk of a longer append: the last chunk does the re-evaluation.
        parent_idx : sequence of int, optional
            [n_tokens] the tree of speculative tokens: index within the token's sequence in this call, -1 for the root.
        stream : int, optional
            CUDA stream, for arrays in device memory; None or 0: the legacy default stream. They have to live until it has
            passed the call, which memory that a stream-ordered allocator, as PyTorch's, took on this stream does by itself.
        cancel : CancelFlag, optional
            Stops the call when any thread sets it; nothing has changed then. For arrays in host memory.
        progress : callable, optional
            Called by this thread with the work done and the work there is, in units of no fixed size. When it raises, the call
            stops, as by `cancel`, and raises that. It may not use this session, nor its engine to attend, append or merge.
        selection : Selection, optional
            The keys that queries attend, in place of those of the session's policy. For layers of policy "all" without
            streaming heads.

        Returns
        -------
        o : `out`, or the array made

        Raises
        ------
        InvalidArgumentError, NotFoundError, BusyError, CapacityError, OutOfMemoryError, UnsupportedError, DeviceLostError
        CancelledError
            `cancel` was set.
        InvalidStateError
            Speculative tokens pending; q_lens beyond what the step declared; the call comes from a progress callback."""
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
        """The lock of a call."""
        refuse_in_callback(self.cache._engine)
        return self._lock

    def _new_output(self, q: Any, layer_idx: int) -> NDArray[Any]:
        """q: a Tensor or an array that is as good as one."""
        if isinstance(q, Tensor) and q.device != "host":
            raise invalid("out", "is None: where q is in device memory the output is the caller's")
        layer = self.cache.layer(layer_idx)
        array = q.array if isinstance(q, Tensor) else q
        dtype = array.dtype if isinstance(array, np.ndarray) and array.dtype.kind in "fV" else np.dtype(np.float32)
        try:
            return np.empty((q.shape[0], layer.n_q_heads, layer.v_dim), dtype)
        except (MemoryError, ValueError) as error:  # more bytes than there are, or than there can be
            raise OutOfMemoryError(f"out: {error}", status=_abi.STATUS["OUT_OF_MEMORY"], field="out") from None

    def commit(self, sequence: Sequence, kept_idx: Several[int]) -> None:
        """End speculation in one sequence.

        Parameters
        ----------
        sequence : Sequence
        kept_idx : sequence of int
            Of the speculative tokens those that stay, ascending, a chain in their tree; the others go, in every layer.

        Raises
        ------
        InvalidStateError
            Nothing is speculative, or layers are uneven.
        InvalidArgumentError
            Not a chain.
        """
        ids = ids_of(self.cache, (sequence,))
        kept = array_of("kept_idx", kept_idx, ctypes.c_int64, 64)
        with self._free():
            call(lib.tandem_session_commit, self._handle.pointer, ids[0], ctypes.byref(kept), len(kept))

    def step(self, sequences: Sequence | Several[Sequence], q_lens: int | Several[int] = 1, *,
             stream: int | None = None) -> "Step":
        """A step, to be entered by ``with``: `q_lens` tokens will be appended to `sequences` in every layer.

        Parameters
        ----------
        sequences : Sequence or sequence of Sequence
        q_lens : int or sequence of int
            Of each sequence; one number goes for all.
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
        """Of one layer: pairs of a query and a key, query head by query head, that appends under "patterns" attended, and what policy
        "all" would have attended.

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
        """The keys that the next decode query of one KV head would attend.

        Parameters
        ----------
        sequence : Sequence
        layer_idx, kv_head_idx : int
        q_head_idx : int
            Query head within the group, whose MAW is wanted.

        Returns
        -------
        token_idx : ndarray of int64
            Ascending, sinks and window included.
        maw : ndarray of float32
            Share of each key that was selected outside window and sinks; 0 for the others.
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
        """Who will compute the next call on device tensors. Where the engine has not measured yet, it does.

        Parameters
        ----------
        kv_lens : sequence of int
            Tokens of each sequence, those of the call among them.
        q_lens : sequence of int, optional
            How many these are; None: 1 each.
        layer_idx : int

        Raises
        ------
        UnsupportedError
            There is no device, or a policy that does not attend all keys.
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
        """Say where W_K and W_V of a layer are whose projection has none: blocks of `weights`, from the next call on.

        Route ``"recompute"``, and ``"auto"`` where that gains, has them in use while it makes keys. Until it is told,
        ``"recompute"`` raises :class:`InvalidStateError` and ``"auto"`` makes no keys. May be called again.

        Parameters
        ----------
        layer_idx : int
        weights : Weights
            Of the session's engine; they may be closed, as the session keeps them.
        w_k_block, w_v_block : int
            Where the matrices are, of the projection's `w_type` and in its `w_order`.

        Raises
        ------
        UnsupportedError
            The layer has no projection, or one with weights of its own.
        InvalidArgumentError
            A block is not there or has another size; the weights are of another engine.
        """
        given = pointer_of("weights", weights, Weights)
        blocks = [integer(name, value, 32) for name, value in (("w_k_block", w_k_block), ("w_v_block", w_v_block))]
        with self._free():
            call(lib.tandem_session_use_weights, self._handle.pointer, integer("layer_idx", layer_idx, 32), given, *blocks)

    def stats(self) -> SessionStats:
        """Sums since the session was made. Waits for selections in flight and for calls under way on the device."""
        with self._free():
            return read_stats(SessionStats, _abi.SessionStatsStruct(), lib.tandem_session_get_stats, self._handle.pointer)

    def __repr__(self) -> str:
        return self._repr("open")


class Step(NotCopied):
    """One step of a session: what happens between entering and leaving counts together. Made by :meth:`Session.step`.

    Raises
    ------
    InvalidStateError
        On entering: a step is open. On leaving: a layer got fewer tokens than declared; every sequence of the step is back at
        its old length then. When the body itself raises, that exception is the one that is seen.
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
            if kind is None:  # else the step was not completed because of what the body raised
                raise
