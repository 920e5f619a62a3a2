#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs what the pages of the documentation show: commands and blocks of code.

  - Commands, in blocks of shell and in a line of prose, are run in a scratch folder with the programs of BUILD_DIR. Flags, files,
    targets and names in them have to be there, also where the command is not run: docs_commands.txt says which, and why.
  - Blocks of C and C++ compile, excerpts behind docs_prelude.h; programs in Python compile, and run where NumPy is; JSON is JSON;
    blocks that are files of the tree are those files. The outputs in docs/tutorial.md are what its programs print.
  - Every block names its language; code and commands are in a fence, or in backticks. Every line of the table is of use.

First the checker is given pages with one mistake of each kind, and has to find all of them.

docs_commands_test.py SOURCE_DIR BUILD_DIR CC CXX WORK_DIR
"""
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import docs_blocks
from docs_arguments import Arguments

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 120  # that a command may take
GATES = "0.9 0.1\n0.2 0.8\n"
MEASURED = re.compile(r"\d+e-\d+")  # errors, which differ between machines


class Checker:
    def __init__(self, source, build, compilers, work):
        self.source, self.build, self.compilers, self.work = source, build, compilers, work
        self.arguments = Arguments(source)
        self.counts = collections.Counter()
        self.env = {**os.environ, "PATH": os.pathsep.join([str(work / "bin"), str(build / "bin"), os.environ["PATH"]]),
                    "TANDEM_LIB_DIR": str(build), "LD_LIBRARY_PATH": str(build), "PYTHONDONTWRITEBYTECODE": "1",
                    "PYTHONPATH": str(source / "bindings/python"), "PKG_CONFIG_PATH": str(work / "bin")}
        self.has_numpy = subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True).returncode == 0

    def make_folder(self):
        """A folder in which the pages' paths lead where they lead in the source tree, with the files that commands read."""
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "bin").mkdir(parents=True)
        for path in self.source.iterdir():
            if path.is_dir() and not path.name.startswith((".git", "build")):
                (self.work / path.name).symlink_to(path)
        (self.work / "build").symlink_to(self.build)
        for path in [*self.source.glob("examples/*.c"), *self.source.glob("examples/tutorial/*")]:
            shutil.copy(path, self.work)
        for name in ("python", "python3"):
            (self.work / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            (self.work / "bin" / name).chmod(0o755)
        (self.work / "bin/tandem.pc").write_text(f"Name: tandem\nDescription: the build\nVersion: 0\nCflags: -I\"{self.source}/include\"\n"
                                                 f"Libs: -L\"{self.build}\" -ltandem\n")
        programs = (self.source / "docs/programs.md").read_text()
        patterns = next(block for block in docs_blocks.blocks_of("", programs) if block.language == "json")
        (self.work / "patterns.json").write_text(patterns.text)
        (self.work / "gates.tsv").write_text(GATES)

    def run(self, words, text=None, folder=None):
        return subprocess.run(words, cwd=folder or self.work, env=self.env, input=text, capture_output=True, text=True, timeout=SECONDS,
                              stdin=subprocess.DEVNULL if text is None else None)

    def says(self, done):
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return f"exit code {done.returncode}: {' / '.join(lines[-3:])[:300]}"

    # ---- commands ----

    def is_built(self, text):
        """Whether the programs of this project that a command calls are in the build folder."""
        for name in re.findall(r"build/(?:bench|test|bin)/\w[\w-]*", text):
            if not (self.work / name).exists():
                return False
        return all((self.build / "bin" / f"tandem-{name}").exists() for name in re.findall(r"^tandem[ -](\w+)", text) if name != "help")

    def check_command(self, command, entry):
        yield from self.arguments.check_text(command.text)
        if entry and entry.what == "left":
            self.counts[f"commands not run, {entry.detail.split(',')[0]}"] += 1
            return
        if entry is None and not command.is_run:
            self.counts["commands that are only named"] += 1
            return
        text = command.text
        for old, new in entry.changes() if entry else []:
            text, n_changed = re.subn(rf"(?<!\S){re.escape(old)}(?!\S)", new, text)
            if n_changed == 0:
                yield f"docs_commands.txt:{entry.line}: the command has no word {old}"
        if not self.is_built(text):
            self.counts["commands not run, program not built"] += 1
            return
        begin = time.monotonic()
        try:
            done = self.run(["bash", "--norc", "-c", text])
        except subprocess.TimeoutExpired:
            yield f"takes more than {SECONDS} s"
            return
        self.counts["commands run"] += 1
        if time.monotonic() - begin > 4:
            print(f"slow  {time.monotonic() - begin:.0f} s: {text}")
        if done.returncode != 0:
            yield self.says(done)

    # ---- blocks ----

    def compile(self, block, before):
        compiler = self.compilers[block.language == "cpp"]
        flags = ["-x", "c++", "-std=c++17"] if block.language == "cpp" else ["-x", "c", "-std=c99"]
        at = f"#line {block.line} \"{block.page}\"\n"
        if "int main(" in block.text:
            text = at + block.text
        elif block.text.startswith("static "):
            text = f'#include "{HERE}/docs_prelude.h"\n{at}{block.text}'
        else:
            text = f'#include "{HERE}/docs_prelude.h"\n{before}int page(void);\nint page(void) {{\n{at}{block.text}\n  return 0;\n'
            text += "done:\n  return 1;\n}\n" if "goto done" in block.text else "}\n"
        done = self.run([compiler, *flags, "-Wall", "-Werror", "-Wno-unused", "-fsyntax-only", f"-I{self.source}/include", "-"], text)
        self.counts[f"blocks of {block.language} compiled"] += 1
        if done.returncode != 0:
            yield "does not compile: " + " / ".join(line for line in done.stderr.splitlines() if "error" in line)[:300]

    def check_python(self, block, is_run):
        try:
            compile(block.text, block.page, "exec")
        except SyntaxError as error:
            yield f"is no Python: {error}"
            return
        self.counts["blocks of python compiled"] += 1
        if is_run and self.has_numpy:
            done = self.run([sys.executable, "-"], block.text)
            self.counts["blocks of python run"] += 1
            if done.returncode != 0:
                yield self.says(done)

    def check_output(self, block, text):
        """What the program prints that the heading above a block of text names."""
        headings = re.findall(r"^## .*`examples/tutorial/(\w+)\.c`", "\n".join(text.split("\n")[:block.line]), re.M)
        program = self.build / "bin" / f"tandem-tutorial-{headings[-1]}" if headings else None
        if program is None or not program.exists():
            return
        self.counts["blocks of text that a program prints"] += 1
        if MEASURED.sub("E", self.run([str(program)]).stdout.strip()) != MEASURED.sub("E", block.text.strip()):
            yield f"{program.name} prints something else"

    def check_file(self, block, path):
        file = self.source / path
        if not file.exists():
            yield f"there is no {path}"
            return
        program = re.sub(r"\A(#|//) SPDX-License-Identifier: MIT\n", "", file.read_text())
        self.counts["blocks that are files of the tree"] += 1
        if block.text != program:
            yield f"is not {path}"

    def check_block(self, block, text, before, entry):
        language = block.language
        if language not in docs_blocks.LANGUAGES:
            return [f"the block names no language of {', '.join(docs_blocks.LANGUAGES)}"]
        if entry and entry.what == "left":
            self.counts[f"blocks of {language} left out, {entry.detail.split(',')[0]}"] += 1
            return list(self.check_python(block, False)) if language == "python" else []
        findings = list(self.check_file(block, entry.detail)) if entry and entry.what == "file" else []
        if language in ("rust", "go") and not entry:
            findings.append("is neither a file of the tree nor in the table")
        if language == "cpp" or language == "c" and "ggml-cpu.h" not in block.text:
            findings += self.compile(block, before)
        if language == "python":
            findings += self.check_python(block, True)
        if language == "json":
            self.counts["blocks of json read"] += 1
            try:
                json.loads(block.text)
            except ValueError as error:
                findings.append(f"is no JSON: {error}")
        if language == "text":
            findings += [*self.arguments.check_synopsis(block.text), *self.check_output(block, text)]
        return findings

    # ---- pages ----

    def check_page(self, page, text, entries):
        yield from docs_blocks.unfenced(page, text)
        before = ""
        for block in docs_blocks.blocks_of(page, text):
            self.counts["blocks"] += 1
            if block.language != "sh":
                entry = docs_blocks.entry_for(entries, page, f"{block.language} {block.number}")
                yield from (f"{block}: {finding}" for finding in self.check_block(block, text, before, entry))
            if block.language == "c" and block.text.startswith("static "):
                before += block.text
        for command in docs_blocks.commands_of(page, text):
            self.counts["commands"] += 1
            entry = docs_blocks.entry_for(entries, page, command.text)
            yield from (f"{command}: {finding}" for finding in self.check_command(command, entry))

    def check_table(self, entries):
        for entry in entries:
            reason, _, test = entry.detail.partition(", ")
            if entry.n_uses == 0:
                yield f"docs_commands.txt:{entry.line}: no page has {entry.pattern}"
            if entry.what == "left" and reason not in docs_blocks.REASONS:
                yield f"docs_commands.txt:{entry.line}: {reason} is no reason"
            if entry.what == "left" and test and test not in self.arguments.tests():
                yield f"docs_commands.txt:{entry.line}: there is no test {test}"

    def check(self, pages, entries):
        self.make_folder()
        findings = [finding for page, text in pages.items() for finding in self.check_page(page, text, entries)]
        return findings + list(self.check_table(entries))


GOOD = """# A page
```sh
tandem plan --kv-len 4096   # a comment
p="--kv-len 1024"
tandem plan $p
```
Also `tandem plan --kv-len N` and `tandem bench decode --kv-len …`.
```c
static int one(void) { return 1; }
```
```c
args.n_sequences = one();
```
```json
[1]
```
"""
MISTAKES = {  # what a page says: what has to be found
    "```\nx\n```": "names no language", "```sh\ntandem plan --kv-len x\n```": "exit code 2", "`tandem plan --kvlen 3`": "no flag --kvlen",
    "`tandem plan --policy al`": "no value al", "`tandem-gone --x`": "no program tandem-gone", "```sh\nfrobnicate\n```": "knows no frobnicate",
    "`./dev test fast --bsan`": "takes no --bsan", "`./dev test -- -R gone`": "no test is named gone", "`./dev gone`": "no command gone",
    "`build/bench/gone_bench 3`": "has no source", "`python -m tandem.eval M --gone`": "no flag --gone",
    "`python3 bench/gone.py x`": "there is no bench/gone.py", "`cmake --preset gone`": "no preset gone",
    "`cmake --build build --target gone`": "no target gone", "`cmake -DTANDEM_GONE=1 ..`": "no option TANDEM_GONE",
    "`TANDEM_GONE=1 ./dev build`": "no file knows TANDEM_GONE", "`pip install bindings/gone`": "no Python package",
    "`cargo add --path DIR/gone`": "no crate in DIR/gone", "`cc gone.c -lm`": "there is no gone.c",
    "```sh\nfor i in 1; do\n```": "bash: ", "    tandem info --json": "outside of a fence", "    int x = 1;": "outside of a fence",
    "```c\nargs.gone = 1;\n```": "does not compile", "```cpp\ngone();\n```": "does not compile", "```python\nx = (\n```": "is no Python",
    "```json\n[\n```": "is no JSON", "```rust\nx\n```": "neither a file", "```c\nint main(void) { return 0; }\n```": "is not examples/smallest.c",
    "```text\ntandem-plan --gone N\n```": "no flag --gone",
    "## `examples/tutorial/1_prompt.c`\n```text\n1020 tokens in each layer, 4e-04 from attention\n```": "prints something else"}


def check_the_checker(checker):
    entry = docs_blocks.Entry
    shown = [entry("shown.md", "c 1", "file", "examples/smallest.c", 1)]
    named = [entry("*", f"{word} *", "left", "build", 2) for word in ("./dev", "pip", "cargo", "cmake", "*./dev", "python")]
    named += [entry("*", "tandem plan --kv-len N", "left", "no command", 3)]
    wrong = [f"the checker refuses what is right: {finding}" for finding in checker.check({"good.md": GOOD}, named[-1:])]
    for text, expected in MISTAKES.items():
        page = "shown.md" if "examples/smallest.c" in expected else "bad.md"
        found = list(checker.check_page(page, f"# A page\n{text}\n", shown + named))
        if len(found) < 1 or not any(expected in finding for finding in found):
            wrong.append(f"the checker does not find {expected!r} in {text!r}, but {found}")
    table = [entry("*", "gone", "left", "build", 1), entry("*", "x", "left", "boredom", 2, 1), entry("*", "x", "left", "gpu, gone_test", 3, 1)]
    found = list(checker.check_table(table))
    for expected in ("no page has gone", "boredom is no reason", "there is no test gone_test"):
        wrong += [] if any(expected in finding for finding in found) else [f"the checker does not find {expected!r} in a table"]
    checker.counts.clear()
    return wrong


def main():
    source, build, work = (pathlib.Path(sys.argv[i]).resolve() for i in (1, 2, 5))
    if not shutil.which("bash") or not shutil.which("pkg-config"):
        print("skip  bash or pkg-config is missing")
        return 77
    begin = time.monotonic()
    checker = Checker(source, build, sys.argv[3:5], work)
    findings = check_the_checker(checker)
    pages = {page: (source / page).read_text() for page in docs_blocks.pages_of(source)}
    findings += checker.check(pages, docs_blocks.table_of(HERE / "docs_commands.txt"))
    for finding in findings:
        print(f"FAIL  {finding}")
    for what, n in sorted(checker.counts.items()):
        print(f"{n:5}  {what}")
    if not checker.has_numpy:
        print("programs in Python are not run: there is no NumPy")
    print(f"{'FAIL' if findings else 'ok'}    {len(pages)} pages, {time.monotonic() - begin:.0f} s")
    return findings != []


if __name__ == "__main__":
    sys.exit(main())
