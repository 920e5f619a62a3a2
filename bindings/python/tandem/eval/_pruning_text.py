# SPDX-License-Identifier: MIT
"""Options of policy "hip" as text: a preset, or SINKS/WINDOW/STAGE/... as for ``tandem generate --pruning``.

A stage is JUDGE:CHUNK:KEEP:INTERVAL. "+next" after it keeps with each chunk the next one: 64/512/bounds:8:1472:4. "dense+" in
front leaves appends dense, so that only decode calls prune.
"""
from .._pruning import Pruning, PruningRecord, PruningStage

JUDGES = ("descent", "bounds", "exact")
_ALL = PruningRecord([PruningStage("exact", 64, 1 << 30)])  # keeps every key


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _stage(text: str) -> PruningStage:
    plain = text.removesuffix("+next")
    words = plain.split(":")
    if len(words) != 4:
        raise ValueError(f"{text!r} is not JUDGE:CHUNK:KEEP:INTERVAL")
    if words[0] not in JUDGES:
        raise ValueError(f"{words[0]!r} is none of {', '.join(JUDGES)}")
    chunk, keep, interval = map(_number, words[1:])
    return PruningStage(words[0], chunk, keep, interval, plus_next=plain != text)


def pruning_of(text: str) -> Pruning:
    """Returns the pruning that a text describes.

    Raises
    ------
    ValueError
    """
    plain = text.removeprefix("dense+")
    append = [_ALL] if plain != text else None
    if "/" not in plain:
        return Pruning(preset=plain or None, append=append)
    words = plain.split("/")
    if len(words) < 3:
        raise ValueError(f"{plain!r} is neither a preset nor SINKS/WINDOW/STAGE/...")
    record = PruningRecord([_stage(word) for word in words[2:]], _number(words[0]), _number(words[1]))
    return Pruning(decode=[record], append=append or [record])
