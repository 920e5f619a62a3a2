# SPDX-License-Identifier: MIT
"""Retrieval: facts planted in a text at several depths, and asked for at its end.

Two kinds: a pass key, one in a text, so that each depth has a text of its own; and named numbers, several in one text, which are
asked by name. Chat models get text and question as one message in their template, unless they are asked plainly: to go on with
the sentence. Questions come behind the text in four ways. The first two go on from a fork of the text for each question; in a row
one question comes behind the other, in random order, with the answers that were given between them.

appended           In one call, as chat programs do. Under "all" and "hgca" such a call attends every key; "hgca" then judges all
                   keys by what the question attended, and "hip" runs all stages in the next call.
decoded            Token by token, as if the model had come upon the question by itself. "hgca" has what it kept before it knew it,
                   and "hip" the lists of the last refresh.
in a row           Token by token.
appended in a row  Each in one call.
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
               "magnet", "needle", "orchid", "pebble", "rabbit", "saddle", "temple", "valley")  # for texts of more facts than 20
MAX_FACTS = len(_NAMES) + len(_MORE_NAMES)
KINDS = ("pass key", "named number")
ANSWER_TOKENS = 12  # at most: enough for five digits in a short sentence; models of words may say more before them
QUESTION_TOKENS = 24  # what progress takes a question for
ROWS = ("in a row", "appended in a row")
WAYS = ("appended", "decoded", *ROWS)


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


def depths(n: int, shift: float = 0.5, until: float = 1.0, after: float = 0.0) -> list[float]:
    """Shares of the text before each of n facts: each in one of n equal parts of [after, until), `shift` of the part's way into it."""
    return [after + (i + shift) / n * (until - after) for i in range(n)]


def names_for(n_facts: int) -> tuple[str, ...]:
    """Names to choose from for so many numbers of a text."""
    return _NAMES if n_facts <= len(_NAMES) else _NAMES + _MORE_NAMES


def _facts(kind: str, is_asked: bool, where: list[float], chance: random.Random, names: Sequence[str]) -> list[Fact]:
    """Plain models go on with the sentence, as examples/models/pico was taught; chat models are asked."""
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


def _tokens(tokenizer: Tokenizer, text: str, facts: list[Fact], is_asked: bool) -> tuple[list[int], list[list[int]]]:
    planted = _planted(text, facts)
    if not is_asked:
        # A tokenizer of words has the space in the token that follows it.
        questions = [fact.question if tokenizer.own is None else fact.question.rstrip(" ") for fact in facts]
        return tokenizer.tokens(planted), [tokenizer.tokens(question, False) for question in questions]
    whole = [tokenizer.chat(planted + fact.question) for fact in facts]
    at = [one.rindex(fact.question) for one, fact in zip(whole, facts, strict=True)]
    return (tokenizer.tokens(whole[0][:at[0]], False),
            [tokenizer.tokens(one[place:], False) for one, place in zip(whole, at, strict=True)])


@dataclass(frozen=True)
class Planting:
    """What is planted, and where.

    Attributes
    ----------
    kind : str
        "pass key" or "named number".
    where : list of float
        Depths.
    seed : int or str
        Of answers and the order of names.
    names : sequence of str
        At least one for each depth.
    plain : bool
        Chat models are asked as others are.
    """

    kind: str
    where: list[float]
    seed: int | str
    names: Sequence[str] = ()
    plain: bool = False


def make(tokenizer: Tokenizer, text: str, n_context: int, planting: Planting) -> Haystack:
    """A text of at most `n_context` tokens with questions and answers.

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
    """Whether a number in what was said is complete. A comma may be within it."""
    digits = [place for place, char in enumerate(said) if char.isdigit()]
    return bool(digits) and any(not char.isdigit() and char != "," for char in said[digits[0]:])


def _ask(model: LanguageModel, past: Any, question: list[int], way: str) -> str:
    """The most likely tokens after the question, up to the end of the first number. In a row the cache has all of them."""
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
    """Whether the first number in what was said is the answer. Commas in it are a matter of style."""
    digits = ""
    for char in said.replace(",", ""):
        if char.isdigit():
            digits += char
        elif digits:
            break
    return digits == answer


def dense_ways(ways: Sequence[str]) -> list[str]:
    """To dense attention a question is the same in one call and token by token."""
    return [way for way in ways if way not in ROWS][:1] + [way for way in ways if way in ROWS][:1]


def measure_retrieval(model: LanguageModel, haystack: Haystack, past: Any, ways: Sequence[str],
                      progress: Progress) -> Iterator[dict[str, Any]]:
    """Asks for each fact in each way behind the text that `past` holds. Yields depth, way, and whether the answer was right."""
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
