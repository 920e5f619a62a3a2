# SPDX-License-Identifier: MIT
"""Owned handles and who gives them back.

close() releases at once, in the caller's thread. What the garbage collector finds is handed to a thread of its own: the
collector may run inside a log callback, where the library holds locks and must not be called. At the interpreter's exit
there are no callbacks left to fear, and everything is released directly. The library counts references, so order never
matters; a handle keeps its parents' Python side (a log callback) for as long as the library may use it.
"""
from __future__ import annotations

import atexit
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _abi
from ._errors import InvalidStateError, NotCopied, call, of_type

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on; not needed at run time

_released: "queue.SimpleQueue[Handle]" = queue.SimpleQueue()  # its put() may interrupt another
_reaper_lock = threading.Lock()
_reaper: threading.Thread | None = None
_exiting = False


class Handle:
    """A pointer of the C ABI, the function that releases it, and what has to live as long."""

    __slots__ = ("_lock", "_release", "keeps", "pointer")

    def __init__(self, pointer: int | None, release: Callable[[int], Any], *keeps: object) -> None:
        self.pointer = pointer
        self.keeps = keeps
        self._release = release
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            pointer, self.pointer = self.pointer, None
        if pointer is not None:
            self._release(pointer)


def _reap() -> None:
    while True:
        _released.get().close()


def start_reaper() -> None:
    """Called where objects are made, never by the collector: starting a thread takes locks."""
    global _reaper
    if _reaper is not None and _reaper.is_alive():  # a child made by fork() has none
        return
    with _reaper_lock:
        if _reaper is None or not _reaper.is_alive():
            _reaper = threading.Thread(target=_reap, name="tandem-release", daemon=True)
            _reaper.start()


def _collected(handle: Handle) -> None:
    if _exiting:
        handle.close()
    else:
        _released.put(handle)


def _exit() -> None:
    global _exiting
    _exiting = True
    try:
        while True:
            _released.get_nowait().close()
    except queue.Empty:
        pass


class Owner(NotCopied):
    """Base of the objects that own a handle: ``close()``, ``with``, and release when the object is collected."""

    _handle: Handle
    _finalizer: "weakref.finalize[[Handle], Owner]"

    def _own(self, handle: Handle) -> None:
        self._handle = handle
        self._finalizer = weakref.finalize(self, _collected, handle)
        start_reaper()

    @property
    def closed(self) -> bool:
        """Whether this object has been closed."""
        return self._handle.pointer is None

    def close(self) -> None:
        """Give up this object's reference. Does nothing when it is closed; objects made from it live on."""
        self._finalizer.detach()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr(self, what: str) -> str:
        return f"<tandem.{type(self).__name__} {'closed' if self.closed else what}>"


def pointer_of(name: str, owner: Any, kind: type[Owner]) -> int | None:
    """The handle of an argument; None, which the library refuses, where it has been closed."""
    of_type(name, owner, kind)
    pointer: int | None = owner._handle.pointer
    return pointer


telling: dict[int, Handle] = {}  # threads that are in a progress callback, and the engine of the call that it belongs to


def refuse_in_callback(engine: Handle) -> None:
    """Refuses what would wait for ever: the engine's workers are in the call that waits for this thread's callback."""
    if telling.get(threading.get_ident()) is engine:
        raise InvalidStateError("progress: a callback may not use the session of its call, nor attend, append or merge on its "
                                "engine: both would wait for ever", status=_abi.STATUS["INVALID_STATE"], field="progress")


def create(function: Any, *arguments: Any) -> int:
    """Calls a create function, whose first parameter is where the handle goes."""
    made = ctypes.c_void_p()
    call(function, ctypes.byref(made), *arguments)
    assert made.value is not None
    return made.value


# finalize registers its own exit function with its first object; functions run in reverse order, so this one goes first.
weakref.finalize(Handle, lambda: None).detach()
atexit.register(_exit)
