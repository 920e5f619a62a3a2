# SPDX-License-Identifier: MIT
"""What Transformers may ask of a cache and a TandemCache has not: tensors, and states that are not keys and values."""
from typing import Any, NoReturn

from transformers.cache_utils import Cache as HuggingFaceCache

from ._layers import unsupported


def _refuse_states() -> NoReturn:
    raise unsupported("layers", "of a TandemCache have no tensors: keys and values are in Tandem, and a model that has other states "
                      "(convolution, recurrence, index keys, cross attention) needs another cache")


class _NoLayers(list[Any]):
    """The `layers` of a Transformers cache: there are none, and a model that takes one is told why."""

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse_states()


class Refusals(HuggingFaceCache):  # type: ignore[misc]
    """The part of a cache's interface that a TandemCache refuses, or answers with no."""

    def __init__(self) -> None:
        super().__init__(layers=_NoLayers())

    def _no_states(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _refuse_states()

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _no_states

    conv_states = ssm_states = recurrent_states = property(_no_states)  # of caches before Transformers 5.4

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: see :meth:`activate_past_recording`."""
        return False

    def activate_past_recording(self) -> None:
        """Nothing to do: every token stays until it is cropped."""

    def offload(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise unsupported("offload", "is not for a TandemCache, whose tokens are in host memory already")

    prefetch = offload

    def early_initialization(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise unsupported("early_initialization", "is not for a TandemCache: the first forward pass says what the model is")

    @property
    def is_compileable(self) -> bool:
        """False: it is not made of tensors."""
        return False

    # A list of no layers would do for all() of them: Transformers 5.24 would take the model for one without attention, and read
    # tokens of a prompt again that the cache holds.
    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer, at least one: every layer counts all columns."""
        return [False] * max(len(self), 1)

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer, at least one: every layer is attention."""
        return [False] * max(len(self), 1)

    is_dummy = is_linear
