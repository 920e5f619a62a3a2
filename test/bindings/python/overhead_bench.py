# SPDX-License-Identifier: MIT
"""The extra cost of a call through Python, compared with C: one query over 512 keys, in one process on one session, in
turns.

overhead_bench.py [BATCHES]. Compiles the loop of the other bindings ($CC; headers in $TANDEM_INCLUDE_DIR). Answers are
compared before anything is timed. Figures are medians over batches. The difference is that of two batches in a row. As
processors differ, the limit is relative: a call may cost at most six times what the interpreter takes to fill a structure of
eight numbers and to call a C function with one of them. It costs 4 to 5 times that on two cores of an EPYC: 2.5 us each, or
6 us while other programs use the cores, too.
"""
import ctypes
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from conftest import ROOT, include_folder, reference

import tandem

HEADS, KV_HEADS, DIM, KEYS = 8, 2, 64, 512
CALLS = 20  # calls of a batch: less than a time slice, for cores that others use too
MOST_UNITS = 6
TRIES = 4


def c_side(folder):
    """Loads overhead.c as a library of this process."""
    library = pathlib.Path(tandem.library_path())
    source = ROOT / "bindings/rust/tandem/benches/overhead.c"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", f"-I{include_folder()}", str(source), "-o", f"{folder}/overhead.so",
                    str(library), f"-Wl,-rpath,{library.parent}"], check=True)
    attend_n = ctypes.CDLL(f"{folder}/overhead.so").attend_n
    attend_n.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    return attend_n


class Numbers(ctypes.Structure):
    _fields_ = [(f"n{i}", ctypes.c_int64) for i in range(8)]


labs = ctypes.CDLL(None).labs
labs.argtypes = [ctypes.c_long]


def units():
    for _ in range(CALLS):
        numbers = Numbers()
        for i in range(8):
            setattr(numbers, f"n{i}", i)
        labs(numbers.n7)


def timed(body):
    begin = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - begin) / CALLS


def compare(attend_n, n_batches, wrap):
    """Returns the medians of a call through Python, of one in C, of their difference, and of the interpreter's time for a
    unit."""
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((n, heads, DIM)).astype(np.float32) for n, heads in ((1, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS)))
    o, o_c = np.full_like(q, np.nan), np.full_like(q, np.nan)
    with tandem.Engine(n_threads=1) as engine:
        model = tandem.Model(tandem.Layer(n_q_heads=HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM))
        cache = tandem.Cache(engine, model, k_type="f32")
        session, sequence = tandem.Session(cache), cache.create_sequence()
        sequence.append(k, v)
        given, out = wrap(q), wrap(o)

        def in_python():
            for _ in range(CALLS):
                session.attend(sequence, given, out=out)

        def in_c():
            assert attend_n(session._handle.pointer, sequence.id, q.ctypes.data, o_c.ctypes.data, CALLS) == 0

        in_python(), in_c()
        assert np.array_equal(o, o_c) and np.allclose(o, reference(q, k, v)[0], atol=1e-5)
        pairs = []
        for batch in range(n_batches):
            order = (in_python, in_c) if batch % 2 else (in_c, in_python)
            took = {body: timed(body) for body in order}
            pairs.append((took[in_python], took[in_c], took[in_python] - took[in_c], timed(units)))
    return [statistics.median(values) for values in zip(*pairs)]


def main():
    n_batches = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    most = 0.0
    with tempfile.TemporaryDirectory() as folder:
        attend_n = c_side(folder)
        for name, wrap in (("arrays", lambda array: array), ("tandem.Tensor views", tandem.Tensor)):
            # On a shared core some tries are slower than the call is, and none is faster.
            for _ in range(TRIES):
                ours, theirs, more, unit = compare(attend_n, n_batches, wrap)
                if more <= MOST_UNITS * unit:
                    break
            print(f"attend of {KEYS} keys, one thread, {name}: Python {ours / 1e3:.2f} us, C {theirs / 1e3:.2f} us, "
                  f"difference {more / 1e3:.2f} us, {more / unit:.1f} units of {unit / 1e3:.2f} us")
            most = max(most, more / unit)
    if most > MOST_UNITS:
        sys.exit(f"a call through Python costs {most:.1f} units more, at most {MOST_UNITS} are allowed")


main()
