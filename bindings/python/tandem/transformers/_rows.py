# SPDX-License-Identifier: MIT
"""Padding: which tokens of a batch are real, call by call.

A cache counts columns. A row's sequence has those columns that the attention mask shows. Later masks must agree with earlier
ones, because a stored token cannot be hidden, and a token that was not stored cannot be shown.
"""
from dataclasses import dataclass

import torch

from .. import _abi
from .._errors import invalid
from .._tensor import Tensor, made, packed_view
from ._layers import unsupported

_CODES = {torch.float32: _abi.DTYPES["f32"], torch.float16: _abi.DTYPES["f16"], torch.bfloat16: _abi.DTYPES["bf16"]}


@dataclass(frozen=True)
class Rows:
    """The tokens that one forward pass appends.

    Attributes
    ----------
    q_lens : list of int
        Tokens of each row.
    index : Tensor or None
        Their places in the batch, flattened to [batch * n_columns]; None: all places.
    mask : Tensor or None
        All columns up to the end of the pass, [batch, columns] of bool; None: no padding.
    has_gaps : bool
        Whether a row has padding between its tokens, so that distances in columns and in tokens differ.
    """

    q_lens: list[int]
    index: torch.Tensor | None
    mask: torch.Tensor | None
    has_gaps: bool


def read_rows(before: torch.Tensor | None, n_before: int, mask: torch.Tensor | None, batch: int, n_new: int) -> Rows:
    """Compares the mask with that of the `n_before` columns of earlier calls, and takes the new columns from it.

    Makes one copy from the device, whatever the mask's length.
    """
    if mask is None:
        if before is not None:
            raise invalid("attention_mask", "is None, but columns of earlier calls were padding")
        return Rows([n_new] * batch, None, None, False)
    if mask.ndim == 4:
        raise unsupported("attention_mask", "has 4 dimensions: masks of queries by keys are not taken; pass one of padding, [batch, "
                          "columns], or none: queries see keys up to their own, and as far back as the layer's sliding window")
    if mask.ndim != 2:
        raise invalid("attention_mask", f"has {mask.ndim} dimensions: a mask of padding has two, [batch, columns]")
    if tuple(mask.shape) != (batch, n_before + n_new):
        raise invalid("attention_mask", f"has shape {list(mask.shape)}, must be [{batch}, {n_before} + {n_new}]: the columns of "
                      "the cache and the new ones")
    mask = mask.bool()
    old = mask[:, :n_before]
    changed = (~old if before is None else old != before).any()
    n_blocks = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, :1].sum(1)
    said = torch.cat([changed[None], (n_blocks > 1).any()[None], mask[:, n_before:].reshape(-1)]).cpu()
    if said[0]:
        raise invalid("attention_mask", f"is not that of the calls before in its first {n_before} columns: what was stored cannot be "
                      "hidden later, nor padding shown. generate() stores the padding behind a row that ends early, so the next mask "
                      "has 1 there; else crop() the cache, or begin with a new one")
    new = said[2:]
    q_lens = new.view(batch, n_new).sum(1).tolist()
    if bool(new.all()):
        return Rows(q_lens, None, None if before is None else mask.clone(), bool(said[1]))
    return Rows(q_lens, new.nonzero()[:, 0].to(mask.device), mask.clone(), bool(said[1]))


def view_of(name: str, tensor: torch.Tensor) -> Tensor:
    """Makes the same Tensor as DLPack would, several times faster. The tensor is PyTorch's and on the call's stream."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise invalid(name, f"is of {tensor.dtype}, not f32, f16 or bf16")
    tensor = tensor.resolve_neg()  # else the tensor itself; an output is never a negative view
    device, index = (_abi.DEVICE_CUDA, tensor.device.index) if tensor.is_cuda else (_abi.DEVICE_HOST, 0)
    shape = tuple(tensor.shape)
    packed = packed_view((device, index, tensor.data_ptr()), code, shape, None if tensor.is_contiguous() else tensor.stride())
    return made(tensor, (packed, code, device, shape, True, tensor))


def tokens_of(states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Converts [batch, n_heads, n_columns, head_dim] to the tokens of all rows, [n_tokens, n_heads, head_dim]; a view if
    possible."""
    batch, n_heads, n_columns, head_dim = states.shape
    tokens = states.transpose(1, 2).reshape(batch * n_columns, n_heads, head_dim)
    if rows.index is not None:
        return tokens.index_select(0, rows.index)
    # The C ABI needs strides that grow outwards. Heads with larger strides than tokens do not have them.
    is_outer = tokens.stride(2) == 1 and tokens.stride(1) >= head_dim and tokens.stride(0) >= tokens.stride(1) * n_heads
    return tokens if is_outer else tokens.contiguous()


def batch_of(tokens: torch.Tensor, rows: Rows, batch: int, n_columns: int) -> torch.Tensor:
    """Converts tokens back to [batch, n_columns, n_heads, head_dim]; padding is 0."""
    if rows.index is not None:
        tokens = tokens.new_zeros((batch * n_columns, *tokens.shape[1:])).index_copy_(0, rows.index, tokens)
    return tokens.view(batch, n_columns, *tokens.shape[1:])
