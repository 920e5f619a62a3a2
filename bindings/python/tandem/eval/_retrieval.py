# SPDX-License-Identifier: MIT
"""Retrieval: facts planted in a text at several depths, and questions for them at its end.

A fact is of one of two kinds. A pass key is alone in its text, so each depth has its own text. Named numbers share one text and
are asked for by name. Chat models get text and question as one message in their template, unless they are asked plainly: to
continue the sentence. Questions come after the text in four ways. In the first two, each question starts from a fork of the
text. In a row, questions follow one another in random order, with the answers given so far between them.

appended           In one call, as chat programs do. Under "all" and "hgca" such a call attends every key. "hgca" then judges all
                   keys by the question's attention, and "hip" runs all stages in the next call.
decoded            Token by token, as if the model had written the question. "hgca" has only the keys that it kept before the
                   question, and "hip" the lists of the last refresh.
in a row           Token by token, one question after another.
appended in a row  Each question in one call, one after another.
"""
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._language_model import LanguageModel, Tokenizer, close, pattern_pairs
from ._progress import Progress

_NAMES = ("amber", "cedar", "ember", "granite", "harbor", "indigo", "jasmine", "lantern", "maple", "nickel", "opal", "pepper",
          "quartz", "raven", "saffron", "timber", "umber", "velvet", "willow", "zephyr")
_MORE_NAMES = ("anchor", "beacon", "candle", "dolphin", "engine", "falcon", "garden", "helmet", "island", "jacket", "kettle", "ladder",
               "magnet", "needle", "orchid", "pebble", "rabbit", "saddle", "temple", "valley")  # for more than 20 facts
MAX_FACTS = len(_NAMES) + len(_MORE_NAMES)
KINDS = ("pass key", "named number")
ANSWER_TOKENS = 12  # at most: enough for five digits in a short sentence; word models may say more first
QUESTION_TOKENS = 24  # a question's length, as progress counts it
ROWS = ("in a row", "appended in a row")
WAYS = ("appended", "decoded", *ROWS)


