# SPDX-License-Identifier: MIT
"""Where decode begins: caches that hold a text, each made by its own prefill, or all of them from one.

One prefill for all of them is a cache of policy "all". Every setting goes on from a fork of it, and appends the text's last tokens
by itself: that is where policies that judge keys by queries ("hgca") get theirs from. Prompts that a setting prunes ("hip",
"streaming") are dense then, up to these last tokens. Dense attention is policy "all" too.
"""
from typing import Any, Protocol

import torch

from ._language_model import LanguageModel
from ._progress import Progress
from ._settings import Setting, SettingError

TAIL_TOKENS = 128
_ALL = Setting((("policy", "all"),))


class Start(Protocol):
    """Makes caches that hold a text, and knows who computes on them."""

    model: LanguageModel
    progress: Progress

    def cache(self, setting: Setting | None) -> Any:
        """A cache under a setting; None: dense attention."""

    def close(self) -> None:
        """The caches that were made are closed before."""


class OwnPrefill:
    """A prefill for each cache.

    Parameters
    ----------
    model : LanguageModel
    ids : Tensor
        The text.
    progress : Progress
    dense_by_tandem : bool
        Dense attention is Tandem's policy "all", and not Transformers' own.
    """

    def __init__(self, model: LanguageModel, ids: torch.Tensor, progress: Progress, dense_by_tandem: bool = False) -> None:
        self.model, self._ids, self.progress, self._dense = model, ids, progress, _ALL if dense_by_tandem else None

    def cache(self, setting: Setting | None) -> Any:
        """See Start."""
        past = self.model.new_cache(setting or self._dense)
        self.model.prefill(self._ids, past)
        self.progress.prefill(len(self._ids))
        return past

    def close(self) -> None:
        """Nothing is held."""


class SharedPrefill:
    """One prefill for all caches."""

    def __init__(self, model: LanguageModel, ids: torch.Tensor, progress: Progress) -> None:
        self.model, self.progress, n_first = model, progress, max(len(ids) - TAIL_TOKENS, 1)
        self._tail = ids[n_first:]
        self._base = model.new_cache(_ALL)
        model.prefill(ids[:n_first], self._base)
        progress.prefill(n_first)

    def cache(self, setting: Setting | None) -> Any:
        """See Start."""
        setting = setting or _ALL
        options = dict(setting.session)
        past = self._base.fork(window=options.pop("window_tokens", -1), dense_layers=setting.dense_layers, **options)
        if len(self._tail):
            self.model.forward(self._tail, past, 1)
        return past

    def close(self) -> None:
        """See Start."""
        self._base.close()


def check_shared(settings: list[Setting]) -> None:
    """Raises SettingError where settings cannot go on from one prefill."""
    for setting in settings:
        if setting.storage:
            raise SettingError(f"--shared-prefill: {setting.label} stores keys and values in a way of its own")
        if setting.patterns_file is not None:
            raise SettingError(f"--shared-prefill: {setting.label} is about prompts, and this one would be prefilled densely")
