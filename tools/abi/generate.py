#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Generates all copies of the C ABI's facts from include/tandem/tandem.h and the parts that it includes:

  include/tandem/*.h               the macros of defaults, TANDEM_*_INIT
  lib/base/abi_layout.h            sizes, offsets, the fingerprint
  bindings/rust, go, python        constants, structs, prototypes; the tables of the options of caches and sessions

A struct's defaults are zero, or -1 if the comment of a member says what -1 means. A new option is a line in the header.

usage: tools/abi/generate.py [--check] [--root DIR]     --check: writes nothing, names outdated files and exits with 1
"""
import argparse
import pathlib
import sys

import emit_c
import emit_go
import emit_python
import emit_rust
import header


def read(root):
    """Returns the texts of the header's files by their paths, in the order of inclusion."""
    folder = pathlib.Path("include/tandem")
    texts = {folder / "tandem.h": (root / folder / "tandem.h").read_text()}
    for part in header.includes_of(texts[folder / "tandem.h"]):
        texts[folder / part] = (root / folder / part).read_text()
    return texts


def made_from(root):
    texts = read(root)
    parsed = header.parse(texts.values())
    made = {str(path): emit_c.with_defaults(text, parsed.structs) for path, text in texts.items()}
    made["lib/base/abi_layout.h"] = emit_c.layout(parsed)
    for emitter in (emit_rust, emit_go, emit_python):
        made |= emitter.files(parsed)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
    args = parser.parse_args()
    stale = []
    for path, text in made_from(args.root).items():
        file = args.root / path
        if file.exists() and file.read_text() == text:
            continue
        stale.append(path)
        if not args.check:
            file.write_text(text)
    for path in stale:
        print(f"{path} {'is not up to date: run tools/abi/generate.py' if args.check else 'is made anew'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
