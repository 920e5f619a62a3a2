# SPDX-License-Identifier: MIT
"""Finds out what a command of a page calls, without running it, and whether the flags, files and names in it are there."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

# A shell with an empty PATH expands the line and writes what it would have called, a line for each call.
SHELL = r"""
command_not_found_handle() { { printf '%s\037' "$@"; printf '\n'; } >>"$CALLS"; }
head() { :; }
tail() { :; }
"""
SLASH = "\N{DIVISION SLASH}"  # a name with a slash would not reach the function above
PATHS = re.compile(r"(?<![^\s(;&|])(?:\./|build/|bench/|test/|tools/)[^\s;&|)]+")
FLAG = re.compile(r"--[a-z][\w-]*")
OTHERS = {"ldconfig", "head", "tail", "a.out", "pkg-config", "llama-bench"}  # not of this project


def calls_of(text):
    """The calls that a shell makes of a line or a script: lists of words. Also what the shell has to say against it."""
    text = PATHS.sub(lambda found: found[0].replace("/", SLASH), text)
    with tempfile.TemporaryDirectory() as folder:
        calls = pathlib.Path(folder, "calls")
        calls.touch()
        done = subprocess.run([shutil.which("bash"), "--norc", "-c", SHELL + text], cwd=folder, capture_output=True, text=True,
                              env={"PATH": f"{folder}/empty", "CALLS": str(calls), "LC_ALL": "C.UTF-8"})
        lines = calls.read_text().split("\x1f\n")[:-1]
    return [[word.replace(SLASH, "/") for word in line.split("\x1f")] for line in lines], done.stderr.strip()


def flags_in(words):
    return [word.split("=")[0] for word in words if FLAG.match(word)]


def files_of(root):
    """The files of the source tree, without build folders, which other tests write to."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith((".git", "build")) and name not in ("target", "__pycache__")]
        yield from (pathlib.Path(folder, name) for name in names if not os.path.islink(os.path.join(folder, name)))


