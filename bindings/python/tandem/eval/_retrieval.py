# SPDX-License-Identifier: MIT
"""Retrieval: facts planted in a text at several depths, and asked for at its end.

Two kinds: a pass key, one in a text, so that each depth has a text of its own; and named numbers, several in one text, which are
asked by name. Chat models get text and question as one message in their template. The text is prefilled; each question goes on
from a fork of it, in two ways. "appended": in one call, as chat programs do. Such a call attends every key under each policy, and
hgca then judges all keys by what the question attended. "decoded": token by token, as if the model had come upon the question by
itself. Then hgca has what it kept before it knew the question.
"""
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._language_model import LanguageModel, Tokenizer
from ._progress import Progress
from ._settings import Setting

_NAMES = ("amber", "cedar", "ember", "granite", "harbor", "indigo", "jasmine", "lantern", "maple", "nickel", "opal", "pepper",
          "quartz", "raven", "saffron", "timber", "umber", "velvet", "willow", "zephyr")
MAX_FACTS = len(_NAMES)
ANSWER_TOKENS = 12  # enough for five digits in a short sentence; models of words may say more before them
QUESTION_TOKENS = 24  # what progress takes a question for
WAYS = ("appended", "decoded")


@dataclass(frozen=True)
class Fact:
    """A sentence to plant, the question for it, and its answer."""

    sentence: str
    question: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text with facts in it.

    Attributes
    ----------
    kind : str
        "pass key" or "named number".
    body : list of int
        Tokens up to the questions.
    facts : list of Fact
    questions : list of list of int
        Tokens of each fact's question, with what follows in the chat template.
    """

    kind: str
    body: list[int]
    facts: list[Fact]
    questions: list[list[int]]


def depths(n: int) -> list[float]:
    """Shares of the text before each of n facts: the middles of n equal parts."""
    return [(i + 0.5) / n for i in range(n)]


def _facts(kind: str, is_chat: bool, where: list[float], chance: random.Random) -> list[Fact]:
    """Plain models go on with the sentence, as examples/models/pico was taught; chat models are asked."""
    found = []
    for depth, name in zip(where, chance.sample(_NAMES, len(where)), strict=True):
        answer = str(chance.randrange(10000, 100000))
        thing = "pass key" if kind == "pass key" else f"number of {name}"
        sentence = (f"\nThe pass key is {answer}. Remember it. {answer} is the pass key.\n" if kind == "pass key"
                    else f"\nThe number of {name} is {answer}.\n")
        question = f"\nWhat is the {thing}?"
        if not is_chat:
            question += " The pass key is " if kind == "pass key" else " It is "
        found.append(Fact(sentence, question, answer, depth))
    return found


def _planted(text: str, facts: list[Fact]) -> str:
    """The facts stand at line ends, else between words."""
    places = []
    for fact in facts:
        wanted = int(len(text) * fact.depth)
        line_end = text.rfind("\n", max(wanted - len(text) // 50 - 1, 0), wanted + 1)
        place = line_end if line_end >= 0 else text.rfind(" ", 0, wanted + 1)
        places.append(max(place, 0))
    for fact, place in sorted(zip(facts, places, strict=True), key=lambda pair: -pair[1]):
        text = text[:place] + fact.sentence + text[place:]
    return text


def _tokens(tokenizer: Tokenizer, text: str, facts: list[Fact]) -> tuple[list[int], list[list[int]]]:
    planted = _planted(text, facts)
    if not tokenizer.has_chat:
        return tokenizer.tokens(planted), [tokenizer.tokens(fact.question, False) for fact in facts]
    whole = [tokenizer.chat(planted + fact.question) for fact in facts]
    at = [one.rindex(fact.question) for one, fact in zip(whole, facts, strict=True)]
    return (tokenizer.tokens(whole[0][:at[0]], False),
            [tokenizer.tokens(one[place:], False) for one, place in zip(whole, at, strict=True)])


def make(tokenizer: Tokenizer, text: str, n_context: int, kind: str, where: list[float], seed: int) -> Haystack:
    """A text of at most `n_context` tokens with questions and answers. Depths and seed say all of it.

    Raises
    ------
    ValueError
        The text is too short.
    """
    facts = _facts(kind, tokenizer.has_chat, where, random.Random(f"{seed} {n_context} {kind} {where}"))
    low, high = 0, len(text)

    def fits(n_chars: int) -> tuple[int, list[int], list[list[int]]]:
        body, questions = _tokens(tokenizer, text[:n_chars], facts)
        return len(body) + max(map(len, questions)) + ANSWER_TOKENS, body, questions

    if fits(high)[0] < n_context:
        raise ValueError(f"--text is too short for --contexts {n_context}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle)[0] <= n_context else (low, middle)
    _, body, questions = fits(low)
    return Haystack(kind, body, facts, questions)


def _fork(past: Any) -> Any:
    return past.fork() if hasattr(past, "fork") else copy.deepcopy(past)


def _ask(model: LanguageModel, past: Any, question: list[int], way: str) -> str:
    """The most likely tokens after the question."""
    size = len(question) if way == "appended" else 1
    for first in range(0, len(question), size):
        logits = model.step(torch.tensor(question[first:first + size]), past)
    answer: list[int] = []
    for _ in range(ANSWER_TOKENS):
        answer.append(int(logits.argmax()))
        if len(answer) < ANSWER_TOKENS:
            logits = model.step(torch.tensor(answer[-1:]), past)
    return model.tokenizer.text(answer)


def is_right(said: str, answer: str) -> bool:
    """Whether the first number in what was said is the answer. Commas in it are a matter of style."""
    digits = ""
    for char in said.replace(",", ""):
        if char.isdigit():
            digits += char
        elif digits:
            break
    return digits == answer


def measure_retrieval(model: LanguageModel, haystack: Haystack, setting: Setting | None,
                      progress: Progress) -> Iterator[dict[str, Any]]:
    """Asks for each fact in each way. Yields depth, way, and whether the answer was right."""
    past = model.new_cache(setting)
    try:
        model.prefill(torch.tensor(haystack.body), past)
        progress.prefill(len(haystack.body))
        for fact, question in zip(haystack.facts, haystack.questions, strict=True):
            for way in WAYS if setting is not None else WAYS[:1]:  # to dense attention they are the same
                fork = _fork(past)
                try:
                    said = _ask(model, fork, question, way)
                finally:
                    if setting is not None:
                        fork.close()
                progress.steps(QUESTION_TOKENS + ANSWER_TOKENS)
                yield {"depth": fact.depth, "question": way, "answer": fact.answer, "said": said,
                       "right": is_right(said, fact.answer)}
    finally:
        if setting is not None:
            past.close()
