# SPDX-License-Identifier: MIT
"""Each status that can occur without a GPU raises its class, with field and message. Also refusals of the binding itself."""
import gc
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import World

import tandem
from tandem import _errors
from tandem._abi import STATUS


def check(raised, kind, field=None):
    error = raised.value
    assert type(error) is kind and error.status == STATUS[error.name.removeprefix("TANDEM_ERROR_")] < 0
    assert _errors.ERROR_CLASSES[error.status] is kind and error.message == str(error) != ""
    if field is not None:
        assert error.field == field, (error.field, error.message)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and (again.message, again.field, again.status) == (error.message, error.field, error.status)


def test_every_status_has_a_class_of_its_own():
    assert set(_errors.ERROR_CLASSES) == set(STATUS.values()) - {0}
    assert len(set(_errors.ERROR_CLASSES.values())) == 16
    assert all(issubclass(kind, tandem.TandemError) for kind in _errors.ERROR_CLASSES.values())


def test_invalid_argument(world):
    with pytest.raises(ValueError) as raised:
        world.session.attend(world.sequence, *world.qkv(1), layer_idx=3)
    check(raised, tandem.InvalidArgumentError, "layer_idx")
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        tandem.Cache(world.engine, world.model, page_tokens=17)
    check(raised, tandem.InvalidArgumentError, "page_tokens")


def test_invalid_handle(world):
    world.session.close()
    with pytest.raises(tandem.TandemError) as raised:
        world.session.attend(world.sequence, *world.qkv(1))
    check(raised, tandem.InvalidHandleError)
    with tandem.Engine(n_threads=1) as engine:
        pass
    with pytest.raises(tandem.InvalidHandleError):
        engine.report()


def test_invalid_state(world):
    with pytest.raises(tandem.TandemError) as raised:
        world.session.commit(world.sequence, [])
    check(raised, tandem.InvalidStateError)


def test_unsupported():
    with pytest.raises(NotImplementedError) as raised:
        tandem.Model(tandem.Layer(n_q_heads=1, n_kv_heads=1, k_head_dim=72))
    check(raised, tandem.UnsupportedError)


def test_capacity():
    world = World(host_cap_bytes=1 << 23)
    with pytest.raises(tandem.TandemError) as raised:
        world.sequence.reserve(1 << 20)
    check(raised, tandem.CapacityError)


def test_out_of_memory():
    """Runs in a process of its own, whose address space is limited once everything is loaded."""
    program = """
import resource, tandem
engine = tandem.Engine(n_threads=1)
cache = tandem.Cache(engine, tandem.Model(tandem.Layer(n_q_heads=1, n_kv_heads=1, k_head_dim=64)))
sequence = cache.create_sequence()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), -1))
try:
    sequence.reserve(1 << 26)
except MemoryError as error:
    assert type(error) is tandem.OutOfMemoryError, error
    print(error.name, sequence.length())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "TANDEM_ERROR_OUT_OF_MEMORY 0\n"), done.stderr


def test_system():
    """Asks for more threads than there is room for stacks, in a process of its own whose address space is limited."""
    program = """
import errno, resource, tandem
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20), -1))
try:
    tandem.Engine(n_threads=1000)
except tandem.SystemError as error:
    print(error.name, error.underlying == errno.EAGAIN)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "TANDEM_ERROR_SYSTEM True\n"), done.stderr


