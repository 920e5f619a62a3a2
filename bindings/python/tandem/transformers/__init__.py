# SPDX-License-Identifier: MIT
"""Tandem as an attention implementation and a cache of Hugging Face Transformers (5.x).

Importing this module registers the attention function and the mask function ``"tandem"``. A model that was loaded with
``attn_implementation="tandem"`` then runs with ``past_key_values=TandemCache(...)``. Keys and values go to Tandem's host store;
on a GPU the newest ``window`` tokens stay there too. Each row of a batch is its own sequence, without its padding. If no cache
is given, a ``TandemCache()`` is made. With ``use_cache=False`` a pass attends its own keys and keeps nothing.

    import tandem.transformers
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="tandem", device_map="cuda")
    past = tandem.transformers.TandemCache(window=4096, policy="hgca")
    output = model.generate(**tokens, past_key_values=past, max_new_tokens=100)

Features that Tandem lacks raise :class:`tandem.UnsupportedError` with the reason, and nothing falls back: gradients, dropout,
attention weights as an output, masks other than causal ones with padding, other caches.
"""
try:
    import torch as _torch  # noqa: F401
    from transformers import AttentionInterface as _AttentionInterface
    from transformers import AttentionMaskInterface as _AttentionMaskInterface
except ImportError as _error:
    raise ImportError(f"tandem.transformers needs PyTorch and Transformers 5 or later: {_error}") from _error

from ._attention import tandem_attention, tandem_mask
from ._cache import TandemCache
from ._models import give_caches

__all__ = ["TandemCache", "tandem_attention", "tandem_mask"]

_AttentionInterface.register("tandem", tandem_attention)
_AttentionMaskInterface.register("tandem", tandem_mask)
give_caches()
