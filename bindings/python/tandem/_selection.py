# SPDX-License-Identifier: MIT
"""Keys that the caller names."""
import ctypes
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._errors import of_type
from ._options import integer
from ._tensor import TensorArgument, as_tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """The keys that each query of :meth:`Session.attend` attends, for models with their own indexer.

    Index i names the tokens ``i * unit_tokens`` to ``(i + 1) * unit_tokens - 1`` of the query's sequence. A query attends those
    that it could see without a selection. Indices of a row ascend, and -1 fills the rest of the row. A row of -1 attends no
    key.

    Parameters
    ----------
    idx : array_like
        [n_tokens, n_kv_heads, n_idx] int32, or [n_tokens, 1, n_idx] for all KV heads alike. In host memory, or, for calls on
        device arrays, in device memory. Indices in device memory are read in the order of the call's stream, without waiting. A
        wrong row of them makes the query's o and lse NaN, and a later call raises InvalidArgumentError. A step on a stream
        takes them in device memory only.
    unit_tokens : int
        A power of two from 1 to 256.
    any_order : bool
        Indices of a row may be in any order: the library sorts a copy of each row.
    plus_window : bool
        Queries also attend the session's `sink_tokens` first keys and the `window_tokens` newest keys up to their own.
    """

    idx: Any
    unit_tokens: int = 1
    any_order: bool = False
    plus_window: bool = False


class SelectionArgument:
    """A tandem_selection in C memory, with its indices, which it keeps alive."""

    __slots__ = ("_idx", "_struct")

    def __init__(self, selection: Selection, stream: int | None) -> None:
        of_type("selection", selection, Selection)
        self._idx = TensorArgument(as_tensor("selection.idx", selection.idx, stream))
        self._struct = _abi.SelectionStruct(
            struct_size=ctypes.sizeof(_abi.SelectionStruct),
            flags=(_abi.SELECTION_ANY_ORDER if selection.any_order else 0) |
                  (_abi.SELECTION_PLUS_WINDOW if selection.plus_window else 0),
            unit_tokens=integer("selection.unit_tokens", selection.unit_tokens, 64),
            idx=ctypes.cast(self._idx.address, ctypes.POINTER(_abi.TensorStruct)))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)
