# SPDX-License-Identifier: MIT
"""Caches and their sequences."""
from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableMapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import _abi
from ._engine import Engine
from ._errors import call, invalid, of_type
from ._handle import Handle, Owner, create, pointer_of, refuse_in_callback
from ._library import lib
from ._model import Layer, Model
from ._options import CacheOptions, cache_struct, integer, listed
from ._tensor import TensorArgument, as_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on; only type checkers need it

    from ._saving import Target
    from ._session import Session

Stats = TypeVar("Stats")


@dataclass(frozen=True)
class CacheStats:
    """Memory and sequences of a cache; sizes in bytes.

    Attributes
    ----------
    n_sequences : int
    n_pages_used, n_pages_shared : int
        Pages held by at least one sequence, and by more than one.
    host_kv_bytes, host_session_bytes, selection_bytes : int
        Pages; MAW and selection tables; compacted copies of selected keys.
    host_peak_bytes, device_peak_bytes : int
        Largest use so far, which the caps bound.
    device_window_bytes, device_work_bytes, device_stream_bytes, device_weights_bytes : int
        In device memory: windows, work space of calls, buffers of sessions that stream or rebuild keys, projections.
    pinned_bytes : int
        Pages pinned for streams.
    """

    n_sequences: int
    n_pages_used: int
    n_pages_shared: int
    host_kv_bytes: int
    host_session_bytes: int
    selection_bytes: int
    host_peak_bytes: int
    device_window_bytes: int
    device_work_bytes: int
    device_peak_bytes: int
    device_stream_bytes: int
    pinned_bytes: int
    device_weights_bytes: int


def read_stats(kind: type[Stats], struct: Any, function: Any, handle: int | None) -> Stats:
    """Fills a C struct of numbers and copies it into the dataclass with the same members."""
    struct.struct_size = ctypes.sizeof(struct)
    call(function, ctypes.byref(struct), handle)
    return kind(**{field.name: getattr(struct, field.name) for field in fields(kind)})  # type: ignore[arg-type]


class Cache(Owner):
    """Keys and values of many sequences, in pages. Any thread may use it; a writer lock serialises changes.

    Parameters
    ----------
    engine : Engine
    model : Model
    **options
        :class:`tandem.CacheOptions`.

    Attributes
    ----------
    layers : tuple of Layer

    Raises
    ------
    UnsupportedError
        The layers cannot have the storage type or the rotation of keys.
    CapacityError, OutOfMemoryError
    """

    def __init__(self, engine: Engine, model: Model, **options: Unpack[CacheOptions]) -> None:
        parents = pointer_of("engine", engine, Engine), pointer_of("model", model, Model)
        self.layers: tuple[Layer, ...] = model.layers
        struct = cache_struct(options, len(self.layers))
        pointer = create(lib.tandem_cache_create, *parents, ctypes.byref(struct))
        self._engine = engine._handle
        self._own(Handle(pointer, lib.tandem_cache_release, self._engine, self.layers))  # may hold projections in device memory

    def create_sequence(self) -> "Sequence":
        """Make a new, empty sequence."""
        made = ctypes.c_int64()
        call(lib.tandem_sequence_create, ctypes.byref(made), self._handle.pointer)
        return Sequence(self, made.value)

    def load(self, source: "Target", *, session: "Session | None" = None, model_id: int = 0,
             blobs: MutableMapping[str, bytes] | None = None) -> "Sequence":
        """Make a sequence from what :meth:`Sequence.save` has written.

        Parameters
        ----------
        source : path, or binary file object
            No byte behind the sequence is read from a file object.
        session : Session, optional
            A session of this cache, which gets what the saved session had learned. None: that is skipped.
        model_id : int
            The number that was saved.
        blobs : dict, optional
            Receives the blobs, by name. None: they are skipped.

        Raises
        ------
        CorruptError
            The file is cut off, changed, or no saved sequence.
        InvalidArgumentError
            The sequence is of another model, is stored in other types, or the session has another policy. `field` names the
            member.
        UnsupportedError
            The file has a later version of the format.
        CapacityError, OutOfMemoryError, OSError
            On any exception, the cache is unchanged.
        """
        from ._saving import load
        return Sequence(self, load(self, source, session, model_id, blobs))

    def stats(self) -> CacheStats:
        """Return what the cache holds now."""
        return read_stats(CacheStats, _abi.CacheStatsStruct(), lib.tandem_cache_get_stats, self._handle.pointer)

    def trim(self) -> int:
        """Free host-store memory that closed and truncated sequences have left.

        Returns
        -------
        int
            Number of bytes.
        """
        given = ctypes.c_int64()
        call(lib.tandem_cache_trim, ctypes.byref(given), self._handle.pointer)
        return given.value

    def layer(self, layer_idx: int) -> Layer:
        """Return the geometry of a layer.

        Parameters
        ----------
        layer_idx : int

        Raises
        ------
        InvalidArgumentError
            The model has no such layer.
        """
        if not 0 <= integer("layer_idx", layer_idx, 32) < len(self.layers):
            raise invalid("layer_idx", f"= {layer_idx}, the model has {len(self.layers)} layers")
        return self.layers[layer_idx]

    def __repr__(self) -> str:
        return self._repr(f"of {len(self.layers)} layers")


