# SPDX-License-Identifier: MIT
"""Refuses models that are loaded with attention "tandem" and compute attention by code of their own.

Transformers lets such a model ask for any attention and then runs the model's own. Two rules find it, neither by names:

- A class of Transformers is refused as it is made, where its module has attention layers and never looks an implementation up.
- Any other model is refused at the end of a pass in which no layer, or not every layer, has been attended by Tandem.
"""
import inspect
import re
import sys
import threading
from functools import lru_cache
from typing import Any

from transformers import GenerationMixin

from ._attention import n_attended
from ._cache import TandemCache
from ._layers import unsupported

_ATTENTION = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_ADVICE = ("load it with another attention (attn_implementation='eager' or 'sdpa') and without a TandemCache. Where it has several "
           "parts, one part may ask alone: attn_implementation={'text_config': 'tandem'}")


class _Begun(threading.local):
    """A thread's value of :func:`n_attended` at the begin of each running pass, by the model's id."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}


_begun = _Begun()


@lru_cache(maxsize=None)
def _has_own_attention(name: str) -> bool:
    """Returns whether a module of Transformers has attention layers and never looks up an attention implementation."""
    try:
        code = inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return False  # the end of its first pass will tell
    return _ATTENTION.search(code) is not None and "ALL_ATTENTION_FUNCTIONS" not in code


def refuse_own_attention(model: Any) -> None:
    """Called as a model that asks for "tandem" is made.

    Raises
    ------
    UnsupportedError
    """
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models.") and _has_own_attention(kind.__module__):
            raise unsupported("attn_implementation", f"= 'tandem': {type(model).__name__} computes attention by code of its own, which "
                              f"Tandem cannot replace (BLOOM's adds ALiBi, for one); {_ADVICE}")


def count_from_here(model: Any) -> None:
    """Called before a pass of a model that asks for "tandem"."""
    _begun.counts[id(model)] = n_attended()


def refuse_unattended(model: Any, takes_cache: bool, cache: TandemCache | None) -> None:
    """Called after a pass of a model that asks for "tandem". The cache is then as before the pass.

    Raises
    ------
    UnsupportedError
    """
    before = _begun.counts.pop(id(model), None)
    if before == n_attended() and (takes_cache or isinstance(model, GenerationMixin)):
        if cache is not None:
            cache._take_back()
        raise unsupported("attn_implementation", f"= 'tandem': in this pass no layer of {type(model).__name__} was attended by Tandem. "
                          f"Its attention is code of its own, or it has none; {_ADVICE}")
    if cache is not None and (taken_back := cache._take_back()) is not None:
        raise unsupported("layers", f"{taken_back} to {len(cache) - 1} of {len(cache)} were not attended by Tandem in this pass: every "
                          "layer must be attention that is looked up by name; where layers were taken away from the model, its "
                          "configuration has to say so (num_hidden_layers)")
