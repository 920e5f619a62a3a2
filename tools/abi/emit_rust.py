# SPDX-License-Identifier: MIT
"""Writes the parts for Rust, formatted as by rustfmt (bindings/rust/rustfmt.toml)."""
import re
import textwrap

from emit_c import MADE
from options import TABLES, TITLES, options_of, sentence

WIDTH = 125
NUMBERS = {"uint8_t": "u8", "int32_t": "i32", "uint32_t": "u32", "int64_t": "i64", "uint64_t": "u64", "size_t": "usize",
           "float": "f32", "double": "f64", "char": "c_char", "void": "c_void"}
HEAD = f"// SPDX-License-Identifier: MIT\n// {MADE}\n"


def pointed(kind):
    return (("*const " if kind.is_const else "*mut ") * kind.stars) + NUMBERS.get(kind.name, kind.name)


def rust_type(field):
    text = f"Option<{field.type.name}>" if field.type.name.endswith("_fn") else pointed(field.type)
    return f"[{text}; {field.length}]" if field.length else text


def constants(header):
    lines = [HEAD + "//! The constants, in the order of the header."]
    for name, value in header.constants.items():
        kind = "u32" if value.endswith("u") or name.startswith("TANDEM_VERSION_") else "i32"
        lines.append(f"pub const {name}: {kind} = {value.rstrip('u')};")
    return "\n".join(lines) + "\n"


def signature(indent, head, parameters, tail):
    """Returns the signature on one line if it fits, else with one parameter a line."""
    line = f"{indent}{head}({', '.join(parameters)}){tail}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{indent}{head}(", *(f"{indent}    {parameter}," for parameter in parameters), f"{indent}){tail}"]


def result_of(function):
    kind = function.result
    return "" if kind.name == "void" and not kind.stars else f" -> {pointed(kind)}"


def functions(header):
    lines = [HEAD + "//! The functions, in the order of the header.", "use super::*;", "use std::os::raw::{c_char, c_void};", "",
             '#[link(name = "tandem")]', 'extern "C" {']
    for function in header.functions:
        parameters = [f"{field.name}: {rust_type(field)}" for field in function.parameters]
        lines += signature("    ", f"pub fn {function.name}", parameters, result_of(function) + ";")
    return "\n".join([*lines, "}"]) + "\n"


def structs(header):
    value = f"{header.fingerprint():016x}"
    handles = sorted({member.type.name for struct in header.structs for member in struct.members} & set(header.handles))
    lines = [HEAD + "//! The fingerprint, the callbacks and the structs, in the order of the header.",
             *(f"use crate::{handle};" for handle in handles), "use std::os::raw::{c_char, c_void};", "",
             "/// `tandem_abi_fingerprint(TANDEM_VERSION_MINOR)` that these declarations were written for (64-bit pointers).",
             f"pub const FINGERPRINT: u64 = 0x{'_'.join(value[i:i + 4] for i in range(0, 16, 4))};", ""]
    for callback in header.callbacks:
        parameters = ", ".join(f"{field.name}: {rust_type(field)}" for field in callback.parameters)
        line = f'pub type {callback.name} = unsafe extern "C" fn({parameters}){result_of(callback)};'
        lines += doc("", re.sub(r"\b\w*(?:_|\(\))[\w()]*", "`{0[0]}`".format, callback.comment).replace("task(i, context)", "`task(i, context)`"))
        lines += [line] if len(line) <= WIDTH else [line.replace(" = ", " =\n    ", 1)]
    lines += ["", "abi_structs! {"]
    for i, struct in enumerate(header.structs):
        lines += ([""] if i else []) + [f"    struct {struct.name} {{"]
        lines += [f"        {member.name}: {rust_type(member)}," for member in struct.members] + ["    }"]
    return "\n".join([*lines, "}"]) + "\n"


def doc(indent, text):
    return [f"{indent}/// {line}" for line in textwrap.wrap(text, WIDTH - 5 - len(indent), break_long_words=False,
                                                           break_on_hyphens=False)]


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def pointed_type(option):
    return camel(option.struct.removeprefix("tandem_"))


def field_type(option):
    return {"text": "String", "dtype": "Option<Dtype>", "dtypes": "Option<Vec<Dtype>>", "flag": "bool", "flags": "Vec<bool>", "texts": "Vec<String>",
            "struct": f"Option<{pointed_type(option)}>", "enum": camel(option.enum.lower())}.get(option.kind) or NUMBERS[option.kind]


def setter(option):
    """Returns the kind and the type of a setter, as the macro of setters.rs takes them."""
    rust = field_type(option)
    if rust.startswith("Option<"):
        inner = rust.removeprefix("Option<").removesuffix(">")
        return f"{'some_from' if inner.startswith('Vec<') else 'some'} {inner}"
    return f"{'from' if rust == 'String' or rust.startswith('Vec<') else 'is'} {rust}"


def default_of(option):
    if option.kind == "text":
        return f'"{option.default}".to_string()'
    if option.kind in ("float", "double"):
        return f"{option.default}.0"
    return {"dtype": "None", "dtypes": "None", "struct": "None", "flag": "false", "flags": "Vec::new()", "texts": "Vec::new()",
            "enum": f"{field_type(option)}::default()"}.get(option.kind, str(option.default))


