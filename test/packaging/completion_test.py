#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the completions that tools/completion/make.py makes from the help texts:

  - bash offers commands, their words, each flag of each help text, the named values, files and folders;
  - fish offers the same commands, flags and values, and zsh reads the file, if these shells are installed;
  - a program that is not built is not offered.

First the checker gets completions with mistakes and must find every mistake.

completion_test.py SOURCE_DIR
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
ROOT = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(ROOT / "tools/completion"))

import make
from commands import flags_of

POLICIES = ["all", "streaming", "hgca", "hip", "patterns"]
ASK_BASH = r"""
source "$1"
while IFS= read -r line; do
  IFS=$'\t' read -r -a COMP_WORDS <<<"$line"
  [[ $line != *$'\t' ]] || COMP_WORDS+=('')
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _tandem
  (IFS=$'\t'; printf '%s\n' "${COMPREPLY[*]}")
done
"""
# Command lines with the cursor in their last word, and the expected completions.
LINES = [
    (["tandem", "be"], ["bench"]),
    (["tandem", ""], ["info", "plan", "patterns", "bench", "generate", "demo", "help", "--help", "--version"]),
    (["tandem", "help", "p"], ["plan", "patterns"]),
    (["tandem", "nothing", ""], []),
    (["tandem", "bench", ""], ["decode", "append", "prefill", "wake"]),
    (["tandem", "bench", "--pol"], ["--policy"]),
    (["tandem", "bench", "decode", "--policy", ""], POLICIES),
    (["tandem", "bench", "decode", "--policy", "h"], ["hgca", "hip"]),
    (["tandem", "bench", "decode", "--policy", "="], POLICIES),
    (["tandem", "bench", "decode", "--policy", "=", "s"], ["streaming"]),
    (["tandem-bench", "decode", "--policy", ""], POLICIES),
    (["/usr/bin/tandem-bench", "wa"], ["wake"]),
    (["tandem", "bench", "decode", "--kv-type", "f16,q"], ["f16,q8_0", "f16,q4_0"]),
    (["tandem", "bench", "decode", "--threads", ""], []),
    (["tandem", "bench", "decode", "--kv-len", "3", "--kv"], ["--kv-heads", "--kv-type"]),  # a flag is not offered twice
    (["tandem", "patterns", "profile", "--pattern", "full", "--pat"], ["--pattern"]),  # except this flag
    (["tandem", "patterns", "s"], ["show", "search"]),
    (["tandem", "patterns", "show", "FILE", "--sv"], ["--svg"]),
    (["tandem", "patterns", "profile", "--sha"], ["--shape"]),
    (["tandem", "patterns", "show", f"{ROOT}/READM"], [f"{ROOT}/README.md"]),
    (["tandem", "plan", "--patterns", f"{ROOT}/READM"], [f"{ROOT}/README.md"]),
    (["tandem", "plan", "--model", f"{ROOT}/exampl"], [f"{ROOT}/examples"]),
    (["tandem", "plan", "--model", f"{ROOT}/READM"], []),
    (["tandem", "generate", "--policy", ""], POLICIES),
    (["tandem", "generate", "--route", "host"], ["host", "host+stream"]),
    (["tandem", "info", "--plan", "--v-al"], ["--v-aliases-k"]),
]


def texts_of(root):
    return {path.stem: path.read_text() for path in (root / "docs/man/help").glob("*.txt")}


def lines_of_help(root):
    """Yields each flag, and the values of each flag that names its values."""
    for name, text in texts_of(root).items():
        words = name.split("-")
        words += {"bench": ["decode"], "patterns": ["show"]}.get(words[-1], [])
        if len(words) == 1:
            continue
        for flag in flags_of(text):
            yield [*words, flag.name], flag.name
            if re.fullmatch(r"[\w+-]+(\|[\w+-]+)+(\[,\.\.\.\])?", flag.value):
                yield from (([*words, flag.name, value], value) for value in flag.value.removesuffix("[,...]").split("|"))


