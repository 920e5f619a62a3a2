# SPDX-License-Identifier: MIT
"""Objects may be closed in any order, left to the collector, or open at the interpreter's exit."""
import gc
import itertools
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from conftest import World

import tandem

ORDERS = list(itertools.permutations(("engine", "model", "cache", "session", "sequence")))


def eventually(true):
    """A thread releases the objects that the collector finds, so this waits."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("order", ORDERS[::5], ids="-".join)
def test_close_in_any_order(order):
    world = World()
    world.session.attend(world.sequence, *world.qkv(3))
    for name in order:
        getattr(world, name).close()
        getattr(world, name).close()
        assert getattr(world, name).closed and "closed" in repr(getattr(world, name))


@pytest.mark.parametrize("order", ORDERS[::5], ids="-".join)
def test_collect_in_any_order(order):
    world = World()
    world.session.attend(world.sequence, *world.qkv(3))
    for name in order:
        delattr(world, name)
        gc.collect()


def test_what_an_object_needs_lives_on(world):
    q, k, v = world.qkv(4)
    world.engine.close(), world.model.close()
    o = world.session.attend(world.sequence, q, k, v)
    assert np.isfinite(o).all()
    world.cache.close()
    with pytest.raises(tandem.InvalidHandleError):
        world.sequence.length()
    assert np.array_equal(world.session.attend(world.sequence, q[3:]), o[3:])  # the session still holds the cache


def test_collected_sequences_are_dropped(world):
    fork = world.sequence.fork()
    assert world.cache.stats().n_sequences == 2
    del fork
    eventually(lambda: world.cache.stats().n_sequences == 1)
    loop = [world.cache.create_sequence()]
    loop.append(loop)
    del loop
    gc.collect()
    eventually(lambda: world.cache.stats().n_sequences == 1)


def test_with_closes(world):
    with world.cache.create_sequence() as sequence:
        assert world.cache.stats().n_sequences == 2
    assert sequence.closed and world.cache.stats().n_sequences == 1
    with pytest.raises(KeyError), tandem.Session(world.cache) as session:
        raise KeyError
    assert session.closed


def test_engines_give_their_threads_back():
    def n_threads():
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    gc.collect()
    World()
    time.sleep(0.1)
    gc.collect()
    time.sleep(0.1)
    before = n_threads()
    for _ in range(20):
        World()
    gc.collect()
    eventually(lambda: n_threads() <= before)


def test_a_call_keeps_its_arrays_and_no_longer(world):
    q, k, v = world.qkv(3)
    o = np.empty_like(q)
    gone = [weakref.ref(array) for array in (q, k, v, o)]
    world.session.attend(world.sequence, q, k, v, out=o)
    del q, k, v, o
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


@pytest.mark.parametrize("last_line", ["", "import gc; del w; gc.collect()", "w.engine.close()", "raise SystemExit(0)",
                                       "import os; os.fork() or os._exit(0)", "w.cycle = w; del w"])
def test_exit_with_everything_open(last_line):
    program = f"""
import sys
sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})
from conftest import World
import tandem
w = World()
w.engine2 = tandem.Engine(n_threads=2, log=print)
w.cache2 = tandem.Cache(w.engine2, w.model)
w.session.attend(w.sequence, *w.qkv(3))
{last_line}
"""
    # From 3.12 on Python warns of a fork() beside other threads, which is what is tested here.
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", program],
                          capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_exit_releases_what_is_open():
    """Otherwise an engine's threads could call a log callback after the interpreter is gone."""
    program = """
import tandem
from tandem import _handle
engine = tandem.Engine(n_threads=1, log=print)
cycle = [tandem.Engine(n_threads=1)]
cycle.append(cycle)
close = _handle.Handle.close
_handle.Handle.close = lambda handle: (close(handle), print("released"))[0]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", 2 * "released\n")
