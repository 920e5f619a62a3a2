// SPDX-License-Identifier: MIT
//! Tests reading files of head patterns, and refusals.
mod common;
use common::*;
use std::path::{Path, PathBuf};
use tandem::*;

/// A file with this text, removed at the end of the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tandem-patterns-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn full() -> HeadPattern {
    HeadPattern::new().kinds(PatternKinds::FULL)
}

fn a_shape(sink_tokens: i64, window_tokens: i64) -> HeadPattern {
    HeadPattern::new().kinds(PatternKinds::A_SHAPE).sink_tokens(sink_tokens).window_tokens(window_tokens)
}

#[test]
fn json_is_read() {
    let text = r#"[{"0": ["full"], "1": ["stream_llm", 4, 1020, 0.5]}, {"0": ["vertical_and_slash", 30, 800],
        "1": [["stream_llm", 0, 1], ["block_sparse", 7, 0]]}]"#;
    let file = File::new("json", text);
    let slash = PatternKinds::VERTICAL_SLASH;
    let slash = HeadPattern::new().kinds(slash).vertical_tokens(30).slash_tokens(800);
    let union = a_shape(0, 1).kinds(PatternKinds::A_SHAPE | PatternKinds::BLOCK_SPARSE).n_blocks(7);
    let read = Patterns::read(&file.0, &PatternFileOptions::default()).unwrap();
    assert_eq!(read.layers, [[full(), a_shape(4, 1020)], [slash, union]]);
    assert!(read.layers[1][1].kinds.contains(PatternKinds::A_SHAPE) && !slash.kinds.contains(PatternKinds::A_SHAPE));
}

#[test]
fn gates_are_read() {
    let file = File::new("gates", "0.5\t0.25\n0.1\t0.75\n");
    let read = |options| Patterns::read(&file.0, &options).unwrap().layers;
    let rest = a_shape(128, 256);
    assert_eq!(read(PatternFileOptions::default()), [[full(), rest], [rest, full()]]);
    let rest = a_shape(0, 64);
    let options = PatternFileOptions::new().group_size(2).threshold(0.25).sink_tokens(0).window_tokens(64);
    assert_eq!(read(options), [[full(); 4], [rest, rest, full(), full()]]);
}

#[test]
fn what_is_refused() {
    let wrong = |text, message| {
        let file = File::new("wrong", text);
        refused(Patterns::read(&file.0, &PatternFileOptions::default()), Status::InvalidArgument, "path", message);
    };
    wrong(r#"[{"0": ["stripes"]}]"#, "layer 0: head 0: kind \"stripes\" is unknown");
    wrong("1 2\n3", "line 2 has 1 gates");
    let read = |path: &Path| Patterns::read(path, &PatternFileOptions::default());
    refused(read(Path::new("/nonexistent")), Status::Io, "path", "/nonexistent");
    refused(read(Path::new("a\0b")), Status::InvalidArgument, "path", "zero byte");
    let file = File::new("options", "0.5");
    let options = |options, field, message| {
        refused(Patterns::read(&file.0, &options), Status::InvalidArgument, field, message);
    };
    let default = PatternFileOptions::default();
    options(default.group_size(-1), "group_size", "= -1");
    options(default.threshold(f64::NAN), "threshold", "nan");
    options(default.window_tokens(0), "window_tokens", "= 0");
}
