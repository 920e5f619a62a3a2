# SPDX-License-Identifier: MIT
"""Keyword options as the structs of the C ABI: names, defaults and meaning are those of tandem.h."""
import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from . import _abi
from ._errors import invalid, of_type
from ._library import lib


class CacheOptions(TypedDict, total=False):
    """How a cache stores keys and values. Every key may be left out.

    Parameters
    ----------
    k_type, v_type : str
        Storage type: ``"f32"``, ``"f16"``, ``"bf16"``, ``"e4m3"``, ``"q8_0"``, ``"q4_0"``. Left out: ``"bf16"`` for keys,
        the keys' type for values.
    page_tokens : int
        Tokens of a page, a power of two from 16 to 4,096; 0: 128.
    host_cap_bytes, device_cap_bytes : int
        Hard caps on memory; 0: none.
    layer_k_types, layer_v_types : sequence of str
        One per layer, in place of ``k_type`` and ``v_type``.
    k_rotation : str
        ``"hadamard"``: rotate keys before they are rounded; ``"none"``; ``"default"``, as left out: ``"hadamard"`` for keys in
        4 bits where a layer's keys can be rotated and its hidden states are not kept, else ``"none"``.
    x_type : str
        ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q4_0"`` or ``"q4_64"``: hidden states of layers with a projection are kept too,
        in this type, and every append brings them.
    """

    k_type: str
    v_type: str
    page_tokens: int
    host_cap_bytes: int
    device_cap_bytes: int
    layer_k_types: Sequence[str]
    layer_v_types: Sequence[str]
    k_rotation: str
    x_type: str


class SessionOptions(TypedDict, total=False):
    """Which keys a session attends. Every key may be left out.

    Parameters
    ----------
    sleep_between_calls : bool
        Whether the CPU workers may sleep between the calls of a step without a stream, for programs whose own threads compute
        on the same cores in between. Left out: they spin from the step's begin to its end.
    policy : str
        ``"all"`` (exact; the default), ``"streaming"`` or ``"hgca"``.
    window_tokens : int
        Newest tokens, always attended; -1: 4,096; 0: none.
    sink_tokens : int
        First tokens, always attended; -1: 64; 0: none.
    alpha : float
        Factor in (0, 1] of the moving average of attention weights (MAW); 0: 0.3.
    beta : float
        Factor of its threshold, at least 0; -1: 1.
    halo_tokens : int
        Keys kept after a strongly attended one; -1: 128; 0: none.
    route : str
        ``"auto"`` (the default), ``"host"``, ``"stream"``, ``"host+stream"`` or ``"recompute"``: who computes over keys outside
        the window for device tensors.
    stream_buffer_bytes : int
        Each of the two buffers that keys go through; 0: 16 MiB.
    stream_fraction : float
        With route ``"host+stream"``: the share of these keys that crosses the bus, 0 to 1.
    append_tokens : int
        Most tokens of an append that meet a streamed key together; 0: 16,384, and plans have room for single queries alone.
    stream_heads : int
        KV heads of what is streamed at a time, at most; 0: as many as take the least time.
    recompute_share : float
        With route ``"recompute"``: the share, in (0, 1], of these keys that is made of hidden states; 0: 1.
    streaming_heads : sequence of sequence of bool
        For each layer, for each KV head: whether its queries see the first `sink_tokens` and the `window_tokens` newest alone.
    """

    sleep_between_calls: bool
    policy: str
    window_tokens: int
    sink_tokens: int
    alpha: float
    beta: float
    halo_tokens: int
    route: str
    stream_buffer_bytes: int
    stream_fraction: float
    append_tokens: int
    stream_heads: int
    recompute_share: float
    streaming_heads: Sequence[Sequence[bool]]


def integer(name: str, value: Any, bits: int = 64) -> int:
    """`value` as an int that fits; ctypes would cut it down in silence."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(name, f"= {value!r} is not an integer") from None
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise invalid(name, f"= {number} does not fit {bits} bits")
    return number


def named(name: str, value: Any, table: Mapping[str, int]) -> int:
    """The number of a name."""
    if isinstance(value, str) and value in table:
        return table[value]
    raise invalid(name, f"= {value!r} is none of {', '.join(table)}")


def listed(name: str, values: Any) -> Sequence[Any]:
    """The members of what may be any sequence, or an array of one dimension."""
    try:
        return values if isinstance(values, (list, tuple)) else list(values)
    except TypeError:
        raise invalid(name, f"= {values!r} is not a sequence") from None


def real(name: str, value: Any) -> float:
    """`value` as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(name, f"= {value!r} is not a number: {error}") from None


