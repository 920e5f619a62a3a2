# SPDX-License-Identifier: MIT
"""Attention over key/value caches larger than the GPU: the Python binding of libtandem.

An :class:`Engine` owns the processors. A :class:`Model` holds the geometry of the layers. A :class:`Cache` holds the keys and
values of many :class:`Sequence` objects. A :class:`Session` says how they are attended; :meth:`Session.attend` is the call that
does the work. Objects are context managers and have ``close()``. They may be closed or collected in any order. Names, defaults
and units are those of ``tandem.h``: lengths are tokens, sizes bytes (``_bytes``), times nanoseconds (``_ns``). Other Python
threads run during a call.
"""
from ._abi import LOG_ERROR, LOG_INFO, LOG_WARNING
from ._attend_tensors import attend_tensors
from ._cache import Cache, CacheStats, Sequence
from ._engine import Engine, cpu_isas, dtype_row_bytes, library_path, policies, version
from ._errors import (BackendError, BusyError, CancelledError, CapacityError, CorruptError, DeviceLostError, InternalError,
                      InvalidArgumentError, InvalidHandleError, InvalidStateError, IoError, NotFoundError, OutOfMemoryError,
                      SystemError, TandemError, TimeoutError, UnsupportedError)
from ._model import Layer, Model
from ._options import CacheOptions, SessionOptions
from ._patterns import HeadPattern, Patterns
from ._projection import Projection
from ._pruning import Pruning, PruningRecord, PruningStage
from ._selection import Selection
from ._session import CancelFlag, RoutePlan, Session, SessionStats, Step
from ._state import MemoryPlan, Support, merge, plan_memory, supports
from ._tensor import Tensor
from ._weights import Block, Weights, WeightsStats

# TimeoutError and SystemError are left out, so that `from tandem import *` does not hide Python's own.
__all__ = [
    "BackendError", "Block", "BusyError", "Cache", "CacheOptions", "CacheStats", "CancelFlag", "CancelledError",
    "CapacityError", "CorruptError", "DeviceLostError", "Engine", "HeadPattern", "InternalError", "InvalidArgumentError",
    "InvalidHandleError", "InvalidStateError", "IoError", "LOG_ERROR", "LOG_INFO", "LOG_WARNING", "Layer", "MemoryPlan",
    "Model", "NotFoundError", "OutOfMemoryError", "Patterns", "Projection", "Pruning", "PruningRecord",
    "PruningStage", "RoutePlan", "Selection", "Sequence", "Session",
    "SessionOptions", "SessionStats", "Step", "Support", "TandemError", "Tensor", "UnsupportedError", "Weights", "WeightsStats",
    "attend_tensors", "cpu_isas", "dtype_row_bytes", "library_path", "merge", "plan_memory", "policies", "supports", "version",
]
