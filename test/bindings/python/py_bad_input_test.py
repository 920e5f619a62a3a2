# SPDX-License-Identifier: MIT
"""Any input gives the right answer or an exception that names the field: never a crash, never a hang."""
import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS, World

import tandem


ABSENT = object()


def described(**changes):
    """An object whose interface may contain anything. `name` selects the interface."""
    name = changes.pop("name", "__array_interface__")
    array = np.zeros((5, Q_HEADS, DIM), np.float32)
    interface = {**array.__array_interface__, **changes}
    fields = {key: value for key, value in interface.items() if value is not ABSENT}
    return type("Described", (), {name: fields, "held": array})()


@pytest.mark.parametrize("name", ["__array_interface__", "__cuda_array_interface__"])
@pytest.mark.parametrize("changes, field", [
    ({"shape": (1 << 63, 2, 64)}, "shape[0]"), ({"shape": (-5, 4, 64)}, "shape"), ({"shape": (5.0, 4, 64)}, "shape[0]"),
    ({"shape": 5}, "shape"), ({"shape": ABSENT}, "shape"), ({"shape": (5, 4, 64, "x")}, "shape[3]"),
    ({"shape": (4, 1 << 62, 64)}, "strides"), ({"strides": (1024, 256)}, "strides"), ({"strides": "text"}, "strides"),
    ({"strides": (1024, 1 << 68, 4)}, "strides[1]"), ({"strides": (1024.0, 256, 4)}, "strides[0]"),
    ({"typestr": ABSENT}, "typestr"), ({"typestr": 5}, "typestr"), ({"typestr": ""}, "dtype"), ({"typestr": "<f8"}, "dtype"),
    ({"data": 5}, "array"), ({"data": ()}, "array"), ({"data": ABSENT}, "array"), ({"data": (-1, False)}, "data"),
    ({"data": (1 << 64, False)}, "data"), ({"data": (1 << 70, False)}, "data"), ({"data": (0.5, False)}, "data"),
    ({"mask": np.zeros(5)}, "array"),
])
def test_interfaces_that_make_no_sense(name, changes, field):
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        tandem.Tensor(described(name=name, **changes))
    assert raised.value.field == field, raised.value.message


def test_interfaces_that_are_no_dictionaries(world):
    for name in ("__array_interface__", "__cuda_array_interface__"):
        with pytest.raises(tandem.InvalidArgumentError, match="is a int, not a dict"):
            world.session.attend(world.sequence, type("Odd", (), {name: 5})())
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        tandem.Tensor(described(name="__cuda_array_interface__", version=3, stream="x"))
    assert raised.value.field == "stream"
    with pytest.raises(tandem.InvalidArgumentError) as raised:  # address 0 reaches the library, which refuses it
        world.session.attend(world.sequence, described(data=(None, False)), *world.qkv(5)[1:], q_lens=[5], out=world.qkv(5)[0])
    assert raised.value.field.startswith("q")


def owner_that_raises(name, error):
    """An object whose member `name` raises: when it is read, or when it is called if it belongs to DLPack."""
    def raises(*_, **__):
        raise error

    dlpack = {"__dlpack__": lambda _, **__: None, "__dlpack_device__": lambda _: (1, 0)} if name.startswith("__dlpack") else {}
    return type("Odd", (), {**dlpack, name: raises if dlpack else property(raises)})()


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError, BufferError])
@pytest.mark.parametrize("name", ["__dlpack__", "__dlpack_device__", "__array_interface__", "__cuda_array_interface__"])
def test_owners_that_raise(world, name, error):
    odd = owner_that_raises(name, error("the owner's words"))
    q, k, v = world.qkv(1)
    for attempt in (lambda: tandem.Tensor(odd), lambda: world.session.attend(world.sequence, odd, k, v),
                    lambda: world.session.attend(world.sequence, q, k, v, out=odd)):
        with pytest.raises(tandem.InvalidArgumentError) as raised:
            attempt()
        # Python takes a property that raises AttributeError for a missing one.
        assert (error is AttributeError and not name.startswith("__dlpack")) or "the owner's words" in raised.value.message
    assert world.sequence.length() == 0


@pytest.mark.parametrize("name", ["__dlpack__", "__dlpack_device__", "__array_interface__", "__cuda_array_interface__"])
def test_what_is_no_refusal_goes_through(name):
    for error in (MemoryError, KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error, match="^not mine$"):
            tandem.Tensor(owner_that_raises(name, error("not mine")))


