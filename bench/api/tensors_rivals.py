#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Whole calls of tandem_attend_tensors() beside other libraries' attention on the CPU: decode, one query token per call.

The rivals are PyTorch's scaled_dot_product_attention, ONNX Runtime's GroupQueryAttention and ggml's FLASH_ATTN_EXT. All run in
this process on the same number of threads, in turns, and read the same keys and values in place. The keys rotate over layers
that are together larger than the caches. A contestant's turn is one untimed call and then some timed ones. A pause before each
turn lets the threads of the previous contestant stop spinning.

Every output is checked against double precision on the stored numbers before a time is taken. The error is relative to the
largest element of the expected output. JSON lines go to stdout, the table goes to stderr.

Times are the median of all timed calls and the best call. A ratio is the contestant's time divided by Tandem's time with the
same type and layout: the median of the rounds' ratios, and the ratio of the best calls. A ratio below 1 means that Tandem is
slower. Threads of OpenMP (PyTorch, ggml) spin at barriers. If other programs use the cores too, they spin while the thread that
they wait for has no core, and calls take 100 times as long. Then set OMP_WAIT_POLICY=passive, and look at the best calls.

Exit codes: 0 all outputs are right; 1 an output is wrong; 2 Tandem cannot be loaded, or an argument is bad.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections import namedtuple

import numpy as np

import rival_calls

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "onnxruntime", "ggml")
CHECKED_LAYERS = (0, 1, -1)
DISTINCT_LAYERS = 2  # later layers are copies of these two, in their own memory
# Largest errors allowed. Outputs of Tandem and ggml are f32. PyTorch and ONNX Runtime round outputs to the type of the keys.
# ggml rounds the queries to 8 bits where keys are q8_0, and sums the output in f16 where values are f16.
BOUNDS = {("tandem", "f32"): 1e-5, ("tandem", "f16"): 1e-5, ("tandem", "bf16"): 1e-5, ("tandem", "q8_0"): 1e-5,
          ("torch", "f32"): 1e-5, ("torch", "bf16"): 1e-2, ("onnxruntime", "f32"): 1e-5, ("onnxruntime", "f16"): 2e-3,
          ("ggml", "f16"): 3e-2, ("ggml", "bf16"): 1e-4, ("ggml", "q8_0"): 4e-2}
TYPES = ("f32", "bf16", "f16", "q8_0")
LAYOUTS = ("head-major", "token-major")

Shape = namedtuple("Shape", "n_q_heads n_kv_heads head_dim n_keys")


def shape_of(text):
    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)@(\d+)", text)
    shape = Shape(*map(int, match.groups())) if match else None
    if shape is None or 0 in shape or shape.n_q_heads % shape.n_kv_heads or shape.head_dim % 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY_HEADS/KV_HEADSxHEAD_DIM@KEYS with a head_dim of 32s")
    return shape


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def cache_bytes():
    """Returns the size of the last-level cache, 0 if the system does not report it."""
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes, default=0)


def cpu_model():
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())
        if match:
            return match[1].strip()
    return "unknown"


def encode(x, dtype):
    """Encodes x [..., head_dim] f32 for storage: f32, f16, bf16 as 16-bit integers, or rows of ggml's blocks as bytes."""
    if dtype == "f32":
        return x
    if dtype == "f16":
        return x.astype(np.float16)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
    codes = np.clip(np.rint(blocks / scales.astype(np.float32)), -127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], -1).reshape(*x.shape[:-1], -1)


