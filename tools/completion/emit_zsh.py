# SPDX-License-Identifier: MIT
"""Completion for zsh: a function for each command, by _arguments."""


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def said(text):
    """Escapes a description for a specification of _arguments."""
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def action(flag):
    """Returns the action that completes a flag's value."""
    if flag.words and flag.is_list:
        return f"_values -s , {flag.name.removeprefix('--')} {' '.join(flag.words)}"
    if flag.words:
        return f"({' '.join(flag.words)})"
    return "_files" if flag.takes_file else "_files -/" if flag.takes_folder else " "


def flag_specification(flag):
    repeats = "*" if "several times" in flag.text else ""
    if not flag.value:
        return quoted(f"{flag.name}[{said(flag.text)}]")
    name = flag.name.removeprefix("--")
    return quoted(f"{repeats}{flag.name}=[{said(flag.text)}]:{name}:{action(flag)}")


def words_action(scope):
    """Returns the action for a scope's words: ((decode\\:"one new token" ...))"""
    words = (f"{word}\\:\"{said(text.replace(chr(34), ''))}\"" if text else word for word, text in scope.words.items())
    return f"(({' '.join(words)}))"


def function(scope, scopes):
    parts = [other for other in scopes if other.name.startswith(scope.name + " ")]
    lines = [f"_tandem_{scope.key}() {{"]
    if parts:
        lines.append("  local curcontext=$curcontext state line")
    specifications = [flag_specification(flag) for flag in scope.flags]
    if scope.words:
        specifications.append(quoted(f"1: :{words_action(scope)}"))
    if parts:
        specifications.append("'*:: :->part'")
    elif scope.takes_file:
        specifications.append("'1:file:_files'")
    lines.append("  _arguments " + ("-C " if parts else "") + "\\\n    " + " \\\n    ".join(specifications))
    if parts:
        lines += ["  case $state/$words[1] in",
                  *(f"    part/{part.name.split()[-1]}) _tandem_{part.key} ;;" for part in parts), "  esac"]
    return "\n".join([*lines, "}"])


def text(commands, scopes):
    named = "\n".join(f"    {quoted(name + ':' + said(what))}" for name, what in commands.items())
    cases = "\n".join(f"    {name}) _tandem_{name} ;;" for name in commands)
    programs = " ".join(["tandem", *(f"tandem-{name}" for name in commands)])
    return f"""#compdef {programs}
# zsh completion of tandem and its commands, made by tools/completion/make.py

{chr(10).join(function(scope, scopes) + chr(10) for scope in scopes)}
_tandem_commands() {{
  local -a commands=(
{named}
  )
  _describe command commands "$@"
}}

_tandem_command() {{ # command
  case $1 in
{cases}
    help) _arguments '1: :_tandem_commands' ;;
  esac
}}

_tandem() {{
  local curcontext=$curcontext state line
  if [[ $service = tandem-* ]]; then
    _tandem_command ${{service#tandem-}}
    return
  fi
  _arguments -C '(- *)--help[this text]' '(- *)--version[the version of the program]' '1: :_tandem_commands' '*:: :->rest'
  [[ $state != rest ]] || _tandem_command $words[1]
}}

_tandem "$@"
"""
