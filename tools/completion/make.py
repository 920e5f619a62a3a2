#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes command-line completions for bash, zsh and fish from the help texts in docs/man/help, which are equal to the output
of the programs (man_test).

usage: tools/completion/make.py OUT [--programs NAME,...] [--root DIR]    writes OUT/bash, OUT/zsh and OUT/fish
"""
import argparse
import pathlib
import shutil
import sys

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]

import emit_bash
import emit_fish
import emit_zsh
from commands import commands_of, scopes_of

PROGRAMS = ["tandem", "tandem-info", "tandem-plan", "tandem-patterns", "tandem-bench", "tandem-generate", "tandem-demo"]


def files_of(root, programs):
    """Returns the texts of all files by their paths. A link maps to the path of the file that it links to."""
    folder = root / "docs/man/help"
    parts = ["tandem-patterns-profile"]
    texts = {name: (folder / f"{name}.txt").read_text() for name in PROGRAMS + parts
             if any(name == program or name.startswith(program + "-") for program in programs if program != "tandem")}
    scopes = scopes_of(texts)
    commands = {name: text for name, text in commands_of((folder / "tandem.txt").read_text()).items()
                if f"tandem-{name}" in programs}
    others = [program for program in programs if program != "tandem"]
    made = {"bash/tandem": emit_bash.text(commands, scopes), "zsh/_tandem": emit_zsh.text(commands, scopes),
            "fish/tandem.fish": emit_fish.text_of_tandem(commands, scopes)}
    made |= {f"bash/{program}": pathlib.Path("tandem") for program in others}
    made |= {f"fish/{program}.fish": emit_fish.text_of_program(program, scopes) for program in others}
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    args = parser.parse_args()
    programs = [name for name in args.programs.split(",") if name]
    unknown = [name for name in programs if name not in PROGRAMS]
    if unknown:
        parser.error(f"--programs = {unknown[0]} is none of {', '.join(PROGRAMS)}")
    for folder in ("bash", "zsh", "fish"):  # removes files that are no longer made
        shutil.rmtree(args.out / folder, ignore_errors=True)
    for path, text in files_of(args.root, programs).items():
        (args.out / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, pathlib.Path):
            (args.out / path).symlink_to(text)
        else:
            (args.out / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