def _drop(cache: Handle, sequence_id: int) -> None:
    """Drops a collected sequence. If its cache has been closed, the sequence goes with the last session."""
    if cache.pointer is not None:
        error = ctypes.c_void_p()
        lib.tandem_sequence_drop(cache.pointer, sequence_id, ctypes.byref(error))
        lib.tandem_error_release(error)


class Sequence(Owner):
    """One sequence of a cache, from :meth:`Cache.create_sequence` or :meth:`fork`. It is dropped when closed or collected.

    Every method raises :class:`tandem.NotFoundError` if the sequence has been closed, :class:`tandem.BusyError` while a session
    has it in flight, and :class:`tandem.InvalidStateError` if all layers must have the same length and do not.

    Attributes
    ----------
    cache : Cache
    id : int
        Its number in the cache, never used twice.
    """

    def __init__(self, cache: Cache, sequence_id: int) -> None:
        self.cache = cache
        self.id = sequence_id
        self._id_array = (ctypes.c_int64 * 1)(sequence_id)
        # The handle is the id plus one, because 0 is a valid id but not a valid handle.
        parent = cache._handle
        self._own(Handle(sequence_id + 1, lambda _: _drop(parent, sequence_id), parent))

    def _call(self, function: Any, *arguments: Any) -> None:
        call(function, self.cache._handle.pointer, self.id, *arguments)

    def fork(self) -> "Sequence":
        """Make a sequence with the same tokens. Both share pages; a page is copied when one of them writes."""
        made = ctypes.c_int64()
        call(lib.tandem_sequence_fork, ctypes.byref(made), self.cache._handle.pointer, self.id)
        return Sequence(self.cache, made.value)

    def save(self, target: "Target", *, session: "Session | None" = None, model_id: int = 0,
             blobs: Mapping[str, Any] | None = None) -> None:
        """Write the sequence for :meth:`Cache.load`. All its layers must have the same length.

        A path gets a temporary file (``.part``) beside it, which is flushed to disk and then renamed. So the path holds the old
        file, or none, until the new one is complete. If the process is killed, the ``.part`` file stays. Other threads can use
        other sequences meanwhile, with the same session too.

        Parameters
        ----------
        target : path, or binary file object
        session : Session, optional
            A session of this cache; what it has learned of the sequence is saved too.
        model_id : int
            A number for the model's weights; load() compares it.
        blobs : dict, optional
            More bytes, by name.

        Raises
        ------
        OSError, BusyError, InvalidStateError
        """
        from ._saving import save
        save(self, target, session, model_id, blobs)

    def close(self) -> None:
        """Drop the sequence. Pages that no other sequence holds serve other sequences; Cache.trim() frees their memory.

        Raises BusyError, and stays open, while the sequence is in flight.
        """
        if not self.closed and not self.cache.closed:
            self._call(lib.tandem_sequence_drop)
        self._finalizer.detach()
        self._handle.pointer = None

    def reserve(self, n_tokens: int) -> None:
        """Take memory for `n_tokens` more tokens in every layer.

        Parameters
        ----------
        n_tokens : int
            Number of additional tokens.

        Raises
        ------
        CapacityError, OutOfMemoryError
        """
        self._call(lib.tandem_sequence_reserve, integer("n_tokens", n_tokens))

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer.

        Parameters
        ----------
        n_tokens : int
            Number of tokens that stay.
        """
        self._call(lib.tandem_sequence_truncate, integer("n_tokens", n_tokens))

    def remove(self, first: int, n_tokens: int, *, shift_positions: bool = False) -> None:
        """Remove tokens [first, first + n_tokens).

        Parameters
        ----------
        first, n_tokens : int
        shift_positions : bool
            Move the positions of later tokens down by `n_tokens`.

        Raises
        ------
        UnsupportedError
            A shift of keys that the caller has rotated: such keys carry their position.
        """
        self._call(lib.tandem_sequence_remove, integer("first", first), integer("n_tokens", n_tokens),
                   int(bool(shift_positions)))

    def append(self, k: Any, v: Any = None, *, x: Any = None, layer_idx: int = 0, stream: int | None = None) -> None:
        """Append to one layer without attending. Values are rounded once, to the storage type.

        Parameters
        ----------
        k : array_like
            [n_tokens, n_kv_heads, k_head_dim], of any element type.
        v : array_like, optional
            [n_tokens, n_kv_heads, v_head_dim]; None if V aliases K.
        x : array_like, optional
            [n_tokens, hidden_dim] f32, f16 or bf16; given if and only if the layer keeps hidden states.
        layer_idx : int
        stream : int, optional
            CUDA stream of arrays in device memory, which the library does not support yet.

        Raises
        ------
        CapacityError, OutOfMemoryError, BusyError
        """
        refuse_in_callback(self.cache._engine)
        keys, values, hidden = (None if array is None else TensorArgument(as_tensor(name, array, stream))
                                for name, array in (("k", k), ("v", v), ("x", x)))
        where = integer("layer_idx", layer_idx, 32), keys and keys.address, values and values.address
        if hidden is None:
            self._call(lib.tandem_sequence_append, *where, stream_pointer(stream))
        else:
            self._call(lib.tandem_sequence_append_x, *where, hidden.address, stream_pointer(stream))

    def _n_to_read(self, first: int, n_tokens: int | None, layer_idx: int) -> int:
        """Checks the range, and returns its number of tokens, before an array of that size is made."""
        length = self.length(layer_idx)
        if not 0 <= integer("first", first) <= length:
            raise invalid("first", f"= {first}, the layer has {length} tokens")
        if n_tokens is None:
            return length - first
        if not 0 <= integer("n_tokens", n_tokens) <= length - first:
            raise invalid("n_tokens", f"= {n_tokens}, the layer has {length - first} tokens from {first} on")
        return n_tokens

    def read_x(self, first: int = 0, n_tokens: int | None = None, *, layer_idx: int = 0, x: Any = None) -> Any:
        """Read back the hidden states of tokens [first, first + n_tokens) of one layer.

        Parameters
        ----------
        first : int
        n_tokens : int, optional
            None: to the end. Ignored if `x` is given; its first dimension is the number.
        layer_idx : int
        x : array_like, optional
            Written: [n_tokens, hidden_dim]. None: a NumPy array of f32 is made.

        Returns
        -------
        x : the given or the new array
        """
        projection = self.cache.layer(layer_idx).projection
        if x is None:
            if projection is None:
                raise invalid("layer_idx", f"= {layer_idx}: the layer has no projection")
            n = self._n_to_read(first, n_tokens, layer_idx)
            x = np.empty((n, projection.hidden_dim), np.float32)
        hidden = TensorArgument(as_tensor("x", x, output=True))
        call(lib.tandem_sequence_read_x, hidden.address, self.cache._handle.pointer, self.id, layer_idx, integer("first", first))
        return x

    def read(self, first: int = 0, n_tokens: int | None = None, *, layer_idx: int = 0, k: Any = None,
             v: Any = None) -> tuple[Any, Any]:
        """Read back tokens [first, first + n_tokens) of one layer, as stored.

        Parameters
        ----------
        first : int
        n_tokens : int, optional
            None: to the end. Ignored if `k` or `v` is given; its first dimension is the number.
        layer_idx : int
        k, v : array_like, optional
            Written; shaped as in :meth:`append`, of any element type. If both are None, NumPy arrays of f32 are made.

        Returns
        -------
        k, v
            The given or the new arrays. None for one that was not asked for, and for V that aliases K.
        """
        layer = self.cache.layer(layer_idx)
        if k is None and v is None:
            n = self._n_to_read(first, n_tokens, layer_idx)
            k = np.empty((n, layer.n_kv_heads, layer.k_head_dim), np.float32)
            v = None if layer.v_aliases_k else np.empty((n, layer.n_kv_heads, layer.v_dim), np.float32)
        keys, values = (None if array is None else TensorArgument(as_tensor(name, array, output=True))
                        for name, array in (("k", k), ("v", v)))
        call(lib.tandem_sequence_read, keys and keys.address, values and values.address, self.cache._handle.pointer, self.id,
             layer_idx, integer("first", first))
        return k, v

    def length(self, layer_idx: int = 0) -> int:
        """Return the number of committed tokens of one layer.

        Parameters
        ----------
        layer_idx : int
        """
        n_tokens = ctypes.c_int64()
        call(lib.tandem_sequence_length, ctypes.byref(n_tokens), self.cache._handle.pointer, self.id,
             integer("layer_idx", layer_idx, 32))
        return n_tokens.value

    def digest(self) -> int:
        """Return a hash of the lengths, positions and stored bytes of every layer."""
        digest = ctypes.c_uint64()
        call(lib.tandem_sequence_digest, ctypes.byref(digest), self.cache._handle.pointer, self.id)
        return digest.value

    def __repr__(self) -> str:
        return self._repr(str(self.id))


def stream_pointer(stream: int | None) -> int | None:
    """Converts a CUDA stream, such as torch.cuda.current_stream().cuda_stream, for the C ABI."""
    if stream is not None and not 0 <= integer("stream", stream, 65) < 1 << 64:
        raise invalid("stream", f"= {stream} is not an address")
    return stream or None


def ids_of(cache: Cache | None, sequences: "Several[Sequence]") -> Any:
    """Returns the sequences' ids as a C array. All must belong to `cache`, because other caches use the same ids."""
    sequences = listed("sequences", sequences)
    for i, sequence in enumerate(sequences):
        of_type(f"sequences[{i}]", sequence, Sequence)
        if sequence.cache is not cache:
            raise invalid(f"sequences[{i}]", "belongs to another cache")
    return (ctypes.c_int64 * len(sequences))(*[sequence.id for sequence in sequences])
