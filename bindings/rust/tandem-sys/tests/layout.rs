// SPDX-License-Identifier: MIT
//! Compares the declarations with the installed header, as a C compiler reads it, and with the loaded library.
use std::process::Command;
use tandem_sys::*;

/// Size, alignment and member offsets of a struct, as Rust lays it out.
struct Layout {
    name: &'static str,
    size: usize,
    align: usize,
    members: &'static [(&'static str, usize, usize)], // name, offset and size in bytes, in order of declaration
}

/// Replaces the crate's macro of this name. It lists the structs that the crate's macro declares, so that no member is left
/// out.
macro_rules! abi_structs {
    ($(struct $name:ident { $($member:ident: $type:ty,)+ })+) => {
        use tandem_sys::*;
        /// Every public struct, in the order of the library's fingerprint.
        pub const LAYOUTS: &[super::Layout] = &[$(super::Layout {
            name: stringify!($name),
            size: std::mem::size_of::<$name>(),
            align: std::mem::align_of::<$name>(),
            members: &[$((
                stringify!($member),
                std::mem::offset_of!($name, $member),
                std::mem::size_of::<$type>(),
            ),)+],
        },)+];
    };
}

#[allow(dead_code, non_camel_case_types)]
#[path = "../src/structs.rs"]
mod structs;
use structs::LAYOUTS;

/// Computes what `tandem_abi_fingerprint()` returns: FNV-1a over the size and member offsets of every struct, 4 bytes of
/// each number.
fn fingerprint() -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut add = |number: usize| {
        for i in 0..4 {
            hash = (hash ^ (number as u64 >> (8 * i) & 0xff)).wrapping_mul(0x100_0000_01b3);
        }
    };
    for layout in LAYOUTS {
        add(layout.size);
        layout.members.iter().for_each(|member| add(member.1));
    }
    hash
}

#[test]
fn fingerprint_is_the_library_s() {
    assert_eq!(fingerprint(), FINGERPRINT);
    // SAFETY: takes and returns numbers.
    unsafe {
        assert_eq!(tandem_abi_fingerprint(TANDEM_VERSION_MINOR), FINGERPRINT);
        assert_eq!(tandem_abi_fingerprint(TANDEM_VERSION_MINOR + 1000), 0);
        assert_eq!(tandem_version() >> 16, TANDEM_VERSION_MAJOR);
    }
}

/// One line for each struct, then one for each member, as this crate lays them out.
fn expected() -> String {
    let mut text = String::new();
    for layout in LAYOUTS {
        text += &format!("{} {} {}\n", layout.name, layout.size, layout.align);
        for (member, offset, size) in layout.members {
            text += &format!("{}.{member} {offset} {size}\n", layout.name);
        }
    }
    for (name, value) in constants() {
        text += &format!("{name} {value}\n");
    }
    text
}

/// Names and values of src/constants.rs.
fn constants() -> Vec<(String, String)> {
    let source = include_str!("../src/constants.rs");
    let lines = source.lines().filter_map(|line| line.strip_prefix("pub const "));
    let parsed = lines.map(|line| {
        let (name, rest) = line.split_once(": ").unwrap();
        let (_, value) = rest.split_once(" = ").unwrap();
        (name.to_string(), value.trim_end_matches(';').to_string())
    });
    parsed.collect()
}

/// A C program that prints the same lines for the header.
fn program() -> String {
    let mut body = String::new();
    for layout in LAYOUTS {
        let name = layout.name;
        body += &format!("  printf(\"{name} %zu %zu\\n\", sizeof({name}), offsetof(struct {{ char c; {name} s; }}, s));\n");
        for (member, ..) in layout.members {
            let size = format!("sizeof((({name} *)0)->{member})");
            body += &format!("  printf(\"{name}.{member} %zu %zu\\n\", offsetof({name}, {member}), {size});\n");
        }
    }
    for (name, _) in constants() {
        body += &format!("  printf(\"{name} %lld\\n\", (long long){name});\n");
    }
    format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <tandem/tandem.h>\nint main(void) {{\n{body}  return 0;\n}}\n"
    )
}

