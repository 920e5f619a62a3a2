# SPDX-License-Identifier: MIT
"""The measurements of a run: prefill, decode, retrieval and speed of each context. Measurements in the results are skipped."""
import argparse
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from .._patterns import Patterns
from ._language_model import LanguageModel, close
from ._perplexity import decode_dense, decode_setting, measure_prefill, sampled
from ._progress import STEP_COST, Progress
from ._results import Results
from ._retrieval import ANSWER_TOKENS, QUESTION_TOKENS, Haystack, Planting, dense_ways, depths, make, measure_retrieval
from ._settings import Setting
from ._speed import BASELINES, ROUNDS, STEPS, Runner, measure_speed
from ._start import OwnPrefill, SharedPrefill, Start

DENSE = "dense"
Job = tuple[float, str, Callable[[], None]]


class Evaluation:
    """One run of the evaluation.

    Parameters
    ----------
    model : LanguageModel
    given : argparse.Namespace
        The flags.
    results : Results

    Raises
    ------
    ValueError
        The text is too short for a context, or a setting names a layer or heads that the model lacks.
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
            if setting.patterns_file is not None:
                shape = [len(heads) for heads in Patterns.read(setting.patterns_file).layers]
                if shape != [model.n_heads] * model.n_layers:
                    raise ValueError(f"--setting: patterns = {setting.patterns_file} has {len(shape)} layers of {shape[0]} heads, the "
                                     f"model has {model.n_layers} of {model.n_heads}")
        self._common = {"model": model.name, "gguf_file": given.gguf_file, "of_bytes": model.is_of_bytes, "seed": given.seed,
                        "text_sha256": hashlib.sha256(given.characters.encode()).hexdigest()}
        self._progress = Progress(1)
        part, n_parts = given.part
        self._passages = range(part, given.passages, n_parts)

    def _what(self, measurement: str, setting: Setting | str | None, **more: Any) -> dict[str, Any]:
        shown = DENSE if setting is None else setting if isinstance(setting, str) else dict(setting.options)
        if isinstance(setting, Setting) and setting.patterns_file is not None:
            more["patterns_sha256"] = hashlib.sha256(pathlib.Path(setting.patterns_file).read_bytes()).hexdigest()
        return {**self._common, "measurement": measurement, "setting": shown, **more}

    def _place(self, context: int, passage: int) -> dict[str, Any]:
        """Returns the members of a line that say where it was measured. A single passage and own prefills are not mentioned."""
        many = {"passage": passage, "n_passages": self._given.passages} if self._given.passages > 1 else {}
        return {"context": context, **many, **({"shared_prefill": True} if self._given.shared_prefill else {}),
                **({"dense_by_tandem": True} if self._given.dense_by_tandem else {})}

    def _start(self, ids: torch.Tensor) -> Start:
        if self._given.shared_prefill:
            return SharedPrefill(self._model, ids, self._progress)
        return OwnPrefill(self._model, ids, self._progress, self._given.dense_by_tandem)

    def run(self) -> None:
        """Runs all missing measurements."""
        jobs: list[Job] = []
        for context in self._given.contexts:
            for passage in self._passages:
                if {"perplexity", "mass"} & set(self._given.tasks):
                    jobs += self._perplexity_jobs(context, passage)
                if "retrieval" in self._given.tasks:
                    jobs += self._retrieval_jobs(context, passage)
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

    def _passage(self, passage: int, n_tokens: int) -> torch.Tensor:
        """Returns n_tokens tokens of the text. Passages are equally spaced: the first begins with the text, the last ends with
        it."""
        first = passage * (len(self._ids) - n_tokens) // max(self._given.passages - 1, 1)
        return self._ids[first:first + n_tokens]

    def _perplexity_jobs(self, context: int, passage: int) -> list[Job]:
        jobs: list[Job] = []
        if "perplexity" in self._given.tasks and not (self._given.shared_prefill or self._given.dense_by_tandem):
            stored = [one for one in dict.fromkeys(setting.stores_only for setting in self._settings)
                      if not self._results.has(self._what("prefill", one, **self._place(context, passage)))]
            if stored:
                jobs.append((context * (len(stored) + 1.0), f"prefill of {context}", partial(self._prefill, context, passage, stored)))
        missing = [setting for setting in self._settings if not self._results.has(self._decode_what(context, passage, setting))]
        if missing:
            cost = (context + self._given.steps * STEP_COST) * (len(missing) + 1.0)
            jobs.append((cost, f"decode after {context}", partial(self._decode, context, passage, missing)))
        return jobs

    def _prefill(self, context: int, passage: int, settings: list[Setting]) -> None:
        for setting, figures in measure_prefill(self._model, self._passage(passage, context + 1), settings, self._progress):
            self._add(self._what("prefill", setting, **self._place(context, passage)), figures)

    def _decode_what(self, context: int, passage: int, setting: Setting | None) -> dict[str, Any]:
        more = {} if setting is None else {"samples": self._given.samples, "with_mass": "mass" in self._given.tasks}
        return self._what("decode", setting, **self._place(context, passage), steps=self._given.steps, **more)

    def _decode(self, context: int, passage: int, settings: list[Setting]) -> None:
        ids = self._passage(passage, context + self._given.steps + 1)
        samples = sampled(self._given.steps, self._given.samples)
        with_weights = samples if "mass" in self._given.tasks else []
        with closing(self._start(ids[:context])) as start:
            dense = decode_dense(start, ids, context, with_weights)
            self._add(self._decode_what(context, passage, None), dense.figures)
            for setting in settings:
                self._progress.doing = f"decode after {context}: {setting.label}"
                self._add(self._decode_what(context, passage, setting),
                          decode_setting(start, ids, setting, dense, samples))

    def _add(self, what: dict[str, Any], figures: dict[str, Any]) -> None:
        """Writes a line, unless it exists: a resumed run computes dense attention's again."""
        if not self._results.has(what):
            self._results.add(what, figures)

    # ---- retrieval ----

    def _retrieval_jobs(self, context: int, passage: int) -> list[Job]:
        given, jobs = self._given, list[Job]()
        own = depths(given.facts, (passage + 0.5) / given.passages, given.until, given.after)  # pass keys: elsewhere in each passage
        groups = [("pass key", [depth]) for depth in own] + [
            ("named number", depths(given.facts, until=given.until, after=given.after))]
        for kind, where in groups:
            runners = [setting for setting in [None, *self._settings] if kind in given.kinds and not all(
                self._results.has(self._fact_what(context, passage, setting, (kind, len(where)), (depth, way)))
                for depth in where for way in self._ways(setting))]
            if runners:
                cost = context + len(runners) * len(where) * len(given.ways) * STEP_COST * (QUESTION_TOKENS + ANSWER_TOKENS)
                jobs.append((float(cost), f"{kind} in {context}", partial(self._retrieval, context, passage, kind, where, runners)))
        return jobs

    def _ways(self, setting: Setting | None) -> Sequence[str]:
        return dense_ways(self._given.ways) if setting is None else list(self._given.ways)

    def _fact_what(self, context: int, passage: int, setting: Setting | None, group: tuple[str, int],
                   asked: tuple[float, str]) -> dict[str, Any]:
        more: dict[str, Any] = {"plain": True} if self._given.plain else {}
        if self._given.names and group[0] == "named number":
            more["names"] = " ".join(self._given.names)
        return self._what("retrieval", setting, **self._place(context, passage), kind=group[0], n_facts=group[1], depth=asked[0],
                          question=asked[1], **more)

    def _haystack(self, context: int, passage: int, kind: str, where: list[float]) -> Haystack:
        given = self._given
        first = passage * len(given.characters) // given.passages
        text = given.characters[first:] + "\n" + given.characters[:first] if first else given.characters
        seed = f"{given.seed} {passage}" if passage else given.seed
        return make(self._model.tokenizer, text, context, Planting(kind, where, seed, given.names, given.plain))

    def _retrieval(self, context: int, passage: int, kind: str, where: list[float], settings: list[Setting | None]) -> None:
        haystack = self._haystack(context, passage, kind, where)
        with closing(self._start(torch.tensor(haystack.body))) as start:
            for setting in settings:
                self._progress.doing = f"{kind} in {context}: {DENSE if setting is None else setting.label}"
                past = start.cache(setting)
                try:
                    for figures in measure_retrieval(self._model, haystack, past, self._ways(setting), self._progress):
                        asked = figures.pop("depth"), figures.pop("question")
                        self._add(self._fact_what(context, passage, setting, (kind, len(where)), asked), figures)
                finally:
                    close(past)

    # ---- speed ----

    def _speed_jobs(self, context: int) -> list[tuple[float, str, Callable[[], None]]]:
        runners: list[Runner] = [*BASELINES, *self._settings]
        missing = [one for one in runners if not self._results.has(self._what("speed", one, context=context))]
        cost = (context + (ROUNDS + 1) * STEPS * STEP_COST) * float(len(runners))
        return [(cost, f"speed behind {context}", lambda: self._speed(context, runners))] if missing else []

    def _speed(self, context: int, runners: list[Runner]) -> None:
        """Measures all runners in turns, also those with results, because times of two runs are not comparable."""
        ids = self._ids[:context + (ROUNDS + 1) * STEPS]
        for runner, figures in measure_speed(self._model, ids, runners, self._progress):
            self._add(self._what("speed", runner, context=context), figures)
