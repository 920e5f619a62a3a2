# SPDX-License-Identifier: MIT
"""The file of a TandemCache: a part for all rows, then each row's sequence as tandem_sequence_save() writes it.

    "TANDEMTC" | length of the text, 8 bytes | the text, JSON | its CRC-32, 4 bytes | sequence | sequence | ...
"""
import base64
import json
import struct
import zlib
from dataclasses import asdict, fields
from typing import Any, BinaryIO

import torch

from .. import _abi
from .._cache import Cache, Sequence
from .._errors import CorruptError
from .._model import Layer
from .._session import Session
from ._pass import Held

_MAGIC, _MOST_TEXT = b"TANDEMTC", 1 << 30
_MEMBERS = {"columns": int, "lengths": list, "mask": str | None, "layers": list | None, "storage": dict}
STORAGE = ("k_type", "v_type", "layer_k_types", "layer_v_types", "k_rotation", "x_type")  # options that describe the rows


def corrupt(what: str) -> CorruptError:
    return CorruptError(f"header {what}", status=_abi.STATUS["CORRUPT"], field="header")


def _plain(layers: tuple[Layer, ...]) -> list[dict[str, Any]] | None:
    """Returns the layers for JSON. None if one has arrays or a projection; load() must then be given the layers."""
    kinds = (int, float, str, bool)
    if not all(getattr(layer, one.name) is None or isinstance(getattr(layer, one.name), kinds) for layer in layers
               for one in fields(layer)):
        return None
    return [asdict(layer) for layer in layers]


def write(file: BinaryIO, cache: Cache, session: Session, held: Held, storage: dict[str, Any], model_id: int) -> None:
    """Writes the whole file."""
    mask = None if held.mask is None else base64.b64encode(held.mask.cpu().to(torch.uint8).numpy().tobytes()).decode()
    text = json.dumps({"version": 1, "columns": held.columns, "lengths": held.lengths, "mask": mask, "layers": _plain(cache.layers),
                       "storage": storage}).encode()
    file.write(_MAGIC + struct.pack("<Q", len(text)) + text + struct.pack("<I", zlib.crc32(text)))
    for sequence in held.sequences:
        sequence.save(file, session=session, model_id=model_id)


def read_text(file: BinaryIO) -> dict[str, Any]:
    """Reads the part for all rows.

    Raises
    ------
    CorruptError
    """
    head = file.read(16)
    if len(head) < 16 or head[:8] != _MAGIC:
        raise corrupt("is not that of a saved TandemCache")
    n_bytes = struct.unpack("<Q", head[8:])[0]
    if n_bytes > _MOST_TEXT:
        raise corrupt(f"says that it has {n_bytes} bytes")
    text, check = file.read(n_bytes), file.read(4)
    if len(text) < n_bytes or len(check) < 4 or struct.unpack("<I", check)[0] != zlib.crc32(text):
        raise corrupt("is cut off or changed")
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != 1:
        raise corrupt("is of another version than 1, which this package reads")
    for name, kinds in _MEMBERS.items():
        if not isinstance(found.get(name, ...), kinds):
            raise corrupt(f"lacks {name}, or has it as {found.get(name)!r}")
    return found


def layers_in(found: dict[str, Any]) -> list[Layer] | None:
    return None if found["layers"] is None else [Layer(**layer) for layer in found["layers"]]


def read_held(file: BinaryIO, cache: Cache, session: Session | None, found: dict[str, Any], device: Any, model_id: int) -> Held:
    """Reads the rows. If one fails, none is left."""
    sequences: list[Sequence] = []
    lengths, mask = found["lengths"], None
    try:
        for length in lengths:
            sequences.append(cache.load(file, session=session, model_id=model_id))
            if sequences[-1].length() != length:
                raise corrupt(f"says that row {len(sequences) - 1} has {length} tokens: it has {sequences[-1].length()}")
        if file.read(1):
            raise corrupt(f"says that there are {len(lengths)} rows: more bytes follow")
        if found["mask"] is not None:
            data = bytearray(base64.b64decode(found["mask"]))
            if len(data) != len(lengths) * found["columns"]:
                raise corrupt(f"has a mask of {len(data)} bytes, not of {len(lengths)} rows with {found['columns']} columns")
            mask = torch.frombuffer(data, dtype=torch.uint8).reshape(len(lengths), found["columns"]).bool().to(device)
    except BaseException:
        for sequence in sequences:
            sequence.close()
        raise
    return Held(sequences, list(lengths), found["columns"], mask)
