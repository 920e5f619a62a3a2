# SPDX-License-Identifier: MIT
"""What a cache counts, and how a change that was broken off is taken back.

A forward pass ends half-way when a hook raises, memory runs out or the user presses Ctrl-C. Nothing tells the cache: the
exception unwinds the model, not Tandem. Ctrl-C can also come between any two instructions of this package. So a cache keeps its
numbers in one object, :class:`Held`, and replaces it by one assignment when a change is complete. Before a change touches a
sequence it is noted as :class:`Change`. Whoever needs the sequences next finds the note and rolls them back to the numbers.
"""
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .._cache import Sequence
from .._errors import DeviceLostError, NotFoundError
from .._session import Step
from ._rows import Rows


@dataclass(frozen=True)
class Held:
    """What the completed passes have left.

    Attributes
    ----------
    sequences : list of Sequence
        One for each row.
    lengths : list of int
        Tokens of each row.
    columns : int
        Tokens and padding.
    mask : Tensor or None
        Of the columns; None: no padding.
    """

    sequences: list[Sequence] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    columns: int = 0
    mask: torch.Tensor | None = None


class _Owner(Protocol):
    """A TandemCache, as a change knows it."""

    _held: Held
    _pending: int | None


@dataclass
class Change:
    """A change of sequences that is not complete: a truncation, or a pass.

    Attributes
    ----------
    owner : TandemCache
    sequences : list of Sequence
        Those of the owner, or new ones, which the owner gets when the change is complete.
    """

    owner: _Owner
    sequences: list[Sequence]

    def roll_back(self) -> None:
        """Give the sequences the lengths that the owner counts. May be interrupted and called again."""
        if self.owner._held.sequences is self.sequences:
            for sequence, length in zip(self.sequences, self.owner._held.lengths, strict=True):
                sequence.truncate(length)
            return
        for sequence in self.sequences:
            with suppress(NotFoundError):  # dropped by an earlier call that was interrupted
                sequence.close()


@dataclass
class Pass(Change):
    """A forward pass: a step of the session, from the first layer's attention to the last layer's."""

    step: Step
    rows: Rows
    n_columns: int
    n_done: int = 0  # layers
    masks: list[torch.Tensor | None] = field(default_factory=list)  # known to say the same

    def roll_back(self) -> None:
        with suppress(DeviceLostError):  # the pass has raised it; the tokens in host memory can still be truncated
            self.step.__exit__(RuntimeError, None, None)  # does not raise because the step is incomplete, or was never opened
        super().roll_back()


@dataclass
class Changes:
    """The change under way of the caches that share a session, which has one step at a time."""

    under_way: Change | None = None

    def settle(self) -> None:
        """Roll a change back that was broken off."""
        if self.under_way is not None:
            self.under_way.roll_back()
            self.under_way = None  # last: an interrupt before it leaves the note for the next call
