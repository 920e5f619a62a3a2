# SPDX-License-Identifier: MIT
"""Offloaded weights, for which the device has no room."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _abi
from ._cache import read_stats, stream_pointer
from ._engine import Engine
from ._errors import NotCopied, call, invalid
from ._handle import Handle, Owner, create, pointer_of
from ._library import lib
from ._options import fill, integer, listed

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on; only type checkers need it


@dataclass(frozen=True)
class WeightsStats:
    """Sums since the weights were made, and what they hold now; sizes in bytes.

    Attributes
    ----------
    n_blocks, n_resident : int
        All blocks, and those that are resident on the device.
    resident_bytes, host_bytes, pinned_bytes : int
        Bytes of resident blocks, host copies of the others, and the pinned part of these copies.
    device_bytes, buffer_bytes : int
        Device memory of blocks, and the streaming buffer's part of it.
    n_uses, n_streamed_uses, n_ahead : int
        Uses, those of blocks that cross the bus, and those of these that were under way or there when asked for.
    streamed_bytes : int
        Bytes sent so far, unneeded transfers included.
    """

    n_blocks: int
    n_resident: int
    resident_bytes: int
    host_bytes: int
    pinned_bytes: int
    device_bytes: int
    buffer_bytes: int
    n_uses: int
    n_streamed_uses: int
    n_ahead: int
    streamed_bytes: int


def _bytes_of(name: str, block: Any) -> Any:
    """Returns the bytes of a contiguous buffer, without a copy."""
    try:
        view = block if isinstance(block, np.ndarray) else memoryview(block)
        contiguous = view.flags.c_contiguous if isinstance(view, np.ndarray) else view.c_contiguous
    except TypeError:
        raise invalid(name, f"is a {type(block).__name__}, which is no buffer") from None
    if isinstance(view, np.ndarray) and view.dtype.hasobject:
        raise invalid(name, f"holds Python objects ({view.dtype}), not numbers")
    if not contiguous:
        raise invalid(name, "is not contiguous")
    if isinstance(view, np.ndarray):
        return view.reshape(-1).view(np.uint8)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


class Weights(Owner):
    """A model's weights when the device has no room for all of them. Any thread may use them.

    They are blocks of bytes, in the order in which a token uses them. Some stay on the device. The others cross the bus again
    and again, while the work before them computes.

    Parameters
    ----------
    engine : Engine
        An engine with a device.
    blocks : sequence of buffers
        NumPy arrays or objects with the buffer protocol, contiguous. They are copied.
    resident_bytes : int
        Device memory for resident blocks, which are spread evenly over the order; 0: no block is resident.
    buffer_bytes : int
        Device memory for the streamed blocks; 0: the largest sum of two neighbours, plus the largest block.
    host_cap_bytes, device_cap_bytes : int
        Hard caps; 0: none.

    Raises
    ------
    UnsupportedError
        The engine has no device.
    CapacityError, OutOfMemoryError, DeviceLostError
    """

    def __init__(self, engine: Engine, blocks: Sequence[Any], *, resident_bytes: int = 0, buffer_bytes: int = 0,
                 host_cap_bytes: int = 0, device_cap_bytes: int = 0) -> None:
        handle = pointer_of("engine", engine, Engine)
        arrays = [_bytes_of(f"blocks[{i}]", block) for i, block in enumerate(listed("blocks", blocks))]
        self._sizes = [array.nbytes for array in arrays]
        data = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        n_bytes = (ctypes.c_int64 * len(arrays))(*self._sizes)
        struct = _abi.WeightsOptionsStruct()
        lib.tandem_weights_options_init(ctypes.byref(struct))
        fill(struct, {"resident_bytes": resident_bytes, "buffer_bytes": buffer_bytes, "host_cap_bytes": host_cap_bytes,
                      "device_cap_bytes": device_cap_bytes}, {}, "weights")
        pointer = create(lib.tandem_weights_create, handle, ctypes.byref(data), ctypes.byref(n_bytes), len(arrays),
                         ctypes.byref(struct))
        self._own(Handle(pointer, lib.tandem_weights_release, engine._handle))

    def use(self, block_idx: int, stream: int | None = None) -> "Block":
        """Return a block for later work on `stream`, until :meth:`Block.done` or the end of ``with``. Does not wait for the
        device.

        Parameters
        ----------
        block_idx : int
            In the blocks' order, each block is there or on its way when it is asked for. One out of order is sent only then.
        stream : int, optional
            CUDA stream; None or 0: the legacy default stream.

        Raises
        ------
        InvalidStateError
            Blocks in use leave no room for this one, or the stream is being captured.
        InvalidArgumentError, DeviceLostError
        """
        data = ctypes.c_void_p()
        idx, pointer = integer("block_idx", block_idx, 32), stream_pointer(stream)
        call(lib.tandem_weights_use, ctypes.byref(data), self._handle.pointer, idx, pointer)
        return Block(self, idx, data.value or 0, pointer)

    def stats(self) -> WeightsStats:
        """Return what the weights hold and what they have done."""
        return read_stats(WeightsStats, _abi.WeightsStatsStruct(), lib.tandem_weights_get_stats, self._handle.pointer)

    def __repr__(self) -> str:
        return self._repr(f"of {len(self._sizes)} blocks")


class Block(NotCopied):
    """A block in use, from :meth:`Weights.use`: bytes in device memory that other packages can view without a copy.

    ``torch.as_tensor(block, device="cuda")`` and ``cupy.asarray(block)`` make read-only views, for work on its stream until
    :meth:`done`.

    Attributes
    ----------
    data : int
        Address in device memory, 256-byte aligned.
    n_bytes : int
    """

    def __init__(self, weights: Weights, block_idx: int, data: int, stream: int | None) -> None:
        self.data = data
        self.n_bytes = weights._sizes[block_idx]
        self._weights: Weights | None = weights
        self._block_idx = block_idx
        self._stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._weights is None:
            raise invalid("block", f"{self._block_idx} is not in use any more")
        return {"shape": (self.n_bytes,), "typestr": "|u1", "data": (self.data, False), "strides": None, "version": 3,
                "stream": self._stream or 1}

    def done(self) -> None:
        """End the use. Only work that is on the stream by now may read the block. A second call does nothing."""
        weights, self._weights = self._weights, None
        if weights is not None:
            call(lib.tandem_weights_done, weights._handle.pointer, self._block_idx, self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
