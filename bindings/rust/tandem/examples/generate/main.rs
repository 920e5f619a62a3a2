// SPDX-License-Identifier: MIT
//! Continues a text with pico, a byte-level model: `generate MODEL_DIRECTORY PROMPT [N] [POLICY]`.
mod json;
mod safetensors;
mod transformer;

use std::io::Write;
use std::path::Path;
use tandem::SessionOptions;
use transformer::{Failure, Transformer};

/// Returns the most likely byte of one row of logits.
fn most_likely(logits: &[f32]) -> u8 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap_or(0) as u8
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, directory, prompt, options @ ..] = &arguments[..] else {
        return Err("usage: generate MODEL_DIRECTORY PROMPT [N] [POLICY]".into());
    };
    let n_predict: usize = options.first().map_or(Ok(64), |n| n.parse())?;
    let policy = options.get(1).map_or("all", String::as_str).to_string();
    let mut model = Transformer::open(Path::new(directory), &SessionOptions::new().policy(policy))?;
    let mut tokens = prompt.as_bytes().to_vec();
    let mut out = std::io::stdout();
    out.write_all(&tokens)?;
    for _ in 0..n_predict {
        let logits = model.forward(&tokens)?;
        let Some(last) = logits.chunks_exact(model.config.vocab).last() else { return Err("PROMPT is empty".into()) };
        tokens = vec![most_likely(last)];
        out.write_all(&tokens)?;
        out.flush()?;
    }
    Ok(writeln!(out)?)
}
