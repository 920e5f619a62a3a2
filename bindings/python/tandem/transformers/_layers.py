# SPDX-License-Identifier: MIT
"""The layers of a model, from its configuration and an attention call."""
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _abi
from .._errors import UnsupportedError, invalid
from .._model import Layer
from .._options import SessionOptions, integer, listed

if TYPE_CHECKING:
    from ._attention import Call

_FULL, _SLIDING = ("full_attention", "attention"), "sliding_attention"
_WINDOW = 4096  # the library's default
_LONGEST = 131_072  # tokens, if a configuration does not say
_MOST = (1 << 30) - 1  # most tokens that a search supports
_LISTS_OF_KINDS = ("layer_types", "layers_block_type", "block_types")  # names of the list in configurations


def unsupported(field: str, what: str) -> UnsupportedError:
    """Returns the error for a feature of Transformers that Tandem does not support."""
    return UnsupportedError(f"{field} {what}", status=_abi.STATUS["UNSUPPORTED"], field=field)


def text_config(config: Any) -> Any:
    """Returns the decoder's configuration, if a model has several parts."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def refuse_layers(config: Any) -> None:
    """Refuses models with layers that do not keep their own keys and values for each token.

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
    """Returns a model's layers, from its configuration and the first layer's call. Each later call is compared with them."""
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
    """Returns the given indices, checked as far as possible without a model.

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
    """Returns a policy for each layer: "all" for the dense layers.

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
    """Returns the number of tokens that a model was made for, from its configuration; 0: it does not say."""
    lengths = [getattr(config, "max_position_embeddings", None)]
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(config, name, None)
        if isinstance(scaling, dict):
            trained, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
            if isinstance(trained, int) and isinstance(factor, int | float):
                lengths.append(int(trained * factor))
    return max((length for length in lengths if isinstance(length, int)), default=0)


def window_of(window: Any, policies: Sequence[str], config: Any, on_device: bool) -> Any:
    """Returns a session's window: as given, or, if it is -1 and a GPU prunes, as many tokens as the model was made for.

    On a GPU, layers under "hip" find keys only in the window, and prompts under "patterns" are faster there. Layers of policies
    other than "all" attend by the window, so beside them the library's default stays.
    """
    if window != -1 or not on_device or not {"hip", "patterns"} & set(policies) or set(policies) - {"all", "hip", "patterns"}:
        return window
    return min(max(_WINDOW, longest_of(config) or _LONGEST), _MOST)
