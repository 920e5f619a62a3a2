# SPDX-License-Identifier: MIT
"""The measurements of a run, in order: prefill, decode, retrieval and speed of each context. What is there is skipped."""
import argparse
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._language_model import LanguageModel
from ._perplexity import decode_dense, decode_setting, measure_prefill, sampled
from ._progress import STEP_COST, Progress
from ._results import Results
from ._retrieval import ANSWER_TOKENS, QUESTION_TOKENS, WAYS, Haystack, depths, make, measure_retrieval
from ._settings import Setting
from ._speed import BASELINES, ROUNDS, STEPS, Runner, measure_speed

DENSE = "dense"


class Evaluation:
    """A run.

    Parameters
    ----------
    model : LanguageModel
    given : argparse.Namespace
        The flags.
    results : Results

    Raises
    ------
    ValueError
        The text is too short for a context, or a setting names a layer that is not there.
    """

    def __init__(self, model: LanguageModel, given: argparse.Namespace, results: Results) -> None:
        self._model, self._given, self._results = model, given, results
        self._settings: list[Setting] = given.setting
        self._ids = torch.tensor(model.tokenizer.tokens(given.characters))
        needed = max(given.contexts) + max(given.steps + 1, (ROUNDS + 1) * STEPS)
        if len(self._ids) < needed:
            raise ValueError(f"--text has {len(self._ids)} tokens; --contexts {max(given.contexts)} and --steps {given.steps} need "
                             f"{needed}")
        for setting in self._settings:
            if setting.dense_layers and setting.dense_layers[-1] >= model.n_layers:
                raise ValueError(f"--setting: dense_layers = {setting.dense_layers[-1]}, the model has layers 0 to "
                                 f"{model.n_layers - 1}")
        self._common = {"model": model.name, "gguf_file": given.gguf_file, "of_bytes": model.is_of_bytes, "seed": given.seed,
                        "text_sha256": hashlib.sha256(given.characters.encode()).hexdigest()}
        self._progress = Progress(1)

    def _what(self, measurement: str, setting: Setting | str | None, **more: Any) -> dict[str, Any]:
        shown = DENSE if setting is None else setting if isinstance(setting, str) else dict(setting.options)
        return {**self._common, "measurement": measurement, "setting": shown, **more}

    def run(self) -> None:
        """All that is missing."""
        jobs: list[tuple[float, str, Callable[[], None]]] = []
        for context in self._given.contexts:
            if {"perplexity", "mass"} & set(self._given.tasks):
                jobs += self._perplexity_jobs(context)
            if "retrieval" in self._given.tasks:
                jobs += self._retrieval_jobs(context)
            if "speed" in self._given.tasks:
                jobs += self._speed_jobs(context)
        self._progress = Progress(sum(cost for cost, _, _ in jobs))
        done = 0.0
        try:
            for cost, name, job in jobs:
                self._progress.doing = name
                job()
                done += cost
                self._progress.done = done
        finally:
            self._progress.end()

    # ---- perplexity and mass ----

    def _perplexity_jobs(self, context: int) -> list[tuple[float, str, Callable[[], None]]]:
        jobs: list[tuple[float, str, Callable[[], None]]] = []
        if "perplexity" in self._given.tasks:
            stored = [one for one in dict.fromkeys(setting.stores_only for setting in self._settings)
                      if not self._results.has(self._what("prefill", one, context=context))]
            if stored:
                jobs.append((context * (len(stored) + 1.0), f"prefill of {context}", lambda: self._prefill(context, stored)))
        missing = [setting for setting in self._settings if not self._results.has(self._decode_what(context, setting))]
        if missing:
            cost = (context + self._given.steps * STEP_COST) * (len(missing) + 1.0)
            jobs.append((cost, f"decode after {context}", lambda: self._decode(context, missing)))
        return jobs

    def _prefill(self, context: int, settings: list[Setting]) -> None:
        for setting, figures in measure_prefill(self._model, self._ids[:context + 1], settings, self._progress):
            self._add(self._what("prefill", setting, context=context), figures)

    def _decode_what(self, context: int, setting: Setting | None) -> dict[str, Any]:
        more = {} if setting is None else {"samples": self._given.samples, "with_mass": "mass" in self._given.tasks}
        return self._what("decode", setting, context=context, steps=self._given.steps, **more)

    def _decode(self, context: int, settings: list[Setting]) -> None:
        ids, samples = self._ids[:context + self._given.steps + 1], sampled(self._given.steps, self._given.samples)
        with_weights = samples if "mass" in self._given.tasks else []
        dense = decode_dense(self._model, ids, context, with_weights, self._progress)
        self._add(self._decode_what(context, None), dense.figures)
        for setting in settings:
            self._progress.doing = f"decode after {context}: {setting.label}"
            self._add(self._decode_what(context, setting),
                      decode_setting(self._model, ids, setting, dense, samples, self._progress))

    def _add(self, what: dict[str, Any], figures: dict[str, Any]) -> None:
        """Writes a line; dense attention's is computed again by a run that is resumed, and there already."""
        if not self._results.has(what):
            self._results.add(what, figures)

    # ---- retrieval ----

    def _retrieval_jobs(self, context: int) -> list[tuple[float, str, Callable[[], None]]]:
        where = depths(self._given.facts)
        jobs: list[tuple[float, str, Callable[[], None]]] = []
        groups = [("pass key", [depth]) for depth in where] + [("named number", where)]
        for kind, mine in groups:
            haystack = make(self._model.tokenizer, self._given.characters, context, kind, mine, self._given.seed)
            for setting in [None, *self._settings]:
                ways = WAYS if setting is not None else WAYS[:1]
                if all(self._results.has(self._fact_what(context, setting, haystack, (depth, way))) for depth in mine
                       for way in ways):
                    continue
                name = f"{kind} in {context}: {DENSE if setting is None else setting.label}"
                cost = context + len(mine) * len(ways) * STEP_COST * (QUESTION_TOKENS + ANSWER_TOKENS)
                jobs.append((float(cost), name, partial(self._retrieval, context, setting, haystack)))
        return jobs

    def _fact_what(self, context: int, setting: Setting | None, haystack: Haystack, asked: tuple[float, str]) -> dict[str, Any]:
        return self._what("retrieval", setting, context=context, kind=haystack.kind, depth=asked[0], question=asked[1],
                          n_facts=len(haystack.facts))

    def _retrieval(self, context: int, setting: Setting | None, haystack: Haystack) -> None:
        for figures in measure_retrieval(self._model, haystack, setting, self._progress):
            self._add(self._fact_what(context, setting, haystack, (figures.pop("depth"), figures.pop("question"))),
                      figures)

    # ---- speed ----

    def _speed_jobs(self, context: int) -> list[tuple[float, str, Callable[[], None]]]:
        runners: list[Runner] = [*BASELINES, *self._settings]
        missing = [one for one in runners if not self._results.has(self._what("speed", one, context=context))]
        cost = (context + (ROUNDS + 1) * STEPS * STEP_COST) * float(len(runners))
        return [(cost, f"speed behind {context}", lambda: self._speed(context, runners))] if missing else []

    def _speed(self, context: int, runners: list[Runner]) -> None:
        """All in turns, those that were measured too: times of two runs are not comparable."""
        ids = self._ids[:context + (ROUNDS + 1) * STEPS]
        for runner, figures in measure_speed(self._model, ids, runners, self._progress):
            self._add(self._what("speed", runner, context=context), figures)
