#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the manual that tools/man/make.py makes:

  - each function, struct, callback and constant of the header has its page, and docs/man/names.txt a line for each page;
  - declarations on pages are those of the header;
  - a function that returns a status lists its errors, each function states which threads may call it, and a function that
    takes a stream or tensors states its stream order. Rules for every function are only at the head of tandem.h. Pages
    repeat them, and fail here if the head lacks the sentence for an object or for streams;
  - no word of a comment or of a help text is lost on its way to the page;
  - each reference names an existing page, and each HTML file is well-formed, with links that lead to files;
  - mandoc and groff print no warnings, if they are installed;
  - the programs in the overviews compile;
  - docs/man/help equals the output of the programs, if BIN is given.

First the checker gets copies of the tree with one mistake each and must find every mistake.

man_test.py SOURCE_DIR CC [BIN]
"""
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
ROOT = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(ROOT / "tools/man"))

import make
from document import Lines, references_of, text_of
from reference import is_init, is_status

VOID = {"meta", "link", "br"}
RULES = {"ERRORS": "what errors there are", "RETURN VALUE": "what it returns", "THREADS": "which threads may call it",
         "STREAM ORDER": "in what order streams do its work"}


class WellFormed(html.parser.HTMLParser):
    """Collects tags that do not match, links and anchors."""

    def __init__(self):
        super().__init__()
        self.open, self.faults, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name == "href"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> ends what is not open")


def words_of(text):
    return re.findall(r"[A-Za-z0-9_]+", text)


def pages_by_name(manual):
    return {name: page for page in manual.pages if page.section == 3 for name in (page.name, *page.aliases)}


def text_of_page(page):
    return page.summary + "\n" + "\n".join(text_of(block) for section in page.sections for block in section.blocks)


def check_names(manual):
    """Checks that every public name has a page and every page a line of names.txt."""
    reference, pages = manual.reference, pages_by_name(manual)
    header = reference.header
    for kind, things in (("function", header.functions), ("struct", header.structs), ("callback", header.callbacks)):
        yield from (f"the {kind} {thing.name} has no page" for thing in things if thing.name not in pages)
    for page in manual.pages:
        if not page.summary:
            yield f"{page.name} has no line in docs/man/names.txt"
    known = {page.name for page in manual.pages if page.section == 3}
    yield from (f"docs/man/names.txt: {name} is no page" for name in reference.summaries if name not in known)
    everything = "\n".join(map(text_of_page, manual.pages))
    yield from (f"the constant {name} is on no page" for name in header.constants
                if not re.search(rf"\b{name}\b", everything))


def signs(text):
    """Returns a declaration without its line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"\s*([(),;*\[\]{}])\s*", r" \1 ", text.replace("struct tandem_", "tandem_"))).strip()


def check_declarations(manual, root):
    there = signs("\n".join(re.sub(r"/\*.*?\*/", "", text, flags=re.S) for text in make.generate.read(root).values()))
    for page in manual.pages:
        synopses = [text_of(block) for section in page.sections for block in section.blocks
                    if isinstance(block, Lines) and block.is_synopsis]
        for declaration in re.findall(r"typedef struct .*?^\} \w+;|[^;]*;", "\n".join(synopses), re.S | re.M):
            declaration = declaration.replace("#include <tandem/tandem.h>", "")
            if "_INIT" not in declaration and signs(declaration) not in there:
                yield f"{page.file} declares what the header does not: {signs(declaration)}"


def check_rules(manual):
    """Checks that the page of each function has the required sections."""
    rules, pages = manual.reference.rules, pages_by_name(manual)
    for function in manual.reference.header.functions:
        page = pages.get(function.name)
        if page is None or is_init(function):
            continue
        wanted = ["THREADS"]
        wanted += ["ERRORS", "RETURN VALUE"] if is_status(function) else []
        wanted += ["STREAM ORDER"] if rules.takes_stream(function) or rules.takes_tensors(function) else []
        yield from (f"{function.name} does not say {RULES[title]}" for title in wanted if not page.section_of(title).strip())
        if not (page.section_of("DESCRIPTION") + page.section_of("RETURN VALUE")).strip() or \
                not manual.reference.notes.comments.get(function.name):
            yield f"{function.name} has no comment in the header"


