#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode speed by interleaved runs of tandem-bench. Prints medians: each case's share of the read bandwidth, the time of each
storage type against bf16, and of a ragged batch against one sequence with as many keys. Each run checks its answers and takes
the cases in turns, so that all of them see the same machine.

usage: decode_runs.py build/bin/tandem-bench [runs [flags of tandem-bench]]
"""

import json
import statistics
import subprocess
import sys

LENGTHS = "8192,32768,131072"
TYPES = "bf16,f16,q8_0,q4_0,e4m3"
RAGGED = 8  # sequences, with 16,384 keys on average
RUNS = [["--interleave", "--kv-type", TYPES, "--kv-len", LENGTHS], ["--batch", str(RAGGED), "--ragged", "--kv-len", "16384"]]


def key(result):
    return result["type"], result["kv_len"], result["batch"]


def run(program, flags):
    lines = []
    for arguments in RUNS:
        command = [program, "decode", "--output", "json"] + arguments + flags
        lines += subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    results = {key(result): result for result in map(json.loads, lines)}
    for case, result in results.items():
        if result["check"] != "ok":
            sys.exit(f"{case}: {result['check']}")
    return results


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    program, n_runs, flags = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10, sys.argv[3:]
    runs = [run(program, flags) for _ in range(n_runs)]
    print("| K, V | keys | share of read bandwidth | lowest, highest | time against bf16, as many keys |\n|---|--:|--:|--:|--:|")
    for kind, n_keys, batch in runs[0]:
        shares = [each[kind, n_keys, batch]["share"] for each in runs]
        reference = "bf16", n_keys * batch, 1
        ratio = statistics.median(each[kind, n_keys, batch]["median_us"] / each[reference]["median_us"] for each in runs)
        keys = f"{batch} ragged, {n_keys * batch}" if batch > 1 else str(n_keys)
        print(f"| {kind} | {keys} | {statistics.median(shares):.2f} | {min(shares):.2f}, {max(shares):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