def array_of(name: str, values: Any, kind: Any, bits: int) -> Any:
    """A ctypes array, every number checked."""
    values = listed(name, values)
    numbers = [integer(f"{name}[{i}]", value, bits) for i, value in enumerate(values)]
    return (kind * len(numbers))(*numbers)


def encoded(name: str, value: Any) -> bytes | None:
    """A text for the C ABI: UTF-8 without a 0 inside."""
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value:
        raise invalid(name, f"= {value!r} is not a text without 0 bytes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"= {value!r} is not a text: {error}") from None


def fill(struct: Any, options: Mapping[str, Any], converters: Mapping[str, Callable[[str, Any], Any]], who: str) -> None:
    """Sets members of a struct that its init function has filled; what is None keeps the default."""
    of_type(f"options of {who}", options, Mapping)
    kinds = dict(type(struct)._fields_)
    for name, value in options.items():
        if name not in kinds or name in ("struct_size", "reserved"):
            raise TypeError(f"{who} has no option {name!r}")
        if value is None:
            continue
        if name in converters:
            value = converters[name](name, value)
        elif kinds[name] is ctypes.c_char_p:
            value = encoded(name, value)
        elif kinds[name] in (ctypes.c_int32, ctypes.c_int64):
            value = integer(name, value, 8 * ctypes.sizeof(kinds[name]))
        else:
            value = real(name, value)
        setattr(struct, name, value)


def _name_in(table: Mapping[str, int]) -> Callable[[str, Any], int]:
    return lambda name, value: named(name, value, table)


def _names_in(table: Mapping[str, int], n_layers: int) -> Callable[[str, Any], Any]:
    def convert(name: str, values: Any) -> Any:
        if isinstance(values, str) or len(values := listed(name, values)) != n_layers:
            raise invalid(name, f"= {values!r} is not a sequence of one name for each of {n_layers} layers")
        numbers = [named(f"{name}[{i}]", value, table) for i, value in enumerate(values)]
        return (ctypes.c_int32 * n_layers)(*numbers)
    return convert


def cache_struct(options: Mapping[str, Any], n_layers: int) -> Any:
    """tandem_cache_options; keeps alive what it points to."""
    struct = _abi.CacheOptionsStruct()
    lib.tandem_cache_options_init(ctypes.byref(struct))
    types = _names_in(_abi.DTYPES, n_layers)
    fill(struct, options, {
        "k_type": _name_in(_abi.DTYPES), "v_type": _name_in(_abi.DTYPES), "k_rotation": _name_in(_abi.ROTATIONS),
        "layer_k_types": types, "layer_v_types": types,
        "x_type": _name_in(_abi.DTYPES)}, "a cache")
    return struct


def _flags(name: str, layers: Any) -> Any:
    """A byte for each member of each member."""
    flags = []
    for i, heads in enumerate(listed(name, layers)):
        for j, flag in enumerate(listed(f"{name}[{i}]", heads)):
            number = integer(f"{name}[{i}][{j}]", flag)
            if number not in (0, 1):
                raise invalid(f"{name}[{i}][{j}]", f"= {flag!r} is neither True nor False")
            flags.append(number)
    return (ctypes.c_uint8 * len(flags))(*flags)


def session_struct(options: Mapping[str, Any]) -> Any:
    """tandem_session_options; keeps alive what it points to."""
    struct = _abi.SessionOptionsStruct()
    lib.tandem_session_options_init(ctypes.byref(struct))

    def flags(name: str, layers: Any) -> Any:
        made = _flags(name, layers)
        struct.n_streaming_heads = len(made)
        return made

    of_type("options of a session", options, Mapping)
    if "n_streaming_heads" in options:
        raise TypeError("a session has no option 'n_streaming_heads'")
    fill(struct, options, {"streaming_heads": flags}, "a session")
    return struct