def test_cancelled():
    """A flag cancels the call, set before or during it, and so does an exception of the progress callback."""
    world = World(page_tokens=16)
    q, k, v = world.qkv(3000)
    world.sequence.append(k[:100], v[:100])
    before = world.sequence.digest()
    flag, out = tandem.CancelFlag(), np.full(q.shape, np.nan, np.float32)
    flag.set()
    with pytest.raises(tandem.TandemError) as raised:
        world.session.attend(world.sequence, q, k, v, out=out, cancel=flag)
    check(raised, tandem.CancelledError, "cancel")
    flag.clear()
    called = threading.Event()

    def wait(done, total):
        called.set()
        while not flag.is_set():
            pass

    thread = threading.Thread(target=lambda: called.wait() and flag.set())
    thread.start()
    with pytest.raises(tandem.CancelledError):
        world.session.attend(world.sequence, q, k, v, out=out, cancel=flag, progress=wait)
    thread.join()
    assert flag.is_set()
    flag.clear()

    def fail(done, total):
        raise ZeroDivisionError(done, total)

    with pytest.raises(ZeroDivisionError):
        world.session.attend(world.sequence, q, k, v, out=out, cancel=flag, progress=fail)
    assert np.isnan(out).all() and world.sequence.digest() == before
    seen = []
    world.session.attend(world.sequence, q, k, v, out=out, cancel=flag,
                         progress=lambda done, total: seen.append((threading.get_ident(), done, total)))
    assert world.sequence.length() == 3100 and np.isfinite(out).all()
    assert all(ident == threading.get_ident() for ident, *_ in seen) and seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("call", [
    lambda w, q, k, v: w.session.attend(w.sequence, q[:1]),
    lambda w, q, k, v: tandem.Session(w.cache).attend(w.cache.create_sequence(), q, k, v),
    lambda w, q, k, v: w.session.stats(),
    lambda w, q, k, v: w.session.step(w.cache.create_sequence()).__enter__(),
    lambda w, q, k, v: w.session.selection(w.sequence),
    lambda w, q, k, v: w.cache.create_sequence().append(k, v),
    lambda w, q, k, v: tandem.merge(w.engine, [q, q.copy()], [np.zeros(q.shape[:2], np.float32)] * 2),
])
def test_a_callback_may_not_wait_for_its_call(world, call):
    q, k, v = world.qkv(2000)
    with pytest.raises(tandem.InvalidStateError, match="progress: a callback may not") as refusal:
        world.session.attend(world.sequence, q, k, v, progress=lambda *_: call(world, q, k, v))
    assert refusal.value.field == "progress" and world.sequence.length() == 0
    world.session.attend(world.sequence, q, k, v)
    # The callback may use another engine freely, and of its own engine every call that does not wait.
    other, lengths = World(), []

    def use(*_):
        other.session.attend(other.sequence, q[:1], k[:1], v[:1], progress=lambda *_: lengths.append(world.sequence.length()))
        with pytest.raises(tandem.InvalidStateError, match="may not"):
            world.session.stats()

    world.session.attend(world.sequence, q, k, v, progress=use)
    assert set(lengths) == {2000} and world.sequence.length() == 4000 and world.session.stats().n_attends == 2



def test_busy(world):
    other = tandem.Session(world.cache)
    with world.session.step(world.sequence):
        with pytest.raises(tandem.TandemError) as raised:
            other.attend(world.sequence, *world.qkv(1))
        check(raised, tandem.BusyError)
        with pytest.raises(tandem.BusyError):
            world.sequence.close()
        assert not world.sequence.closed
        world.session.attend(world.sequence, *world.qkv(1))
    world.sequence.close()


def test_not_found(world):
    with pytest.raises(LookupError) as raised:
        tandem.Session(world.cache, policy="no such policy")
    check(raised, tandem.NotFoundError, "policy")
    with pytest.raises(tandem.NotFoundError):
        tandem.Engine(cpu_isa="no such set")
    world.sequence.close()
    with pytest.raises(tandem.NotFoundError):
        world.sequence.length()


def test_timeout(world):
    """Keys that leave the window are judged in the background, which takes longer than the timeout of 0."""
    # keeps and copies all keys
    session = tandem.Session(world.cache, policy="hgca", window_tokens=16, sink_tokens=0, beta=0.0)
    q, k, v = world.qkv(6000)
    session.attend(world.sequence, q, k, v)
    seen = []
    for _ in range(400):
        if seen:
            break
        session.attend(world.sequence, q[:1], k[:1], v[:1])
        try:
            world.engine.drain(0)
        except TimeoutError as error:
            seen.append(error)
    world.engine.drain()
    assert seen and type(seen[0]) is tandem.TimeoutError and seen[0].name == "TANDEM_ERROR_TIMEOUT"


def test_backend():
    with pytest.raises(tandem.TandemError) as raised:
        tandem.Engine(backend="cuda", backend_path="/no/such/libtandem-cuda.so")
    check(raised, tandem.BackendError)
    assert "/no/such/libtandem-cuda.so" in raised.value.message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_child_after_fork_is_refused(world):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            world.sequence.length()
        except tandem.InvalidStateError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert world.sequence.length() == 0


