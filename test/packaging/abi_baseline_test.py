#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the C interface with that of the last release, by libabigail's abidiff.

The interface is what the headers declare: every function is compiled with an empty body and debug information into a small
library, so that abidiff sees the public types alone. (symbols_test compares these functions with what libtandem exports.)
Allowed are new functions and members at the end of structs; macros are compared by their values, as debug information has none.
test/packaging/abi has the baseline. First the comparison is given changes that it has to refuse or to allow.

abi_baseline_test.py SOURCE_DIR CC WORK_DIR            compares; exits 77 (skipped) without abidiff
abi_baseline_test.py SOURCE_DIR CC WORK_DIR --write    writes the baseline: once, at a release
"""
import pathlib
import re
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
ROOT, CC, WORK = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], pathlib.Path(sys.argv[3])
sys.path.insert(0, str(ROOT / "tools/abi"))

import generate
import header as abi_header

BASELINE = ROOT / "test/packaging/abi"
# Programs say by struct_size which members they know.
SUPPRESSIONS = "[suppress_type]\n  type_kind = struct\n  has_data_member_inserted_at = end\n"
NEWER = ("TANDEM_VERSION_", "TANDEM_NUM_")  # macros whose values a release may change


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def interface_of(include):
    """The headers of a folder, as tools/abi reads them."""
    return abi_header.parse(generate.read(include.parent).values())


def build(include, name):
    """Compiles the functions that the headers declare, with empty bodies."""
    source, library = WORK / f"{name}.c", WORK / f"lib{name}.so"
    lines = ["#include <tandem/tandem.h>"]
    for text in generate.read(include.parent).values():
        for declared in re.findall(r"^TANDEM_API ([^;{]+\));", re.sub(r"/\*.*?\*/", "", text, flags=re.S), re.M):
            body = "" if declared.startswith("void ") else "return 0; "
            lines.append(f"{declared} {{ {body}}}")
    source.write_text("\n".join(lines) + "\n")
    done = run(CC, "-g", "-O0", "-fvisibility=hidden", "-shared", "-fPIC", "-Wl,-soname,libtandem.so.0", "-w", f"-I{include}",
               f"-ffile-prefix-map={WORK}=.", "-o", str(library), str(source))
    if done.returncode != 0:
        sys.exit(f"FAIL  the headers do not compile: {done.stderr}")
    return library


def constants_of(include):
    return {name: str(value) for name, value in interface_of(include).constants.items() if not name.startswith(NEWER)}


def differences(baseline, include, name):
    """What programs that were compiled for the baseline cannot live with: lines of text."""
    rules = WORK / "suppressions"
    rules.write_text(SUPPRESSIONS)
    done = run("abidiff", "--no-added-syms", "--suppressions", str(rules), str(baseline / "interface.abi"), str(build(include, name)))
    found = done.stdout.splitlines() if done.returncode & ~4 or has_changes(done.stdout) else []
    before = dict(line.split(" ", 1) for line in (baseline / "constants.txt").read_text().splitlines())
    now = constants_of(include)
    return found + [f"{key} was {value}, is {now.get(key, 'gone')}" for key, value in before.items() if now.get(key) != value]


def has_changes(text):
    """Returns whether abidiff counts a change that the rules do not allow."""
    counts = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("Functions changes summary:")]
    left = [part.strip().split(" ")[:2] for line in counts for part in line.split(",")]
    return any(n != "0" and what in ("Removed", "Changed") for n, what in left)


def write(include, baseline):
    baseline.mkdir(parents=True, exist_ok=True)
    done = run("abidw", "--no-show-locs", "--no-comp-dir-path", "--no-corpus-path", "--out-file", str(baseline / "interface.abi"),
               str(build(include, "tandem")))
    if done.returncode != 0:
        sys.exit(f"FAIL  abidw: {done.stderr}")
    (baseline / "constants.txt").write_text("".join(f"{key} {value}\n" for key, value in constants_of(include).items()))


# A change of tandem.h, and whether programs that were compiled before can live with it.
CHANGES = {
    "a new function": ("TANDEM_API uint32_t tandem_version(void);",
                       "TANDEM_API uint32_t tandem_version(void);\nTANDEM_API int32_t tandem_new(int32_t number);", True),
    "a member at the end": ("} tandem_session_options;", "  int64_t new_member; /* 0 */\n} tandem_session_options;", True),
    "a member in the middle": ("} tandem_session_options;", None, False),
    "a parameter more": ("TANDEM_API uint32_t tandem_version(void);", "TANDEM_API uint32_t tandem_version(int32_t number);", False),
    "a function that is gone": ("TANDEM_API uint32_t tandem_version(void);", "", False),
    "another number": ("#define TANDEM_BF16 3", "#define TANDEM_BF16 7", False),
}


def check_the_comparison(baseline):
    wrong = []
    for number, (what, (old, new, is_allowed)) in enumerate(CHANGES.items()):
        include = WORK / str(number) / "include"
        shutil.rmtree(include, ignore_errors=True)
        shutil.copytree(ROOT / "include", include)
        path = include / "tandem/tandem.h"
        text = path.read_text()
        if text.count(old) != 1:
            sys.exit(f"FAIL  {what}: {old!r} stands {text.count(old)} times in tandem.h")
        if new is None:  # before the struct's last member
            end = text.index(old)
            at = text.rindex("\n  ", 0, text.rindex(";", 0, end))
            text = text[:at] + "\n  int64_t new_member; /* 0 */" + text[at:]
        path.write_text(text if new is None else text.replace(old, new))
        if (not differences(baseline, include, f"tandem{number}")) != is_allowed:
            wrong.append(f"{what} is {'refused' if is_allowed else 'allowed'}")
    return wrong


def main():
    if shutil.which("abidiff") is None:
        print("skipped: there is no abidiff (package abigail-tools)")
        return 77
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    if sys.argv[4:] == ["--write"]:
        write(ROOT / "include", BASELINE)
        return 0
    write(ROOT / "include", WORK / "now")
    wrong = check_the_comparison(WORK / "now")
    wrong += differences(BASELINE, ROOT / "include", "tandem")
    print("\n".join(f"FAIL  {line}" for line in wrong) or "ok    the interface has all that the last release had")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
