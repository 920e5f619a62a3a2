# SPDX-License-Identifier: MIT
"""Keyword options as the structs of the C ABI: names, defaults and meaning are those of tandem.h."""
import ctypes
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import _abi
from ._errors import invalid, of_type
from ._library import lib
from ._option_tables import CACHE, SESSION, OptionTable
from ._option_tables import CacheOptions as CacheOptions
from ._option_tables import SessionOptions as SessionOptions
from ._patterns import patterns_struct
from ._pruning import pruning_struct

# Session options that point to structs of their own.
_STRUCTS: Mapping[str, Callable[[str, Any], Any]] = {"pruning": pruning_struct, "patterns": patterns_struct}


def integer(name: str, value: Any, bits: int = 64) -> int:
    """Returns `value` as an int that fits into `bits` bits. ctypes would truncate it silently."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(name, f"= {value!r} is not an integer") from None
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise invalid(name, f"= {number} does not fit {bits} bits")
    return number


def named(name: str, value: Any, table: Mapping[str, int]) -> int:
    """Returns the number of a name."""
    if isinstance(value, str) and value in table:
        return table[value]
    raise invalid(name, f"= {value!r} is none of {', '.join(table)}")


def listed(name: str, values: Any) -> Sequence[Any]:
    """Returns the members of a sequence or of a one-dimensional array."""
    try:
        return values if isinstance(values, (list, tuple)) else list(values)
    except TypeError:
        raise invalid(name, f"= {values!r} is not a sequence") from None


def real(name: str, value: Any) -> float:
    """Returns `value` as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(name, f"= {value!r} is not a number: {error}") from None


def array_of(name: str, values: Any, kind: Any, bits: int) -> Any:
    """Returns a ctypes array of checked integers."""
    values = listed(name, values)
    numbers = [integer(f"{name}[{i}]", value, bits) for i, value in enumerate(values)]
    return (kind * len(numbers))(*numbers)


def encoded(name: str, value: Any) -> bytes | None:
    """Returns a text for the C ABI: UTF-8 without a 0 byte."""
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value:
        raise invalid(name, f"= {value!r} is not a text without 0 bytes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"= {value!r} is not a text: {error}") from None


def suggestion(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a suggestion, if a similar name exists."""
    near = difflib.get_close_matches(name, list(known), 1) if isinstance(name, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def fill(struct: Any, options: Mapping[str, Any], converters: Mapping[str, Callable[[str, Any], Any]], who: str) -> None:
    """Sets members of a struct that its init function has filled. None keeps the default."""
    of_type(f"options of {who}", options, Mapping)
    kinds = dict(type(struct)._fields_)
    for name, value in options.items():
        if name not in kinds or name in ("struct_size", "reserved"):
            known = [kind for kind in kinds if kind not in ("struct_size", "reserved") and not kind.startswith("n_")]
            raise TypeError(f"{who} has no option {name!r}{suggestion(name, known)}")
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


def _flags(name: str, layers: Any) -> Any:
    """Returns a C array with one byte for each flag of each layer."""
    flags = []
    for i, heads in enumerate(listed(name, layers)):
        for j, flag in enumerate(listed(f"{name}[{i}]", heads)):
            number = integer(f"{name}[{i}][{j}]", flag)
            if number not in (0, 1):
                raise invalid(f"{name}[{i}][{j}]", f"= {flag!r} is neither True nor False")
            flags.append(number)
    return (ctypes.c_uint8 * len(flags))(*flags)


def _texts(name: str, texts: Any) -> Any:
    if isinstance(texts, str):
        raise invalid(name, f"= {texts!r} is not a sequence of texts")
    made = [encoded(f"{name}[{i}]", text) for i, text in enumerate(listed(name, texts))]
    return (ctypes.c_char_p * len(made))(*made)


def _filled(struct: Any, options: Mapping[str, Any], table: OptionTable, n_layers: int, who: str) -> Any:
    """Sets the options in an initialised struct and returns it. The struct keeps alive what it points to."""
    of_type(f"options of {who}", options, Mapping)
    counts = {**table.flags, **table.texts}
    for count in counts.values():
        if count in options:
            raise TypeError(f"{who} has no option {count!r}")

    def counted(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        def converted(name: str, values: Any) -> Any:
            made = convert(name, values)
            setattr(struct, counts[name], len(made))
            return made
        return converted

    converters = {name: _name_in(codes) for name, codes in table.names.items()}
    converters |= {name: _names_in(codes, n_layers) for name, codes in table.names_by_layer.items()}
    converters |= dict.fromkeys(_STRUCTS, lambda _, value: value)
    converters |= dict.fromkeys(table.flags, counted(_flags)) | dict.fromkeys(table.texts, counted(_texts))
    fill(struct, options, converters, who)
    return struct


def cache_struct(options: Mapping[str, Any], n_layers: int) -> Any:
    """Returns tandem_cache_options, which keeps alive what it points to."""
    struct = _abi.CacheOptionsStruct()
    lib.tandem_cache_options_init(ctypes.byref(struct))
    return _filled(struct, options, CACHE, n_layers, "a cache")


def session_struct(options: Mapping[str, Any]) -> Any:
    """Returns tandem_session_options, which keeps alive what it points to."""
    struct = _abi.SessionOptionsStruct()
    lib.tandem_session_options_init(ctypes.byref(struct))
    made = {name: make(name, options[name]) for name, make in _STRUCTS.items() if options.get(name) is not None}
    return _filled(struct, {**options, **made}, SESSION, 0, "a session")
