# SPDX-License-Identifier: MIT
"""Reports files over 600 lines, functions over 60 lines (kernels 150), and functions with more than 6 parameters.

limits.py FILE...    Functions of the C ABI may have more parameters. Exits 1 when something is reported.

Not a parser: it blanks comments, strings and preprocessor lines, and classifies every brace by the text before it. That
is enough for formatted code, and needs no installed tools.
"""
import re
import sys

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS = 600, 60, 150, 6
BLANKED = re.compile(r"""//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|^[ \t]*\#(?:\\\n|[^\n])*""",
                     re.S | re.M)
SCOPE = re.compile(r"\b(namespace|class|struct|union|enum)\b|\bextern\s*$|^\s*$")
CONTROL = re.compile(r"\b(if|for|while|switch|catch|return|do|else|try)\b|[=,(]\s*$|\]\s*$|\[[^\]]*\]\s*(\([^()]*\))?[^()]*$")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def parameters(head):
    """Names the function of a head and counts its parameters."""
    match = re.search(r"([\w:~]+|operator\S+)\s*\(", head)
    if not match:
        return None, 0
    depth, commas, text = 0, 0, head[match.end():]
    angle = 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                return match.group(1), commas + 1 if text[:i].strip() not in ("", "void") else 0
            depth -= 1
        elif char == "<":
            angle += 1
        elif char == ">":
            angle -= 1
        elif char == "," and depth == 0 and angle == 0:
            commas += 1
    return match.group(1), 0


def functions(text):
    """Yields (name, first line, lines, parameters) of the function bodies in blanked text."""
    stack, start = [], 0
    for match in re.finditer(r"[{};]", text):
        char, end = match.group(), match.start()
        if char == "{":
            head = text[start:end]
            inside = any(kind != "scope" for kind, *_ in stack)
            call = "(" in head and not CONTROL.search(head.split(") :")[0])
            if not inside and call and not re.search(r"\b(class|namespace|enum)\b", head):
                stack.append(("function", start + len(head) - len(head.lstrip()), head))
            elif not inside and SCOPE.search(head):
                stack.append(("scope", 0, ""))
            else:
                stack.append(("block", 0, ""))
        elif char == "}" and stack:
            kind, begin, head = stack.pop()
            if kind == "function":
                name, count = parameters(head)
                first = text.count("\n", 0, begin) + 1
                yield name, first, text.count("\n", begin, end) + 1, count
        start = match.end()


def check(path):
    with open(path, encoding="utf-8") as file:
        source = file.read()
    n_lines = source.count("\n")
    if n_lines > FILE_LINES:
        yield f"{path}:1: {n_lines} lines (at most {FILE_LINES})"
    most = KERNEL_LINES if "HWY_NAMESPACE" in source else FUNCTION_LINES
    for name, line, lines, count in functions(BLANKED.sub(blank, source)):
        if lines > most:
            yield f"{path}:{line}: {name} has {lines} lines (at most {most})"
        if count > PARAMETERS and not (name or "").startswith("tandem_"):
            yield f"{path}:{line}: {name} has {count} parameters (at most {PARAMETERS})"


def main():
    findings = [finding for path in sys.argv[1:] for finding in check(path)]
    print("\n".join(findings), end="\n" if findings else "")
    return 1 if findings else 0


sys.exit(main())
