# SPDX-License-Identifier: MIT
"""Keys and values of a TandemCache as tensors, for code that inspects them: interpretability, compression, tests.

Transformers' caches are lists of layers with tensors `keys` and `values`. A TandemCache has none. Its layers are made on
request, and their tensors are copies read from the host store.
"""
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from .._errors import invalid
from .._options import integer
from ._layers import unsupported
from ._refusals import Refusals

if TYPE_CHECKING:
    from ._cache import TandemCache

_READ_AS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class LayerOfCache:
    """The interface of a Transformers cache layer, as far as keys and values need it. Each access reads them anew."""

    is_sliding = is_compileable = False
    is_croppable = True

    def __init__(self, cache: "TandemCache", layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    @property
    def keys(self) -> torch.Tensor:
        """The same as :meth:`TandemCache.keys`."""
        return self._cache.keys(self._layer_idx)

    @property
    def values(self) -> torch.Tensor:
        """The same as :meth:`TandemCache.values`."""
        return self._cache.values(self._layer_idx)

    @property
    def is_initialized(self) -> bool:
        return self._cache.is_initialized

    def get_seq_length(self) -> int:
        """Return the columns, padding included."""
        return self._cache.get_seq_length(self._layer_idx)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a layer of a TandemCache has no {name!r}: it has keys and values alone, and the cache changes it")

    def __repr__(self) -> str:
        return f"<layer {self._layer_idx} of {self._cache!r}>"


class LayersOfCache(list[Any]):
    """The `layers` of a TandemCache, made on request. They do not keep the cache alive."""

    def __init__(self, cache: "TandemCache") -> None:
        super().__init__()
        self._cache = weakref.ref(cache)

    def __len__(self) -> int:
        cache = self._cache()
        return 0 if cache is None else len(cache)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __getitem__(self, index: Any) -> Any:
        cache = self._cache()
        if cache is not None:
            cache._check_open()
        if cache is None or not len(cache):
            raise unsupported("layers", "of a TandemCache are there once a pass has said how many, and have keys and values alone: a model "
                              "that has other states (convolution, recurrence, index keys, cross attention) needs another cache")
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(cache)))]
        at = integer("layers", index)
        if not -len(cache) <= at < len(cache):
            raise IndexError(f"layers[{at}]: the cache has {len(cache)} layers")
        return LayerOfCache(cache, at % len(cache))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} layers of a TandemCache>"

    def __reduce__(self) -> Any:
        raise TypeError("layers of a TandemCache can be neither copied nor pickled; the cache's save() writes a file")


def read_states(cache: "TandemCache", layer_idx: int, of_values: bool) -> torch.Tensor:
    """Returns [batch, n_kv_heads, n_columns, head_dim] of one layer, in host memory; padding is 0.

    Raises
    ------
    InvalidArgumentError
        There is no such layer.
    """
    sequences, mask = cache.sequences, cache._held.mask
    store = cache.cache
    if store is None or not 0 <= integer("layer_idx", layer_idx, 32) < len(store.layers):
        raise invalid("layer_idx", f"= {layer_idx}, the cache has {len(cache)} layers" + ("" if store else ", as no pass has been"))
    layer = store.layers[layer_idx]
    dim, dtype = layer.v_dim if of_values else layer.k_head_dim, _READ_AS[cache._model_type]
    states = torch.zeros((len(sequences), cache._held.columns, layer.n_kv_heads, dim), dtype=dtype)
    for row, (sequence, n) in enumerate(zip(sequences, cache._held.lengths, strict=True)):
        tokens = states[row] if mask is None else torch.empty((n, layer.n_kv_heads, dim), dtype=dtype)
        if n:
            sequence.read(layer_idx=layer_idx, **{"v" if of_values else "k": tokens})
        if mask is not None:
            states[row, mask[row].cpu()] = tokens
    return states.transpose(1, 2)


class Readable(Refusals):
    """A cache whose keys and values can be read."""

    def keys(self, layer_idx: int) -> torch.Tensor:
        """Return a layer's keys, [batch, n_kv_heads, columns, head_dim]: a copy in host memory, in the model's type; padding is
        0.

        The keys are those that the model gave to its attention, rounded to the storage type. ``past.layers[layer_idx].keys`` is
        the same. A call in the middle of a pass rolls the pass back, as :meth:`TandemCache.get_seq_length` does.
        """
        return read_states(cast("TandemCache", self), layer_idx, of_values=False)

    def values(self, layer_idx: int) -> torch.Tensor:
        """Return a layer's values, in the form of :meth:`keys`."""
        return read_states(cast("TandemCache", self), layer_idx, of_values=True)
