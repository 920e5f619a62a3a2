# SPDX-License-Identifier: MIT
"""The engine: the processors, and queries about them and the build."""
import ctypes
import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _abi
from ._errors import call, callable_or_none, text
from ._handle import Handle, Owner, create
from ._library import lib
from ._options import fill, integer, named

Log = Callable[[int, str], object]


def _log_function(log: Log) -> Any:
    """Wraps a log function for the library, which calls it from any of its threads. sys.unraisablehook gets exceptions."""
    def called(level: int, message: bytes | None, _user: int | None) -> None:
        try:
            log(level, text(message))
        except BaseException as error:
            try:
                sys.unraisablehook(_Unraisable(error, log))
            except BaseException:  # a hook that raises is ignored
                pass
    return _abi.LogFunction(called)


class _Unraisable:
    """The argument of sys.unraisablehook. Python code cannot make the interpreter's own type."""

    def __init__(self, error: BaseException, log: Log) -> None:
        self.exc_type: type[BaseException] = type(error)
        self.exc_value: BaseException | None = error
        self.exc_traceback: TracebackType | None = error.__traceback__
        self.err_msg: str | None = "Exception ignored in a log callback of tandem"
        self.object: object = log


def json_report(function: Any, handle: Any) -> dict[str, Any]:
    """Returns the JSON report that `function` writes to a buffer. The report may grow between two calls."""
    needed = ctypes.c_size_t(4096)
    while True:
        size = needed.value
        buffer = ctypes.create_string_buffer(size)
        call(function, buffer, size, ctypes.byref(needed), handle)
        if needed.value <= size:
            report: dict[str, Any] = json.loads(buffer.value)
            return report


class Engine(Owner):
    """The CPU's workers and, if one is named, a device.

    Any thread may use it, at any time. Caches and sessions keep it alive.

    Parameters
    ----------
    n_threads : int
        CPU workers, the calling thread included. 0: from the affinity mask and cgroup quota; with a backend, one CPU of four or
        more is left to the program's thread.
    cpu_isa : str, optional
        Exactly this instruction set (:func:`tandem.cpu_isas`). None: ``$TANDEM_CPU_ISA``, else the best.
    backend : str, optional
        Device backend, ``"cuda"``. Its module must load and have a usable device.
    backend_path : str, optional
        Absolute path of that module. No other file is tried.
    log : callable, optional
        ``log(level, message)``, with level ``LOG_ERROR``, ``LOG_WARNING`` or ``LOG_INFO``. None: silent. Any thread of the
        library may call it. It must not call the library. Its exceptions go to ``sys.unraisablehook``.
    spin_ns : int
        Nanoseconds that idle workers spin before they sleep; -1: 50,000; 0: never.
    pin_threads : int
        1: bind each worker to a core; 0: the system places workers; -1: default (1).
    matmul_rows : int
        Fewest query rows of a KV head for matrix products in a call. 0: by instruction set, from a table, so that every process
        gets the same bits. -1: from where they are faster, as measured.

    Raises
    ------
    NotFoundError
        `cpu_isa` is unknown or not on this processor.
    BackendError
        No module loads; the message lists every path tried.
    SystemError, OutOfMemoryError
    """

    def __init__(self, *, n_threads: int = 0, cpu_isa: str | None = None, backend: str | None = None,
                 backend_path: str | None = None, log: Log | None = None, spin_ns: int = -1, pin_threads: int = -1,
                 matmul_rows: int = 0) -> None:
        callable_or_none("log", log)
        struct = _abi.EngineOptionsStruct()
        lib.tandem_engine_options_init(ctypes.byref(struct))
        fill(struct, {"n_threads": n_threads, "cpu_isa": cpu_isa, "backend": backend, "backend_path": backend_path,
                      "spin_ns": spin_ns, "pin_threads": pin_threads, "matmul_rows": matmul_rows}, {}, "an engine")
        function = None
        if log is not None:
            function = _log_function(log)
            struct.log = function
        pointer = create(lib.tandem_engine_create, ctypes.byref(struct))
        self._own(Handle(pointer, lib.tandem_engine_release, function))

    def drain(self, timeout_ns: int = -1) -> None:
        """Wait until background work has finished.

        Parameters
        ----------
        timeout_ns : int
            Below 0: for ever.

        Raises
        ------
        TimeoutError
        """
        call(lib.tandem_engine_drain, self._handle.pointer, integer("timeout_ns", timeout_ns))

    def report(self) -> dict[str, Any]:
        """Return topology, workers, instruction set, devices, and backends with the reason for each refusal."""
        return json_report(lib.tandem_engine_report, self._handle.pointer)

    def __repr__(self) -> str:
        return self._repr("open")


def _names(function: Any) -> list[str]:
    names: list[str] = []
    while (name := function(len(names))) is not None:
        names.append(text(name))
    return names


def policies() -> list[str]:
    """Return the names of the policies."""
    return _names(lib.tandem_policy_name)


def cpu_isas() -> dict[str, bool]:
    """Return the instruction sets of this build, best first, and whether this processor has each."""
    return {name: bool(lib.tandem_cpu_isa_available(name.encode())) for name in _names(lib.tandem_cpu_isa_name)}


def dtype_row_bytes(dtype: str, head_dim: int) -> int:
    """Return the bytes that a cache stores for a row of K or V, scales included.

    Parameters
    ----------
    dtype : str
        Storage type.
    head_dim : int
        Elements of the row. The result is 0 for an invalid length.
    """
    return int(lib.tandem_dtype_row_bytes(named("dtype", dtype, _abi.DTYPES), integer("head_dim", head_dim, 32)))


def version() -> tuple[int, int, int]:
    """Return the version of the loaded library."""
    number = int(lib.tandem_version())
    return number >> 16, number >> 8 & 255, number & 255


def library_path() -> str:
    """Return the library's file, or the name that the dynamic linker was given."""
    return str(lib._name)
