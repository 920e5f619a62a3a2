# SPDX-License-Identifier: MIT
"""Sequences in files: the format as another program reads it, sequences that go on from files, and files left by a killed
save."""
import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import read_saved
from conftest import DIM, KV_HEADS, Q_HEADS, World

import tandem

TYPES = ("f32", "f16", "bf16", "e4m3", "q8_0", "q4_0")


@pytest.mark.parametrize("k_type", TYPES)
@pytest.mark.parametrize("v_type", TYPES)
def test_another_reader_finds_what_the_library_reads(tmp_path, k_type, v_type):
    world = World(2, k_type=k_type, v_type=v_type, page_tokens=16)
    _, k, v = world.qkv(75)
    for layer in range(2):
        world.sequence.append(k * (1 + layer), v, layer_idx=layer)
    world.sequence.remove(10, 3)
    world.sequence.save(tmp_path / "s", model_id=7, blobs={"a": b"text", "b": np.arange(3)})
    saved = read_saved.read((tmp_path / "s").read_bytes())
    assert (saved.n_tokens, saved.model_id) == (72, 7)
    assert saved.blobs == {"a": b"text", "b": np.arange(3).tobytes()}
    assert saved.positions().tolist() == [*range(10), *range(13, 75)]
    for layer in range(2):
        stored_k, stored_v = world.sequence.read(layer_idx=layer)
        if saved.layers[layer]["k_rotation"] == 1:  # the library turns keys back in f32, the reader in double precision
            np.testing.assert_allclose(saved.k(layer), stored_k, rtol=0, atol=2e-6 * np.abs(stored_k).max())
        else:
            np.testing.assert_array_equal(saved.k(layer), stored_k)
        np.testing.assert_array_equal(saved.v(layer), stored_v)


def test_another_reader_finds_what_a_session_has_learned(tmp_path):
    world = World()
    session = tandem.Session(world.cache, policy="hgca", window_tokens=32, sink_tokens=4, halo_tokens=0, beta=0.5)
    q, k, v = world.qkv(200)
    session.attend(world.sequence, q * 4, k, v)
    for _ in range(20):
        q, k, v = world.qkv(1)
        session.attend(world.sequence, q * 4, k, v)
    world.sequence.save(tmp_path / "s", session=session)
    found = read_saved.read((tmp_path / "s").read_bytes()).statistics(0)
    assert found["policy"] == "hgca" and found["maw"].shape == (Q_HEADS, 220)
    for head in range(KV_HEADS):
        listed = [token for token in session.selection(world.sequence, kv_head_idx=head)[0] if 4 <= token < found["window_begin"]]
        assert found["selected"][head].tolist() == listed and listed


def test_text_goes_on(tmp_path):
    world = World(2)
    session = tandem.Session(world.cache, policy="hgca", window_tokens=32)
    q, k, v = world.qkv(150)
    for layer in range(2):
        session.attend(world.sequence, q, k, v, layer_idx=layer)
    path = tmp_path / "s"
    world.sequence.save(path, session=session, blobs={"state": b"1"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    blobs = {}
    loaded = world.cache.load(path, session=session, blobs=blobs)
    assert blobs == {"state": b"1"} and loaded.digest() == world.sequence.digest()
    for _ in range(10):
        q, k, v = world.qkv(1)
        for layer in range(2):
            both = [session.attend(one, q, k, v, layer_idx=layer) for one in (world.sequence, loaded)]
            np.testing.assert_array_equal(*both)


def test_file_objects(world):
    q, k, v = world.qkv(40)
    world.sequence.append(k, v)
    file = io.BytesIO()
    world.sequence.save(file)
    n_bytes = file.tell()
    world.sequence.save(file)
    file.seek(0)
    for i in range(2):
        assert world.cache.load(file).digest() == world.sequence.digest()
        assert file.tell() == n_bytes * (i + 1)
    with pytest.raises(tandem.CorruptError, match="ends at byte 0"):
        world.cache.load(file)


def test_what_is_wrong_is_said(world, tmp_path):
    _, k, v = world.qkv(40)
    world.sequence.append(k, v)
    path = tmp_path / "s"
    world.sequence.save(path)
    before = path.read_bytes()
    with pytest.raises(FileNotFoundError):
        world.cache.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        world.sequence.save(tmp_path / "none" / "s")
    with pytest.raises(tandem.InvalidArgumentError, match="model_id"):
        world.cache.load(path, model_id=1)
    with pytest.raises(tandem.InvalidArgumentError, match="without a session"):
        world.cache.load(path, session=world.session)
    with pytest.raises(tandem.InvalidArgumentError, match=r"layers\[0\].k_type is f32 in the file, q8_0"):
        World(k_type="q8_0").cache.load(path)
    for n in (0, 10, len(before) - 1):
        path.write_bytes(before[:n])
        with pytest.raises(tandem.CorruptError):
            world.cache.load(path)
    path.write_bytes(before)

    class Broken(io.RawIOBase):
        def write(self, _):
            raise OSError("no room")

        def readinto(self, _):
            raise KeyError("of the test")

    with pytest.raises(OSError, match="no room"):
        world.sequence.save(Broken())
    with pytest.raises(KeyError, match="of the test"):
        world.cache.load(Broken())
    with pytest.raises(TypeError):
        world.sequence.save(path, blobs={"a": 5})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert world.cache.stats().n_sequences == 1


CHILD = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import numpy as np
from conftest import World
world = World()
_, k, v = world.qkv(20_000)
world.sequence.append(k, v)
print(world.sequence.digest(), flush=True)
while True:
    world.sequence.save(sys.argv[1])
"""


def test_a_killed_save_leaves_the_old_file_or_the_new_one(tmp_path):
    world = World()
    _, k, v = world.qkv(20_000)
    world.sequence.append(2 * k, v)
    path, n_parts = tmp_path / "s", 0
    for i in range(8):
        world.sequence.save(path)
        child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, text=True)
        theirs = int(child.stdout.readline())
        time.sleep(0.003 * (i + 1))
        child.send_signal(signal.SIGKILL)
        child.wait()
        loaded = world.cache.load(path)
        assert loaded.digest() in (world.sequence.digest(), theirs)
        loaded.close()
        for part in tmp_path.glob("*.part"):
            n_parts += 1
            os.unlink(part)
        child.stdout.close()
    assert n_parts > 0, "no save was killed half-way"


assert DIM == 64
