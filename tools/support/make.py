#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes docs/support.md, the matrix of supported features, from the library's own answers (tandem_supports()).

  make.py                     writes the page: the CPU's part from this libtandem, the GPU's part from docs/support-cuda.json
  make.py --check             fails if the page on disk differs from the one that make.py would write
  make.py --record [MODULE]   on a machine with a GPU: asks the CUDA module and writes docs/support-cuda.json

It finds libtandem as the Python package does (TANDEM_LIB_DIR).
"""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings/python"))
import tandem  # noqa: E402

PAGE, RECORD = ROOT / "docs/support.md", ROOT / "docs/support-cuda.json"
TYPES = ["f32", "f16", "bf16", "e4m3", "q8_0", "q4_0"]
DIMS = [64, 80, 96, 112, 128, 192, 256]
BASE = {"n_q_heads": 8, "n_kv_heads": 2, "k_head_dim": 128}
SINKS = [0.0] * BASE["n_q_heads"]
FULL, A_SHAPE = tandem.HeadPattern(), tandem.HeadPattern(("a_shape",), sink_tokens=4, window_tokens=100)
HEADS = tandem.Patterns([[FULL] * 4 + [A_SHAPE] * 4])
FEATURES = {  # name: members of the layer, options of the cache
    "MHA": ({"n_kv_heads": 8}, {}),
    "GQA": ({}, {}),
    "MQA": ({"n_kv_heads": 1}, {}),
    "MLA: K of 576 dims, of which V is 512": ({"n_kv_heads": 1, "k_head_dim": 576, "v_head_dim": 512, "v_aliases_k": True}, {}),
    "K and V of different dims (128, 64)": ({"v_head_dim": 64}, {}),
    "sliding window": ({"sliding_window_tokens": 1024}, {}),
    "soft cap": ({"soft_cap": 30.0}, {}),
    "learned sinks": ({"sinks": SINKS}, {}),
    "RoPE by the library, halves": ({"rope": "halves"}, {}),
    "RoPE by the library, interleaved": ({"rope": "interleaved"}, {}),
    "Hadamard rotation of keys": ({}, {"k_rotation": "hadamard"}),
}
POLICIES = {"all": {}, "streaming": {}, "hgca": {}, "hip": {}, "patterns": {"patterns": HEADS}}
ROUTES = {"auto": {}, "host": {}, "stream": {}, "host+stream": {"stream_fraction": 0.5}, "recompute": {}}


def answer(engine, layer, cache, session):
    """Returns "yes", or the field that is refused."""
    try:
        support = tandem.supports(engine, tandem.Layer(**(BASE | layer)), cache=cache, session=session)
    except tandem.TandemError as error:
        return error.field or "no"
    return "yes" if support else support.why.field or "no"


def ask(engine):
    """Returns all answers by feature."""
    def one(layer=None, cache=None, session=None):
        return answer(engine, layer or {}, cache or {}, session or {})
    found = {}
    for k in TYPES:
        for v in TYPES:
            found[f"K {k}, V {v}"] = one({}, {"k_type": k, "v_type": v})
        for dim in DIMS:
            found[f"{k}, {dim} dims"] = one({"k_head_dim": dim}, {"k_type": k, "v_type": k})
    for name, (layer, cache) in FEATURES.items():
        found[name] = one(layer, cache)
        for policy, options in POLICIES.items():
            found[f"{name}, {policy}"] = one(layer, cache, {"policy": policy, **options})
    for policy, options in POLICIES.items():
        for route, more in ROUTES.items():
            found[f"{policy}, {route}"] = one({}, {}, {"policy": policy, "route": route, **options, **more})
    return found


OLDER = "attention (no copy engine for tiles), searches of `hip` over appends, choices of `patterns`"


def cell(cpu, gpu, key):
    return {(True, True): "both", (True, False): "CPU", (False, True): "GPU", (False, False): "-"}[cpu[key] == "yes", gpu[key] == "yes"]


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def page(cpu, record):
    gpu = record["answers"]
    lines = [
        "# What is supported", "",
        "`tools/support/make.py` makes this page of the library's own answers (`tandem_supports()`), and a test compares them. *Both*: on host",
        "tensors and on device tensors. *CPU*: on host tensors alone, by an engine without a backend. Other cases that a call refuses, and",
        "why, are in [what is not there yet](not-there-yet.md). `tandem_supports()` and `tandem info` answer on your machine.", "",
        "## Processors", "",
        *table(["processor", "built", "run"], [
            ["x86-64: SSSE3, SSE4, AVX2, AVX-512, AMX", "yes, chosen at run time", "yes"],
            ["64-bit ARM: NEON, SVE of 256 bits", "yes", "under an emulator alone"],
            ["GPU of compute capability 9.0 (H100, H200)", "yes", f"yes; this page's answers are of an {record['card']}"],
            ["8.0, 8.6, 8.9, 12.0 (A100; RTX 3090, A6000; RTX 4090, L40S; RTX 5090)", "yes, with kernels for 99 KB of shared memory",
             "no such card was at hand: these kernels were run on a card of 9.0 that was held to 99 KB"],
            ["any other GPU", "no", "no"]]),
        "Where a table says GPU or both, it holds for every card of these two rows: the same types, dims, policies and routes. The build has to",
        "name the card ([device backends](building-and-linking.md#device-backends)):", "",
        *table(["card", "compute capability", "`TANDEM_CUDA_ARCHITECTURES`", "slower there than on 9.0"], [
            ["H100, H200", "9.0", "`90a-real` (what `./dev` builds)", ""],
            ["A100", "8.0", "`80-real`", OLDER],
            ["RTX 3090, A6000", "8.6", "`86-real`", OLDER],
            ["RTX 4090, L40S", "8.9", "`89-real`", OLDER],
            ["RTX 5090", "12.0", "`120-real` (CUDA 12.8), or `90-virtual`, which the driver compiles", OLDER]]),
        "## Types of K and V", "", "128 dims; rows: K, columns: V.", "",
        *table(["", *TYPES], [[k, *(cell(cpu, gpu, f"K {k}, V {v}") for v in TYPES)] for k in TYPES]),
        "## Head dims", "", "K and V alike.", "",
        *table(["", *map(str, DIMS)], [[k, *(cell(cpu, gpu, f"{k}, {dim} dims") for dim in DIMS)] for k in TYPES]),
        "## Layers and policies", "", "K and V in bf16, 8 query heads, a model of one layer. In a model whose other layers follow `patterns` a layer with a sliding",
        "window attends all of it. `hip` takes MLA by stages without bounds of keys: the paper's presets have none, its default preset `small` has. On device tensors",
        "RoPE by the library takes 64, 96, 128 and 256 dims, and V in f32, f16, bf16 or q8_0. A layer may have several of these",
        "features: `tandem_supports()` answers for the combination.", "",
        *table(["", "a layer", *POLICIES], [[name, cell(cpu, gpu, name), *(cell(cpu, gpu, f"{name}, {policy}") for policy in POLICIES)]
                                             for name in FEATURES]),
        "## Policies and routes", "", "Routes are for device tensors. `recompute` wants a projection in every layer and hidden states in the cache, which the",
        "layer that was asked about has not.", "",
        *table(["", *ROUTES], [[policy, *("yes" if gpu[f"{policy}, {route}"] == "yes" else f"no: `{gpu[f'{policy}, {route}']}`" for route in ROUTES)]
                               for policy in POLICIES]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--record"]:
        import torch
        engine = tandem.Engine(backend="cuda", backend_path=arguments[1] if len(arguments) > 1 else None)
        record = {"card": torch.cuda.get_device_name(), "answers": ask(engine)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    made = page(ask(tandem.Engine(n_threads=1)), json.loads(RECORD.read_text()))
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != made:
            print("FAIL  docs/support.md is not what the library answers: run tools/support/make.py")
            return 1
        print("ok    docs/support.md")
        return 0
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
