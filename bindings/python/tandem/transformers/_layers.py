# SPDX-License-Identifier: MIT
"""The layers of a model, as its configuration and a call of attention say."""
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _abi
from .._errors import UnsupportedError, invalid
from .._model import Layer
from .._options import SessionOptions, integer, listed

if TYPE_CHECKING:
    from ._attention import Call

_FULL, _SLIDING = ("full_attention", "attention"), "sliding_attention"
_WINDOW = 4096  # the library's
_LONGEST = 131_072  # tokens, where a configuration does not say
_MOST = (1 << 30) - 1  # that a search takes
_LISTS_OF_KINDS = ("layer_types", "layers_block_type", "block_types")  # what configurations call them


def unsupported(field: str, what: str) -> UnsupportedError:
    """What Transformers can ask for and Tandem has no implementation for."""
    return UnsupportedError(f"{field} {what}", status=_abi.STATUS["UNSUPPORTED"], field=field)


def text_config(config: Any) -> Any:
    """That of the decoder, where a model has several parts."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def refuse_layers(config: Any) -> None:
    """Refuses models with layers that do not keep keys and values of their own for each token.

    Raises
    ------
    UnsupportedError
    """
    for name in _LISTS_OF_KINDS:
        for kind in getattr(config, name, None) or ():
            if kind not in (*_FULL, _SLIDING):
                raise unsupported(name, f"has {kind!r}, which is not attention over a cache of keys and values")
    if getattr(config, "num_kv_shared_layers", None):
        raise unsupported("num_kv_shared_layers", f"= {config.num_kv_shared_layers}: layers attend the keys of other layers")


def layers_of(config: Any, call: "Call") -> list[Layer]:
    """The layers of a model as its configuration and the first layer's call say; each later call is compared with them."""
    if config is None:
        raise unsupported("config", "is missing: the attention module does not say what layers there are; pass layers=")
    refuse_layers(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windows = [call.sliding_window_tokens] * config.num_hidden_layers
    else:
        # Early exit runs the first layers alone: it lowers num_hidden_layers and leaves the list as it is.
        windows = [config.sliding_window or 0 if kind == _SLIDING else 0 for kind in kinds[:config.num_hidden_layers]]
    return [Layer(n_q_heads=call.query.shape[1], n_kv_heads=call.key.shape[1], k_head_dim=call.key.shape[3],
                  v_head_dim=call.value.shape[3], sm_scale=call.sm_scale, soft_cap=call.soft_cap, sliding_window_tokens=window)
            for window in windows]


def dense_layers_of(dense_layers: Any, options: SessionOptions) -> list[int]:
    """The indices that a cache was given, checked as far as no model is known.

    Raises
    ------
    InvalidArgumentError
    """
    if dense_layers is None:
        return []
    indices = [integer(f"dense_layers[{i}]", one) for i, one in enumerate(listed("dense_layers", dense_layers))]
    if options.get("layer_policies") is not None:
        raise invalid("dense_layers", "are given beside layer_policies, which names the policy of each layer already")
    return indices


def policies_of(dense_layers: Sequence[int], policy: str, n_layers: int) -> list[str]:
    """A policy for each layer: "all" for the dense layers.

    Raises
    ------
    InvalidArgumentError
        The model has no such layer.
    """
    for i, layer_idx in enumerate(dense_layers):
        if not 0 <= layer_idx < n_layers:
            raise invalid(f"dense_layers[{i}]", f"= {layer_idx}, the model has layers 0 to {n_layers - 1}")
    return ["all" if layer_idx in dense_layers else policy for layer_idx in range(n_layers)]


def longest_of(config: Any) -> int:
    """Tokens that a model was made for, as its configuration says; 0: it does not say."""
    lengths = [getattr(config, "max_position_embeddings", None)]
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(config, name, None)
        if isinstance(scaling, dict):
            trained, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
            if isinstance(trained, int) and isinstance(factor, int | float):
                lengths.append(int(trained * factor))
    return max((length for length in lengths if isinstance(length, int)), default=0)


def window_of(window: Any, policies: Sequence[str], config: Any, on_device: bool) -> Any:
    """The window of a session: as given, or, where nothing is and a GPU prunes, as many tokens as the model was made for.

    A GPU finds the keys that layers under "hip" attend in the window alone, and under "patterns" prompts are faster there. Layers
    of other policies than "all" attend by the window, so beside them it stays as the library has it.
    """
    if window != -1 or not on_device or not {"hip", "patterns"} & set(policies) or set(policies) - {"all", "hip", "patterns"}:
        return window
    return min(max(_WINDOW, longest_of(config) or _LONGEST), _MOST)