def test_torch_tensors_without_memory(world):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = world.qkv(1)
    for odd in (torch.empty((1, Q_HEADS, DIM), device="meta"), torch.from_numpy(q).requires_grad_(),
                torch.ones(1, Q_HEADS, DIM).to_mkldnn(), torch.from_numpy(q).to_sparse()):
        for attempt in (lambda odd=odd: tandem.Tensor(odd), lambda odd=odd: world.session.attend(world.sequence, odd, k, v)):
            with pytest.raises(tandem.InvalidArgumentError, match="is not exported by its owner"):
                attempt()
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        world.session.attend(world.sequence, torch._efficientzerotensor((1, Q_HEADS, DIM)), k, v)
    assert raised.value.field == "q.data"
    assert world.sequence.length() == 0


@pytest.mark.parametrize("device", [5, None, ("x", 0), (1,), ABSENT])
def test_dlpack_without_a_device(device):
    class Odd:
        def __dlpack__(self, **_):
            return np.zeros((5, 2, 64), np.float32).__dlpack__()

    if device != ABSENT:
        Odd.__dlpack_device__ = lambda _: device
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        tandem.Tensor(Odd())
    assert raised.value.field == "array"


def test_masked_arrays_are_refused(world):
    q, k, v = world.qkv(5)
    world.session.attend(world.cache.create_sequence(), q, k, v)
    with pytest.raises(tandem.InvalidArgumentError, match="has a mask"):
        world.session.attend(world.sequence, np.ma.masked_array(q, q > 0), k, v)
    assert world.sequence.length() == 0


def heads(**changes):
    return tandem.Layer(**{"n_q_heads": 2, "n_kv_heads": 1, "k_head_dim": 64, **changes})


@pytest.mark.parametrize("call, field", [
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), q_lens=2), "q_lens"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), q_lens=[2.0]), "q_lens[0]"),
    (lambda w: w.session.attend(None, *w.qkv(2)), "sequences"),
    (lambda w: w.session.attend(5, *w.qkv(2)), "sequences"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), cancel=threading.Event()), "cancel"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), progress=5), "progress"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), speculative=True, parent_idx=5), "parent_idx"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), out=np.zeros((2, Q_HEADS, DIM))[::-1]), "o.dtype"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), out=w.qkv(2)[0][::-1]), "o.strides"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), out=w.qkv(2)[0][:, :, ::-1]), "o.strides"),
    (lambda w: w.session.attend(w.sequence, *w.qkv(2), lse=np.zeros((), np.float32)), "lse.n_dims"),
    (lambda w: w.session.commit(w.sequence, None), "kept_idx"),
    (lambda w: w.session.step(None), "sequences"),
    (lambda w: w.session.plan(None), "kv_lens"),
    (lambda w: tandem.Cache(None, w.model), "engine"),
    (lambda w: tandem.Cache(w.model, w.engine), "engine"),
    (lambda w: tandem.Cache(w.engine, w.layer), "model"),
    (lambda w: tandem.Session(w.engine), "cache"),
    (lambda w: tandem.Model(None), "layers"),
    (lambda w: tandem.Model([5]), "layer"),
    (lambda w: tandem.Model(heads(n_kv_heads=None)), "n_kv_heads"),
    (lambda w: tandem.Model(heads(k_head_dim="64")), "k_head_dim"),
    (lambda w: tandem.Model(heads(sm_scale="x")), "sm_scale"),
    (lambda w: tandem.Model(heads(sm_scale=10**400)), "sm_scale"),
    (lambda w: tandem.Model(heads(sinks=["x", "y"])), "sinks"),
    (lambda w: tandem.Model(heads(sinks=[[1], [1, 2]])), "sinks"),
    (lambda w: tandem.Engine(n_threads=1, log=5), "log"),
    (lambda w: tandem.Engine(cpu_isa="\ud800"), "cpu_isa"),
    (lambda w: tandem.Cache(w.engine, w.model, layer_k_types=5), "layer_k_types"),
    (lambda w: tandem.Session(w.cache, alpha="x"), "alpha"),
    (lambda w: tandem.merge(w.engine, None, None), "o"),
    (lambda w: tandem.merge(None, [w.qkv(1)[0]], [np.zeros((1, Q_HEADS), np.float32)]), "engine"),
    (lambda w: tandem.plan_memory(w.engine, w.model, None), "kv_lens"),
    (lambda w: tandem.plan_memory(w.engine, w.model, [1], cache=5), "options of a cache"),
    (lambda w: tandem.plan_memory(w.model, w.model, [1]), "engine"),
    (lambda w: tandem.supports(None), "engine"),
    (lambda w: tandem.supports(w.engine, 5), "layer"),
    (lambda w: tandem.Weights(w.engine, None), "blocks"),
    (lambda w: tandem.Weights(w.engine, [np.array([object()])]), "blocks[0]"),
    (lambda w: tandem.Weights(w.model, []), "engine"),
])
def test_values_of_the_wrong_kind(world, call, field):
    with pytest.raises(tandem.InvalidArgumentError) as raised:
        call(world)
    assert raised.value.field == field, raised.value.message
    assert world.sequence.length() == 0


