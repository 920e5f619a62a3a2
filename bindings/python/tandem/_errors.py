# SPDX-License-Identifier: MIT
"""One exception class per status of the C ABI, and the check that raises them."""
import builtins
import ctypes
from typing import Any

from . import _abi
from ._library import lib


class TandemError(Exception):
    """A call was refused or failed. It has changed nothing.

    Attributes
    ----------
    status : int
        The C status, negative (``TANDEM_ERROR_*``).
    name : str
        Its name, e.g. ``"TANDEM_ERROR_BUSY"``.
    message : str
        One line naming field and value.
    field : str
        The argument, option or member that was refused; ``""`` if none applies.
    underlying : int
        errno, CUDA result or other code of the layer below; 0 if none applies.
    """

    def __init__(self, message: str, *, status: int, field: str = "", underlying: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.field = field
        self.underlying = underlying

    def __reduce__(self) -> tuple[Any, ...]:  # exceptions are pickled when they pass between processes
        return _rebuild, (self.message, self.status, self.field, self.underlying)

    @property
    def name(self) -> str:
        """The status's constant in ``tandem.h``."""
        return text(lib.tandem_status_name(self.status))


class InvalidArgumentError(TandemError, ValueError):
    """A value is out of range, missing, misaligned, overlapping, or inconsistent."""


class InvalidHandleError(TandemError):
    """The object, or one it belongs to, has been closed."""


class InvalidStateError(TandemError):
    """The object cannot do this now: open step, uneven layers, child after fork."""


class UnsupportedError(TandemError, NotImplementedError):
    """A valid request that this build or machine does not implement."""


class OutOfMemoryError(TandemError, MemoryError):
    """The operating system refused memory."""


class CapacityError(TandemError):
    """A cap or a declared maximum would be exceeded."""


class BusyError(TandemError):
    """A call, a step or a save has the sequence in flight."""


class NotFoundError(TandemError, LookupError):
    """No such sequence, policy, instruction set or backend."""


class CancelledError(TandemError):
    """The caller asked to stop: :class:`tandem.CancelFlag`."""


class TimeoutError(TandemError, builtins.TimeoutError):
    """The given time has passed."""


class DeviceLostError(TandemError):
    """The device failed for good; tokens that were not yet on the host are gone."""


class BackendError(TandemError):
    """A requested backend module could not be used."""


class IoError(TandemError):
    """A file operation failed."""


class CorruptError(TandemError):
    """A file or a buffer is not what it claims to be."""


class SystemError(TandemError):
    """The operating system refused something other than memory."""


class InternalError(TandemError):
    """A bug in Tandem."""


ERROR_CLASSES: dict[int, type[TandemError]] = {
    _abi.STATUS[name]: kind for name, kind in (
        ("INVALID_ARGUMENT", InvalidArgumentError), ("INVALID_HANDLE", InvalidHandleError),
        ("INVALID_STATE", InvalidStateError), ("UNSUPPORTED", UnsupportedError), ("OUT_OF_MEMORY", OutOfMemoryError),
        ("CAPACITY", CapacityError), ("BUSY", BusyError), ("NOT_FOUND", NotFoundError), ("CANCELLED", CancelledError),
        ("TIMEOUT", TimeoutError), ("DEVICE_LOST", DeviceLostError), ("BACKEND", BackendError), ("IO", IoError),
        ("CORRUPT", CorruptError), ("SYSTEM", SystemError), ("INTERNAL", InternalError))
}


def text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


def _rebuild(message: str, status: int, field: str, underlying: int) -> TandemError:
    kind = ERROR_CLASSES.get(status, TandemError)
    return kind(message, status=status, field=field, underlying=underlying)


def taken_error(status: int, error: ctypes.c_void_p) -> TandemError:
    """Returns the exception for a failed call, and releases the error object."""
    made = _rebuild(text(lib.tandem_error_message(error)) or text(lib.tandem_status_name(status)), status,
                    text(lib.tandem_error_field(error)), int(lib.tandem_error_underlying(error)))
    lib.tandem_error_release(error)
    return made


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the ABI, with the error as the last argument, and raises on failure."""
    error = ctypes.c_void_p()
    status = function(*arguments, ctypes.byref(error))
    if status:
        raise taken_error(status, error)


def invalid(field: str, what: str) -> InvalidArgumentError:
    """Returns the exception for a refusal before the library is called."""
    return InvalidArgumentError(f"{field} {what}", status=_abi.STATUS["INVALID_ARGUMENT"], field=field)


# Exceptions by which owners refuse to export an array: NumPy and DLPack raise BufferError, PyTorch ValueError (a meta tensor)
# and RuntimeError too. Other exceptions pass through.
_REFUSALS = (BufferError, ValueError, TypeError, RuntimeError, AttributeError)


def asked_of_owner(function: Any, *arguments: Any) -> Any:
    """Calls a function of an array's owner. Turns a refusal into an error of this package."""
    try:
        return function(*arguments)
    except TandemError:
        raise
    except _REFUSALS as error:
        raise invalid("array", f"is not exported by its owner: {error}") from error


def of_type(field: str, value: Any, kind: type) -> None:
    """Refuses a value that is not of this type."""
    if not isinstance(value, kind):
        raise invalid(field, f"is a {type(value).__name__}, not a {kind.__name__}")


def callable_or_none(field: str, value: Any) -> None:
    """Refuses a value that cannot be called, before the library's threads try to."""
    if value is not None and not callable(value):
        raise invalid(field, f"= {value!r} cannot be called")


class NotCopied:
    """Base of classes that stand for a resource of this process. A copy would be a second owner, or an address without an
    owner."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(f"tandem.{type(self).__name__} can be neither copied nor pickled")