@dataclass(frozen=True)
class Fact:
    """A sentence to plant, the question for it, and the answer."""

    sentence: str
    question: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text with planted facts.

    Attributes
    ----------
    kind : str
        "pass key" or "named number".
    body : list of int
        Tokens before the questions.
    facts : list of Fact
    questions : list of list of int
        Tokens of each fact's question, with the end of the chat template.
    """

    kind: str
    body: list[int]
    facts: list[Fact]
    questions: list[list[int]]


def depths(n: int, shift: float = 0.5, until: float = 1.0, after: float = 0.0) -> list[float]:
    """Returns the share of the text before each of n facts. [after, until) has n equal parts with one fact each, `shift` of the
    way into its part."""
    return [after + (i + shift) / n * (until - after) for i in range(n)]


def names_for(n_facts: int) -> tuple[str, ...]:
    """Returns names to choose from, for a text with n_facts numbers."""
    return _NAMES if n_facts <= len(_NAMES) else _NAMES + _MORE_NAMES


def _facts(kind: str, is_asked: bool, where: list[float], chance: random.Random, names: Sequence[str]) -> list[Fact]:
    """Makes the facts. Plain models continue a sentence, as examples/models/pico was taught; chat models are asked."""
    found = []
    for depth, name in zip(where, chance.sample(list(names), len(where)), strict=True):
        answer = str(chance.randrange(10000, 100000))
        thing = "pass key" if kind == "pass key" else f"number of {name}"
        sentence = (f"\nThe pass key is {answer}. Remember it. {answer} is the pass key.\n" if kind == "pass key"
                    else f"\nThe number of {name} is {answer}.\n")
        question = f"\nWhat is the {thing}?"
        if not is_asked:
            question += " The pass key is " if kind == "pass key" else " It is "
        found.append(Fact(sentence, question, answer, depth))
    return found


def _planted(text: str, facts: list[Fact]) -> str:
    """Plants the facts at line ends, else between words."""
    places = []
    for fact in facts:
        wanted = int(len(text) * fact.depth)
        line_end = text.rfind("\n", max(wanted - len(text) // 50 - 1, 0), wanted + 1)
        place = line_end if line_end >= 0 else text.rfind(" ", 0, wanted + 1)
        places.append(max(place, 0))
    for fact, place in sorted(zip(facts, places, strict=True), key=lambda pair: -pair[1]):
        text = text[:place] + fact.sentence + text[place:]
    return text


def _tokens(tokenizer: Tokenizer, text: str, facts: list[Fact], is_asked: bool) -> tuple[list[int], list[list[int]]]:
    planted = _planted(text, facts)
    if not is_asked:
        # A word tokenizer puts the space into the token after it.
        questions = [fact.question if tokenizer.own is None else fact.question.rstrip(" ") for fact in facts]
        return tokenizer.tokens(planted), [tokenizer.tokens(question, False) for question in questions]
    whole = [tokenizer.chat(planted + fact.question) for fact in facts]
    at = [one.rindex(fact.question) for one, fact in zip(whole, facts, strict=True)]
    return (tokenizer.tokens(whole[0][:at[0]], False),
            [tokenizer.tokens(one[place:], False) for one, place in zip(whole, at, strict=True)])


@dataclass(frozen=True)
class Planting:
    """The facts to plant, and where.

    Attributes
    ----------
    kind : str
        "pass key" or "named number".
    where : list of float
        Depths of the facts.
    seed : int or str
        Seed of the answers and the order of names.
    names : sequence of str
        At least one name for each depth.
    plain : bool
        Ask chat models plainly, like other models.
    """

    kind: str
    where: list[float]
    seed: int | str
    names: Sequence[str] = ()
    plain: bool = False


def make(tokenizer: Tokenizer, text: str, n_context: int, planting: Planting) -> Haystack:
    """Returns a text of at most `n_context` tokens, questions and answers included.

    Raises
    ------
    ValueError
        The text is too short.
    """
    kind, where, is_asked = planting.kind, planting.where, tokenizer.has_chat and not planting.plain
    chance = random.Random(f"{planting.seed} {n_context} {kind} {where}")
    facts = _facts(kind, is_asked, where, chance, planting.names or names_for(len(where)))
    text = text[:16 * n_context]
    low, high = 0, len(text)

    def fits(n_chars: int) -> tuple[int, list[int], list[list[int]]]:
        body, questions = _tokens(tokenizer, text[:n_chars], facts, is_asked)
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


def _ends(said: str) -> bool:
    """Returns whether the first number in the answer is complete. A comma may be part of it."""
    digits = [place for place, char in enumerate(said) if char.isdigit()]
    return bool(digits) and any(not char.isdigit() and char != "," for char in said[digits[0]:])


def _ask(model: LanguageModel, past: Any, question: list[int], way: str) -> str:
    """Returns the most likely tokens after the question, up to the end of the first number. In a row, the cache gets all of
    them."""
    size = len(question) if way.startswith("appended") else 1
    for first in range(0, len(question), size):
        logits = model.step(torch.tensor(question[first:first + size]), past)
    answer: list[int] = []
    while True:
        answer.append(int(logits.argmax()))
        said = model.tokenizer.text(answer)
        is_last = len(answer) == ANSWER_TOKENS or _ends(said)
        if not is_last or way in ROWS:
            logits = model.step(torch.tensor(answer[-1:]), past)
        if is_last:
            return said


def is_right(said: str, answer: str) -> bool:
    """Returns whether the first number said is the answer. Commas in it are ignored."""
    digits = ""
    for char in said.replace(",", ""):
        if char.isdigit():
            digits += char
        elif digits:
            break
    return digits == answer


def dense_ways(ways: Sequence[str]) -> list[str]:
    """Returns the ways that dense attention needs: one call and token by token are the same to it."""
    return [way for way in ways if way not in ROWS][:1] + [way for way in ways if way in ROWS][:1]


def measure_retrieval(model: LanguageModel, haystack: Haystack, past: Any, ways: Sequence[str],
                      progress: Progress) -> Iterator[dict[str, Any]]:
    """Asks for each fact in each way after the text in `past`. Yields depth, way, and whether the answer was right."""
    asked = list(zip(haystack.facts, haystack.questions, strict=True))
    in_a_row = random.Random(len(haystack.body)).sample(asked, len(asked))

    def answered(fact: Fact, question: list[int], way: str, cache: Any) -> dict[str, Any]:
        said = _ask(model, cache, question, way)
        progress.steps(QUESTION_TOKENS + ANSWER_TOKENS)
        return {"depth": fact.depth, "question": way, "answer": fact.answer, "said": said, "right": is_right(said, fact.answer),
                **pattern_pairs(cache)}

    for way in ways:
        row = _fork(past) if way in ROWS else None
        try:
            for fact, question in in_a_row if way in ROWS else asked:
                fork = row or _fork(past)
                try:
                    yield answered(fact, question, way, fork)
                finally:
                    if row is None:
                        close(fork)
        finally:
            if row is not None:
                close(row)
