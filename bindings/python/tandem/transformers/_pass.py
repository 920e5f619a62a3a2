# SPDX-License-Identifier: MIT
"""The numbers of a cache, and the rollback of an interrupted change.

A forward pass ends half-way when a hook raises, memory runs out or the user presses Ctrl-C. The cache is not told: the
exception unwinds the model, not Tandem. Ctrl-C can also come between any two instructions of this package. So a cache keeps its
numbers in one object, :class:`Held`, and replaces it by one assignment when a change is complete. Before a change touches a
sequence, it is recorded as :class:`Change`. The next user of the sequences finds the record and rolls them back to the numbers.
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
    """The state after the completed passes.

    Attributes
    ----------
    sequences : list of Sequence
        One sequence for each row.
    lengths : list of int
        Tokens of each row.
    columns : int
        Tokens and padding together.
    mask : Tensor or None
        Mask of the columns; None: no padding.
    """

    sequences: list[Sequence] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    columns: int = 0
    mask: torch.Tensor | None = None


class _Owner(Protocol):
    """A TandemCache, as far as a change needs it."""

    _held: Held
    _pending: int | None


@dataclass
class Change:
    """An incomplete change of sequences: a truncation, or a pass.

    Attributes
    ----------
    owner : TandemCache
    sequences : list of Sequence
        The owner's sequences, or new ones, which the owner gets when the change is complete.
    """

    owner: _Owner
    sequences: list[Sequence]

    def roll_back(self) -> None:
        """Truncates the sequences to the owner's lengths, or drops new ones. May be interrupted and called again."""
        if self.owner._held.sequences is self.sequences:
            for sequence, length in zip(self.sequences, self.owner._held.lengths, strict=True):
                sequence.truncate(length)
            return
        for sequence in self.sequences:
            with suppress(NotFoundError):  # dropped by an earlier, interrupted call
                sequence.close()


@dataclass
class Pass(Change):
    """A forward pass: a step of the session, from the first layer's attention to the last layer's."""

    step: Step
    rows: Rows
    n_columns: int
    n_done: int = 0  # layers attended so far
    masks: list[torch.Tensor | None] = field(default_factory=list)  # masks that are known to be equal

    def roll_back(self) -> None:
        with suppress(DeviceLostError):  # the pass has raised it already; tokens in host memory can still be truncated
            self.step.__exit__(RuntimeError, None, None)  # raises nothing if the step is incomplete or was never opened
        super().roll_back()


@dataclass
class Changes:
    """The running change of the caches that share a session, which can have only one step at a time."""

    under_way: Change | None = None

    def settle(self) -> None:
        """Rolls back an interrupted change."""
        if self.under_way is not None:
            self.under_way.roll_back()
            self.under_way = None  # last, so that an interrupt before it keeps the record