@pytest.mark.parametrize("call, field", [
    (lambda w: w.sequence.truncate(1 << 64), "n_tokens"),
    (lambda w: w.sequence.truncate(1.5), "n_tokens"),
    (lambda w: w.sequence.remove(-(1 << 63) - 1, 1), "first"),
    (lambda w: w.sequence.reserve(1 << 63), "n_tokens"),
    (lambda w: w.sequence.length(1 << 32), "layer_idx"),
    (lambda w: w.sequence.read(0, 6), "n_tokens"),
    (lambda w: w.sequence.read(6), "first"),
    (lambda w: w.sequence.read(-1), "first"),
    (lambda w: w.sequence.read(2, 4), "n_tokens"),
    (lambda w: w.sequence.read(0, -1), "n_tokens"),
    (lambda w: w.sequence.read(layer_idx=1), "layer_idx"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(1), layer_idx=1 << 32), "layer_idx"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), q_lens=[1, 1]), "q_lens"),
    (lambda w: w.session.attend([w.sequence, w.cache.create_sequence()], *w.qkv(2)), "q_lens"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), speculative=True, parent_idx=[-1]), "parent_idx"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), speculative=True, parent_idx=[-1, 1 << 32]), "parent_idx[1]"),
    (lambda w: w.session.attend(w.sequence, None), "q"),
    (lambda w: w.session.attend([3], *w.qkv(1)), "sequences[0]"),
    (lambda w: w.session.attend(World().sequence, *w.qkv(1)), "sequences[0]"),
    (lambda w: w.session.attend([World().sequence], *w.qkv(1), q_lens=[1]), "sequences[0]"),
    (lambda w: w.session.step([w.sequence], [1, 1]), "q_lens"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(1), stream=-1), "stream"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(1), stream=1 << 64), "stream"),
    (lambda w: tandem.Engine(n_threads=1 << 31), "n_threads"),
    (lambda w: tandem.Engine(cpu_isa="av\0x"), "cpu_isa"),
    (lambda w: tandem.Cache(w.engine, w.model, k_type="f64"), "k_type"),
    (lambda w: tandem.Cache(w.engine, w.model, layer_k_types=["f32", "f32"]), "layer_k_types"),
    (lambda w: tandem.Layer(n_q_heads=2, n_kv_heads=1, k_head_dim=64, sinks=[1, 2, 3]), None),
    (lambda w: tandem.Model(tandem.Layer(n_q_heads=2, n_kv_heads=1, k_head_dim=64, sinks=[1, 2, 3])), "sinks"),
    (lambda w: tandem.Model(tandem.Layer(n_q_heads=2, n_kv_heads=1, k_head_dim=64, rope="halves", rope_inv_freq=[1])),
     "rope_inv_freq"),
])
def test_refused_before_a_call(world, call, field):
    world.sequence.append(*world.qkv(5)[1:])
    digest = world.sequence.digest()
    if field is None:
        call(world)
        return
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        call(world)
    check(raised, tandem.InvalidArgumentError, field)
    assert world.sequence.length() == 5 and world.sequence.digest() == digest


def test_unknown_options_are_type_errors(world):
    with pytest.raises(TypeError, match="windows.*did you mean .window_tokens"):
        tandem.Session(world.cache, windows=3)
    with pytest.raises(TypeError, match="struct_size"):
        tandem.Cache(world.engine, world.model, struct_size=3)
    with pytest.raises(TypeError):
        tandem.Engine(threads=3)


def test_log_callback_that_raises():
    """The cap leaves no memory for copies of selected keys, which causes a warning. The call itself succeeds."""
    said, unraisable, main = [], [], threading.get_ident()

    def log(level, message):
        said.append((level, message, threading.get_ident() == main))
        raise KeyError("of the callback")

    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        engine = tandem.Engine(n_threads=2, log=log)
        model = tandem.Model(tandem.Layer(n_q_heads=4, n_kv_heads=2, k_head_dim=64))
        options = {"policy": "hgca", "window_tokens": 64, "sink_tokens": 0, "beta": 0.0}
        n = 1000
        plan = tandem.plan_memory(engine, model, [n], session=options)
        cache = tandem.Cache(engine, model, host_cap_bytes=plan.host_kv_bytes + plan.host_session_bytes)
        sequence, session = cache.create_sequence(), tandem.Session(cache, **options)
        engine.close()  # the callback must outlive the object that it was given to
        del engine
        gc.collect()
        random = np.random.default_rng(1)
        for count in (n - 10, *[1] * 10):
            q, k, v = (random.standard_normal((count, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
            assert np.isfinite(session.attend(sequence, q, k, v)).all()
        assert sequence.length() == n
    finally:
        sys.unraisablehook = hook
    assert said and said[0][0] == tandem.LOG_WARNING and "no memory for a copy" in said[0][1]
    assert len(unraisable) == len(said) and unraisable[0].exc_type is KeyError and unraisable[0].object is log
