// SPDX-License-Identifier: MIT
//! The program in bindings/rust/README.md is the example that the crate's documentation runs.

#[test]
fn readme_shows_the_smallest_example() {
    let readme = match std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")) {
        Ok(readme) => readme,
        Err(error) => return eprintln!("left out: ../README.md cannot be read ({error})"), // the crate alone
    };
    let shown = readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next());
    let example = include_str!("../examples/smallest.rs");
    assert_eq!(shown, example.strip_prefix("// SPDX-License-Identifier: MIT\n"));
}
