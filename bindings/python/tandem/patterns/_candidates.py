# SPDX-License-Identifier: MIT
"""The patterns that a head may get, and their names in a file of head patterns."""
from dataclasses import dataclass
from typing import Any

_SINKS, _WINDOWS = (16, 64, 128), (128, 256, 512, 1024, 2048)
_COLUMNS, _DIAGONALS = (16, 64, 256, 1024, 2048), (64, 256, 1024, 2048)
_BLOCKS = (8, 16, 32, 64)
_UNITED_WINDOWS, _UNITED_COLUMNS, _UNITED_DIAGONALS = (128, 512, 1024), (16, 64, 256, 1024), 64


@dataclass(frozen=True)
class Candidate:
    """One pattern or the union of several. No pattern: all keys.

    Attributes
    ----------
    a_shape : (int, int), optional
        Sinks and window, in tokens.
    vertical_slash : (int, int), optional
        Columns and diagonals, in tokens.
    block_sparse : int, optional
        Blocks of 64 tokens.
    """

    a_shape: tuple[int, int] | None = None
    vertical_slash: tuple[int, int] | None = None
    block_sparse: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether all keys are attended."""
        return self == Candidate()

    @property
    def kind(self) -> str:
        """"full", "a_shape", "vertical_slash", "block_sparse", or "union"."""
        kinds = [name for name in ("a_shape", "vertical_slash", "block_sparse") if getattr(self, name) is not None]
        return "union" if len(kinds) > 1 else kinds[0] if kinds else "full"

    def json(self, score: float) -> list[Any]:
        """Returns the head's value in a file, in the form that tandem_patterns_read() reads."""
        lists: list[list[Any]] = []
        if self.a_shape is not None:
            lists.append(["stream_llm", *self.a_shape, score])
        if self.vertical_slash is not None:
            lists.append(["vertical_and_slash", *self.vertical_slash, score])
        if self.block_sparse is not None:
            lists.append(["block_sparse", self.block_sparse, 0, score])
        return lists if len(lists) > 1 else lists[0] if lists else ["full", 0, 0, score]


def grid() -> list[Candidate]:
    """Returns all candidates. The first one attends all keys."""
    found = [Candidate()]
    found += [Candidate(a_shape=(sinks, window)) for sinks in _SINKS for window in _WINDOWS]
    found += [Candidate(vertical_slash=(columns, diagonals)) for columns in _COLUMNS for diagonals in _DIAGONALS]
    found += [Candidate(block_sparse=blocks) for blocks in _BLOCKS]
    found += [Candidate(a_shape=(_SINKS[0], window), vertical_slash=(columns, _UNITED_DIAGONALS))
              for window in _UNITED_WINDOWS for columns in _UNITED_COLUMNS]
    found += [Candidate(a_shape=(_SINKS[0], window), block_sparse=blocks) for window in _UNITED_WINDOWS for blocks in _BLOCKS]
    return found
