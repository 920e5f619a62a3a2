# SPDX-License-Identifier: MIT
"""Section 1: reads the --help output of a program from docs/man/help.

The first lines are the usage. Then come paragraphs. Indented lines are commands or flags with descriptions, or
examples, which begin with the program's name. "Flags of x:" is a heading.
"""
import re

from document import Code, Heading, Page, Paragraph, Section, Span, Terms

ENTRY = re.compile(r"  (?P<term>\S.*?)(?:  +(?P<text>\S.*))?$")
EXIT = "Exit codes: "


def usage_of(lines):
    """Removes the usage lines from the front and returns them, each with the description of that call if there is one."""
    taken = []
    while lines and re.match(r"(usage: )?tandem \w*\b(?!:)", lines[0]):
        line = re.split(r"  +", lines.pop(0).removeprefix("usage: "))
        words = line[0].split()
        n_names = 2 if len(words) > 1 and words[1].isalpha() and words[1].islower() else 1
        call = (Span(" ".join(words[:n_names]), "bold"), Span(" " + " ".join(words[n_names:])))
        taken.append((call, tuple(Paragraph(spans_of(does)) for does in line[1:])))
    return taken


def spans_of(text):
    """Returns running text with bold flags."""
    parts = re.split(r"(?<![\w-])(--[a-z][\w-]*)", text)
    return tuple(Span(part, "bold" if part.startswith("--") else "") for part in parts if part)


def entries(lines):
    """Returns terms of flags or commands. Lines with a deeper indent continue the term before."""
    items = []
    for line in lines:
        found = ENTRY.match(line)
        if len(line) - len(line.lstrip()) > 8:
            items[-1][1].append(line.strip())
        else:
            items.append((found["term"], [found["text"]] if found["text"] else []))
    return Terms(tuple((flag_spans(term), (Paragraph(spans_of(" ".join(words))),) if words else ())
                       for term, words in items))


def flag_spans(term):
    name, _, value = term.partition(" ")
    return (Span(name, "bold"), Span(" "), Span(value, "italic")) if value else (Span(name, "bold"),)


def paragraphs(lines):
    """Returns running text as paragraphs. A line that begins with "word: " after the end of a sentence starts a paragraph."""
    made = [[lines[0]]]
    for line in lines[1:]:
        if re.match(r"\w+: ", line) and made[-1][-1].endswith("."):
            made.append([line])
        else:
            made[-1].append(line)
    return [Paragraph(spans_of(" ".join(part))) for part in made]


class Help:
    """Sections of one help text."""

    def __init__(self, text):
        lines = text.splitlines()
        first = re.fullmatch(r"tandem: (.*)", lines[0])
        self.summary = first[1] if first else ""
        del lines[:1 if first else 0]
        while lines and not lines[0].strip():
            del lines[0]
        self.usage = usage_of(lines)
        self.description, self.options, self.examples, self.exit_status = [], [], [], ""
        for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
            if part.strip():
                self.add(part.splitlines())

    def add(self, lines):
        if lines[0].startswith(EXIT):
            self.exit_status = " ".join(lines).removeprefix(EXIT)
        elif lines[0].startswith("  --"):
            self.options.append(entries(lines))
        elif re.match(r"  tandem (?!help|--)", lines[0]):
            self.examples += [line.strip() for line in lines]
        elif lines[0].startswith("  "):
            self.description.append(entries(lines))
        elif lines[0].endswith(":") and len(lines) == 1:
            self.options.append(Heading(lines[0].removesuffix(":")))
        elif self.options:
            self.options += paragraphs(lines)
        else:
            self.description += paragraphs(lines)


def summaries_of(front):
    """Returns the front program's description of each command, from its help text's first list."""
    return dict(re.findall(r"^  (\w+) +(\S.*)$", front.split("\n\n")[2], re.M))


def status_items(text):
    return Terms(tuple(((Span(code, "bold"),), (Paragraph((Span(words[:1].upper() + words[1:] + "."),)),))
                       for code, words in re.findall(r"(\d+): (.*?)(?:; |\.$)", text)), is_compact=True)


def same_program(name, command):
    if not command:
        return Paragraph((Span("tandem", "bold"), Span(" COMMAND runs the program "), Span("tandem-", "bold"),
                          Span("COMMAND, which is in the folder of "), Span("tandem", "bold"), Span(" itself:")))
    return Paragraph((Span(f"tandem {command}", "bold"), Span(" and "), Span(name, "bold"), Span(" are one program.")))


def page(name, texts, programs):
    """Makes a page. texts: by the file's name, such as "tandem-info", "tandem-patterns-profile"; programs: those with pages."""
    front = Help(texts["tandem"])
    own = Help(texts[name])
    command = name.removeprefix("tandem").removeprefix("-")
    summary = summaries_of(texts["tandem"])[command] if command else front.summary
    parts = [(other.removeprefix(name + "-"), Help(text)) for other, text in texts.items()
             if command and other.startswith(name + "-")]
    usage = [*own.usage, *(line for _, part in parts for line in part.usage if line not in own.usage)]
    sections = [Section("SYNOPSIS", [Terms(tuple(usage), is_compact=True)]),
                Section("DESCRIPTION", [same_program(name, command), *own.description])]
    sections.append(Section("OPTIONS", own.options))
    for title, part in parts:
        sections.append(Section(title.upper(), [*part.description, Heading("Flags"), *part.options]))
    examples = own.examples + [line for _, part in parts for line in part.examples]
    sections += [Section("EXAMPLES", [Code("\n".join(examples))])] if examples else []
    sections.append(Section("EXIT STATUS", [status_items(front.exit_status)]))
    others = [(other, 1) for other in programs if other != name] + [("tandem", 7)]
    spans = [span for other, section in others for span in (Span(other, "page", section), Span(", "))]
    sections.append(Section("SEE ALSO", [Paragraph(tuple(spans[:-1]))]))
    return Page(name, 1, summary, [one for one in sections if one.blocks])
