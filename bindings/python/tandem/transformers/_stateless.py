# SPDX-License-Identifier: MIT
"""Attention of a pass without a cache: over the pass's own keys, in place."""
from typing import TYPE_CHECKING

import torch

from .._attend_tensors import attend_tensors
from ._engines import shared_engine
from ._layers import unsupported
from ._rows import batch_of, read_rows, tokens_of, view_of

if TYPE_CHECKING:
    from ._attention import Call


def _refuse(call: "Call") -> None:
    if call.query.device.type != "cpu":
        raise unsupported("use_cache", f"= False on {call.query.device}: without a cache keys are attended in host memory alone; leave "
                          "use_cache=False out, or pass past_key_values=tandem.transformers.TandemCache(...)")
    if call.key.shape[2] != call.query.shape[2]:
        raise unsupported("past_key_values", f"is not a TandemCache: {call.query.shape[2]} queries come with {call.key.shape[2]} keys, "
                          "so keys of earlier passes, or of an encoder, are kept elsewhere")


def attend_without_cache(call: "Call") -> torch.Tensor:
    """Returns [batch, n_columns, n_heads, head_dim] of a pass that has all its keys. Padding is 0, and nothing is kept.

    Raises
    ------
    UnsupportedError
        The tensors are on a GPU, or keys and queries are not of the same tokens.
    InvalidArgumentError
        As :func:`tandem.attend_tensors`.
    """
    _refuse(call)
    batch, n_heads, n_columns, _ = call.query.shape
    rows = read_rows(None, 0, call.mask, batch, n_columns)
    if rows.has_gaps and call.sliding_window_tokens:
        raise unsupported("attention_mask", "has padding between tokens of a row, and the layer has a sliding window, which counts "
                          "tokens without padding")
    states = (call.query, call.key, call.value)
    if rows.index is None:  # no copy, whatever the strides
        q, k, v = (each.transpose(1, 2) for each in states)
        lens = None
    else:
        q, k, v = (tokens_of(each, rows) for each in states)
        lens = rows.q_lens
    o = call.query.new_empty((*q.shape[:-1], call.value.shape[3]))
    attend_tensors(shared_engine(None), view_of("query", q), view_of("key", k), view_of("value", v), causal=True, q_lens=lens,
                   kv_lens=lens, sliding_window_tokens=call.sliding_window_tokens, sm_scale=call.sm_scale, soft_cap=call.soft_cap,
                   sinks=None if call.sinks is None else call.sinks.detach().tolist(), out=view_of("out", o))
    return o if rows.index is None else batch_of(o, rows, batch, n_columns)
