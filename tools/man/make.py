#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the manual: pages for man(1) and the same as HTML.

  section 3   a page for each function and struct, from the comments of include/tandem/*.h; docs/man/names.txt has the
              lines for whatis(1)
  section 1   a page for each program, from its --help output in docs/man/help
  section 7   overviews, from docs/man/*.md

usage: tools/man/make.py OUT [--programs NAME,...] [--root DIR]    writes OUT/man1, man3, man7 and html
       tools/man/make.py --write-help BIN                          rewrites docs/man/help from the programs in BIN

If SOURCE_DATE_EPOCH is set, it is the date of the pages.
"""
import argparse
import dataclasses
import datetime
import os
import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/abi"))

import emit_html
import emit_man
import generate
import header as abi_header
import help_text
from made_files import chosen_programs, write_files
from markdown import Markdown
from reference import Reference

# The commands that print the help texts. The first word is a program in the programs' folder.
HELP = {"tandem": ["tandem", "--help"], "tandem-info": ["tandem-info", "--help"], "tandem-plan": ["tandem-plan", "--help"],
        "tandem-patterns": ["tandem-patterns", "--help"],
        "tandem-patterns-profile": ["tandem-patterns", "profile", "--help"],
        "tandem-bench": ["tandem-bench", "--help"], "tandem-generate": ["tandem-generate", "--help"],
        "tandem-demo": ["tandem-demo", "--help"]}
PROGRAMS = [name for name, command in HELP.items() if command[0] == name]


@dataclasses.dataclass
class Manual:
    version: str
    reference: Reference
    pages: list


def names_of(root):
    """Parses docs/man/names.txt: each line is a name, a colon and a description."""
    lines = [line for line in (root / "docs/man/names.txt").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def manual_of(root, programs):
    texts = {path.name: text for path, text in generate.read(root).items()}
    parsed = abi_header.parse(texts.values())
    reference = Reference(parsed, abi_header.notes_of(texts), names_of(root))
    helps = {name: (root / f"docs/man/help/{name}.txt").read_text() for name in HELP}
    markdown = Markdown(reference)
    pages = [help_text.page(name, helps, programs) for name in programs]
    pages += reference.pages()
    pages += [markdown.page(path) for path in sorted((root / "docs/man").glob("*.md"))]
    return Manual(".".join(map(str, parsed.version())), reference, pages)


def date_of_today():
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc) if seconds else datetime.datetime.now()
    return now.strftime("%Y-%m-%d")


def files_of(manual, date):
    """Returns the texts of all files by their paths. An alias maps to the path of the file that it links to."""
    made = {}
    links = {(name, page.section): emit_html.name_of(page) for page in manual.pages for name in (page.name, *page.aliases)}
    for page in manual.pages:
        folder = f"man{page.section}"
        made[f"{folder}/{page.file}"] = emit_man.page(page, manual.version, date)
        made |= {f"{folder}/{alias}.{page.section}": pathlib.Path(page.file) for alias in page.aliases}
        made[f"html/{emit_html.name_of(page)}"] = emit_html.page(page, manual.version, links)
    made["html/index.html"] = emit_html.index(manual.pages, manual.version)
    made["html/style.css"] = emit_html.STYLE
    return made


def help_of(folder, name):
    program, *arguments = HELP[name]
    return subprocess.run([str(folder / program), *arguments], capture_output=True, text=True, check=True).stdout


def write_help(root, folder):
    for name in HELP:
        (root / f"docs/man/help/{name}.txt").write_text(help_of(folder, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, nargs="?")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--write-help", type=pathlib.Path, metavar="BIN")
    args = parser.parse_args()
    if args.write_help:
        return write_help(args.root, args.write_help)
    if args.out is None:
        parser.error("OUT is missing: the folder that the pages go to")
    programs = chosen_programs(parser, args.programs, PROGRAMS)
    write_files(args.out, ("man1", "man3", "man7", "html"), files_of(manual_of(args.root, programs), date_of_today()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
