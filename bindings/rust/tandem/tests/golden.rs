// SPDX-License-Identifier: MIT
//! Compares the example's model with the logits that Hugging Face Transformers computed in f32.
#[path = "../examples/generate/json.rs"]
#[allow(dead_code)]
mod json;
#[path = "../examples/generate/safetensors.rs"]
mod safetensors;
#[path = "../examples/generate/transformer.rs"]
mod transformer;

use std::path::PathBuf;
use tandem::SessionOptions;

const MOST_DIFFERENCE: f32 = 2e-3; // from the order of summation
const LAST: usize = 32;

struct Golden {
    prompt: Vec<u8>,
    logits: Vec<f32>, // [32, 256] of its last 32 bytes
}

fn directory() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/models/pico"))
}

fn golden() -> Golden {
    let file = safetensors::Weights::open(&directory().join("golden.safetensors")).unwrap();
    let (prompt, dtype) = file.find("prompt", &[1024]).unwrap();
    assert_eq!((prompt.len(), dtype), (1024, "U8"));
    Golden { prompt: prompt.to_vec(), logits: file.read_f32("logits_last32", &[LAST, 256]).unwrap() }
}

fn open(policy: &str) -> transformer::Transformer {
    let session = SessionOptions::new().policy(policy);
    transformer::Transformer::open(&directory(), &session).unwrap()
}

fn check(logits: &[f32], golden: &[f32]) {
    assert_eq!(logits.len(), golden.len());
    let difference = |(a, b): (&f32, &f32)| if a.is_finite() { (a - b).abs() } else { f32::INFINITY };
    let most = logits.iter().zip(golden).map(difference).fold(0.0, f32::max);
    println!("logits differ by at most {most:.2e}");
    assert!(most <= MOST_DIFFERENCE, "logits differ by {most}");
}

#[test]
fn prefill_gives_golden_logits() {
    let golden = golden();
    let mut model = open("hgca"); // under "hgca" too, an append attends everything
    model.forward(&golden.prompt[..512]).unwrap();
    let logits = model.forward(&golden.prompt[512..]).unwrap();
    check(&logits[(512 - LAST) * 256..], &golden.logits);
}

/// Decodes the last 32 bytes one at a time, which uses other kernels.
#[test]
fn decode_gives_golden_logits() {
    let golden = golden();
    let mut model = open("all");
    let (context, last) = golden.prompt.split_at(1024 - LAST);
    model.forward(context).unwrap();
    let decoded = last.iter().flat_map(|byte| model.forward(&[*byte]).unwrap()).collect::<Vec<f32>>();
    check(&decoded, &golden.logits);
}
