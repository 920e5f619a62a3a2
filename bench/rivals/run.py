#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures attention of Tandem's CUDA module and of its rivals, shape by shape. A JSON line for each cell and contestant.

  run.py --list [--only GROUP...]
  run.py --out FILE [--append] [--only GROUP...] [--build FOLDER] [--fa3 FILE] [--flashinfer FILE]

Groups: decode, append, mqa, prefill, ragged (cells.py). Contestants: "tandem": planned calls through the C ABI that a graph
replays; "tandem-eager": the same calls one by one; "tandem-kernel": only the attention of the window; all three by
decode_call_bench. PyTorch's "cudnn" and "flash". "fa3" and "flashinfer" if a library is given for them (README.md). "+rows":
with two copies that write the new rows (in the group mqa only if named). Every output is first compared with double precision,
and Tandem's calls with the CPU. tables.py makes tables of the file.
"""
import argparse
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import ours
from cells import GROUPS, cells_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = (*ours.CALLS, ours.KERNEL)
THEIRS = tuple(name + rows for name in ("cudnn", "flash", "fa3", "flashinfer") for rows in ("", "+rows"))


class Results:
    """The results file. Pairs that it already has are not measured again."""

    def __init__(self, path, appends):
        self.path, self.done, self.card = pathlib.Path(path), set(), None
        if self.path.exists() and not appends:
            raise ValueError(f"{path} exists: --append goes on with it")
        if self.path.exists():
            self.read()

    def read(self):
        for i, text in enumerate(self.path.read_text().splitlines()):
            try:
                line = json.loads(text)
                if "cell" in line:
                    self.done.add((line["group"], line["cell"], line["contestant"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}:{i + 1} is no line of this program") from error

    def has(self, cell, contestant):
        return (cell.group, cell.name, contestant) in self.done

    def write(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def add(self, cell, contestant, line):
        self.done.add((cell.group, cell.name, contestant))
        facts = {"group": cell.group, "cell": cell.name, "contestant": contestant}
        self.write({**facts, **line, "card": line.get("card", self.card), "bytes": cell.bytes, "flops": cell.flops})
        said = f"{line['us']:12.2f} us" if "us" in line else line["failure"]
        print(f"{cell.group:8} {cell.name:40} {contestant:16} {said}", file=sys.stderr, flush=True)


class Run:
    def __init__(self, args):
        self.args, self.ends = args, time.monotonic() + args.seconds
        self.results = Results(args.out, args.append)

    def is_late(self):
        return time.monotonic() > self.ends

    def is_missing(self, cell, contestant):
        named = self.args.contestants
        wanted = contestant in named if named else cell.group != "mqa" or not contestant.endswith("+rows")
        return wanted and not self.results.has(cell, contestant)

    def run_ours(self, bench, cells):
        for cell, contestant, line in ours.measure(bench, cells, self.is_missing):
            self.results.add(cell, contestant, line)
            if self.is_late():
                return

    def run_theirs(self, theirs, kinds, cells):
        for cell in cells:
            names = [(name, writes) for name in kinds for writes in (False, True)
                     if self.is_missing(cell, name + ("+rows" if writes else ""))]
            if self.is_late():
                return
            layers = theirs.try_to_make_layers(cell) if names else None
            for name, writes in names:
                line = theirs.try_to_measure(kinds[name], layers, writes)
                self.results.add(cell, name + ("+rows" if writes else ""), line)
                if "failure" in line and not theirs.is_alive():
                    sys.exit("the GPU has failed: --append goes on in a new process, behind this contestant")

    def run(self, bench, theirs):
        kinds = theirs.contestants_of(self.args.fa3, self.args.flashinfer) if theirs else {}
        if theirs:
            machine = theirs.machine()
            self.results.card = machine["card"]
            self.results.write({"machine": machine})
        for group in self.args.only or GROUPS:
            cells = cells_of([group])
            if theirs:
                theirs.torch.cuda.empty_cache()
            if bench:
                self.run_ours(bench, cells)
            if kinds:
                self.run_theirs(theirs, kinds, cells)
            if self.is_late():
                print(f"stopped after {self.args.seconds} s: --append goes on", file=sys.stderr)
                return 3
        return 0


def find_theirs():
    """Returns the module of rivals, or None if PyTorch or a GPU is missing."""
    try:
        import torch
    except ImportError:
        print("no PyTorch: rivals are left out", file=sys.stderr)
        return None
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU: rivals are left out", file=sys.stderr)
        return None
    import theirs
    return theirs


def positive(text):
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the cells and measure nothing")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--contestants", nargs="+", choices=OURS + THEIRS, metavar="NAME", help=f"of {', '.join(OURS + THEIRS)}")
    parser.add_argument("--out", metavar="FILE", help="of JSON lines")
    parser.add_argument("--append", action="store_true", help="go on with a file that exists: what it has is not measured again")
    parser.add_argument("--seconds", type=positive, default=3600.0, help="no cell begins later than this")
    parser.add_argument("--build", metavar="FOLDER", default=str(ROOT / "build"), help="Tandem's; default: build")
    parser.add_argument("--fa3", metavar="FILE", help="a library of FlashAttention-3 (README.md)")
    parser.add_argument("--flashinfer", metavar="FILE", help="a library of FlashInfer; else its Python package, where it is")
    args = parser.parse_args()
    if not args.list and not args.out:
        parser.error("--out FILE or --list")
    for file in (args.fa3, args.flashinfer):
        if file and not os.path.isfile(file):
            parser.error(f"{file} is no file")
    return parser, args


def main():
    parser, args = arguments()
    if args.list:
        for cell in cells_of(args.only):
            print(f"{cell.group:8} {cell.name:40} {cell.key_bytes / 1e6:9.2f} MB {cell.flops / 1e9:12.2f} GFLOP")
        return 0
    try:
        run = Run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    bench = ours.find_bench(args.build)
    if not bench:
        print(f"{args.build} has no decode_call_bench or no libtandem-cuda.so: Tandem is left out", file=sys.stderr)
    theirs = find_theirs()
    if not bench and not theirs:
        return 2
    return run.run(bench, theirs)


if __name__ == "__main__":
    sys.exit(main())
