#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The files that tools/abi/generate.py makes are up to date, and its check can fail. In a copy, one more option makes
every made file stale. A second run makes them current, with the option and its default.

abi_tables_test.py SOURCE_DIR CC WORK_DIR
"""
import pathlib
import re
import shutil
import subprocess
import sys

ROOT, CC, WORK = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
COPIED = ("tools/abi", "include", "lib/base/abi_layout.h", "bindings/rust/tandem-sys/src", "bindings/rust/tandem/src", "bindings/go",
          "bindings/python/tandem")
# The made files that change when a session gets one more option.
CHANGED = {"include/tandem/tandem.h", "lib/base/abi_layout.h", "bindings/rust/tandem-sys/src/structs.rs",
           "bindings/rust/tandem/src/option_tables.rs", "bindings/go/option_tables.go", "bindings/python/tandem/_abi.py",
           "bindings/python/tandem/_option_tables.py"}
END = "} tandem_session_options;"
PROGRAM = """#include <tandem/tandem.h>
int main(void) {
  const tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  return options.tried_tokens == -1 && options.tried_share == 0.0 && options.struct_size == sizeof options ? 0 : 1;
}
"""


def generate(root, *flags):
    done = subprocess.run([sys.executable, str(root / "tools/abi/generate.py"), *flags], capture_output=True, text=True)
    return done.returncode, {line.split()[0] for line in done.stdout.splitlines()}, done.stderr


def expect(what, got, wanted):
    if got != wanted:
        sys.exit(f"FAIL  {what}: {got}, should be {wanted}")


def copy():
    shutil.rmtree(WORK, ignore_errors=True)
    for name in COPIED:
        source, to = ROOT / name, WORK / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to)


def edit(name, old, new):
    text = (WORK / name).read_text()
    expect(f"{old!r} in {name}", text.count(old), 1)
    (WORK / name).write_text(text.replace(old, new))


def main():
    expect("the tree", generate(ROOT, "--check"), (0, set(), ""))
    copy()
    expect("the copy", generate(WORK, "--check"), (0, set(), ""))
    edit("bindings/go/option_tables.go", "\tPageTokens int32", "\tPageTokens int64")
    expect("an edit by hand", generate(WORK, "--check"), (1, {"bindings/go/option_tables.go"}, ""))
    expect("its end", generate(WORK), (0, {"bindings/go/option_tables.go"}, ""))

    edit("include/tandem/tandem.h", END, "  int64_t tried_tokens; /* tried; -1: 7; 0: none */\n  double tried_share; /* tried; 0: 1 */\n" + END)
    expect("one more option", generate(WORK, "--check"), (1, CHANGED, ""))
    expect("made anew", generate(WORK), (0, CHANGED, ""))
    expect("once more", generate(WORK, "--check"), (0, set(), ""))
    for name in CHANGED:
        if not re.search(r"\b(tried_tokens|TriedTokens)\b", (WORK / name).read_text()):
            sys.exit(f"FAIL  {name} does not have the option")
    (WORK / "defaults.c").write_text(PROGRAM)
    subprocess.run([CC, f"-I{WORK / 'include'}", "-o", str(WORK / "defaults"), str(WORK / "defaults.c")], check=True)
    subprocess.run([str(WORK / "defaults")], check=True)

    edit("include/tandem/tandem.h", END, "  const float *tried_factors; /* tried */\n" + END)
    code, _, said = generate(WORK)
    expect("an option of no known kind", (code, "tried_factors is of a kind" in said), (1, True))
    print("ok    the tables are those of the header")


main()