class Arguments:
    def __init__(self, root):
        self.root = root
        self.files = sorted(files_of(root))
        self.cmake = "\n".join(path.read_text() for path in self.files
                               if path.name == "CMakeLists.txt" or path.suffix == ".cmake")
        self.helps = {path.stem: path.read_text() for path in root.glob("docs/man/help/*.txt")}

    def has_word(self, word, text=None):
        return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", self.cmake if text is None else text) is not None

    def missing_flags(self, words, text, what):
        yield from (f"{what} has no flag {flag}" for flag in flags_in(words) if not self.has_word(flag, text))

    def check(self, words):
        """What is wrong with a call."""
        name, rest = words[0], words[1:]
        while rest and (name == "sudo" or name == "compute-sanitizer"):
            while rest and name == "compute-sanitizer" and not rest[0].startswith("build/"):
                rest = rest[1:]
            if not rest:
                return [f"{name} is given no program"]
            name, rest = rest[0], rest[1:]
        if name.startswith("./"):
            name = name[2:]
        if name in OTHERS:
            return []
        if name.startswith(("build/", "bench/", "test/", "tools/")):
            return list(self.check_path(name, rest))
        kind = "tandem" if name.startswith("tandem") else name.rstrip("3")
        rule = getattr(self, f"check_{kind}", None)
        return list(rule(name, rest)) if rule else [f"docs_arguments.py knows no {name}"]

    def check_tandem(self, name, rest):
        if name == "tandem":
            if rest[:1] == ["help"] or not rest:
                return
            name, rest = f"tandem-{rest[0]}", rest[1:]
        if name == "tandem-COMMAND":
            return
        if f"{name}" not in self.helps:
            yield f"there is no program {name}"
            return
        if name == "tandem-patterns" and rest[:1] == ["search"]:
            yield from self.check_module("tandem.patterns", rest)
            return
        text = self.helps[name]
        if name == "tandem-patterns" and rest[:1] == ["profile"]:
            name, text = "tandem patterns profile", self.helps["tandem-patterns-profile"]
        if name == "tandem-info" and "--plan" in rest:
            text += self.helps["tandem-plan"]
        yield from self.missing_flags(rest, text, name)
        for flag, value in zip(rest, rest[1:]):
            choice = re.search(rf"^ *{re.escape(flag)} ([\w+-]+(?:\|[\w+-]+)+)(\[,\.\.\.\])?", text, re.M)
            given = value.split(",") if choice and choice[2] else value.split("|")
            if choice and flag != "--isa" and value.isascii() and value.islower():
                yield from (f"{name} {flag} has no value {one}" for one in given if one not in choice[1].split("|"))

    def check_module(self, module, rest):
        folder = self.root / "bindings/python" / module.replace(".", "/")
        files = [folder.with_suffix(".py")] if folder.with_suffix(".py").exists() else sorted(folder.glob("*.py"))
        if not files:
            yield f"there is no module {module}"
            return
        quoted = set(re.findall(r"\"(--[a-z][\w-]*)\"", "".join(file.read_text() for file in files)))
        yield from (f"{module} has no flag {flag}" for flag in flags_in(rest) if flag not in quoted)

    def check_python(self, _, rest):
        rest = [word for word in rest if word != "-P"]
        if rest[:1] == ["-m"]:
            yield from self.check_module(rest[1], rest[2:])
        else:
            yield from self.check_path(rest[0], rest[1:])

    def check_path(self, path, rest):
        built = re.fullmatch(r"build/(test|bench)/(\w+)", path)
        if built:
            named = any(file.stem == built[2] and built[1] in file.relative_to(self.root).parts for file in self.files)
            if not named and not self.has_word(built[2]):
                yield f"{path} has no source"
        elif path.startswith("build/"):
            return
        elif not (self.root / path).is_file():
            yield f"there is no {path}"
        elif path.endswith(".py"):
            beside = "".join(file.read_text() for file in (self.root / path).parent.glob("*.py"))
            quoted = set(re.findall(r"\"(--[a-z][\w-]*)\"", beside))
            yield from (f"{path} has no flag {flag}" for flag in flags_in(rest)
                        if flag not in quoted and not any(word.startswith("build/bin/") for word in rest))

    def check_dev(self, _, rest):
        usage = (self.root / "dev").read_text()
        end = rest.index("--") if "--" in rest else len(rest)
        if rest[end + 1:]:
            yield from self.check_ctest("ctest", rest[end + 1:])
        if rest[0] in ("demo", "bench"):
            yield from self.missing_flags(rest, self.helps[f"tandem-{rest[0]}"], f"./dev {rest[0]}")
            return
        line = re.search(rf"^\./dev {re.escape(rest[0])}\b.*", usage, re.M)
        if not line:
            yield f"./dev has no command {rest[0]}"
        for word in rest[1:end] if line else []:
            lines = "\n".join(re.findall(rf"^\./dev {re.escape(rest[0])}\b.*", usage, re.M))
            if not self.has_word(word, lines) and word not in [preset["name"] for preset in self.presets()]:
                yield f"./dev {rest[0]} takes no {word}"

    def presets(self):
        return json.loads((self.root / "CMakePresets.json").read_text())["configurePresets"]

    def check_cmake(self, _, rest):
        for flag, value in zip(rest, [*rest[1:], ""]):
            if flag == "--preset" and value not in [preset["name"] for preset in self.presets()]:
                yield f"there is no preset {value}"
            if flag == "--target" and not self.has_word(value):
                yield f"CMake has no target {value}"
            if (option := re.match(r"-D(\w+)=", flag)) and not self.has_word(option[1]):
                yield f"CMake has no option {option[1]}"

    def check_cpack(self, _, rest):
        if rest[:1] == ["-G"] and rest[1] != "DEB":
            yield f"the packages are made by -G DEB, not {rest[1]}"

    def check_ctest(self, _, rest):
        for flag, value in zip(rest, rest[1:]):
            if flag == "-R" and not any(re.search(value, name) for name in self.tests()):
                yield f"no test is named {value}"
            if flag == "-L" and value not in ("fast", "package", "full", "device", "smoke"):
                yield f"no test has the label {value}"

    def tests(self):
        text = "\n".join(file.read_text() for file in self.files
                         if file.name == "CMakeLists.txt" and file.relative_to(self.root).parts[0] in ("test", "bench", "examples"))
        return set(re.findall(r"\b[a-z]\w*_(?:test|bench|stand)\b", text)) - {"packaging_test", "tandem_test"}

    def check_cc(self, _, rest):
        names = {file.name for file in self.files}
        yield from (f"there is no {word}" for word in rest if word.endswith(".c") and os.path.basename(word) not in names)

    def check_apt(self, _, rest):
        return []  # files of a release: deb_test installs them

    def check_pip(self, _, rest):
        for word in rest[1:]:
            if not word.startswith("-") and not word.split("[")[0].endswith(".whl") and not (self.root / word.split("[")[0] / "pyproject.toml").exists():
                yield f"there is no Python package in {word}"

    def check_cargo(self, _, rest):
        for flag, value in zip(rest, rest[1:]):
            if flag == "--path" and not (self.root / value.removeprefix("DIR/") / "Cargo.toml").exists():
                yield f"there is no crate in {value}"
            folder = self.root / "bindings/rust/tandem/examples"
            if flag == "--example" and not (folder / value).exists() and not (folder / f"{value}.rs").exists():
                yield f"no crate has an example {value}"

    def check_go(self, _, rest):
        for word in rest:
            if found := re.match(r"-replace=tandem=DIR/(.*)", word):
                if not (self.root / found[1] / "go.mod").exists():
                    yield f"there is no Go module in {found[1]}"

    def check_variables(self, text):
        """Names of variables that are set before a command and that no file knows."""
        if not hasattr(self, "_all"):
            kinds = (".c", ".cc", ".cu", ".h", ".sh", ".py", ".cmake", ".txt", "")
            self._all = "\n".join(file.read_text(errors="replace") for file in self.files
                                  if file.suffix in kinds and "docs" not in file.name and "docs" not in file.parts)
        for name in re.findall(r"\b(TANDEM_\w+)=", text):
            if not self.has_word(name, self._all):
                yield f"no file knows {name}"

    def check_text(self, text):
        """What is wrong with a command or a script of a page."""
        calls, said = calls_of(text)
        findings = [f"bash: {said.splitlines()[0]}"] if said else []
        for words in calls:
            findings += self.check(words)
        return findings + list(self.check_variables(text))

    def check_synopsis(self, text):
        """What is wrong in lines that show flags of our programs: text, or lines that go on with flags."""
        name = None
        for line in text.splitlines():
            if found := re.match(r"tandem-(\w+)(?: (\w+)\b)?", line):
                name = f"tandem-{found[1]}"
                if name == "tandem-patterns" and found[2] in ("profile", "search"):
                    name += f"-{found[2]}"
            if name == "tandem-patterns-search":
                yield from self.check_module("tandem.patterns", line.split())
            elif name and name not in self.helps:
                yield f"there is no program {name}"
            elif name:
                yield from self.missing_flags(re.findall(r"--[a-z][\w-]*", line), self.helps[name], name)