def check_bash(script, lines):
    """Yields the errors in a script's answers to LINES and to `lines`."""
    questions = [line for line, _ in LINES] + [line for line, _ in lines]
    done = subprocess.run(["bash", "--norc", "-c", ASK_BASH, "sh", str(script)], capture_output=True, text=True,
                          input="".join("\t".join(question) + "\n" for question in questions))
    if done.returncode or done.stderr:
        yield f"bash: {done.stderr.strip()[:300]}"
        return
    answers = [answer.split("\t") if answer else [] for answer in done.stdout.splitlines()]
    if len(answers) != len(questions):
        yield f"bash: {len(answers)} answers to {len(questions)} lines"
        return
    for (line, wanted), answer in zip(LINES, answers):
        if sorted(answer) != sorted(wanted):
            yield f"bash: {line} is completed to {answer}, not {wanted}"
    for (line, wanted), answer in zip(lines, answers[len(LINES):]):
        if wanted not in answer:
            yield f"bash: {line} is completed to {answer}, without {wanted}"


def check_fish(folder):
    if shutil.which("fish") is None:
        print("      fish is not installed: its completions are not checked")
        return
    for path in sorted(folder.iterdir()):
        done = subprocess.run(["fish", "--no-execute", str(path)], capture_output=True, text=True)
        if done.returncode or done.stderr:
            yield f"fish: {path.name}: {done.stderr.strip()[:300]}"
    sources = "; ".join(f"source '{path}'" for path in sorted(folder.iterdir()))
    for line, wanted in LINES:
        if "=" in line or any(line[i].startswith(("/", "--")) for i in (0, -1)) or line[1] in ("", "help", "nothing"):
            continue  # fish completes paths and flags by itself, and offers flags that are already present
        done = subprocess.run(["fish", "--no-config", "-c", f"{sources}; complete -C '{' '.join(line)}'"],
                              capture_output=True, text=True)
        offered = {answer.split("\t")[0] for answer in done.stdout.splitlines()}
        if set(wanted) - offered:
            yield f"fish: {line} is completed to {sorted(offered)[:8]}, not {wanted} {done.stderr[:200]}"


def check_zsh(script):
    if shutil.which("zsh") is None:
        print("      zsh is not installed: its completion is not checked")
        return
    done = subprocess.run(["zsh", "-f", "-n", str(script)], capture_output=True, text=True)
    if done.returncode or done.stderr:
        yield f"zsh: {done.stderr.strip()[:300]}"


def written(root, programs, out):
    subprocess.run([sys.executable, str(ROOT / "tools/completion/make.py"), str(out), "--root", str(root),
                    f"--programs={','.join(programs)}"], check=True)
    return out


def check_less(work):
    """Checks the completions without the programs of the examples."""
    out = written(ROOT, [name for name in make.PROGRAMS if name not in ("tandem-generate", "tandem-demo")], work / "less")
    for path in sorted(out.rglob("*")):
        if path.is_file() and re.search("generate|demo", path.read_text()):
            yield f"{path.relative_to(out)} names a program that is not there"
    if not (out / "bash/tandem-info").exists() or (out / "bash/tandem-demo").exists():
        yield "bash/tandem-info is missing, or bash/tandem-demo is there"


MISTAKES = [  # text in the script for bash, its replacement, the expected error
    ("decode append prefill wake", "decode append prefill", "'wake'"),
    ("kind=word values='all streaming hgca hip patterns'", "kind=word values='all streaming hgca hip'", "'patterns'"),
    ("--svg", "--swg", "--svg"),
    ("kind=folder", "kind=file", "README.md"),
    ("kind=list", "kind=word", "f16,q"),
    ("repeated='--pattern'", "repeated=''", "--pat"),
    ("_tandem() {", "_tandem() { if", "bash: "),
]


def check_the_checker(script, work):
    for old, new, wanted in MISTAKES:
        text = script.read_text()
        if old not in text:
            yield f"a mistake cannot be made: there is no {old}"
            continue
        (work / "wrong").write_text(text.replace(old, new))
        found = list(check_bash(work / "wrong", []))
        if not any(wanted in line for line in found):
            yield f"the checker does not find {old} made {new}: {found[:2]}"


def main():
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        out = written(ROOT, make.PROGRAMS, work / "all")
        findings = [*check_the_checker(out / "bash/tandem", work),
                    *check_bash(out / "bash/tandem", list(lines_of_help(ROOT))), *check_fish(out / "fish"), *check_zsh(out / "zsh/_tandem"), *check_less(work)]
        for program in make.PROGRAMS:
            if not (out / "bash" / program).exists() or not (out / f"fish/{program}.fish").exists():
                findings.append(f"{program} has no completion of its name, by which shells look for it")
    for finding in findings:
        print(f"FAIL  {finding}")
    if not findings:
        print(f"ok    {len(LINES)} lines, and each flag and value of {len(texts_of(ROOT))} help texts")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
