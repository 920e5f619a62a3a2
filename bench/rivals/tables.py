#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes Markdown tables of the lines that run.py has written, and a heat map of the group mqa.

  tables.py FILE... [--only GROUP...] [--picture PREFIX]

A row of a table has microseconds. First come Tandem's kernel, the best rival that writes no rows, and the ratio of the two.
Then come Tandem's planned call, or else the eager one, the best rival with two copies that write the rows, and their ratio. The
last column is the limit: the machine's time for copying or for matrix products, whichever is longer. Below 1, Tandem is faster.
For a cell with several lines the last line counts. Lines of different cards are refused.

--picture writes PREFIX-light.svg and PREFIX-dark.svg.
"""
import argparse
import importlib.util
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIVALS = ("cudnn", "flash", "fa3", "flashinfer")
HEAD = ("cell", "kernel", "best rival", "ratio", "call", "best rival with rows", "ratio", "limit")


class Lines:
    """us: times by (group, cell) and contestant. facts: bytes and flops. notes: of the calls. machine: that of the last run."""

    def __init__(self, files):
        self.us, self.failures, self.facts, self.notes, self.machine, self.cards = {}, {}, {}, {}, None, set()
        for file in files:
            for i, text in enumerate(pathlib.Path(file).read_text().splitlines()):
                try:
                    self.add(json.loads(text))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{file}:{i + 1} is no line of run.py") from error
        if len(self.cards) > 1:
            raise ValueError(f"lines of different cards: {', '.join(sorted(self.cards))}")

    def add(self, line):
        if "machine" in line:
            self.machine = line["machine"]
            return
        key = line["group"], line["cell"]
        if line.get("card"):
            self.cards.add(line["card"])
        self.facts[key] = float(line["bytes"]), float(line["flops"])
        times, failures = self.us.setdefault(key, {}), self.failures.setdefault(key, {})
        times.pop(line["contestant"], None)
        failures.pop(line["contestant"], None)
        self.notes[(*key, line["contestant"])] = line.get("note", "")
        if "us" in line:
            times[line["contestant"]] = float(line["us"])
        else:
            failures[line["contestant"]] = line["failure"]

    def limit(self, key):
        if not self.machine:
            return None
        n_bytes, flops = self.facts[key]
        return max(n_bytes / self.machine["copy_gb_per_s"] * 1e-3, flops / self.machine["tflop_per_s"] * 1e-6)

    def best(self, key, names):
        """Returns the best (us, name), or None."""
        return min(((self.us[key][name], name) for name in names if name in self.us[key]), default=None)

    def pairs(self, key):
        """Returns Tandem's time and the best rival's, first without the writing of rows, then with it."""
        call = self.best(key, ("tandem",)) or self.best(key, ("tandem-eager",))
        return [(self.best(key, ("tandem-kernel",)), self.best(key, RIVALS)),
                (call, self.best(key, [name + "+rows" for name in RIVALS]))]

    def cells(self, group):
        return [cell for its_group, cell in self.us if its_group == group]


def number(us):
    return "–" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def ratio(ours, best):
    return f"{ours[0] / best[0]:.2f}" if ours and best else "–"


def name_of(lines, key, contestant):
    note = lines.notes[(*key, contestant)]
    return contestant.removesuffix("+rows") + (f", {note}" if note else "")


def row_of(lines, key):
    words = [key[1]]
    for ours, best in lines.pairs(key):
        words += [number(ours and ours[0]) + (" (eager)" if ours and ours[1] == "tandem-eager" else ""),
                  f"{number(best[0])} ({name_of(lines, key, best[1])})" if best else "–", ratio(ours, best)]
    return [*words, number(lines.limit(key))]


def print_table(lines, group):
    print(f"\n## {group}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for cell in lines.cells(group):
        print(f"| {' | '.join(row_of(lines, (group, cell)))} |")
    wrong = [f"{cell}, {name}: {why}" for cell in lines.cells(group) for name, why in lines.failures[group, cell].items()
             if "wrong" in why]
    if wrong:
        print("\nWrong answers, which have no time:\n\n" + "\n".join(f"- {each}" for each in wrong))


def heat_map_module():
    """Loads the Python package's heat map module, which needs no other part of the package."""
    file = ROOT / "bindings/python/tandem/eval/_heat_map.py"
    spec = importlib.util.spec_from_file_location("tandem_heat_map", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def short(total):
    return f"{total / 1000:.0f}K" if total >= 1000 else str(total)


def heat_map(lines):
    """Maps ratios by shape and length: the kernel's, and the call's over rivals with rows if measured, else over the others."""
    cells = {}
    for cell in lines.cells("mqa"):
        before, queries, shape = re.fullmatch(r"(\d+)x1x(\d+)@(.+)", cell).groups()
        cells[shape, int(before) + int(queries)] = "mqa", cell
    shapes, totals = list(dict.fromkeys(shape for shape, _ in cells)), sorted({total for _, total in cells})

    def ratios(which):
        rows = []
        for shape in shapes:
            keys = [cells.get((shape, total)) for total in totals]
            pairs = [lines.pairs(key) if key else None for key in keys]
            rows.append([pair[which][0][0] / (pair[which][1] or pair[0][1])[0]
                         if pair and pair[which][0] and (pair[which][1] or pair[0][1]) else None for pair in pairs])
        return rows
    module = heat_map_module()
    panels = [module.Panel("kernel", "over the best rival", ratios(0)), module.Panel("call", "over the best rival", ratios(1))]
    return module.HeatMap(title="Decode with few KV heads: Tandem's time over the best rival's", row_name="heads/KV heads x dims",
                          column_name="keys", row_labels=shapes, column_labels=[short(total) for total in totals],
                          panels=panels, most=2.0, cell=(34, 14), middle=1.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="that run.py has written")
    parser.add_argument("--only", nargs="+", metavar="GROUP")
    parser.add_argument("--picture", metavar="PREFIX", help="of the heat map's files")
    args = parser.parse_args()
    try:
        lines = Lines(args.files)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    groups = list(dict.fromkeys(group for group, _ in lines.us))
    if unknown := [group for group in args.only or () if group not in groups]:
        parser.error(f"no lines of {', '.join(unknown)}")
    if args.picture and "mqa" not in groups:
        parser.error("no lines of mqa, which the picture is of")
    if lines.machine:
        print(f"{lines.machine['card']}: copies {lines.machine['copy_gb_per_s']:,.0f} GB/s, multiplies "
              f"{lines.machine['tflop_per_s']:.0f} TFLOP/s. Microseconds.")
    for group in args.only or groups:
        print_table(lines, group)
    if args.picture:
        for mode in ("light", "dark"):
            pathlib.Path(f"{args.picture}-{mode}.svg").write_text(heat_map(lines).svg(mode))
    return 0


if __name__ == "__main__":
    sys.exit(main())
