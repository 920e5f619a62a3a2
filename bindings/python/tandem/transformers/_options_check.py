# SPDX-License-Identifier: MIT
"""Checks the arguments of a TandemCache when it is made. Its engine, cache and session come with the first forward pass.

Checks that depend on the model (options of each layer or head, kernels for its heads) are left to that pass.
"""
import ctypes
from collections.abc import Mapping
from typing import Any

from .._engine import Engine, policies
from .._errors import InvalidArgumentError, NotFoundError, UnsupportedError, call, invalid, of_type
from .._library import lib
from .._model import Layer
from .._options import CacheOptions, SessionOptions, cache_struct, integer, listed, session_struct, suggestion
from ._engines import asked_engine

_OWN = ("window", "engine", "layers", "storage", "dense_layers")
_OF_SESSIONS = tuple(name for name in SessionOptions.__annotations__ if name != "window_tokens")
_OF_STORAGE = tuple(CacheOptions.__annotations__)
_BY_MODEL = ("patterns", "layer_policies", "streaming_heads")  # options that depend on the number of layers


def _check_names(options: Mapping[str, Any], storage: Mapping[str, Any]) -> None:
    for name in options:
        if name == "window_tokens":
            raise TypeError("window_tokens: TandemCache calls it window")
        if name in _OF_STORAGE:
            raise TypeError(f"TandemCache has no option {name!r}: it says how keys are stored, storage={{{name!r}: ...}}")
        if name not in _OF_SESSIONS:
            raise TypeError(f"TandemCache has no option {name!r}{suggestion(name, (*_OWN, *_OF_SESSIONS))}")
    for name in storage:
        if name not in _OF_STORAGE:
            raise TypeError(f"storage of a TandemCache has no option {name!r}{suggestion(name, _OF_STORAGE)}")


def _check_policy(field: str, policy: Any) -> None:
    if policy is not None and policy not in (known := policies()):
        raise invalid(field, f"= {policy!r} is none of {', '.join(known)}{suggestion(policy, known)}")


def _check_ranges(engine: Engine | None, options: Mapping[str, Any]) -> None:
    """Asks the library, with a made-up layer, whether numbers are in range."""
    left_out = {*_BY_MODEL} if options.get("layer_policies") is None else {*_BY_MODEL, "policy", "pruning"}
    asked = {name: value for name, value in options.items() if name not in left_out}
    if asked.get("policy") == "patterns":
        del asked["policy"]
    if asked == {"window_tokens": -1}:
        return
    struct = session_struct(asked)
    try:
        call(lib.tandem_supports, (engine or asked_engine())._handle.pointer, None, None, ctypes.byref(struct))
    except (InvalidArgumentError, NotFoundError) as error:
        field = error.field.removeprefix("session.")
        what = error.message.removeprefix("tandem_supports: session: ").removeprefix(field).lstrip()
        raise invalid("window" if field == "window_tokens" else field, what) from None
    except UnsupportedError:  # another layer may support it
        return


def check_options(engine: Any, layers: Any, storage: Any, options: Mapping[str, Any], window: Any) -> None:
    """Refuses options that fit no model.

    Raises
    ------
    TypeError
        An option's name is unknown.
    InvalidArgumentError
        A value has the wrong type, is out of range, or names no policy.
    """
    if storage is not None:
        of_type("storage", storage, dict)
    _check_names(options, storage or {})
    if engine is not None:
        of_type("engine", engine, Engine)
    for i, layer in enumerate(() if layers is None else listed("layers", layers)):
        of_type(f"layers[{i}]", layer, Layer)
    given = {**options, "window_tokens": integer("window", window)}
    _check_policy("policy", options.get("policy"))
    by_layer = options.get("layer_policies")
    for i, policy in enumerate(() if by_layer is None or isinstance(by_layer, str) else listed("layer_policies", by_layer)):
        _check_policy(f"layer_policies[{i}]", policy)
    session_struct(given)
    of_layers = [values for values in ((storage or {}).get(name) for name in ("layer_k_types", "layer_v_types")) if values is not None]
    cache_struct(storage or {}, len(listed("layer_k_types", of_layers[0])) if of_layers else 0)
    _check_ranges(engine, given)
