# SPDX-License-Identifier: MIT
"""What a call costs more through Python than in C: one query over 512 keys, with and without a new key and value.

overhead_bench.py PREFIX [ROUNDS CALLS]; PREFIX is where Tandem is installed, TANDEM_LIB_DIR its folder of libraries. Compiles
overhead_bench.c ($CC). The results of both sides must agree before a time is printed; times are the best of ROUNDS means.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

import tandem

HEADS, KV_HEADS, DIM, KEYS = 8, 2, 64, 512


def in_c(prefix, rounds, calls):
    source = pathlib.Path(__file__).with_suffix(".c")
    lib = os.environ["TANDEM_LIB_DIR"]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/bench"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", f"-I{prefix}/include", str(source), "-o", program, f"-L{lib}",
                        f"-Wl,-rpath,{lib}", "-ltandem"], check=True)
        done = subprocess.run([program, str(rounds), str(calls)], check=True, capture_output=True, text=True)
    numbers = [float(number) for number in done.stdout.split()]
    return numbers[:2], numbers[2:]


def numbers(shape, modulus):
    return (np.arange(np.prod(shape), dtype=np.int64) % modulus).astype(np.float32).reshape(shape) / np.float32(modulus)


def in_python(rounds, calls, wrap):
    q, k, v = numbers((1, HEADS, DIM), 7), numbers((KEYS, KV_HEADS, DIM), 11), numbers((KEYS, KV_HEADS, DIM), 13)
    o = np.empty_like(q)
    arguments = [wrap(array) for array in (q, k[:1], v[:1])]
    out = wrap(o)
    sums, best = [], []
    with tandem.Engine(n_threads=1) as engine:
        model = tandem.Model(tandem.Layer(n_q_heads=HEADS, n_kv_heads=KV_HEADS, k_head_dim=DIM))
        cache = tandem.Cache(engine, model)
        session = tandem.Session(cache)
        for given in (arguments[:1], arguments):
            times = []
            for _ in range(rounds):
                with cache.create_sequence() as sequence:
                    sequence.append(k, v)
                    start = time.perf_counter_ns()
                    for _ in range(calls):
                        session.attend(sequence, *given, out=out)
                    times.append((time.perf_counter_ns() - start) / calls)
            best.append(min(times))
            sums.append(float(o.sum(dtype=np.float64)))
    return sums, best


def main():
    prefix = sys.argv[1]
    rounds, calls = (int(number) for number in sys.argv[2:4] or (60, 256))
    c_sums, c_ns = in_c(prefix, rounds, calls)
    for name, wrap in (("arrays", lambda array: array), ("tandem.Tensor views", tandem.Tensor)):
        sums, ns = in_python(rounds, calls, wrap)
        assert np.allclose(sums, c_sums, rtol=1e-6), (sums, c_sums)
        for what, mine, theirs in zip(("q, o", "q, k, v, o"), ns, c_ns):
            print(f"{name:20} {what:10} Python {mine / 1e3:6.2f} us, C {theirs / 1e3:6.2f} us, "
                  f"more {(mine - theirs) / 1e3:6.2f} us")


main()