#[test]
fn structs_and_constants_are_the_header_s() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&source, program()).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let include = concat!("-I", env!("TANDEM_SYS_INCLUDE_DIR"));
    let compiled = Command::new(&compiler).arg(include).arg("-o").arg(&binary).arg(&source).output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), expected());
}

/// tandem.h and the parts that it includes at its end.
fn public_header() -> String {
    let read = |part: &str| std::fs::read_to_string(format!("{}/{part}", env!("TANDEM_SYS_INCLUDE_DIR"))).unwrap();
    let header = read("tandem/tandem.h");
    let parts = header.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
    let parts: String = parts.map(read).collect();
    header + &parts
}

/// Fails on names that only the header or only this crate declares.
#[test]
fn functions_and_constants_are_complete() {
    let header = public_header();
    let declared = header.lines().filter(|line| line.starts_with("TANDEM_API ")).map(|line| {
        let head = &line[..line.find('(').unwrap()];
        head.rsplit([' ', '*']).next().unwrap().to_string()
    });
    let here = include_str!("../src/functions.rs").lines().filter_map(|line| line.trim().strip_prefix("pub fn "));
    let here = here.map(|line| line[..line.find('(').unwrap()].to_string());
    assert_eq!(declared.collect::<Vec<_>>(), here.collect::<Vec<_>>());
    let defined = header.lines().filter_map(|line| line.strip_prefix("#define TANDEM_"));
    let defined = defined.filter(|line| !line.ends_with('\\') && line.contains(' ') && !line.starts_with("API"));
    let defined = defined.map(|line| format!("TANDEM_{}", line.split(' ').next().unwrap()));
    assert_eq!(defined.collect::<Vec<_>>(), constants().into_iter().map(|constant| constant.0).collect::<Vec<_>>());
}

/// Returns a Rust type as C writes it, such as `*const *const tandem_tensor`.
fn c_type(rust: &str) -> String {
    if let Some(inner) = rust.strip_prefix("*const ") {
        return if inner.starts_with('*') { c_type(inner) + "const *" } else { format!("const {} *", c_type(inner)) };
    }
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return c_type(inner) + " *";
    }
    if let Some(callback) = rust.strip_prefix("Option<") {
        return callback.trim_end_matches('>').to_string();
    }
    let names = [("u32", "uint32_t"), ("i32", "int32_t"), ("i64", "int64_t"), ("u64", "uint64_t"), ("f32", "float")];
    let names = names.iter().chain(&[("usize", "size_t"), ("c_char", "char"), ("c_void", "void")]);
    names.clone().find(|name| name.0 == rust).map_or(rust, |name| name.1).to_string()
}

/// Checks the signatures: C refuses a second declaration of a function with another type.
#[test]
fn signatures_are_the_header_s() {
    let source = include_str!("../src/functions.rs").split_whitespace().collect::<Vec<_>>().join(" ");
    let mut program = String::from("#include <tandem/tandem.h>\n");
    for function in source.split("pub fn ").skip(1) {
        let (head, tail) = function[..function.find(';').unwrap()].split_once(')').unwrap();
        let (name, parameters) = head.split_once('(').unwrap();
        let types = parameters.split(", ").filter_map(|parameter| parameter.split_once(": "));
        let types = types.map(|(_, parameter)| c_type(parameter.trim().trim_end_matches(','))).collect::<Vec<_>>();
        let types = if types.is_empty() { "void".to_string() } else { types.join(", ") };
        let result = tail.trim().strip_prefix("-> ").map_or("void".to_string(), c_type);
        program += &format!("{result} {name}({types});\n");
    }
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("signatures.c");
    std::fs::write(&path, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let include = concat!("-I", env!("TANDEM_SYS_INCLUDE_DIR"));
    let compiled = Command::new(compiler).args(["-fsyntax-only", include]).arg(&path).output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
