# SPDX-License-Identifier: MIT
"""The part of Transformers' cache interface that a TandemCache refuses, or answers independently of its content."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.cache_utils import Cache as HuggingFaceCache

from ._layers import unsupported

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on; only type checkers need it


class Refusals(HuggingFaceCache):  # type: ignore[misc]
    """Refused methods and constant answers of the cache interface; copies, and `with`."""

    fork: Callable[..., Any]
    close: Callable[[], None]
    _check_open: Callable[[], None]

    def __copy__(self) -> Any:
        """The same as :meth:`fork`. A copy with shared sequences would count, or miss, tokens that the other one appends."""
        return self.fork()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return self.fork()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _no_states(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise unsupported("layers", "of a TandemCache have keys and values alone: a model that has other states (convolution, "
                          "recurrence, index keys, cross attention) needs another cache")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _no_states

    conv_states = ssm_states = recurrent_states = property(_no_states)  # names of caches before Transformers 5.4

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: see :meth:`activate_past_recording`."""
        return False

    def activate_past_recording(self) -> None:
        """Does nothing, because every token stays until it is cropped."""

    def offload(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise unsupported("offload", "is not for a TandemCache, whose tokens are in host memory already")

    prefetch = offload

    def early_initialization(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise unsupported("early_initialization", "is not for a TandemCache: the first forward pass says what the model is")

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Always True."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Always False, because the cache is not made of tensors."""
        return False

    # The lists below are never empty. all() of an empty one is True: Transformers 5.24 would then take the model for one
    # without attention, and read cached prompt tokens again.
    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer, at least one: every layer counts all columns."""
        return [False] * max(len(self), 1)

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer, at least one: every layer is attention."""
        return [False] * max(len(self), 1)

    is_dummy = is_linear
