#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes command-line completions for bash, zsh and fish from the help texts in docs/man/help, which are equal to the output
of the programs (man_test).

usage: tools/completion/make.py OUT [--programs NAME,...] [--root DIR]    writes OUT/bash, OUT/zsh and OUT/fish
"""
import argparse
import pathlib
import sys

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools/man"))

import emit_bash
import emit_fish
import emit_zsh
from commands import commands_of, scopes_of
from made_files import chosen_programs, write_files

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
    programs = chosen_programs(parser, args.programs, PROGRAMS)
    write_files(args.out, ("bash", "zsh", "fish"), files_of(args.root, programs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
