# SPDX-License-Identifier: MIT
"""Excludes functions from torch.compile."""
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REASON = "tandem: attention and its cache are calls of a C library, which no graph holds; compile without fullgraph=True"


def untraced(function: _Function) -> _Function:
    """Returns a function that a compiled model calls between two graphs. With ``fullgraph=True`` PyTorch refuses it with our
    reason."""
    try:
        left: _Function = torch.compiler.disable(function, reason=_REASON)
    except TypeError:  # PyTorch before 2.7 takes no reason
        left = torch.compiler.disable(function)
    return left
