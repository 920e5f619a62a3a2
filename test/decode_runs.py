#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode speed by interleaved runs of tandem-bench: medians of each case's share of the read bandwidth, the time of each
storage type against that of bf16, and of a ragged batch against one sequence of as many keys. Each run checks its answers.

usage: decode_runs.py build/bin/tandem-bench [runs [flags of tandem-bench]]
"""

import json
import statistics
import subprocess
import sys

LENGTHS = [8192, 32768, 131072]
RAGGED = 8  # sequences, of 16,384 keys in the mean
CASES = [("bf16", n, 1) for n in LENGTHS] + [("f16", n, 1) for n in LENGTHS]
CASES += [(kind, LENGTHS[-1], 1) for kind in ("q8_0", "q4_0", "q4_64", "e4m3")] + [("bf16", LENGTHS[-1] // RAGGED, RAGGED)]


def run(program, flags, case):
    kind, n_keys, batch = case
    command = [program, "decode", "--kv-type", kind, "--kv-len", str(n_keys), "--batch", str(batch), "--output", "json"]
    command += ["--ragged"] * (batch > 1) + flags
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if result["check"] != "ok":
        sys.exit(f"{case}: {result['check']}")
    return result


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    program, n_runs, flags = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10, sys.argv[3:]
    runs = [[run(program, flags, case) for case in CASES] for _ in range(n_runs)]
    reference = CASES.index(("bf16", LENGTHS[-1], 1))
    print("| K, V | keys | share of read bandwidth | lowest, highest | time against bf16, as many keys |\n|---|--:|--:|--:|--:|")
    for i, (kind, n_keys, batch) in enumerate(CASES):
        shares = [each[i]["share"] for each in runs]
        ratio = statistics.median(each[i]["median_us"] / each[reference]["median_us"] for each in runs)
        keys = f"{batch} ragged, {n_keys * batch}" if batch > 1 else str(n_keys)
        against = f"{ratio:.2f}" if n_keys * batch == LENGTHS[-1] else ""
        print(f"| {kind} | {keys} | {statistics.median(shares):.2f} | {min(shares):.2f}, {max(shares):.2f} | {against} |")


if __name__ == "__main__":
    main()
