#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the structure of lib, so that modules can be read and changed one by one.

structure_test.py SOURCE_DIR

A module is a header with its source. A source that defines methods of a class belongs to the header that declares the
class.
"""
import collections
import pathlib
import re
import sys

# A module includes its own folder and the folders before it in this list. cpu and cuda include only the first three.
FOLDERS = ["base", "model", "tables", "tensors", "rates", "machine", "weights", "store", "policy", "patterns", "pieces", "call", "select",
           "device", "routes", "plan", "attend", "abi"]
FOR_BACKENDS = FOLDERS[:3]
MOST_METHODS = 30  # of one class
# Headers of one policy or one route. Only these modules may include them.
OWN_HEADERS = {"lib/select/hgca": r"lib/select/hgca", "lib/routes/stream": r"lib/routes/(stream|route_table)",
               "lib/routes/recompute": r"lib/routes/(recompute|route_table)"}


def owner_of(path, text):
    """Returns the module of a file. Session has its methods in two sources."""
    if path.suffix == ".cc" and re.search(r"^\S.*\bSession::", text, re.M):
        return "lib/attend/session"
    return str(path.with_suffix(""))


def knots_of(includes):
    """Returns groups of modules that reach each other through includes."""
    def reached(start):
        seen, left = set(), [start]
        while left:
            for module in includes[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        return seen
    reach = {module: reached(module) for module in includes}
    knots = {frozenset({module, *(other for other in reach[module] if module in reach.get(other, ()))}) for module in includes}
    return [sorted(knot) for knot in knots if len(knot) > 1]


def without_comments(text):
    return re.sub(r'"(\\.|[^"\\])*"', '""', re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))


def class_bodies(text):
    """Yields the names of classes, and their bodies without nested braces."""
    for found in re.finditer(r"\b(?:class|struct)\s+(\w+)[^;{()]*\{", text):
        depth, body, at = 1, [], found.end()
        while at < len(text) and depth > 0:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if text[at] == "}":
                body.append(";" if depth == 1 else "")
            elif text[at] != "{" and depth == 1:
                body.append(text[at])
            at += 1
        yield found.group(1), "".join(body)


def n_methods(body):
    n = 0
    for statement in re.sub(r"\b(public|private|protected)\s*:", "", body).split(";"):
        statement = statement.strip()
        if re.match(r"(using|friend|static_assert|typedef|enum|class|struct)\b", statement):
            continue
        head = statement if "operator" in statement else statement.split("=")[0]
        n += bool(re.search(r"[\w~>\]=<]\s*\(", head)) and not re.search(r"\(\s*\*", head)
    return n


def main():
    root = pathlib.Path(sys.argv[1])
    includes, faults, n_lines = collections.defaultdict(set), [], 0
    for file in sorted((root / "lib").rglob("*")):
        if file.suffix not in (".h", ".cc"):
            continue
        path, text = file.relative_to(root), file.read_text()
        n_lines += text.count("\n")
        module, included = owner_of(path, text), set(re.findall(r'#include "(lib/[^"]+)\.h"', text))
        includes[module] |= included - {module}
        folder = path.parts[1]
        for other in included:
            above = other.split("/")[1]
            if FOLDERS.index(above) > FOLDERS.index(folder):
                faults.append(f"{path} includes {other}.h: {above} is below {folder}")
            if other in OWN_HEADERS and not re.match(OWN_HEADERS[other], str(path)):
                faults.append(f"{path} includes {other}.h, which is of one policy or route")
        for name, body in class_bodies(without_comments(text)):
            if n_methods(body) > MOST_METHODS:
                faults.append(f"{path}: {name} has {n_methods(body)} methods, at most {MOST_METHODS}")
    for file in [*(root / "cpu").rglob("*"), *(root / "cuda").rglob("*")]:
        for other in re.findall(r'#include "lib/(\w+)/', file.read_text()) if file.is_file() else []:
            if other not in FOR_BACKENDS:
                faults.append(f"{file.relative_to(root)} includes a header of lib/{other}")
    faults += [f"these include each other in a circle: {', '.join(knot)}"
               for knot in knots_of(includes | {module: includes[module] for module in list(includes)})]
    for fault in faults:
        print(f"FAIL  {fault}")
    if not faults:
        print(f"ok    {len(includes)} modules, {n_lines} lines, {len(FOLDERS)} folders, no circle")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