def decode(stored, dtype):
    """Decodes the result of encode() to f32."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "q8_0":
        blocks = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, 34)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        return (blocks[..., 2:].view(np.int8) * scales).reshape(*stored.shape[:-1], -1)
    return stored.astype(np.float32)


class Pool:
    """Keys and values of several layers in every type and layout; the contestants share them."""

    def __init__(self, shape, rotate_bytes, types):
        self.shape, self.arrays = shape, {}
        random = np.random.default_rng(7)
        # Queries are three times as long as usual, so that logits differ enough for a wrong key to change the output.
        self.q = 3 * random.standard_normal((shape.n_q_heads, shape.head_dim), np.float32)
        head_major = (DISTINCT_LAYERS, 2, shape.n_kv_heads, shape.n_keys, shape.head_dim)
        floats = random.standard_normal(head_major, np.float32)
        for dtype in types:
            stored = encode(floats, dtype)
            n_layers = max(DISTINCT_LAYERS + 1, -(-rotate_bytes // stored[0].nbytes))
            for layout in LAYOUTS:
                ordered = stored if layout == "head-major" else stored.transpose(0, 1, 3, 2, 4)
                array = rival_calls.aligned((n_layers, *ordered.shape[1:]), ordered.dtype)
                for layer in range(n_layers):
                    array[layer] = ordered[layer % DISTINCT_LAYERS]
                self.arrays[dtype, layout] = array  # [n_layers, K or V, ...]

    def n_layers(self, dtype):
        return len(self.arrays[dtype, LAYOUTS[0]])

    def queries(self, dtype):
        """Returns the queries in the storage type; f32 for types with blocks."""
        return self.q if dtype == "q8_0" else encode(self.q, dtype)

    def float_queries(self, dtype):
        """Returns the same numbers as f32."""
        return self.q if dtype == "q8_0" else decode(self.queries(dtype), dtype)

    def expected(self, dtype, layer, head):
        """Attends with one query head in double precision."""
        k, v = (decode(self.arrays[dtype, "head-major"][layer, i, head * self.shape.n_kv_heads // self.shape.n_q_heads],
                       dtype).astype(np.float64) for i in (0, 1))
        q = self.float_queries(dtype)[head].astype(np.float64)
        logits = k @ q / np.sqrt(self.shape.head_dim)
        weights = np.exp(logits - logits.max())
        return weights @ v / weights.sum()


def contestants_of(pool, args, engine, tandem):
    """Returns all available contestants and the versions of their libraries."""
    made, versions = rival_calls.tandem_contestants(pool, engine, tandem)
    makers = {"torch": lambda: rival_calls.torch_contestants(pool, args.threads),
              "onnxruntime": lambda: rival_calls.onnxruntime_contestants(pool, args.threads),
              "ggml": lambda: rival_calls.ggml_contestants(pool, args.ggml_lib, args.threads)}
    for name in args.rivals:
        try:
            more, of_library = makers[name]()
        except (ImportError, OSError, AttributeError, ValueError) as error:
            rival_calls.left_out(name, error)
            continue
        made += more
        versions.update(of_library)
    # Contestants of one type run close to each other in time.
    return sorted(made, key=lambda each: (TYPES.index(each.type), each.layout)), versions


def errors_of(contestants, pool):
    """Returns each contestant's largest error over some heads of some layers, relative to the largest expected element."""
    heads, known, errors = sorted({0, pool.shape.n_q_heads // 2, pool.shape.n_q_heads - 1}), {}, []
    for each in contestants:
        worst = 0.0
        for index in CHECKED_LAYERS:
            layer = index % pool.n_layers(each.type)
            each.call(layer)
            got = each.result().astype(np.float64)
            for head in heads:
                key = each.type, layer % DISTINCT_LAYERS, head
                if key not in known:
                    known[key] = pool.expected(each.type, layer, head)
                error = np.abs(got[head] - known[key]).max() / np.abs(known[key]).max()
                worst = max(worst, float(error)) if np.isfinite(error) else float("inf")
        errors.append(worst)
    return errors


def measure(contestants, pool, args):
    """Returns microseconds of each call: [contestant][round][call]. Every second round runs backwards."""
    times, layers = [[] for _ in contestants], [0] * len(contestants)
    end = time.monotonic() + args.max_seconds
    for i_round in range(args.rounds):
        if i_round > 0 and time.monotonic() > end:
            break
        order = range(len(contestants)) if i_round % 2 == 0 else reversed(range(len(contestants)))
        for i in order:
            time.sleep(args.pause_ms / 1000)
            taken = []
            for _ in range(args.calls + 1):
                begin = time.perf_counter()
                contestants[i].call(layers[i])
                taken.append((time.perf_counter() - begin) * 1e6)
                layers[i] = (layers[i] + 1) % pool.n_layers(contestants[i].type)
            times[i].append(taken[1:])
    return times


def rows_of(contestants, times, errors, pool):
    medians = [[statistics.median(taken) for taken in rounds] for rounds in times]
    base = {(each.type, each.layout): i for i, each in enumerate(contestants) if each.library == "tandem"}
    for i, each in enumerate(contestants):
        of_tandem = base[each.type, each.layout.split(",")[0]]
        us, best, best_of_tandem = statistics.median(sum(times[i], [])), min(sum(times[i], [])), min(sum(times[of_tandem], []))
        ratio = statistics.median(a / b for a, b in zip(medians[i], medians[of_tandem]))
        gb_per_s = pool.arrays[each.type, LAYOUTS[0]][0].nbytes / us / 1e3
        yield {"contestant": each.library, "type": each.type, "layout": each.layout, "us": round(us, 1),
               "best_us": round(best, 1), "gb_per_s": round(gb_per_s, 2), "ratio": round(ratio, 3),
               "best_ratio": round(best / best_of_tandem, 3), "error": float(f"{errors[i]:.2g}")}


def run_shape(shape, args, engine, tandem):
    """Checks, measures and prints one shape. Returns False if an output is wrong; then nothing is timed."""
    pool = Pool(shape, args.rotate_mb << 20, args.types)
    contestants, versions = contestants_of(pool, args, engine, tandem)
    errors, is_right = errors_of(contestants, pool), True
    for each, error in zip(contestants, errors):
        bound = BOUNDS[each.library, each.type]
        if not error <= bound:
            is_right = False
            print(f"wrong: {each.library} {each.type} {each.layout}: error {error:.2g}, bound {bound:.2g}", file=sys.stderr)
    if not is_right:
        return False
    load = os.getloadavg()[0]
    times = measure(contestants, pool, args)
    facts = {**shape._asdict(), "threads": args.threads, "rounds": len(times[0]), "rotate_mb": args.rotate_mb, "cpu": cpu_model(),
             "load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1),
             "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"), "versions": versions}
    print(f"\n{shape.n_q_heads}/{shape.n_kv_heads} heads of {shape.head_dim}, {shape.n_keys} keys, {args.threads} threads, "
          f"{facts['cpu']}, load {facts['load_before']} to {facts['load_after']}\n"
          f"{'':12} {'type':5} {'layout':26} {'us':>10} {'best':>10} {'GB/s':>7} {'ratio':>7} {'of best':>7} {'error':>8}",
          file=sys.stderr)
    for row in rows_of(contestants, times, errors, pool):
        print(json.dumps({**row, **facts}), flush=True)
        print(f"{row['contestant']:12} {row['type']:5} {row['layout']:26} {row['us']:10.1f} {row['best_us']:10.1f} "
              f"{row['gb_per_s']:7.2f} {row['ratio']:7.2f} {row['best_ratio']:7.2f} {row['error']:8.1e}",
              file=sys.stderr, flush=True)
    return True


def arguments():
    cache = cache_bytes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="Q/KVxDIM@KEYS",
                        default=[shape_of(each) for each in ("32/8x128@4096", "32/8x128@32768", "9/3x64@8192")],
                        help="default: 32/8x128@4096 32/8x128@32768 9/3x64@8192")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rivals", nargs="*", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of every library")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--calls", type=positive, default=8, help="timed calls of a contestant in a round")
    parser.add_argument("--max-seconds", type=positive, default=120, help="no round of a shape begins later than this")
    parser.add_argument("--pause-ms", type=positive, default=30, help="pause before each turn")
    parser.add_argument("--rotate-mb", type=positive, default=(4 * cache >> 20) or 256,
                        help="least size of a type's keys and values, all layers; default: 4 times the last-level cache, or 256")
    parser.add_argument("--ggml-lib", metavar="FOLDER", help="has libggml-base.so and libggml-cpu.so")
    parser.add_argument("--tandem-lib", metavar="FOLDER", default=str(ROOT / "build"), help="has libtandem.so; default: build")
    return parser.parse_args()


def main():
    args = arguments()
    # PyTorch's and ggml's libraries are loaded later and then read OpenMP's variable.
    os.environ.update(OMP_NUM_THREADS=str(args.threads), TANDEM_LIB_DIR=args.tandem_lib)
    sys.path.insert(0, str(ROOT / "bindings" / "python"))
    try:
        import tandem
        engine = tandem.Engine(n_threads=args.threads)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"Tandem cannot be used: {error}", file=sys.stderr)
        return 2
    with engine:
        return 0 if all([run_shape(shape, args, engine, tandem) for shape in args.shapes]) else 1


if __name__ == "__main__":
    sys.exit(main())
