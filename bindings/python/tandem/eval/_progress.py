# SPDX-License-Identifier: MIT
"""Progress on stderr: one line that is overwritten on a terminal, else a line every 30 seconds."""
import sys
import time
from typing import TextIO

STEP_COST = 30  # prefill tokens that take about as long as one decode step
_EVERY_S, _EVERY_S_ON_TERMINAL = 30.0, 0.2


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Progress:
    """Counts work in prefill tokens.

    Parameters
    ----------
    total : float
        All the work of the run.
    stream : file
    """

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self.total, self.done, self.doing = max(total, 1.0), 0.0, ""
        self._stream = stream or sys.stderr
        self._start = self._said = time.monotonic()
        self._on_terminal, self._width = self._stream.isatty(), 0

    def prefill(self, n_tokens: int) -> None:
        """Counts n_tokens prefilled tokens."""
        self._advance(n_tokens)

    def steps(self, n_steps: int = 1) -> None:
        """Counts n_steps decode steps."""
        self._advance(n_steps * STEP_COST)

    def _advance(self, work: float) -> None:
        self.done += work
        now = time.monotonic()
        if now - self._said >= (_EVERY_S_ON_TERMINAL if self._on_terminal else _EVERY_S):
            self._said = now
            self._say(now - self._start)

    def _say(self, elapsed: float) -> None:
        share = min(self.done / self.total, 1.0)
        left = _clock(elapsed / share * (1 - share)) if share > 0 else "?"
        text = f"{share:4.0%}  {_clock(elapsed)} passed, about {left} left  {self.doing}"
        if self._on_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """Clears the terminal's line."""
        if self._on_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
