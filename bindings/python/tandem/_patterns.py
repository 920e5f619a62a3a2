# SPDX-License-Identifier: MIT
"""What heads attend under the policy "patterns", and pattern files."""
import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._errors import call, invalid, of_type
from ._library import lib

_KINDS = {"full": _abi.PATTERN_FULL, "a_shape": _abi.PATTERN_A_SHAPE, "vertical_slash": _abi.PATTERN_VERTICAL_SLASH,
          "block_sparse": _abi.PATTERN_BLOCK_SPARSE}
_SIZES = ("sink_tokens", "window_tokens", "vertical_tokens", "slash_tokens", "n_blocks")


@dataclass(frozen=True)
class HeadPattern:
    """Which keys the queries of an append attend in one query head. ``tandem/patterns.h`` describes each kind.

    Parameters
    ----------
    kinds : sequence of str, or str
        "full", "a_shape", "vertical_slash", "block_sparse": the head attends the keys that any of them names. No kind: all
        keys.
    sink_tokens, window_tokens : int
        For "a_shape": first tokens, and newest tokens, at least one.
    vertical_tokens, slash_tokens : int
        For "vertical_slash": columns and diagonals.
    n_blocks : int
        For "block_sparse": blocks of 64 tokens.

    Sizes of a kind that the head does not have are 0.
    """

    kinds: Sequence[str] | str = ()
    sink_tokens: int = 0
    window_tokens: int = 0
    vertical_tokens: int = 0
    slash_tokens: int = 0
    n_blocks: int = 0


@dataclass(frozen=True)
class Patterns:
    """What heads attend under the policy "patterns".

    Parameters
    ----------
    layers : sequence of sequence of HeadPattern
        One pattern for each query head of each layer.
    max_distance : int
        Keys farther from their query are attended as if at this distance; 0: no limit. The limit needs library RoPE
        (`Layer.rope`) and heads of kind "a_shape" alone.
    """

    layers: Sequence[Sequence[HeadPattern]]
    max_distance: int = 0

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, group_size: int | None = None, threshold: float | None = None,
             sink_tokens: int | None = None, window_tokens: int | None = None) -> "Patterns":
        """Read a file of head patterns: JSON as MInference publishes it, or gates as DuoAttention publishes them.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file.
        group_size : int, optional
            For gates: query heads of a KV head. None: 1.
        threshold : float, optional
            For gates: heads with a gate of at least this are "full", the others "a_shape". None: the median of the file's
            gates.
        sink_tokens, window_tokens : int, optional
            For gates: sinks and window of the other heads. None: 128 and 256.

        Raises
        ------
        IoError
            The file cannot be opened or read.
        InvalidArgumentError
            The file is wrong, and the message names the layer and head, or the line; or an option is out of range.
        """
        from ._options import fill
        options = _abi.PatternFileOptionsStruct()
        lib.tandem_pattern_file_options_init(ctypes.byref(options))
        fill(options, {"group_size": group_size, "threshold": threshold, "sink_tokens": sink_tokens, "window_tokens": window_tokens},
             {}, "a file of head patterns")
        name, n_heads, n_layers, heads = _encoded_path(path), ctypes.c_int64(), ctypes.c_int64(), None
        while heads is None or len(heads) < n_heads.value:  # the second round has room for all, unless the file grows
            heads = _room_for(n_heads.value)
            call(lib.tandem_patterns_read, heads, len(heads), ctypes.byref(n_heads), ctypes.byref(n_layers), name,
                 ctypes.byref(options))
        known, n_of_layer = [_head(head) for head in heads[:n_heads.value]], n_heads.value // n_layers.value
        return cls(tuple(tuple(known[i:i + n_of_layer]) for i in range(0, len(known), n_of_layer)))


def _encoded_path(path: Any) -> bytes:
    try:
        encoded = os.fsencode(path)
    except (TypeError, UnicodeEncodeError) as error:
        raise invalid("path", f"= {path!r} is not a path: {error}") from None
    if b"\0" in encoded:
        raise invalid("path", f"= {path!r} has a 0 byte")
    return encoded


def _room_for(n_heads: int) -> Any:
    heads = (_abi.HeadPatternStruct * n_heads)()
    for head in heads:
        lib.tandem_head_pattern_init(ctypes.byref(head))
    return heads


def _head(struct: Any) -> HeadPattern:
    kinds = tuple(name for name, bit in _KINDS.items() if struct.kinds & bit)
    return HeadPattern(kinds, *(getattr(struct, size) for size in _SIZES))


def patterns_struct(name: str, value: Any) -> Any:
    """Returns a pointer to tandem_patterns, which keeps alive what it points to. `value` may be the path of a file."""
    from ._options import integer, listed, named
    patterns = Patterns.read(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(patterns, Patterns):
        raise invalid(name, f"= {value!r} is neither a Patterns nor the path of a file")

    def fill_head(field: str, head: Any, struct: Any) -> None:
        of_type(field, head, HeadPattern)
        kinds = (head.kinds,) if isinstance(head.kinds, str) else listed(f"{field}.kinds", head.kinds)
        for i, kind in enumerate(kinds):
            struct.kinds |= named(f"{field}.kinds[{i}]", kind, _KINDS)
        for size in _SIZES:
            setattr(struct, size, integer(f"{field}.{size}", getattr(head, size)))

    heads = [(f"{name}.layers[{i}][{j}]", head) for i, layer in enumerate(listed(f"{name}.layers", patterns.layers))
             for j, head in enumerate(listed(f"{name}.layers[{i}]", layer))]
    structs = _room_for(len(heads))
    for (field, head), struct in zip(heads, structs, strict=True):
        fill_head(field, head, struct)
    made = _abi.PatternsStruct()
    lib.tandem_patterns_init(ctypes.byref(made))
    made.heads, made.n_heads = structs, len(heads)
    made.max_distance = integer(f"{name}.max_distance", patterns.max_distance)
    return ctypes.pointer(made)