def raw_lines(option):
    """Returns the members of the C struct that an option fills."""
    name, value = option.name, f"self.{option.name}"
    if option.kind == "flags":
        return [f"{name}: pointer(Some(&{name}[..]).filter(|flags| !flags.is_empty())),", f"{option.count}: {name}.len() as i64,"]
    if option.kind == "texts":
        return [f"{name}: pointer(Some(&{name}_c[..]).filter(|texts| !texts.is_empty())),", f"{option.count}: {name}_c.len() as i64,"]
    text = {"text": f"{name}.as_ptr()", "dtype": f"{value}.map_or(0, |dtype| dtype as i32)", "flag": f"{value}.into()",
            "dtypes": f"pointer({name}).cast()", "struct": f"or_null({name}.as_ref().map(|made| &made.raw))", "enum": f"{value} as i32"}.get(option.kind, value)
    return [f"{name}: {text},"]


def conversion(struct, options):
    """Returns the function that makes the C struct: raw() takes lengths of arrays, with_raw() lends the struct."""
    is_lent = any(option.kind in ("text", "texts", "flags", "struct") for option in options)
    raw = f"sys::{struct.name}"
    indent, lines = "        ", []
    if is_lent:
        lines += ["    /// Calls `function` with the C struct.",
                  f"    pub(crate) fn with_raw<R>(&self, function: impl FnOnce(&{raw}) -> Result<R>) -> Result<R> {{"]
    else:
        lines += ["    /// The C struct, which points into `self`.",
                  f"    pub(crate) fn raw(&self, n_layers: usize) -> Result<{raw}> {{"]
    for option in options:
        name, made = option.name, None
        if option.kind == "text":
            made = f'c_text("{struct.name.replace("_options", "_create")}", "{name}", &self.{name})?'
        if option.kind == "texts":
            made = f'c_texts("{struct.name.replace("_options", "_create")}", "{name}", &self.{name})?'
        if option.kind == "flags":
            made = f"self.{name}.iter().map(|&flag| flag.into()).collect::<Vec<u8>>()"
        if option.kind == "struct":
            made = f"self.{name}.as_ref().map({pointed_type(option)}::raw).transpose()?"
        if option.kind == "dtypes":
            made = f'array("{name}", &self.{name}, n_layers as i64, "n_layers")?'
        lines += [f"{indent}let {name} = {made};"] if made else []
        if option.kind == "texts":
            lines.append(f"{indent}let {name}_c = {name}.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();")
    lines += [f"{indent}{'function(&' if is_lent else 'Ok('}{raw} {{", f"{indent}    struct_size: size_of::<{raw}>() as u32,"]
    for option in options:
        lines += [f"{indent}    {line}" for line in raw_lines(option)]
    return [*lines, f"{indent}}})", "    }"]


def option_tables(header):
    tables = {name: options_of(header.struct(name), with_structs=True) for name in TABLES}
    lines = [HEAD + "//! Options of caches and sessions: `SessionOptions::new().policy(\"hgca\")`.",
             "use crate::dtype::Dtype;", "use crate::error::Result;", "use crate::options::{array, c_text, c_texts, pointer, Rotation};",
             *sorted(f"use crate::{option.struct.removeprefix('tandem_')}::{pointed_type(option)};" for options in tables.values()
                     for option in options if option.kind == "struct"), "use crate::raw::or_null;",
             "use std::mem::size_of;", "use tandem_sys as sys;"]
    for name, options in tables.items():
        struct = header.struct(name)
        rust = camel(name.removeprefix("tandem_"))
        is_zero = all(default_of(o) in ("0", "0.0", "None", "false", "Vec::new()", f"{field_type(o)}::default()") for o in options)
        lines += ["", f"/// {TITLES[name]}.", f"#[derive(Clone, Debug,{' Default,' if is_zero else ''} PartialEq)]",
                  "#[non_exhaustive]", f"pub struct {rust} {{"]
        for option in options:
            lines += doc("    ", sentence(option, "`{}`".format, "`None`", "`None`", "`true`", "`false`"))
            lines.append(f"    pub {option.name}: {field_type(option)},")
        lines += ["}", ""]
        if not is_zero:
            lines += [f"impl Default for {rust} {{", "    fn default() -> Self {", "        Self {"]
            lines += [f"            {option.name}: {default_of(option)}," for option in options]
            lines += ["        }", "    }", "}", ""]
        lines += ["setters! {", f"    {rust} {{", *(f"        {o.name}: {setter(o)}," for o in options), "    }", "}", ""]
        lines += [f"impl {rust} {{", "    /// The defaults.", "    #[must_use]", "    pub fn new() -> Self {", "        Self::default()",
                  "    }", "", *conversion(struct, options), "}"]
    return "\n".join(lines) + "\n"


def files(header):
    crate = "bindings/rust/tandem-sys/src"
    return {f"{crate}/constants.rs": constants(header), f"{crate}/functions.rs": functions(header),
            f"{crate}/structs.rs": structs(header), "bindings/rust/tandem/src/option_tables.rs": option_tables(header)}
