# SPDX-License-Identifier: MIT
"""Captures each layer's queries and keys on their way to dense attention, after rotary embedding.

Importing this module registers an attention function with Transformers. It passes queries and keys to the thread's observer and
then calls Transformers' own "sdpa". So a layer's tensors live no longer than the observer needs them.
"""
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..eval._language_model import LanguageModel, ModelError

NAME = "tandem_patterns_search"
Observer = Callable[[int, torch.Tensor, torch.Tensor, float], None]
_watched = threading.local()  # .observer: receives every layer of the running pass


@contextmanager
def _watching(observer: Observer) -> Iterator[None]:
    _watched.observer = observer
    try:
        yield
    finally:
        _watched.observer = None


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
               **options: Any) -> tuple[torch.Tensor, None]:
    """Has the signature of Transformers' attention functions. The tensors are [1, n_heads, n_tokens, head_dim]."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ModelError(f"{name}: layers with soft-capped logits or learned sinks cannot be searched")
    if not options.get("sliding_window"):  # such a layer attends its whole window, whatever its heads' patterns
        scale = options.get("scaling")
        _watched.observer(module.layer_idx, query[0].float(), key[0].float(), query.shape[-1] ** -0.5 if scale is None else float(scale))
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def watch(model: LanguageModel, ids: list[int], observer: Observer) -> None:
    """Runs a prompt densely in one call. The observer gets the layer, queries and keys, both [n_heads, n_tokens, head_dim], and
    the logits' factor."""
    with _watching(observer):
        model.forward(torch.tensor(ids), None, 1, attention=NAME)
