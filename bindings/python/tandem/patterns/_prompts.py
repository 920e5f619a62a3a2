# SPDX-License-Identifier: MIT
"""Prompts that judge heads: passages of a text, and passages with planted facts, followed by questions for them."""
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..eval._language_model import Tokenizer
from ..eval._retrieval import KINDS, Planting, depths, make

FACTS = {"pass key": 1, "named number": 6}  # facts in a prompt


@dataclass(frozen=True)
class Call:
    """Tokens of one call. Blocks and chunks are counted from its first token.

    Attributes
    ----------
    first, end : int
    is_question : bool
        The call asks for a planted fact.
    """

    first: int
    end: int
    is_question: bool = False


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the calls that judge heads. Tokens between calls are answers, which are decoded with all keys."""

    ids: list[int]
    calls: list[Call]


@dataclass(frozen=True)
class Wanted:
    """Describes the prompts to make.

    Attributes
    ----------
    contexts : sequence of int
        Tokens of a prompt.
    passages : int
        Passages of the text for each context.
    has_facts : bool
        Use each passage once more, with facts.
    seed : int
        Seed of the facts.
    """

    contexts: Sequence[int]
    passages: int
    has_facts: bool
    seed: int


def _with_facts(tokenizer: Tokenizer, text: str, context: int, kind: str, seed: str) -> Prompt:
    """Makes a prompt with facts. The questions follow one another in random order, with their answers."""
    haystack = make(tokenizer, text, context, Planting(kind, depths(FACTS[kind]), seed))
    ids, calls = list(haystack.body), [Call(0, len(haystack.body))]
    asked = list(zip(haystack.questions, haystack.facts, strict=True))
    for question, fact in random.Random(seed).sample(asked, len(asked)):
        calls.append(Call(len(ids), len(ids) + len(question), is_question=True))
        ids += question + tokenizer.tokens(f"{fact.answer}.", False)
    return Prompt(ids, calls)


def prompts(tokenizer: Tokenizer, text: str, wanted: Wanted) -> list[Prompt]:
    """Returns all prompts, shortest context first.

    Raises
    ------
    ValueError
        The text is too short.
    """
    ids, found = tokenizer.tokens(text), []
    for context in sorted(wanted.contexts):
        if len(ids) < context:
            raise ValueError(f"--text has {len(ids)} tokens, --contexts {context} needs as many")
        for passage in range(wanted.passages):
            first = passage * (len(ids) - context) // max(wanted.passages - 1, 1)
            found.append(Prompt(ids[first:first + context], [Call(0, context)]))
            if wanted.has_facts:
                at = passage * len(text) // wanted.passages
                kind = KINDS[(passage + 1) % len(KINDS)]
                found.append(_with_facts(tokenizer, text[at:] + "\n" + text[:at], context, kind, f"{wanted.seed} {passage}"))
    return found
