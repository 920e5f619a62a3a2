# SPDX-License-Identifier: MIT
"""Completion for bash: tables of words in case statements, and one function that reads them. It needs nothing of the package
bash-completion except its folder, from which bash loads the files."""

LOGIC = r"""
# Fills COMPREPLY with the words that begin like the word under the cursor.
_tandem_offer() { # word words
  mapfile -t COMPREPLY < <(compgen -W "$2" -- "$1")
}

# Offers names of files or folders. After a folder's name, completion goes on inside the folder.
_tandem_offer_paths() { # word -f|-d
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen "$2" -- "$1")
}

# Offers the values of a flag. In a list the part after the last comma is completed.
_tandem_offer_values() { # word
  case $kind in
    file) _tandem_offer_paths "$1" -f ;;
    folder) _tandem_offer_paths "$1" -d ;;
    word) _tandem_offer "$1" "$values" ;;
    list)
      local before=''
      [[ $1 != *,* ]] || before=${1%,*},
      mapfile -t COMPREPLY < <(compgen -P "$before" -W "$values" -- "${1##*,}")
      ;;
  esac
}

_tandem() {
  local program=${COMP_WORDS[0]##*/} word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  local at=1 scope repeated='' flags='' first='' takes_file='' kind='' values='' given
  COMPREPLY=()
  # Bash splits "--flag=value" into three words.
  if [ "$word" = = ]; then
    word=''
  elif [ "$before" = = ] && [ "$COMP_CWORD" -gt 2 ]; then
    before=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  if [ "$program" = tandem ]; then
    if [ "$COMP_CWORD" -eq 1 ] || { [ "$COMP_CWORD" -eq 2 ] && [ "$before" = help ]; }; then
      _tandem_offer "$word" "$_tandem_commands"
      return
    fi
    scope=${COMP_WORDS[1]} at=2
  else
    scope=${program#tandem-}
  fi
  _tandem_scope "$scope" || return
  # A word after the command may be a command itself, with flags of its own, as in `tandem patterns show`.
  if [ -n "$first" ] && [ "$COMP_CWORD" -gt "$at" ] && _tandem_scope "$scope ${COMP_WORDS[at]}"; then
    scope+=" ${COMP_WORDS[at]}"
  fi
  if [[ $before = -* ]]; then
    _tandem_values "$scope $before"
    if [ -n "$kind" ]; then
      _tandem_offer_values "$word"
      return
    fi
  fi
  if [[ $word != -* ]] && [ "$COMP_CWORD" -eq "$at" ] && [ -n "$first" ]; then
    _tandem_offer "$word" "$first"
  elif [[ $word != -* ]] && [ -n "$takes_file" ]; then
    _tandem_offer_paths "$word" -f
  else
    for given in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do # no flag comes twice
      case " $repeated " in *" $given "*) continue ;; esac
      flags=" $flags "
      flags=${flags/ "$given" / }
    done
    _tandem_offer "$word" "$flags"
  fi
}
"""


def scope_case(scope):
    lines = [f"    '{scope.name}')", f"      flags='{' '.join(flag.name for flag in scope.flags)}'",
             f"      first='{' '.join(scope.words)}'", f"      takes_file={'yes' if scope.takes_file else chr(39) * 2}"]
    repeated = [flag.name for flag in scope.flags if "several times" in flag.text]
    lines.append(f"      repeated='{' '.join(repeated)}'")
    return "\n".join([*lines, "      ;;"])


def value_case(scope, flag):
    if flag.words:
        kind = "list" if flag.is_list else "word"
        return f"    '{scope.name} {flag.name}') kind={kind} values='{' '.join(flag.words)}' ;;"
    kind = "file" if flag.takes_file else "folder" if flag.takes_folder else "other"
    return f"    '{scope.name} {flag.name}') kind={kind} ;;"


def text(commands, scopes):
    first = f"_tandem_commands='{' '.join([*commands, 'help', '--help', '--version'])}'"
    tables = ["# The flags of a command, and the words that may stand behind its name.", "_tandem_scope() { # command",
              "  case $1 in", *map(scope_case, scopes), "    *) return 1 ;;", "  esac", "}", "",
              "# What a flag takes.", "_tandem_values() { # command and flag", "  case $1 in",
              *(value_case(scope, flag) for scope in scopes for flag in scope.flags if flag.value), "  esac", "}"]
    programs = " ".join(["tandem", *(f"tandem-{name}" for name in commands)])
    return ("# bash completion of tandem and its commands, made by tools/completion/make.py\n\n" + first + "\n\n" +
            "\n".join(tables) + "\n" + LOGIC + f"\ncomplete -F _tandem {programs}\n")
