# SPDX-License-Identifier: MIT
"""Owned handles and their release.

close() releases at once, in the caller's thread. Handles of collected objects go to a thread of their own: the collector may
run inside a log callback, where the library holds locks and must not be called. At the interpreter's exit no callbacks run any
more, so handles are released directly. The library counts references, so the order does not matter. A handle keeps its parents'
Python side (a log callback) alive for as long as the library may use it.
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
    from typing_extensions import Self  # in typing from Python 3.11 on; only type checkers need it

_released: "queue.SimpleQueue[Handle]" = queue.SimpleQueue()  # put() is reentrant: the collector may interrupt it
_reaper_lock = threading.Lock()
_reaper: threading.Thread | None = None
_exiting = False


class Handle:
    """A pointer of the C ABI, its release function, and the objects that must live as long."""

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
    """Starts the releasing thread. Called where objects are made, never by the collector, because starting a thread takes
    locks."""
    global _reaper
    if _reaper is not None and _reaper.is_alive():  # a child of fork() has no such thread
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
    """Base of objects that own a handle. Gives them ``close()`` and ``with``, and releases the handle of a collected object."""

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
        """Release this object's reference. A second call does nothing. Objects made from this one stay alive."""
        self._finalizer.detach()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr(self, what: str) -> str:
        return f"<tandem.{type(self).__name__} {'closed' if self.closed else what}>"


def pointer_of(name: str, owner: Any, kind: type[Owner]) -> int | None:
    """Returns an argument's handle. It is None if the object has been closed, which the library refuses."""
    of_type(name, owner, kind)
    pointer: int | None = owner._handle.pointer
    return pointer


telling: dict[int, Handle] = {}  # threads in a progress callback, with the engine of the callback's call


def refuse_in_callback(engine: Handle) -> None:
    """Refuses a call that would deadlock: the engine's workers are busy in the call that waits for this thread's callback."""
    if telling.get(threading.get_ident()) is engine:
        raise InvalidStateError("progress: a callback may not use the session of its call, nor attend, append or merge on its "
                                "engine: both would wait for ever", status=_abi.STATUS["INVALID_STATE"], field="progress")


def create(function: Any, *arguments: Any) -> int:
    """Calls a create function, which writes the handle to its first parameter."""
    made = ctypes.c_void_p()
    call(function, ctypes.byref(made), *arguments)
    assert made.value is not None
    return made.value


# finalize registers its own exit function with its first object. Exit functions run in reverse order, so _exit() runs before
# it.
weakref.finalize(Handle, lambda: None).detach()
atexit.register(_exit)
