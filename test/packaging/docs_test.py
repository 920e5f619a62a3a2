#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the pages of the documentation:

  - relative links lead to files, and their anchors to headings;
  - paths in backticks exist: a path with a slash relative to the page, the source folder or include/, a file name anywhere;
    build/test/NAME has a source in test/, and build/bench/NAME in bench/;
  - README.md stays short, as do its programs, and the programs that pages show are the files that other tests run;
  - the parts of a program that docs/tutorial.md shows occur in the program that the heading above them names;
  - the pictures equal the output of their script.

First the checker gets a page with one mistake of each kind and must find all of them.

docs_test.py SOURCE_DIR          all of these checks
docs_test.py --links FOLDER      only the links of the installed pages in a folder
"""
import fnmatch
import pathlib
import re
import subprocess
import sys
import tempfile

SUFFIXES = "c cc cpp h hpp cu cuh in map md py rs sh go svg cmake".split()
BUILT = re.compile(r"build/(test|bench)/")
MOST_LINES, MOST_C_LINES, MOST_PYTHON_LINES = 200, 30, 8
SPDX = "# SPDX-License-Identifier: MIT\n"
SHOWN = [("README.md", "c", "examples/smallest.c"), ("README.md", "python", "examples/smallest.py"),
         ("docs/attend-step-by-step.md", "c", "examples/decode.c"),
         ("docs/attend-tensors.md", "c", "examples/attend_tensors.c")]  # page, language, file of the page's first such block


def without_fences(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def first_block(text, language):
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return found.group(1) if found else ""


def anchors(text):
    """Returns the anchors that GitHub gives the headings of a page."""
    names, found = {}, set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_fences(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        n_before = names.get(name, 0)
        names[name] = n_before + 1
        found.add(f"{name}-{n_before}" if n_before else name)
    return found


class Tree:
    def __init__(self, root):
        self.root = root
        self.files = [path for path in root.rglob("*") if path.is_file() and not self.is_left_out(path.relative_to(root))]
        self.names = {path.name for path in self.files}
        self.paths = {path.relative_to(root).as_posix() for path in self.files}

    @staticmethod
    def is_left_out(path):
        return path.parts[0].startswith(("build", ".git")) or "target" in path.parts or "__pycache__" in path.parts

    def pages(self):
        return sorted(self.root / path for path in self.paths if path.endswith(".md") and
                      (path == "README.md" or path.startswith(("docs/", "bindings/", "lib/"))))

    def has(self, word, page):
        """Returns whether a word that looks like a path of the tree is one."""
        if built := BUILT.match(word):
            return any(fnmatch.fnmatch(path, f"{built.group(1)}/**/{word[built.end():]}.*") for path in self.paths)
        if "/" not in word:
            return any(fnmatch.fnmatch(name, word) for name in self.names)
        for folder in (page.parent, self.root, self.root / "include"):
            if (folder / word).exists() or any(folder.glob(word)):
                return True
        return False


def looks_like_a_path(word):
    if re.search(r"[<>$…{}()=:,\"']", word) or word.startswith(("/", "-")):
        return False
    if BUILT.match(word):
        return True
    return re.fullmatch(rf"[\w.*+/-]+\.({'|'.join(SUFFIXES)})", word) is not None


def check_links(tree, page, text):
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)
    for target in targets:
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"the link {target} names no heading"


def check_paths(tree, page, text):
    for quoted in re.findall(r"`([^`\n]+)`", text):
        for word in quoted.split():
            if looks_like_a_path(word) and not tree.has(word, page):
                yield f"`{word}` is no file of the tree"


def check_readme(text):
    for what, n_lines, most in (("the page", len(text.splitlines()), MOST_LINES),
                                ("the program in C", len(first_block(text, "c").splitlines()), MOST_C_LINES),
                                ("the program in Python", len(first_block(text, "python").splitlines()), MOST_PYTHON_LINES)):
        if n_lines > most:
            yield f"{what} has {n_lines} lines, {most} are allowed"


def check_shown(tree):
    for page, language, file in SHOWN:
        text, program = (tree.root / page).read_text(), (tree.root / file).read_text()
        if first_block(text, language) != program.removeprefix(SPDX):
            yield f"{page}: its first program in {language} is not {file}"


def lines_of(text):
    return "\n".join(line.strip() for line in text.strip().split("\n"))


def check_excerpts(tree):
    page = tree.root / "docs/tutorial.md"
    for section in re.split(r"^## ", page.read_text(), flags=re.M)[1:] if page.exists() else []:
        program = re.search(r"`([\w/]+\.c)`", section.split("\n")[0])
        for block in re.findall(r"^```c\n(.*?)^```$", section, re.M | re.S):
            if not program or lines_of(block) not in lines_of((tree.root / program.group(1)).read_text()):
                yield f"docs/tutorial.md: {block.strip().splitlines()[0]!r} begins no part of a program of its section"


def check(root):
    tree, findings = Tree(root), []
    for page in tree.pages():
        whole = page.read_text()
        text = without_fences(whole)
        found = [*check_links(tree, page, text), *check_paths(tree, page, text)]
        found += check_readme(whole) if page == root / "README.md" else []
        findings += [f"{page.relative_to(root)}: {finding}" for finding in found]
    return findings + [*check_shown(tree), *check_excerpts(tree)]


MISTAKES = ["the link docs/gone.md leads nowhere", "the link docs/page.md#gone names no heading",
            "the link #gone names no heading", "the link docs/gone.svg leads nowhere", "`lib/gone.cc` is no file of the tree",
            "`gone.h` is no file of the tree", "`build/test/gone_test` is no file of the tree",
            "`build/bench/here_test` is no file of the tree",
            f"the page has {MOST_LINES + 1} lines", f"the program in C has {MOST_C_LINES + 1} lines",
            "the program in Python has 9 lines", "its first program in c is not examples/smallest.c",
            "'attend(c);' begins no part of a program of its section"]


def check_the_checker():
    """Lists the mistakes of a bad page that the checker does not find, and its reports about a good page."""
    good = ("# A page\n[a](docs/page.md#an-api-page) [b](#a-page) [c](https://gone.org/x.md) `lib/here.cc` `here.cc --x gone`\n"
            "`build/test/here_test` `build/bench/here_bench` `here*.cc` `<name>.cc`\n```\n[d](gone.md) `gone.h`\n```\n")
    bad = ("# A page\n[a](docs/gone.md) [b](docs/page.md#gone) [c](#gone) <img src=\"docs/gone.svg\"> `lib/gone.cc 3` `gone.h`\n"
           "`build/test/gone_test` `build/bench/here_test`\n```c\n" + "x\n" * 31 + "```\n```python\n" + "x\n" * 9 + "```\n")
    bad += "x\n" * (MOST_LINES + 1 - len(bad.splitlines()))
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        files = {"docs/page.md": "# An `API` page\n", "docs/attend-step-by-step.md": "", "docs/attend-tensors.md": "", "lib/here.cc": "", "README.md": good,
                 "test/lib/here_test.cc": "", "bench/cpu/here_bench.cc": "", "examples/smallest.c": "", "examples/smallest.py": SPDX, "examples/decode.c": "",
                 "examples/attend_tensors.c": "", "examples/tutorial/a.c": "{\n  attend(a);\n  attend(b);\n}\n",
                 "docs/tutorial.md": "# T\n## A: `examples/tutorial/a.c`\n```c\nattend(a);\nattend(b);\n```\n"}
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        wrong += [f"the checker refuses what is right: {finding}" for finding in check(root)]
        (root / "README.md").write_text(bad)
        (root / "docs/tutorial.md").write_text("# T\n## A: `examples/tutorial/a.c`\n```c\nattend(c);\n```\n")
        found = check(root)
        wrong += [f"the checker does not find: {mistake}" for mistake in MISTAKES if not any(mistake in line for line in found)]
    return wrong


def links_of(folder):
    tree = Tree(folder)
    return [f"{page.relative_to(folder)}: {finding}" for page in sorted(folder.rglob("*.md"))
            for finding in check_links(tree, page, without_fences(page.read_text()))]


def main():
    if sys.argv[1] == "--links":
        findings = links_of(pathlib.Path(sys.argv[2]).resolve())
        print("\n".join(findings) or "ok")
        return findings != []
    root = pathlib.Path(sys.argv[1]).resolve()
    findings = check_the_checker() + check(root)
    drawn = subprocess.run([sys.executable, str(root / "docs/pictures/draw_tandem.py"), "--check"], capture_output=True, text=True)
    if drawn.returncode != 0:
        findings.append(f"docs/pictures: {drawn.stdout}{drawn.stderr}".strip())
    for finding in findings:
        print(f"FAIL  {finding}")
    if not findings:
        print(f"ok    {len(Tree(root).pages())} pages")
    return findings != []


if __name__ == "__main__":
    sys.exit(main())
