// SPDX-License-Identifier: MIT
//! The example's reader refuses weight files that a broken download or an attacker left, with a message of one line.
#[path = "../examples/generate/json.rs"]
#[allow(dead_code)]
mod json;
#[path = "../examples/generate/safetensors.rs"]
#[allow(dead_code)]
mod safetensors;

use safetensors::Weights;
use std::path::{Path, PathBuf};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tandem-safetensors-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
    fn open(&self, header: &str, n_data_bytes: usize) -> Result<Weights, String> {
        let path = self.0.join("weights.safetensors");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + n_data_bytes, b'x');
        std::fs::write(&path, bytes).unwrap();
        Weights::open(&path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn expect_refused(result: Result<Weights, String>, named: &[&str]) {
    let Err(message) = result else { panic!("{named:?}: was accepted") };
    for part in named {
        assert!(message.contains(part), "{part:?} is not in {:.300}", message);
    }
    assert!(message.len() < 600 && !message.contains('\n'), "{} bytes: {:.600}", message.len(), message);
}

/// A header of F32 tensors, each with its name, first byte, and last byte + 1.
fn header(tensors: &[(&str, usize, usize)]) -> String {
    let entry = |&(name, first, end): &(&str, usize, usize)| {
        let length = (end - first) / 4;
        format!(r#""{name}":{{"dtype":"F32","shape":[{length}],"data_offsets":[{first},{end}]}}"#)
    };
    format!("{{{}}}", tensors.iter().map(entry).collect::<Vec<_>>().join(","))
}

#[test]
fn tensors_cover_the_data_once() {
    let folder = Folder::new("cover");
    for (tensors, named) in [
        (&[("a", 0, 32), ("b", 32, 64), ("a", 0, 32)][..], &["\"a\"", "twice"][..]),
        (&[("b", 28, 64), ("a", 0, 32)], &["\"b\"", "overlaps", "\"a\""]),
        (&[("a", 0, 64), ("b", 0, 64)], &["\"b\"", "overlaps"]),
        (&[("a", 0, 64), ("b", 16, 32)], &["\"b\"", "overlaps"]),
        (&[("a", 4, 64)], &["0 to 4", "no tensor"]),
        (&[("a", 0, 16), ("b", 24, 64)], &["16 to 24", "no tensor"]),
        (&[("a", 0, 60)], &["60 to 64", "no tensor"]),
        (&[("a", 0, 72)], &["\"a\"", "[0, 72]", "64 bytes"]),
    ] {
        expect_refused(folder.open(&header(tensors), 64), named);
    }
    let twice = r#"{"a":{"dtype":"F32","shape":[16],"dtype":"I32","data_offsets":[0,64]}}"#;
    expect_refused(folder.open(twice, 64), &["\"dtype\"", "twice"]);
    assert!(folder.open(&header(&[("d", 64, 64), ("a", 0, 0), ("b", 32, 64), ("c", 0, 32)]), 64).is_ok());
    assert!(folder.open("{}", 0).is_ok());
}

#[test]
fn bad_entries_are_refused() {
    let folder = Folder::new("entries");
    for (entry, named) in [
        (r#""dtype":"F31","shape":[16],"data_offsets":[0,64]"#, "\"F31\""),
        (r#""shape":[16],"data_offsets":[0,64]"#, "no dtype"),
        (r#""dtype":"F32","shape":[-16],"data_offsets":[0,64]"#, "shape"),
        (r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,64]"#, "too large"),
        (r#""dtype":"F32","shape":[16]"#, "data_offsets"),
        (r#""dtype":"F32","shape":[16],"data_offsets":[64,0]"#, "[64, 0]"),
        (r#""dtype":"F32","shape":[8],"data_offsets":[0,64]"#, "32 bytes"),
    ] {
        expect_refused(folder.open(&format!(r#"{{"w":{{{entry}}}}}"#), 64), &["\"w\"", named]);
    }
    expect_refused(folder.open("[1]", 64), &["object"]);
}

#[test]
fn long_texts_are_cut() {
    let folder = Folder::new("long");
    for text in ["L".repeat(100_000), "é".repeat(50_000)] {
        let entry = format!(r#"{{"w":{{"dtype":"{text}","shape":[16],"data_offsets":[0,64]}}}}"#);
        expect_refused(folder.open(&entry, 64), &["unknown", "…"]);
        expect_refused(folder.open(&format!(r#"{{"{text}":7}}"#), 64), &["no dtype", "…"]);
        expect_refused(folder.open(&header(&[(&text, 0, 64), (&text, 0, 64)]), 64), &["twice", "…"]);
        expect_refused(folder.open(&header(&[("a", 0, 64), (&text, 0, 64)]), 64), &["overlaps", "…"]);
    }
}

/// Reading a pipe would wait for a writer.
#[test]
fn other_kinds_of_files_are_refused() {
    let folder = Folder::new("kinds");
    let pipe = folder.0.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.as_path(), folder.0.as_path(), Path::new("/dev/zero")] {
        expect_refused(Weights::open(path), &[path.to_str().unwrap(), "regular"]);
    }
}