def huge(array, n):
    """A tensor of n tokens in the memory of a few. The library only sees the shape and reads no row."""
    return np.lib.stride_tricks.as_strided(array, (n, *array.shape[1:]), array.strides)


def test_huge_shapes(world):
    q, k, v = world.qkv(5)
    for n in (1 << 40, 1 << 50):
        with pytest.raises(tandem.CapacityError):
            world.sequence.append(huge(k, n), huge(v, n))
        with pytest.raises(MemoryError) as raised:
            world.session.attend(world.sequence, huge(q, n), huge(k, n), huge(v, n))
        assert type(raised.value) is tandem.OutOfMemoryError and raised.value.field == "out" and str(n) in str(raised.value)
    assert world.sequence.length() == 0


def test_handles_and_views_are_not_copied(world):
    things = [world.engine, world.model, world.cache, world.session, world.sequence, tandem.Tensor(world.qkv(1)[0]),
              tandem.CancelFlag(), world.session.step(world.sequence)]
    for thing in things:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"tandem.{type(thing).__name__} can be neither copied nor pickled"):
                copied(thing)
    layer = pickle.loads(pickle.dumps(world.layer))  # plain data can be pickled
    assert layer == world.layer


@pytest.mark.parametrize("name", ["engine", "model", "cache", "session", "sequence"])
def test_closed_while_other_threads_call(name):
    """Calls give the right answer, or report that the object is closed."""
    for _ in range(5):
        world = World()
        q, k, v = world.qkv(64)
        world.session.attend(world.sequence, q, k, v)
        expected, failed, started = world.session.attend(world.sequence, q[-1:]), [], threading.Barrier(4)

        def work():
            started.wait()
            for _ in range(60):
                try:
                    if not np.array_equal(world.session.attend(world.sequence, q[-1:]), expected):
                        failed.append("another answer")
                    world.sequence.length(), world.cache.stats(), world.engine.report(), tandem.Session(world.cache)
                except (tandem.InvalidHandleError, tandem.NotFoundError):
                    pass
                except BaseException as error:
                    failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        while not getattr(world, name).closed:
            try:
                getattr(world, name).close()
            except tandem.BusyError:
                pass
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_child_of_fork_while_a_thread_is_in_a_call():
    """The child gets the session's lock as the thread left it. Calls there are refused and return."""
    program = f"""
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {os.path.dirname(__file__)!r})
from conftest import World
import tandem
w = World(page_tokens=16)
q, k, v = w.qkv(3000)
inside, go_on = threading.Event(), threading.Event()
def wait(done, total):
    inside.set()
    go_on.wait()
thread = threading.Thread(target=lambda: w.session.attend(w.sequence, q, k, v, progress=wait))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    calls = [lambda: w.session.attend(w.sequence, q[:1]), lambda: w.session.stats(), lambda: w.sequence.length(),
             lambda: w.session.commit(w.sequence, []), lambda: w.session.step(w.sequence).__enter__(), w.cache.create_sequence,
             lambda: tandem.Engine(n_threads=1), lambda: tandem.Model(w.layer)]
    n_refused = 0
    for call in calls:
        try:
            call()
        except tandem.InvalidStateError as error:
            n_refused += "fork" in str(error)
    w.session.close(), w.engine.close()
    os._exit(0 if n_refused == len(calls) else 1)
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(status), w.sequence.length())
"""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, text=True, timeout=60,
                          check=False)
    assert (done.returncode, done.stdout) == (0, "0 3000\n"), done.stderr


def in_child(arguments):
    """In a child of a forked pool: inherited objects are refused, plain data and exceptions can be passed."""
    try:
        tandem.Model(arguments)
    except tandem.TandemError as error:
        return error
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method, refused", [("fork", True), ("spawn", False)])
def test_pools_of_processes(world, method, refused):
    import multiprocessing
    world.session.attend(world.sequence, *world.qkv(KV_HEADS))
    with multiprocessing.get_context(method).Pool(1) as pool:
        answer = pool.apply_async(in_child, (world.layer,)).get(60)
    assert type(answer) is tandem.InvalidStateError and "fork" in answer.message if refused else answer is None
    assert world.sequence.length() == KV_HEADS
