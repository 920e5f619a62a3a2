# SPDX-License-Identifier: MIT
"""The pruning records that are refused, and the content of the presets."""
import dataclasses

import pytest
from pruning_records import PRESETS, Record, Stage, preset


@pytest.mark.parametrize("change, message", [
    ({"stages": ()}, "no stages"),
    ({"sink_tokens": 8}, "sink_tokens"),
    ({"window_tokens": 46}, "window_tokens must be at least 47"),
    ({"judge": "oracle"}, "judge"),
    ({"chunk_tokens": 6}, "chunk_tokens"),
    ({"chunk_tokens": 512}, "chunk_tokens"),
    ({"chunk_tokens": 32}, "chunk_tokens: a stage's chunks"),
    ({"query_block": 128}, "query_block"),
    ({"query_block": 32}, "query_block: a stage's block"),
    ({"keep_tokens": 12}, "keep_tokens"),
    ({"keep_tokens": 0}, "keep_tokens"),
    ({"refresh_interval": 0}, "refresh_interval"),
    ({"plus_next": True}, "plus_next"),
    ({"from_tokens": -1}, "from_tokens"),
])
def test_records_that_are_refused(change, message):
    good = Record(16, 47, (Stage("bounds", 16, 16, 64, 16), Stage("exact", 16, 8, 32), Stage("exact", 8, 4, 16, 4)))
    good.check()
    of_record = {key: value for key, value in change.items() if key in ("stages", "sink_tokens", "window_tokens")}
    stages = list(good.stages)
    if not of_record:
        stages[1] = dataclasses.replace(stages[1], **change)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **{"stages": tuple(stages), **of_record}).check()


def test_plus_next_is_for_the_last_active_stage():
    far = Stage("exact", 16, 8, 32, plus_next=True, from_tokens=500)
    Record(16, 64, (far, Stage("exact", 16, 8, 32, to_tokens=500))).check()
    with pytest.raises(ValueError, match="plus_next"):
        Record(16, 64, (far, Stage("exact", 16, 8, 32, to_tokens=501))).check()
    with pytest.raises(ValueError, match="keep_tokens: 24"):
        Record(16, 64, (dataclasses.replace(far, keep_tokens=24),)).check()


def test_presets():
    for name in PRESETS:
        for layer_idx in (0, 3):
            for kind in ("decode", "append"):
                preset(name, layer_idx, kind).check()
    for refused in (("4k", 0, "decode"), ("3k", 0, "prefill")):
        with pytest.raises(ValueError):
            preset(*refused)
    assert [preset("3k", layer, "decode").stages[-1].keep_tokens for layer in (2, 3)] == [4096, 2048]
    assert [stage.refresh_interval for stage in preset("3k-flash", 9, "append").stages] == [96, 24, 8]
    assert preset("3k-5k", 9, "append") == preset("3k", 9, "append") and preset("3k-5k", 9, "decode") == preset("5k", 9, "decode")
    assert [preset("16k-shallow", layer, "decode").window_tokens for layer in (2, 3)] == [131072, 1024]
    short, long = 32766, 32767
    for kind, chunks in (("decode", {short: [8, 8], long: [64, 16, 8]}), ("append", {short: [8], long: [64, 16, 8]})):
        small = preset("small", 0, kind)
        assert {p0: [stage.chunk_tokens for stage in small.active(p0)] for p0 in chunks} == chunks
