# SPDX-License-Identifier: MIT
"""Head patterns: reading files, passing patterns to the library, and refusals."""
import json
import pathlib

import pytest

import tandem
from tandem import HeadPattern, Patterns
from tandem._patterns import patterns_struct

FULL = HeadPattern(("full",))
LAYERS = ((FULL, HeadPattern(("a_shape",), sink_tokens=4, window_tokens=1020), HeadPattern(("block_sparse",), n_blocks=100)),
          (HeadPattern(("vertical_slash",), vertical_tokens=30, slash_tokens=800), FULL,
           HeadPattern(("a_shape", "block_sparse"), sink_tokens=0, window_tokens=1, n_blocks=7)))
FILE = [{"0": ["full"], "1": ["stream_llm", 4, 1020, 0.5], "2": ["block_sparse", 100, 1000, 1]},
        {"0": ["vertical_and_slash", 30, 800], "1": ["full"], "2": [["stream_llm", 0, 1], ["block_sparse", 7, 0]]}]


@pytest.fixture
def json_file(tmp_path):
    path = tmp_path / "patterns.json"
    path.write_text(json.dumps(FILE))
    return path


@pytest.fixture
def gates(tmp_path):
    path = tmp_path / "gätes.tsv"
    path.write_text("0.5\t0.25\n0.1\t0.75\n")
    return path


def test_json_is_read(json_file):
    assert Patterns.read(json_file) == Patterns.read(str(json_file)) == Patterns(LAYERS)


def test_gates_are_read(gates):
    rest = HeadPattern(("a_shape",), sink_tokens=128, window_tokens=256)
    assert Patterns.read(gates) == Patterns(((FULL, rest), (rest, FULL)))
    rest = HeadPattern(("a_shape",), sink_tokens=0, window_tokens=64)
    assert Patterns.read(gates, group_size=2, threshold=0.25, sink_tokens=0, window_tokens=64) == Patterns(
        ((FULL,) * 4, (rest,) * 2 + (FULL,) * 2))


@pytest.mark.parametrize(("options", "error", "field"), [
    ({"group_size": -1}, tandem.InvalidArgumentError, "group_size"), ({"group_size": 1.5}, tandem.InvalidArgumentError, "group_size"),
    ({"threshold": float("nan")}, tandem.InvalidArgumentError, "threshold"),
    ({"threshold": "much"}, tandem.InvalidArgumentError, "threshold"),
    ({"sink_tokens": 1 << 63}, tandem.InvalidArgumentError, "sink_tokens"),
    ({"window_tokens": 0}, tandem.InvalidArgumentError, "window_tokens"),
])
def test_wrong_options_are_refused(gates, options, error, field):
    with pytest.raises(error) as refused:
        Patterns.read(gates, **options)
    assert refused.value.field == field


def test_wrong_files_are_refused(tmp_path):
    path = tmp_path / "wrong"
    for text, why in (("", "the file is empty"), ('[{"0": ["full"], "1": ["stripes"]}]', 'layer 0: head 1: kind "stripes" is unknown'),
                      ("0.1 0.2\n0.3", "line 2 has 1 gates, but line 1 has 2")):
        path.write_text(text)
        with pytest.raises(tandem.InvalidArgumentError) as refused:
            Patterns.read(path)
        assert refused.value.field == "path" and f"path = {path}: {why}" in refused.value.message
    with pytest.raises(tandem.IoError) as refused:
        Patterns.read(pathlib.Path(tmp_path / "gone"))
    assert refused.value.field == "path" and refused.value.underlying == 2
    for path in (7.5, None, "a\0b"):
        with pytest.raises(tandem.InvalidArgumentError) as refused:
            Patterns.read(path)
        assert refused.value.field == "path"


def flat(pointer):
    patterns = pointer.contents
    return [(head.kinds, head.sink_tokens, head.window_tokens, head.vertical_tokens, head.slash_tokens, head.n_blocks)
            for head in patterns.heads[:patterns.n_heads]]


def test_the_library_gets_every_head(json_file):
    wanted = [(1, 0, 0, 0, 0, 0), (2, 4, 1020, 0, 0, 0), (8, 0, 0, 0, 0, 100), (4, 0, 0, 30, 800, 0), (1, 0, 0, 0, 0, 0),
              (10, 0, 1, 0, 0, 7)]
    for value in (Patterns(LAYERS), Patterns([list(layer) for layer in LAYERS]), json_file, str(json_file)):
        assert flat(patterns_struct("patterns", value)) == wanted
    assert flat(patterns_struct("patterns", Patterns([[HeadPattern(), HeadPattern("full")]]))) == [(0, 0, 0, 0, 0, 0),
                                                                                                   (1, 0, 0, 0, 0, 0)]


@pytest.mark.parametrize(("value", "field"), [
    (7, "patterns"), (Patterns(7), "patterns.layers"), (Patterns([7]), "patterns.layers[0]"),
    (Patterns([[FULL], [7]]), "patterns.layers[1][0]"), (Patterns([[HeadPattern(7)]]), "patterns.layers[0][0].kinds"),
    (Patterns([[HeadPattern(("full", "half"))]]), "patterns.layers[0][0].kinds[1]"),
    (Patterns([[HeadPattern("a_shape", sink_tokens=1.5)]]), "patterns.layers[0][0].sink_tokens"),
    (Patterns([[HeadPattern("block_sparse", n_blocks=1 << 63)]]), "patterns.layers[0][0].n_blocks"),
    ("/nonexistent", "path"),
])
def test_wrong_patterns_are_refused_by_their_field(world, value, field):
    with pytest.raises(tandem.TandemError) as refused:
        tandem.Session(world.cache, patterns=value)
    assert refused.value.field == field
