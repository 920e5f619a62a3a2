# SPDX-License-Identifier: MIT
"""Section 7: reads the overviews of docs/man, which use a small part of Markdown.

  # tandem-errors: summary       the page's name and its subject
  ## Threads                     a section; ### a part of it
  - text                         a bullet; if it begins with `name`: or **name**: a term
  ```                            code, until the next ```
  `tandem_attend()`              a reference to its page; other words in backticks, **bold** and *italic*
  [tandem-errors](tandem-errors.md)    a reference to another overview
  <!-- rule: Threads -->         a row of the table at the head of tandem.h
  <!-- statuses -->              each status with its comment in the header
"""
import re

from comment_text import sentence
from document import Bullets, Code, Heading, Page, Paragraph, Section, Span, Terms

SPAN = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|(?<!\w)\*(?P<italic>[^*\s][^*]*)\*(?!\w)|"
                  r"\[(?P<text>[^\]]+)\]\((?P<target>[^)]+)\)")
TERM = re.compile(r"(`[^`]+`(?:, `[^`]+`)*|\*\*[^*]+\*\*): (.*)", re.S)
DIRECTIVE = re.compile(r"<!-- (rule): (\S+) -->|<!-- (statuses) -->")


class Markdown:
    """reference: of section 3, whose pages texts may name."""

    def __init__(self, reference):
        self.reference = reference

    def span(self, found, page):
        if found["code"]:
            name = found["code"].removesuffix("()")
            home = self.reference.words.pages.get(name)
            return Span(name, "page", 3) if home else Span(found["code"], "code")
        if found["text"]:
            name = re.fullmatch(r"([\w-]+)\.md", found["target"])
            if name is None:
                raise SystemExit(f"docs/man/{page}.md: the link to {found['target']} is to no overview")
            return Span(name[1], "page", 7)
        return Span(found["bold"], "bold") if found["bold"] else Span(found["italic"], "italic")

    def spans(self, text, page):
        made, at = [], 0
        for found in SPAN.finditer(text):
            made += [Span(text[at:found.start()]), self.span(found, page)]
            at = found.end()
        return tuple(span for span in [*made, Span(text[at:])] if span.text)

    def directive(self, found, page):
        words = self.reference.words
        if found[1] == "rule":
            rule = self.reference.rules.rows.get(found[2])
            if rule is None:
                raise SystemExit(f"docs/man/{page}.md: tandem.h has no row {found[2]} in the table at its head")
            return [words.paragraph(rule)]
        header, notes = self.reference.header, self.reference.notes
        names = ["TANDEM_OK", *("TANDEM_ERROR_" + code for code in self.reference.codes)]
        items = [((Span(name, "bold"), Span(f" {header.constants[name]}")),
                  (words.paragraph(sentence(notes.comments.get(name, "success"))),)) for name in names]
        return [Terms(tuple(items), is_compact=True)]

    def bullets(self, lines, page):
        items = [" ".join(item.split()) for item in re.split(r"^- ", "\n".join(lines), flags=re.M)[1:]]
        terms = [TERM.fullmatch(item) for item in items]
        if all(terms):
            return Terms(tuple((self.spans(term[1], page), (Paragraph(self.spans(term[2], page)),)) for term in terms))
        return Bullets(tuple((Paragraph(self.spans(item, page)),) for item in items))

    def blocks(self, text, page):
        made, lines = [], text.splitlines()
        while lines:
            line = lines.pop(0)
            if not line.strip():
                continue
            if line.startswith("```"):
                end = lines.index("```")
                made.append(Code("\n".join(lines[:end])))
                del lines[:end + 1]
            elif found := DIRECTIVE.fullmatch(line):
                made += self.directive(found, page)
            elif line.startswith("### "):
                made.append(Heading(line[4:]))
            else:
                taken = [line]
                while lines and lines[0].strip() and not lines[0].startswith(("```", "#", "<!--")) and \
                        (line.startswith("- ") or not lines[0].startswith("- ")):
                    taken.append(lines.pop(0))
                is_list = line.startswith("- ")
                made.append(self.bullets(taken, page) if is_list else Paragraph(self.spans(" ".join(taken), page)))
        return made

    def page(self, path):
        title, *sections = re.split(r"^## ", path.read_text(), flags=re.M)
        found = re.fullmatch(r"# (?P<name>[\w-]+): (?P<summary>[^\n]*)\n+(?P<lead>.*)", title, re.S)
        name = path.stem
        if found is None or found["name"] != name:
            raise SystemExit(f"{path}: does not begin with \"# {name}: what it is about\"")
        made = [Section("DESCRIPTION", self.blocks(found["lead"], name))] if found["lead"].strip() else []
        for section in sections:
            heading, _, text = section.partition("\n")
            made.append(Section(heading.upper(), self.blocks(text, name)))
        return Page(name, 7, found["summary"].strip(), made)
