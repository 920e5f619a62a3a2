#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The parts of bench/rivals that need no GPU: it lists cells, runs a stand-in for decode_call_bench, resumes from a
file, makes tables and pictures, and refuses invalid input.

rivals_test.py SOURCE_DIR
"""
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(sys.argv[1]) / "bench/rivals"
# Answers every case except 16,384 keys, which ends the bench. At 131,072 keys every kernel is wrong.
STAND_IN = """#!/usr/bin/env python3
import json
import sys
for case in sys.argv[3].split(","):
    if case.startswith("16383x"):
        sys.exit("this case ends the bench")
    times = {"kernel_us": 2.0} if "--kernel" in sys.argv else {"planned_us": 3.0, "eager_us": None, "error": 1e-3}
    is_right = not ("--kernel" in sys.argv and case.startswith("131071x"))
    print(json.dumps({"case": case, "card": "a card", "layers": 2, "is_right": is_right, **times}), flush=True)
"""


def run(program, *words):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, str(FOLDER / program), *map(str, words)], capture_output=True, text=True,
                          env=environment)


def expect(what, is_so, done):
    if not is_so:
        sys.exit(f"FAIL  {what}: {done.returncode}\n{done.stdout}{done.stderr}")


def lists():
    done = run("run.py", "--list")
    names = [line.split()[:2] for line in done.stdout.splitlines()]
    expect("cells are listed", done.returncode == 0 and {group for group, _ in names} ==
           {"decode", "append", "mqa", "prefill", "ragged"}, done)
    expect("a cell is listed once", len({tuple(name) for name in names}) == len(names), done)
    done = run("run.py", "--list", "--only", "decode")
    expect("one group is listed", "4095x16x1@32/8x128" in done.stdout and "mqa" not in done.stdout, done)


def make_build(folder):
    (folder / "bench").mkdir()
    program = folder / "bench/decode_call_bench"
    program.write_text(STAND_IN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "libtandem-cuda.so").write_text("")


def measures(folder):
    out, ours = folder / "lines.jsonl", ("--contestants", "tandem", "tandem-eager", "tandem-kernel")
    make_build(folder)
    command = ("run.py", "--only", "decode", "--build", folder, "--out", out, *ours)
    done = run(*command)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [line for line in lines if "cell" in line]
    expect("each cell has a line of each contestant", done.returncode == 0 and len(cells) == 6 * 3, done)
    failures = {(line["cell"].split("x")[0], line["contestant"]): line["failure"] for line in cells if "failure" in line}
    expect("the case that ends the bench is named", failures["16383", "tandem"] == "this case ends the bench", done)
    expect("the bench goes on behind it", ("65535", "tandem") not in failures, done)
    expect("a wrong answer has no time", failures["131071", "tandem-kernel"].startswith("wrong"), done)
    expect("what no call does is said", failures["4095", "tandem-eager"].startswith("no such call"), done)
    n_lines = len(cells)
    done = run(*command)
    expect("a file that exists is not written over", done.returncode == 2 and "--append" in done.stderr, done)
    out.write_text("".join(json.dumps(line) + "\n" for line in cells[1:]))
    done = run(*command, "--append")
    again = [json.loads(line) for line in out.read_text().splitlines() if "cell" in line]
    expect("what the file has is not measured again", done.returncode == 0 and len(again) == n_lines, done)


def sample(folder):
    """Returns lines as a machine with a GPU writes them."""
    lines = [{"machine": {"card": "a card", "copy_gb_per_s": 3000.0, "tflop_per_s": 700.0, "torch": "2"}}]
    for group, cell in (("decode", "4095x1x1@32/8x128"), ("mqa", "0x1x1@8/1x256"), ("mqa", "4999x1x1@71/1x64")):
        facts = {"group": group, "cell": cell, "bytes": 16_000_000, "flops": 1e9, "card": "a card"}
        for contestant, us in (("tandem", 9.0), ("tandem-kernel", 6.0), ("cudnn", 8.0), ("cudnn+rows", 12.0), ("fa3", 5.0)):
            lines.append({**facts, "contestant": contestant, "us": us})
        lines.append({**facts, "contestant": "flash", "failure": "wrong: error 1"})
    file = folder / "sample.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def makes_tables(folder):
    file = sample(folder)
    done = run("tables.py", file, "--picture", folder / "map")
    row = "| 4095x1x1@32/8x128 | 6.00 | 5.00 (fa3) | 1.20 | 9.00 | 12.0 (cudnn) | 0.75 | 5.33 |"
    expect("a row has ours, theirs and the limit", done.returncode == 0 and row in done.stdout, done)
    expect("wrong answers are told", "4999x1x1@71/1x64, flash: wrong: error 1" in done.stdout, done)
    pictures = [(folder / f"map-{mode}.svg").read_text() for mode in ("light", "dark")]
    expect("pictures have rows and columns", all("71/1x64" in each and ">5K<" in each for each in pictures), done)


def refuses(folder):
    broken, other = folder / "broken.jsonl", folder / "other.jsonl"
    broken.write_text('{"cell": \n')
    other.write_text(sample(folder).read_text().replace("a card", "another card"))
    good, new = folder / "sample.jsonl", folder / "new.jsonl"
    for program, *words in (("run.py",), ("run.py", "--list", "--only", "gone"), ("run.py", "--out", broken, "--append"),
                            ("run.py", "--out", new, "--fa3", folder / "gone.so"), ("run.py", "--out", new, "--seconds", "0"),
                            ("run.py", "--out", new, "--seconds", "nan"), ("run.py", "--out", new, "--contestants", "gone"),
                            ("tables.py",), ("tables.py", folder / "gone.jsonl"), ("tables.py", broken),
                            ("tables.py", good, other), ("tables.py", good, "--only", "ragged")):
        done = run(program, *words)
        expect(f"{program} {' '.join(map(str, words))} is refused", done.returncode == 2 and "Traceback" not in done.stderr, done)
    expect("nothing is written", not new.exists(), done)


def main():
    with tempfile.TemporaryDirectory() as name:
        lists()
        measures(pathlib.Path(name))
        makes_tables(pathlib.Path(name))
        refuses(pathlib.Path(name))
    print("ok    bench/rivals without a GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