def check_words(manual):
    """Reports words of comments that their page lacks."""
    reference, pages = manual.reference, pages_by_name(manual)
    about = [(name, comment) for name, comment in reference.notes.comments.items() if name in pages]
    about += [("tandem_" + name.removesuffix(".h"), head.split("\n\n", 2)[-1])
              for name, head in reference.notes.heads.items() if head.count("\n\n") > 1]
    about += [(struct.name, member.comment) for struct in reference.header.structs for member in struct.members]
    for name, comment in about:
        if name in pages:
            there = set(words_of(text_of_page(pages[name]).lower()))
            lost = [word for word in words_of(comment.lower()) if word not in there and "tandem_error_" + word not in there]
            lost = [word for word in lost if word not in ("errors", "threads", "struct")]
            if lost:
                yield f"{name}: the page lacks words of the comment: {' '.join(lost[:8])}"


def check_help_words(manual, root):
    """Reports words of help texts that the program's page lacks. The first line of tandem's own help is its name."""
    for page in manual.pages:
        for name in make.HELP if page.section == 1 else ():
            if name == page.name or (page.name != "tandem" and name.startswith(page.name + "-")):
                text = (root / f"docs/man/help/{name}.txt").read_text().replace("Exit codes", "").replace("usage: ", "")
                there = {word.lower() for word in words_of(text_of_page(page))}
                lost = [word for word in words_of(text) if word.lower() not in there]
                if lost:
                    yield f"{page.file} lacks words of {name} --help: {' '.join(lost[:8])}"


def check_references(manual):
    there = {(name, page.section) for page in manual.pages for name in (page.name, *page.aliases)}
    for page in manual.pages:
        yield from (f"{page.file} refers to {name}({section}), which is no page"
                    for name, section in references_of(page) if (name, section) not in there)


def check_html(files):
    for path, text in files.items():
        if not path.endswith(".html"):
            continue
        parser = WellFormed()
        parser.feed(text)
        yield from (f"{path}: {fault}" for fault in [*parser.faults, *(f"<{tag}> is not closed" for tag in parser.open)])
        yield from (f"{path}: the link {link} leads nowhere" for link in parser.links if "html/" + link not in files)


def check_roff(files, folder):
    """Reports the warnings of mandoc and groff about the pages, and prints which of the two is not installed."""
    pages = [path for path, text in files.items() if path.startswith("man") and isinstance(text, str)]
    for path in pages:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(files[path])
    for command in (["mandoc", "-T", "lint", "-W", "style"], ["groff", "-man", "-Tutf8", "-ww", "-z"]):
        if shutil.which(command[0]) is None:
            print(f"      {command[0]} is not installed: the pages are not checked by it")
            continue
        for path in pages:
            done = subprocess.run([*command, path], cwd=folder, capture_output=True, text=True)
            yield from (f"{command[0]}: {line}" for line in (done.stdout + done.stderr).splitlines())


def check_programs(root, compiler, folder):
    for page in sorted((root / "docs/man").glob("*.md")):
        if any(len(line) > 68 for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.M | re.S)
               for line in block.splitlines()):
            yield f"docs/man/{page.name}: a line of code has more than 68 characters"
        for i, block in enumerate(re.findall(r"^```c\n(.*?)^```$", page.read_text(), re.M | re.S)):
            if "int main(" not in block:
                continue  # an excerpt: docs_commands_test compiles it
            source = folder / f"{page.stem}{i}.c"
            source.write_text(block)
            done = subprocess.run([compiler, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                                   f"-I{root / 'include'}", str(source)], capture_output=True, text=True)
            if done.returncode:
                yield f"docs/man/{page.name}: a program does not compile: {done.stderr.strip()[:300]}"


def comparable(text, absent):
    """Returns a help text without the parts that depend on the build: columns, the list of instruction sets, absent commands."""
    text = re.sub(r"--isa [\w|]+\s+", "--isa NAME ", re.sub(r"[ \t]+", " ", text))
    return [line for line in text.splitlines() if line.split(" ")[1:2] not in absent]


def check_help(root, folder):
    for name, (program, *_) in make.HELP.items():
        if not (folder / program).exists():
            print(f"      {program} is not built: its help text is not checked")
            continue
        printed = make.help_of(folder, name)
        absent = [[command] for command in re.findall(r"^ +(\w+) +\(not part of this installation\)", printed, re.M)]
        if comparable(printed, absent) != comparable((root / f"docs/man/help/{name}.txt").read_text(), absent):
            yield f"docs/man/help/{name}.txt is not what the program prints: run tools/man/make.py --write-help {folder}"


