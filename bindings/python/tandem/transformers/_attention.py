# SPDX-License-Identifier: MIT
"""The two functions that Transformers calls by the name "tandem".

A model calls cache.update(key, value, layer) and then the attention function, which does not get the cache. So update() returns
the new keys with a note on that tensor (Update), by which the attention function finds the cache. Models with multi-head latent
attention (DeepSeek-V3) pass latents to update() and expand its result. For them the thread's latest note counts.
"""
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import causal_mask_function

from .._errors import UnsupportedError, invalid
from ._layers import refuse_layers, text_config, unsupported
from ._stateless import attend_without_cache
from ._untraced import untraced

if TYPE_CHECKING:
    from ._cache import TandemCache

_NOTE = "_tandem_update"
# Attributes of GPT-2's layers that change the factor of the logits. Old Transformers does not pass that factor.
_FACTORS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
# Arguments that models pass on to attention functions and that do not change the result.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "position_embeddings", "output_hidden_states", "output_router_logits",
             "return_dict", "logits_to_keep", "num_items_in_batch", "past_key_values", "past_key_value", "cache", "target_dtype",
             "assistant_model", "assistant_tokenizer"}  # the last two of generate() with beams, which takes no notice of them


class _Thread(threading.local):
    """The state of a thread's passes.

    Attributes
    ----------
    update : Update or None
        The last note, until it is attended.
    without_cache : bool
        The caller of the pass wants no cache, so that keys come without a note.
    n_attended : int
        Calls of :func:`tandem_attention` so far.
    """

    def __init__(self) -> None:
        self.update: Update | None = None
        self.without_cache = False
        self.n_attended = 0


_thread = _Thread()


@dataclass(frozen=True)
class Update:
    """The note on a key tensor: the cache that it went through."""

    cache: "TandemCache"
    layer_idx: int
    key: torch.Tensor
    value: torch.Tensor


def note(update: Update) -> None:
    """Leaves the note for the attention function."""
    setattr(update.key, _NOTE, update)
    _thread.update = update


def begin_pass(without_cache: bool) -> None:
    """Called before a model's forward pass. without_cache: the caller wants no cache, so keys come without a note."""
    _thread.without_cache = without_cache


def n_attended() -> int:
    """Returns this thread's number of calls of :func:`tandem_attention` so far."""
    return _thread.n_attended


def _noted(module: Any, key: torch.Tensor, value: torch.Tensor) -> Update | None:
    """Returns the note of the update that made these keys and values, or None in a pass without a cache."""
    latest, _thread.update = _thread.update, None
    update: Update | None = getattr(key, _NOTE, None)
    if update is not None:
        delattr(key, _NOTE)
        update.cache._pending = None  # later errors reach the caller; they are no forgotten update
        if value is not update.value:
            raise unsupported("value", "was changed by the model after the cache's update()")
        return update
    if latest is not None and hasattr(module, "expand_kv") and getattr(module, "layer_idx", None) == latest.layer_idx and (
            latest.cache._pending == latest.layer_idx and key.shape[2] == value.shape[2] == latest.key.shape[2]):
        delattr(latest.key, _NOTE)
        latest.cache._pending = None
        return latest
    if _thread.without_cache:
        return None
    raise unsupported("past_key_values", "is not a TandemCache, or the model changes keys after the cache's update() in a way that "
                      "is not known here: attn_implementation='tandem' needs past_key_values=tandem.transformers.TandemCache(...), "
                      "which gradient checkpointing takes away in training")


