# SPDX-License-Identifier: MIT
"""Reads from the help texts of the programs (docs/man/help) what can be completed: commands, the words after them, flags
and their values."""
import dataclasses
import re

FLAG = re.compile(r"  (?P<name>--[\w-]+)(?: (?P<value>[^\s-]\S*))?(?:  +(?P<text>\S.*))?$")
COMMAND = re.compile(r"  (?P<name>[a-z]+)  +(?P<text>\S.*)$")
FILES = {"FILE", "OUT"}
FOLDERS = {"DIR"}


@dataclasses.dataclass
class Flag:
    name: str
    value: str  # as in the help text; empty: a switch
    text: str

    @property
    def is_list(self):
        return self.value.endswith("[,...]")

    @property
    def words(self):
        """Returns the values of a flag if the help text names them."""
        value = self.value.removesuffix("[,...]")
        return value.split("|") if "|" in value else []

    @property
    def takes_file(self):
        return self.value in FILES

    @property
    def takes_folder(self):
        return self.value in FOLDERS


@dataclasses.dataclass
class Scope:
    """The first words of a command line: "info", or "patterns profile"."""
    name: str
    flags: list
    words: dict  # possible first words with their descriptions: the modes of bench, the parts of patterns
    takes_file: bool = False  # a file comes before the flags

    @property
    def key(self):
        return self.name.replace(" ", "_")


def flags_of(text):
    flags = []
    for line in text.splitlines():
        found = FLAG.match(line)
        if found:
            flags.append(Flag(found["name"], found["value"] or "", found["text"] or ""))
        elif flags and re.match(r" {9,}\S", line):
            flags[-1].text = (flags[-1].text + " " + line.strip()).strip()
        elif not line.strip() and flags:
            break  # the rest is not about flags
    return flags


def usage_words(text, command):
    """Returns the words after the command's name in its usage lines, such as "decode|append [flags]" or "show FILE [flags]".
    Each of them maps to the word after it."""
    words = {}
    for line in text.splitlines():
        found = re.match(rf"tandem {command} ([a-z|]+)(?: (\S+))?", line)
        if found:
            words |= {word: found[2] or "" for word in found[1].split("|")}
    return words


def described(words, text):
    """Adds to each word its text in the help: "  decode   one new token ...", or "show: which keys ..."."""
    said = {}
    for word in words:
        found = re.search(rf"^ *{word}(?:  +|: )(\S.*)$", text, re.M)
        said[word] = re.split(r"[.;:(]", found[1])[0].strip() if found else ""
    return said


def scopes_of(texts):
    """Returns all scopes. texts: help texts by the program's name, such as "tandem-patterns-profile"."""
    scopes = []
    for name, text in texts.items():
        command = name.removeprefix("tandem").removeprefix("-").replace("-", " ")
        if not command:
            continue
        words = usage_words(text, command)
        flags = flags_of(text)
        parts = {word for word in words if f"{name}-{word}" in texts or f"Flags of {word}:" in text}
        if " " in command:  # a part of a command that came earlier
            scopes.append(Scope(command, flags, {}, "FILE" in usage_of(text)))
        elif parts:
            standard = [flag for flag in flags if flag.name in ("--help", "--version")]
            scopes.append(Scope(command, standard, described(words, text)))
            scopes += [Scope(f"{command} {part}", flags, {}, words[part].strip("[]") == "FILE")
                       for part in words if f"Flags of {part}:" in text]
        else:
            scopes.append(Scope(command, flags, described(words, text)))
    for scope in scopes:
        for flag in list(scope.flags):
            found = re.search(r"what tandem (\w+) prints, with its flags", flag.text)
            others = next((other.flags for other in scopes if found and other.name == found[1]), [])
            scope.flags += [other for other in others if other.name not in {known.name for known in scope.flags}]
    return scopes


def usage_of(text):
    return text.split("\n\n")[0]


def commands_of(front):
    """Returns the commands of tandem with their descriptions."""
    return {found["name"]: found["text"] for found in map(COMMAND.match, front.split("\n\n")[2].splitlines()) if found}