def check(root):
    """Runs the checks of names and words, which the mistakes below concern."""
    manual = make.manual_of(root, make.PROGRAMS)
    return [*check_names(manual), *check_declarations(manual, root), *check_rules(manual), *check_words(manual),
            *check_help_words(manual, root), *check_references(manual)]


END = "/* Closes the step "  # text before which a copy's header gets the addition
FUNCTION = "/* Does. */\nTANDEM_API int32_t tandem_session_more(tandem_session *session, tandem_error **error);\n\n"
MISTAKES = [  # file, text, replacement, expected error
    ("include/tandem/tandem.h", END, FUNCTION + END, "tandem_session_more has no line in docs/man/names.txt"),
    ("include/tandem/tandem.h", END, FUNCTION.replace("/* Does. */\n", "") + END, "tandem_session_more has no comment"),
    ("include/tandem/tandem.h", END, "typedef struct tandem_thing tandem_thing;\n"
     "/* Does. */\nTANDEM_API int32_t tandem_thing_do(tandem_thing *thing, tandem_error **error);\n\n" + END,
     "tandem_thing_do does not say which threads"),
    ("include/tandem/tandem.h", END, "#define TANDEM_MORE 1\n\n" + END, "the constant TANDEM_MORE is on no page"),
    ("include/tandem/tandem.h", "Session: one thread at a time. ", "", "tandem_attend does not say which threads"),
    ("include/tandem/tandem.h", "Functions without any of these:", "Others:",
     "tandem_version does not say which threads"),
    ("include/tandem/tandem.h", "Functions without it take", "Others take",
     "tandem_sequence_read does not say in what order"),
    ("include/tandem/tandem.h", "`stream` is a CUDA", "A stream is a CUDA", "tandem_merge does not say in what order"),
    ("include/tandem/tandem.h", " *   Errors    A function", " *   A function", "has no row Errors"),
    ("include/tandem/tandem.h", "/* as tandem_engine_release() */", "", "tandem_model_release has no comment"),
    ("docs/man/names.txt", "tandem_attend: ", "tandem_attends: ", "docs/man/names.txt: tandem_attends is no page"),
    ("docs/man/tandem.md", "(tandem-errors.md)", "(tandem-error.md)", "refers to tandem-error(7), which is no page"),
]


def check_the_checker():
    """Yields the mistakes that the checker does not find."""
    for path, old, new, wanted in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("include", "docs/man"):
                shutil.copytree(ROOT / name, root / name)
            text = (root / path).read_text()
            if old not in text:
                yield f"a mistake cannot be made: {path} does not have {old!r}"
                continue
            (root / path).write_text(text.replace(old, new))
            try:
                found = check(root)
            except SystemExit as stop:
                found = [str(stop)]
            if not any(wanted in line for line in found):
                yield f"the checker does not find: {wanted} (it finds {found[:3]})"


def check_the_help_checker(folder):
    """Checks help texts with a wrong word. None may pass."""
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "docs/man/help", pathlib.Path(work) / "docs/man/help")
        for path in (pathlib.Path(work) / "docs/man/help").iterdir():
            path.write_text(path.read_text().replace("--help", "--halp"))
        n_built = sum((folder / program).exists() for program, *_ in make.HELP.values())
        if len(list(check_help(pathlib.Path(work), folder))) != n_built:
            yield "the checker does not find a wrong help text"


def main():
    compiler, folder = sys.argv[2], pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    manual = make.manual_of(ROOT, make.PROGRAMS)
    files = make.files_of(manual, "2026-01-01")
    findings = [*check_the_checker(), *check(ROOT), *check_html(files)]
    with tempfile.TemporaryDirectory() as work:
        findings += [*check_roff(files, pathlib.Path(work)), *check_programs(ROOT, compiler, pathlib.Path(work))]
    findings += [*check_help(ROOT, folder), *check_the_help_checker(folder)] if folder else []
    for finding in findings:
        print(f"FAIL  {finding}")
    if not findings:
        print(f"ok    {len(manual.pages)} pages")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
