# SPDX-License-Identifier: MIT
"""Sequences in files."""
import ctypes
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from . import _abi
from ._errors import call, invalid, of_type
from ._handle import refuse_in_callback
from ._library import lib
from ._options import integer
from ._session import Session

Target = str | os.PathLike[str] | BinaryIO
_Write = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_Read = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_Blob = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path`, which replaces `path` once it is complete and on disk."""
    path = os.path.abspath(os.fspath(path))
    part = f"{path}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _memory(address: int | None, n_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * n_bytes).from_address(address or 0)).cast("B")


class _Calls:
    """Python functions that the library calls. Their exception is raised again after the library has returned."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def guarded(self, function: Callable[..., int], failure: int) -> Callable[..., int]:
        def guard(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except BaseException as error:
                self.raised = error
                return failure
        return guard

    def run(self, function: Any, *arguments: Any) -> None:
        try:
            call(function, *arguments)
        except Exception:
            if self.raised is not None:
                raise self.raised from None
            raise


def _session_pointer(session: Session | None) -> int | None:
    if session is None:
        return None
    of_type("session", session, Session)
    return session._handle.pointer or 1  # a closed session gets an invalid address, which the library refuses


def _model_id(model_id: int) -> int:
    if not 0 <= integer("model_id", model_id, 65) < 1 << 64:
        raise invalid("model_id", f"= {model_id} has more than 64 bits")
    return model_id


def _blobs(blobs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Returns the C array of blobs, and the objects that must live as long."""
    structs, kept = (_abi.SavedBlobStruct * len(blobs))(), []
    for struct, (name, value) in zip(structs, blobs.items(), strict=True):
        view = memoryview(value).cast("B")
        data = (ctypes.c_char * len(view)).from_buffer_copy(view) if view.readonly else (
            ctypes.c_char * len(view)).from_buffer(view)
        of_type("blobs", name, str)
        kept += [data, name.encode()]
        struct.struct_size = ctypes.sizeof(struct)
        struct.name, struct.data, struct.n_bytes = kept[-1], ctypes.addressof(data), len(view)
    return structs, kept


def save(sequence: Any, target: Target, session: Session | None, model_id: int, blobs: Mapping[str, Any] | None) -> None:
    """Implements Sequence.save()."""
    if isinstance(target, str | os.PathLike):
        with replaced(target) as file:
            return save(sequence, file, session, model_id, blobs)
    refuse_in_callback(sequence.cache._engine)
    calls = _Calls()

    def write(data: int, n_bytes: int, _user: Any) -> int:
        left = _memory(data, n_bytes)
        while left:
            n = target.write(left)
            left = left[len(left) if n is None else n:]
        return 0

    structs, kept = _blobs(blobs or {})
    options = _abi.SaveOptionsStruct(session=_session_pointer(session), model_id=_model_id(model_id), n_blobs=len(structs))
    options.struct_size = ctypes.sizeof(options)
    if len(structs):
        options.blobs = structs
    function = _Write(calls.guarded(write, 1))
    calls.run(lib.tandem_sequence_save, sequence.cache._handle.pointer, sequence.id, function, None, ctypes.byref(options))
    del kept
    return None


def load(cache: Any, source: Target, session: Session | None, model_id: int, blobs: MutableMapping[str, bytes] | None) -> int:
    """Implements Cache.load(). Returns the id of the new sequence."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb", buffering=0) as file:
            return _load(cache, file, os.fstat(file.fileno()).st_size, session, model_id, blobs)
    return _load(cache, source, -1, session, model_id, blobs)


def _load(cache: Any, file: BinaryIO, file_bytes: int, session: Session | None, model_id: int,
          blobs: MutableMapping[str, bytes] | None) -> int:
    refuse_in_callback(cache._engine)
    calls, found = _Calls(), {}

    def read(data: int, n_bytes: int, _user: Any) -> int:
        n: int | None = file.readinto(_memory(data, n_bytes))  # type: ignore[attr-defined]
        if n is None:
            raise BlockingIOError("the file has no bytes yet")
        return n

    def take(name: bytes, data: int | None, n_bytes: int, _user: Any) -> int:
        found[name.decode()] = bytes(_memory(data, n_bytes)) if n_bytes else b""
        return 0

    options = _abi.LoadOptionsStruct(session=_session_pointer(session), model_id=_model_id(model_id), file_bytes=file_bytes)
    options.struct_size = ctypes.sizeof(options)
    functions = _Read(calls.guarded(read, -1)), _Blob(calls.guarded(take, 1))
    if blobs is not None:
        options.blob = ctypes.cast(functions[1], ctypes.c_void_p)
    made = ctypes.c_int64()
    calls.run(lib.tandem_sequence_load, ctypes.byref(made), cache._handle.pointer, functions[0], None, ctypes.byref(options))
    if blobs is not None:
        blobs.update(found)
    return made.value
