// SPDX-License-Identifier: MIT
//! Shared by the tests: numbers, a cache with content, attention in double precision.
#![allow(dead_code)]
use tandem::*;

pub const Q_HEADS: usize = 8;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 64;
pub const Q_SHAPE: [usize; 3] = [1, Q_HEADS, DIM];

/// Numbers from -1 to 1, the same in every run.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

pub fn layer() -> LayerOptions {
    LayerOptions::new(Q_HEADS as i32, KV_HEADS as i32, DIM as i32)
}

pub fn engine() -> Engine {
    Engine::new(&EngineOptions::new().n_threads(2).pin_threads(false)).unwrap()
}

/// An f32 cache with one sequence of n tokens in each layer, and its content.
pub struct World {
    pub engine: Engine,
    pub model: Model,
    pub cache: Cache,
    pub sequence: SequenceId,
    pub k: Vec<f32>, // [n, KV_HEADS, DIM]
    pub v: Vec<f32>,
    pub n: usize,
}

impl World {
    pub fn new(n: usize, n_layers: usize) -> Self {
        Self::on(engine(), n, n_layers)
    }
    pub fn on(engine: Engine, n: usize, n_layers: usize) -> Self {
        let model = Model::new(&vec![layer(); n_layers]).unwrap();
        let options = CacheOptions::new().k_type(Dtype::F32).page_tokens(16);
        let cache = Cache::new(&engine, &model, &options).unwrap();
        let sequence = cache.create_sequence().unwrap();
        let (k, v) = (numbers(n * KV_HEADS * DIM, 1), numbers(n * KV_HEADS * DIM, 2));
        for layer_idx in 0..n_layers {
            cache.append(sequence, layer_idx as i32, kv(&k), Some(kv(&v))).unwrap();
        }
        Self { engine, model, cache, sequence, k, v, n }
    }
    pub fn session(&self, policy: &str) -> Session {
        let (window_tokens, sink_tokens) = (64, 16);
        let options = SessionOptions::new().policy(policy).window_tokens(window_tokens).sink_tokens(sink_tokens);
        Session::new(&self.cache, &options).unwrap()
    }
}

/// A view [n, KV_HEADS, DIM].
pub fn kv(data: &[f32]) -> TensorRef<'_> {
    TensorRef::new(data, &[data.len() / (KV_HEADS * DIM), KV_HEADS, DIM]).unwrap()
}

/// A view [n, Q_HEADS, DIM].
pub fn heads(data: &[f32]) -> TensorRef<'_> {
    TensorRef::new(data, &[data.len() / (Q_HEADS * DIM), Q_HEADS, DIM]).unwrap()
}

pub fn heads_mut(data: &mut [f32]) -> TensorMut<'_> {
    let n = data.len() / (Q_HEADS * DIM);
    TensorMut::new(data, &[n, Q_HEADS, DIM]).unwrap()
}

/// Textbook attention of one query [Q_HEADS, DIM] over keys and values [n, KV_HEADS, DIM]. Returns o [Q_HEADS, DIM] and lse
/// [Q_HEADS].
pub fn reference(q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let n = k.len() / (KV_HEADS * DIM);
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for head in 0..Q_HEADS {
        let row = |token: usize| (token * KV_HEADS + head / (Q_HEADS / KV_HEADS)) * DIM;
        let logit = |token: usize| {
            let products = (0..DIM).map(|d| f64::from(q[head * DIM + d]) * f64::from(k[row(token) + d]));
            products.sum::<f64>() / (DIM as f64).sqrt()
        };
        let logits: Vec<f64> = (0..n).map(logit).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
        lse.push(most + sum.ln());
        for d in 0..DIM {
            let terms = (0..n).map(|token| (logits[token] - most).exp() / sum * f64::from(v[row(token) + d]));
            o.push(terms.sum::<f64>());
        }
    }
    (o, lse)
}

pub fn close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*got) - expected).abs() <= 1e-5, "{i}: {got}, expected {expected}");
    }
}

/// Checks the status, field and message of a refused call.
pub fn refused<T>(result: Result<T>, status: Status, field: &str, message: &str) {
    let Err(error) = result else { panic!("{field}, {message}: was not refused") };
    assert_eq!((error.status(), error.field()), (status, field), "{error}");
    assert!(error.message().contains(message), "{error} does not say {message}");
}
