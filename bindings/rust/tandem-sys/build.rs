// SPDX-License-Identifier: MIT
//! Finds libtandem.so in $TANDEM_LIB_DIR, else through pkg-config. Downloads, builds and guesses nothing.
use std::env;
use std::path::Path;
use std::process::Command;

/// The folders of the library and its header.
struct Found {
    lib_dir: String,
    include_dir: Option<String>, // None: there is no header
}

/// Returns the folder with tandem/tandem.h: $TANDEM_INCLUDE_DIR, else the include folder beside the library's folder or
/// beside the folder above that, as multiarch systems have it (/usr/lib/x86_64-linux-gnu).
fn include_of(lib_dir: &Path) -> Result<Option<String>, String> {
    let has_header = |folder: &Path| folder.join("tandem/tandem.h").exists();
    if let Ok(named) = env::var("TANDEM_INCLUDE_DIR") {
        return match has_header(Path::new(&named)) {
            true => Ok(Some(named)),
            false => Err(format!("TANDEM_INCLUDE_DIR = {named} has no tandem/tandem.h")),
        };
    }
    let lib_dir = lib_dir.canonicalize().map_err(|error| format!("TANDEM_LIB_DIR = {}: {error}", lib_dir.display()))?;
    let mut beside = lib_dir.ancestors().skip(1).take(2).map(|prefix| prefix.join("include"));
    Ok(beside.find(|folder| has_header(folder)).map(|folder| folder.display().to_string()))
}

fn in_folder(lib_dir: &str) -> Result<Found, String> {
    let folder = Path::new(lib_dir);
    if !folder.join("libtandem.so").exists() {
        return Err(format!("TANDEM_LIB_DIR = {lib_dir} has no libtandem.so"));
    }
    Ok(Found { lib_dir: lib_dir.to_string(), include_dir: include_of(folder)? })
}

fn pkg_config(arguments: &[&str]) -> Result<String, String> {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_string());
    let output =
        Command::new(&program).args(arguments).output().map_err(|error| format!("{program} could not be run ({error})"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_string());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Returns a folder from pkg-config, which quotes spaces and the like with backslashes, for a shell.
fn folder(variable: &str) -> Result<String, String> {
    let quoted = pkg_config(&[&format!("--variable={variable}"), "tandem"])?;
    let mut characters = quoted.chars();
    let mut text = String::new();
    while let Some(c) = characters.next() {
        text.push(if c == '\\' { characters.next().unwrap_or(c) } else { c });
    }
    Ok(text)
}

fn by_pkg_config() -> Result<Found, String> {
    pkg_config(&["--exists", "--print-errors", "tandem >= 0.2", "tandem < 1"])?;
    let lib_dir = folder("libdir")?;
    let include_dir = folder("includedir")?;
    Ok(Found { lib_dir, include_dir: Some(include_dir) })
}

fn main() {
    for name in ["DOCS_RS", "TANDEM_LIB_DIR", "TANDEM_INCLUDE_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("DOCS_RS").is_some() {
        return; // docs.rs has no libtandem, and the documentation needs none
    }
    let found = match env::var("TANDEM_LIB_DIR") {
        Ok(lib_dir) => in_folder(&lib_dir),
        Err(_) => by_pkg_config(),
    };
    match found {
        Ok(found) => {
            println!("cargo:rustc-link-search=native={}", found.lib_dir);
            println!("cargo:rustc-link-lib=dylib=tandem");
            match found.include_dir {
                Some(include_dir) => {
                    println!("cargo:include={include_dir}");
                    println!("cargo:rustc-env=TANDEM_SYS_INCLUDE_DIR={include_dir}");
                }
                None => println!(
                    "cargo:warning=tandem/tandem.h is not beside TANDEM_LIB_DIR = {}: DEP_TANDEM_INCLUDE is not set; \
                     TANDEM_INCLUDE_DIR would name its folder",
                    found.lib_dir
                ),
            }
        }
        Err(why) => {
            eprintln!("tandem-sys: libtandem was not found: {why}.");
            eprintln!("Install Tandem (cmake --install build --prefix PREFIX), then set either");
            eprintln!("  TANDEM_LIB_DIR=PREFIX/lib                   the folder with libtandem.so, or");
            eprintln!("  PKG_CONFIG_PATH=PREFIX/lib/pkgconfig        the folder with tandem.pc.");
            std::process::exit(1);
        }
    }
}
