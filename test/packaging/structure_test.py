#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Include cycles of lib must not grow: modules that include each other, in a circle, cannot be read or changed one by one.

  structure_test.py SOURCE_DIR

A module is a header with its source. A source that defines methods of a class belongs to the header that declares the class.
"""
import collections
import pathlib
import re
import sys

MOST_LINES = {"lib/device_session": 2150, "lib/engine": 1100}  # of a knot, by a module in it; no other module is in a knot


def owner_of(path, text):
    for name, header in (("AttendCall", "attend_call"), ("Session", "session"), ("HandOver", "hand_over"), ("HostPart", "host_part"),
                         ("Cache", "cache")):
        if path.suffix == ".cc" and re.search(rf"^\S.*\b{name}::", text, re.M):
            return f"lib/{header}"
    return str(path.with_suffix(""))


def knots_of(includes):
    """Groups of modules that reach each other."""
    def reached(start):
        seen, left = set(), [start]
        while left:
            for module in includes[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        return seen
    reach = {module: reached(module) for module in includes}
    knots = {frozenset({module, *(other for other in reach[module] if module in reach.get(other, ()))}) for module in includes}
    return [knot for knot in knots if len(knot) > 1]


def main():
    root = pathlib.Path(sys.argv[1])
    lines, includes = collections.Counter(), collections.defaultdict(set)
    for file in sorted((root / "lib").rglob("*")):
        if file.suffix not in (".h", ".cc"):
            continue
        text = file.read_text()
        module = owner_of(file.relative_to(root), text)
        lines[module] += text.count("\n")
        includes[module] |= set(re.findall(r'#include "(lib/[^"]+)\.h"', text)) - {module}
    failed = False
    for knot in knots_of(dict(includes) | {module: includes[module] for module in lines}):
        size = sum(lines[module] for module in knot)
        most = max((limit for module, limit in MOST_LINES.items() if module in knot), default=0)
        print(f"{'ok  ' if size <= most else 'FAIL'}  {size} of {sum(lines.values())} lines of lib, at most {most}: "
              f"{', '.join(sorted(knot))}")
        failed = failed or size > most
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
