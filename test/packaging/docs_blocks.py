# SPDX-License-Identifier: MIT
"""Reads the pages of the documentation for docs_commands_test.py: fenced blocks, commands, and the table of those not run as they are."""
import dataclasses
import pathlib
import re
import shlex

LANGUAGES = ("sh", "c", "cpp", "python", "json", "rust", "go", "text")
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
PROGRAMS = r"tandem(-\w+)?|python3?|pip|cargo|go|cmake|cpack|ctest|cc|sudo|compute-sanitizer|llama-bench|\./dev|(build|bench|test|tools)/\S+"
COMMAND = re.compile(rf"(?:[A-Z_]+=(?:'[^']*'|\S*) )*(?:{PROGRAMS})( .*)?")
SCRIPT = re.compile(r"^(for |\w+=\S* *(#.*)?$|\w+=[\"'])", re.M)  # lines that only work together
REASONS = ("gpu", "minutes", "network", "root", "build", "other software", "excerpt", "no command")


@dataclasses.dataclass
class Block:
    page: str
    line: int
    language: str
    text: str
    number: int  # the how manieth of its language on the page, from 1

    def __str__(self):
        return f"{self.page}:{self.line}"


@dataclasses.dataclass
class Command:
    page: str
    line: int
    text: str
    is_inline: bool

    @property
    def is_run(self):
        """Commands in a line of prose are run when the table says so, or when they have an argument and nothing is left out."""
        return not self.is_inline or (len(self.words()) > 2 and not re.search(r"…|\.\.\.|\[", self.text))

    def words(self):
        words = [word for word in self.text.split() if not re.match(r"[A-Z_]+=", word)]
        begins = (["python", "-m"], ["python3", "-m"], ["tandem", "patterns"], ["sudo", "cmake"])
        return words[1:] if words[:2] in begins else words

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


@dataclasses.dataclass
class Entry:
    page: str
    pattern: str
    what: str  # run, left or file
    detail: str
    line: int
    n_uses: int = 0

    def matches(self, page, text):
        pattern = ".*".join(re.escape(part) for part in self.pattern.split("*"))
        return self.page in ("*", page) and re.fullmatch(pattern, text, re.S) is not None

    def changes(self):
        return [tuple(change.split("=>")) for change in shlex.split(self.detail)]


def pages_of(root):
    names = ["README.md", "CONTRIBUTING.md", "lib/routes/README.md"]
    for pattern in ("docs/*.md", "docs/man/*.md", "bindings/*/README.md"):
        names += sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
    return [name for name in names if (root / name).exists()]


def blocks_of(page, text):
    n_seen = {}
    for found in FENCE.finditer(text):
        language = found[1]
        n_seen[language] = n_seen.get(language, 0) + 1
        yield Block(page, text[:found.start()].count("\n") + 2, language, found[2], n_seen[language])


def prose_of(text):
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def without_comment(line):
    return re.sub(r"(^|\s+)# .*", "", line)


def commands_of(page, text):
    """Commands of the blocks of shell, one for each line or, where lines need each other, one for a block; and those in prose."""
    for block in blocks_of(page, text):
        if block.language == "sh" and SCRIPT.search(block.text):
            yield Command(page, block.line, block.text, False)
        elif block.language == "sh":
            joined = block.text.replace("\\\n", "\0")
            for i, line in enumerate(joined.split("\n")):
                n_before = "\n".join(joined.split("\n")[:i]).count("\0") + i
                if command := " ".join(without_comment(line.replace("\0", " ")).split()):
                    yield Command(page, block.line + n_before, command, False)
    for number, line in enumerate(prose_of(text).split("\n"), 1):
        for quoted in re.findall(r"`([^`\n]+)`", line):
            if COMMAND.fullmatch(quoted) and len(quoted.split()) > 1:
                yield Command(page, number, quoted, True)


def unfenced(page, text):
    """Indented lines that are commands or code: these belong in a fence."""
    lines = prose_of(text).split("\n")
    for number, line in enumerate(lines, 1):
        code = line.removeprefix("    ")
        if code != line and not code.startswith(" ") and (COMMAND.fullmatch(code) or code.rstrip().endswith((";", "{"))):
            yield f"{page}:{number}: code or a command outside of a fence: {code}"


def table_of(path):
    entries = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split(" | ")] if line.count(" | ") >= 2 else []
            if len(fields) not in (3, 4) or fields[2] not in ("run", "left", "file"):
                raise SystemExit(f"{path}:{number}: not \"page | command | run, left or file | detail\"")
            entries.append(Entry(*fields[:3], fields[3] if len(fields) == 4 else "", number))
    return entries


def entry_for(entries, page, text):
    """The first entry of the table that is meant, or None."""
    for entry in entries:
        if entry.matches(page, text):
            entry.n_uses += 1
            return entry
    return None
