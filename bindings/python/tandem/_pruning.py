# SPDX-License-Identifier: MIT
"""Options of the policy "hip"."""
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._errors import invalid, of_type
from ._library import lib


@dataclass(frozen=True)
class PruningStage:
    """One stage of hierarchical pruning: it scores chunks of keys and keeps the best.

    Parameters
    ----------
    judge : str
        "descent" (the paper's: the logit of one key of each chunk, found by halving), "bounds" (an upper bound of every logit
        in the chunk) or "exact" (the largest logit of the chunk's keys).
    chunk_tokens : int
        A power of two up to 256, at most that of the stage before.
    keep_tokens : int
        Tokens of the chunks that the stage keeps.
    refresh_interval : int
        Tokens between two runs in decode calls.
    query_block : int
        Queries of an append that share a list: a power of two up to 64, at most that of the stage before.
    plus_next : bool
        Last stage only: half of `keep_tokens` is kept by score, and with each such chunk the next one.
    from_tokens, to_tokens : int
        The stage applies to queries that see at least `from_tokens` and fewer than `to_tokens` tokens; 0: no limit.
    """

    judge: str
    chunk_tokens: int
    keep_tokens: int
    refresh_interval: int = 1
    query_block: int = 64
    plus_next: bool = False
    from_tokens: int = 0
    to_tokens: int = 0


@dataclass(frozen=True)
class PruningRecord:
    """Which keys a layer's queries attend: sinks, window, and the chunks that the last stage has kept.

    Parameters
    ----------
    stages : sequence of PruningStage
        1 to 8 stages, in order. Queries attend the tokens that they keep.
    sink_tokens : int
        First tokens, always attended: a multiple of the largest `chunk_tokens`.
    window_tokens : int
        Newest tokens, always attended.
    """

    stages: Sequence[PruningStage]
    sink_tokens: int = 64
    window_tokens: int = 1024


@dataclass(frozen=True)
class Pruning:
    """Configures the policy "hip".

    Parameters
    ----------
    preset : str
        "small", or one of the paper's: "3k", "3k-fast", "3k-flash", "5k", "3k-5k", "16k-shallow".
    decode : sequence of PruningRecord or None
        For calls with one query in a sequence, and speculative tokens: one record for all layers, or one per layer. None: the
        preset's.
    append : sequence of PruningRecord or None
        The same for calls with several queries in a sequence.
    shared_lists : bool
        True: one list for all KV heads, as in the paper. False: one for each.
    """

    preset: str | None = None
    decode: Sequence[PruningRecord] | None = None
    append: Sequence[PruningRecord] | None = None
    shared_lists: bool = False


def pruning_struct(name: str, value: Any) -> Any:
    """Returns a pointer to tandem_pruning, which keeps alive what it points to. `value` may be the name of a preset."""
    from ._options import encoded, fill, integer, listed, named

    def flag(field: str, given: Any) -> int:
        number = integer(field, given)
        if number not in (0, 1):
            raise invalid(field, f"= {given!r} is neither True nor False")
        return number

    def struct_of(kind: Any, options: dict[str, Any], who: str) -> Any:
        struct = kind()
        getattr(lib, f"tandem_{who}_init")(ctypes.byref(struct))
        fill(struct, options, {}, who)
        return struct

    def stage_struct(field: str, stage: PruningStage) -> Any:
        of_type(field, stage, PruningStage)
        options = {key: getattr(stage, key) for key in ("chunk_tokens", "keep_tokens", "refresh_interval", "query_block",
                                                        "from_tokens", "to_tokens")}
        for key, number in options.items():
            options[key] = integer(f"{field}.{key}", number, 32 if key == "query_block" else 64)
        return struct_of(_abi.PruningStageStruct, options | {"judge": named(f"{field}.judge", stage.judge, _abi.JUDGES),
                                                             "plus_next": flag(f"{field}.plus_next", stage.plus_next)}, "pruning_stage")

    def record_struct(field: str, record: PruningRecord) -> Any:
        of_type(field, record, PruningRecord)
        stages = [stage_struct(f"{field}.stages[{i}]", stage) for i, stage in enumerate(listed(f"{field}.stages", record.stages))]
        struct = struct_of(_abi.PruningRecordStruct, {
            "sink_tokens": integer(f"{field}.sink_tokens", record.sink_tokens),
            "window_tokens": integer(f"{field}.window_tokens", record.window_tokens)}, "pruning_record")
        struct.stages = (_abi.PruningStageStruct * len(stages))(*stages)
        struct.n_stages = len(stages)
        return struct

    pruning = Pruning(preset=value) if isinstance(value, str) else value
    if not isinstance(pruning, Pruning):
        raise invalid(name, f"= {value!r} is neither a Pruning nor the name of a preset")
    struct = struct_of(_abi.PruningStruct, {"shared_lists": flag(f"{name}.shared_lists", pruning.shared_lists)}, "pruning")
    struct.preset = encoded(f"{name}.preset", pruning.preset)
    for kind in ("decode", "append"):
        records = getattr(pruning, kind)
        if records is None:
            continue
        made = [record_struct(f"{name}.{kind}[{i}]", record) for i, record in enumerate(listed(f"{name}.{kind}", records))]
        setattr(struct, kind, (_abi.PruningRecordStruct * len(made))(*made))
        setattr(struct, f"n_{kind}", len(made))
    return ctypes.pointer(struct)
