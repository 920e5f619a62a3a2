# SPDX-License-Identifier: MIT
"""Caches that hold a text, from which decode starts. Each cache has its own prefill, or all share one.

A shared prefill is a cache of policy "all". Each setting continues a fork of it and appends the text's last tokens itself:
these give queries to policies that judge keys by queries ("hgca"). So prompts that a setting prunes ("hip", "streaming") are
dense up to these last tokens. Dense attention is policy "all" too.
"""
from typing import Any, Protocol

import torch

from ._language_model import LanguageModel
from ._progress import Progress
from ._settings import Setting, SettingError

TAIL_TOKENS = 128
_ALL = Setting((("policy", "all"),))


class Start(Protocol):
    """Makes caches that hold a text."""

    model: LanguageModel
    progress: Progress

    def cache(self, setting: Setting | None) -> Any:
        """Returns a cache under a setting; None: dense attention."""

    def close(self) -> None:
        """Releases the memory. The caches made must be closed before."""


class OwnPrefill:
    """Prefills each cache separately.

    Parameters
    ----------
    model : LanguageModel
    ids : Tensor
        The text.
    progress : Progress
    dense_by_tandem : bool
        Dense attention is Tandem's policy "all", not Transformers' own.
    """

    def __init__(self, model: LanguageModel, ids: torch.Tensor, progress: Progress, dense_by_tandem: bool = False) -> None:
        self.model, self._ids, self.progress, self._dense = model, ids, progress, _ALL if dense_by_tandem else None

    def cache(self, setting: Setting | None) -> Any:
        """Implements Start.cache()."""
        past = self.model.new_cache(setting or self._dense)
        self.model.prefill(self._ids, past)
        self.progress.prefill(len(self._ids))
        return past

    def close(self) -> None:
        """Does nothing."""


class SharedPrefill:
    """Prefills once for all caches."""

    def __init__(self, model: LanguageModel, ids: torch.Tensor, progress: Progress) -> None:
        self.model, self.progress, n_first = model, progress, max(len(ids) - TAIL_TOKENS, 1)
        self._tail = ids[n_first:]
        self._base = model.new_cache(_ALL)
        model.prefill(ids[:n_first], self._base)
        progress.prefill(n_first)

    def cache(self, setting: Setting | None) -> Any:
        """Implements Start.cache()."""
        setting = setting or _ALL
        options = dict(setting.session)
        past = self._base.fork(window=options.pop("window_tokens", -1), dense_layers=setting.dense_layers, **options)
        if len(self._tail):
            self.model.forward(self._tail, past, 1)
        return past

    def close(self) -> None:
        """Implements Start.close()."""
        self._base.close()


def check_shared(settings: list[Setting]) -> None:
    """Raises SettingError if a setting cannot continue a shared prefill."""
    for setting in settings:
        if setting.storage:
            raise SettingError(f"--shared-prefill: {setting.label} stores keys and values in a way of its own")
        if setting.patterns_file is not None:
            raise SettingError(f"--shared-prefill: {setting.label} is about prompts, and this one would be prefilled densely")