@dataclass(frozen=True)
class Call:
    """A layer's attention call that Tandem supports."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    sm_scale: float
    sliding_window_tokens: int
    soft_cap: float
    sinks: torch.Tensor | None


def _refuse_not_causal(module: Any, is_causal: bool | None) -> None:
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise unsupported("is_causal", "= False: queries see keys up to their own token. Where this is the encoder of images or sound of "
                          "a model, its decoder can ask alone: attn_implementation={'text_config': 'tandem'}")


def _refuse(module: Any, tensors: tuple[torch.Tensor | None, ...], dropout: float, is_causal: bool | None,
            others: dict[str, Any]) -> None:
    if dropout:
        raise unsupported("dropout", f"= {dropout}: attention weights are not dropped; use model.eval()")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise unsupported("requires_grad", "of query, key, value or sinks: Tandem has no backward pass; use torch.no_grad()")
    _refuse_not_causal(module, is_causal)
    if others.pop("output_attentions", None):
        raise unsupported("output_attentions", "= True: attention weights are never formed as a whole")
    for name, value in others.items():
        if name not in _HARMLESS and value is not None:
            raise unsupported(name, "is an argument of attention that is not known here")


@untraced
def tandem_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                     sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
                     is_causal: bool | None = None, **others: Any) -> tuple[torch.Tensor, None]:
    """Attention of one layer over a :class:`TandemCache` and the new `key` and `value`, which it appends.

    In a pass with ``use_cache=False`` and without a cache, `key` and `value` are attended in place, and nothing is kept.

    Parameters
    ----------
    module : torch.nn.Module
        The layer. Its ``config`` describes the model's layers.
    query, key, value : Tensor
        [batch, n_heads, n_columns, head_dim], on the CPU or on a CUDA device. `key` and `value` are the results of
        ``TandemCache.update``.
    attention_mask : Tensor, optional
        [batch, columns] of bool: all columns of the cache and the new ones. False marks padding.
    scaling : float, optional
        Factor of the logits; None: ``1 / sqrt(head_dim)``.
    dropout : float
        Must be 0.
    sliding_window : int, optional
    softcap : float, optional
    s_aux : Tensor, optional
        [n_heads] learned sink logits.
    is_causal : bool, optional
        May not be False.

    Returns
    -------
    output : Tensor
        [batch, n_columns, n_heads, head_dim]; padding is 0.
    weights : None

    Raises
    ------
    UnsupportedError
        Tandem does not support the call, or it has no TandemCache.
    InvalidArgumentError
        The mask contradicts earlier calls, or the layer differs from the one that the cache was made for.
    TandemError
        As :meth:`tandem.Session.attend`.
    """
    if not hasattr(key, _NOTE):
        _refuse_not_causal(module, is_causal)  # the reason why an encoder has no cache
    update = _noted(module, key, value)
    if update is not None and getattr(module, "layer_idx", update.layer_idx) != update.layer_idx:
        raise unsupported("layer_idx", f"= {module.layer_idx} attends keys of layer {update.layer_idx}")
    _refuse(module, (query, key, value, s_aux), dropout, is_causal, others)
    for name, usual in _FACTORS.items() if scaling is None else ():
        if getattr(module, name, usual) != usual:
            raise unsupported(name, f"= {not usual}: this version of Transformers does not say the factor of the logits")
    call = Call(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                int(sliding_window or 0), float(softcap or 0), s_aux)
    if update is None:
        output = attend_without_cache(call)
    else:
        output = update.cache._attend(update.layer_idx, getattr(module, "config", None), call)
    _thread.n_attended += 1
    return output, None


def _is_causal(mask_function: Callable[..., torch.Tensor], batch: int, n_queries: int, first: int, window: int | None) -> bool:
    """Asks a mask function, for every query, about the keys at both ends of its range and just outside."""
    rows, queries = torch.arange(batch)[:, None], torch.arange(first, first + n_queries)[None]
    head = torch.zeros((), dtype=torch.long)
    oldest = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp(min=0)

    def sees(keys: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return mask_function(rows, head, queries.expand(batch, -1), keys.expand(batch, -1)).cpu() & asked

    everywhere = torch.ones_like(queries, dtype=torch.bool)
    next_key = (queries + 1).clamp(max=first + n_queries - 1)
    return bool(sees(queries, everywhere).all() and sees(oldest, everywhere).all()
                and not sees(next_key, next_key > queries).any()
                and not sees((oldest - 1).clamp(min=0), oldest > 0).any())


@untraced
def tandem_mask(batch_size: int, q_length: int | None = None, kv_length: int = 0, q_offset: int = 0, kv_offset: int = 0,
                mask_function: Callable[..., torch.Tensor] = causal_mask_function, attention_mask: torch.Tensor | None = None,
                local_size: int | None = None, use_vmap: bool = False, cache_position: torch.Tensor | None = None,
                config: Any = None, **_: Any) -> torch.Tensor | None:
    """Returns the padding mask unchanged, [batch, columns]. No mask of queries by keys is made.

    Transformers before 5.4 gives the queries' positions in `cache_position`, [q_length].

    Raises
    ------
    UnsupportedError
        The mask is neither causal nor that of a sliding window: it is bidirectional, chunked, packed or the caller's own. Or
        the model has layers without attention.
    """
    refuse_layers(config)
    if q_length is None:
        if cache_position is None:
            raise invalid("q_length", "is None, and so is cache_position")
        q_length, q_offset = len(cache_position), int(cache_position[0])
    if use_vmap:
        raise unsupported("mask_function", "is the model's or the caller's own: masks are causal, of padding and sliding windows")
    if kv_offset or kv_length != q_offset + q_length:
        raise unsupported("mask_function", f"is over keys {kv_offset} to {kv_offset + kv_length} for queries {q_offset} to "
                          f"{q_offset + q_length}: queries are the last tokens, so a cache that has room for more (a static one) "
                          "is none for attn_implementation='tandem': pass a TandemCache, or none")
    if local_size == 0 and "sliding_attention" not in (getattr(text_config(config), "layer_types", None) or ()):
        return attention_mask  # Transformers makes this mask for Qwen2-MoE, and no layer takes it
    if mask_function is not causal_mask_function and not _is_causal(mask_function, batch_size, q_length, q_offset, local_size):
        raise unsupported("mask_function", "is not causal: bidirectional, chunked or packed, or of blocks that see each other")
    return attention_mask
