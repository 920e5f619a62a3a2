// SPDX-License-Identifier: MIT
//! A Llama-family transformer in plain Rust, in f32, with Tandem's attention. `forward` is the whole body of the decode
//! loop.
use crate::json::Json;
use crate::safetensors::{read_regular, Weights};
use std::path::Path;
use std::thread;
use tandem::{Attend, Cache, CacheOptions, Dtype, Engine, EngineOptions, LayerOptions, Model, Rope, SequenceId, Session};
use tandem::{SessionOptions, TensorMut, TensorRef};

pub type Failure = Box<dyn std::error::Error>;

/// Members of config.json.
pub struct Config {
    pub hidden: usize,
    pub n_layers: usize,
    pub n_q_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub rms_eps: f64,
    pub rope_theta: f64,
}

impl Config {
    fn open(directory: &Path) -> Result<Self, Failure> {
        let json = Json::parse(std::str::from_utf8(&read_regular(&directory.join("config.json"))?)?)?;
        let number =
            |key: &str| json.get(key).and_then(Json::number).ok_or_else(|| format!("config.json: {key} is not a number"));
        let length = |key: &str| number(key).map(|value| value as usize);
        if json.get("tie_word_embeddings") != Some(&Json::Bool(true)) {
            return Err("config.json: tie_word_embeddings must be true".into());
        }
        Ok(Self {
            hidden: length("hidden_size")?,
            n_layers: length("num_hidden_layers")?,
            n_q_heads: length("num_attention_heads")?,
            n_kv_heads: length("num_key_value_heads")?,
            head_dim: length("head_dim")?,
            ffn: length("intermediate_size")?,
            vocab: length("vocab_size")?,
            rms_eps: number("rms_norm_eps")?,
            rope_theta: number("rope_theta")?,
        })
    }
    fn q_size(&self) -> usize {
        self.n_q_heads * self.head_dim
    }
    fn kv_size(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}

/// A layer's weights. Matrices are `[n_out, n_in]`.
struct Layer {
    attention_norm: Vec<f32>,
    qkv: Vec<f32>,
    out: Vec<f32>,
    ffn_norm: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl Layer {
    fn read(weights: &Weights, config: &Config, layer_idx: usize) -> Result<Self, String> {
        let (hidden, ffn, q, kv) = (config.hidden, config.ffn, config.q_size(), config.kv_size());
        let read = |name: &str, shape: &[usize]| weights.read_f32(&format!("model.layers.{layer_idx}.{name}"), shape);
        let mut qkv = read("self_attn.q_proj.weight", &[q, hidden])?;
        qkv.extend(read("self_attn.k_proj.weight", &[kv, hidden])?);
        qkv.extend(read("self_attn.v_proj.weight", &[kv, hidden])?);
        Ok(Self {
            attention_norm: read("input_layernorm.weight", &[hidden])?,
            qkv,
            out: read("self_attn.o_proj.weight", &[hidden, q])?,
            ffn_norm: read("post_attention_layernorm.weight", &[hidden])?,
            gate: read("mlp.gate_proj.weight", &[ffn, hidden])?,
            up: read("mlp.up_proj.weight", &[ffn, hidden])?,
            down: read("mlp.down_proj.weight", &[hidden, ffn])?,
        })
    }
}

/// A model, its cache and one sequence of bytes.
pub struct Transformer {
    pub config: Config,
    embedding: Vec<f32>,
    final_norm: Vec<f32>,
    layers: Vec<Layer>,
    session: Session,
    sequence: SequenceId,
    n_threads: usize,
}

impl Transformer {
    /// Loads the model and makes its attention. K and V are kept in f32; the library applies RoPE.
    pub fn open(directory: &Path, session: &SessionOptions) -> Result<Self, Failure> {
        let config = Config::open(directory)?;
        let weights = Weights::open(&directory.join("model.safetensors"))?;
        let layer = LayerOptions::new(config.n_q_heads as i32, config.n_kv_heads as i32, config.head_dim as i32)
            .rope(Rope::Halves)
            .rope_theta(config.rope_theta);
        let engine = Engine::new(&EngineOptions::default())?;
        let model = Model::new(&vec![layer; config.n_layers])?;
        let cache = Cache::new(&engine, &model, &CacheOptions::new().k_type(Dtype::F32))?;
        let layers = (0..config.n_layers).map(|layer_idx| Layer::read(&weights, &config, layer_idx));
        Ok(Self {
            embedding: weights.read_f32("model.embed_tokens.weight", &[config.vocab, config.hidden])?,
            final_norm: weights.read_f32("model.norm.weight", &[config.hidden])?,
            layers: layers.collect::<Result<_, _>>()?,
            session: Session::new(&cache, session)?,
            sequence: cache.create_sequence()?, // the session keeps the cache alive
            n_threads: thread::available_parallelism().map_or(1, usize::from),
            config,
        })
    }

    /// Appends tokens in one step and returns the logits `[tokens.len(), vocab]`.
    pub fn forward(&mut self, tokens: &[u8]) -> Result<Vec<f32>, Failure> {
        let (c, n, threads) = (&self.config, tokens.len(), self.n_threads);
        let (q, kv, d) = (c.q_size(), c.kv_size(), c.head_dim);
        let row = q + 2 * kv;
        let mut x: Vec<f32> = Vec::with_capacity(n * c.hidden);
        for &token in tokens {
            x.extend_from_slice(&self.embedding[usize::from(token) * c.hidden..][..c.hidden]);
        }
        let mut o = vec![0f32; n * q];
        let (ids, lens) = ([self.sequence], [n as i64]);
        let mut step = self.session.step(&ids, &lens)?;
        for (layer_idx, layer) in self.layers.iter().enumerate() {
            let qkv = linear(&normalized(&x, &layer.attention_norm, c.rms_eps), &layer.qkv, c.hidden, threads);
            let heads =
                |first: usize, n_heads| TensorRef::strided(qkv.get(first..).unwrap_or(&[]), &[n, n_heads, d], &[row, d, 1]);
            let (queries, keys, values) = (heads(0, c.n_q_heads)?, heads(q, c.n_kv_heads)?, heads(q + kv, c.n_kv_heads)?);
            let out = TensorMut::new(&mut o, &[n, c.n_q_heads, d])?;
            step.attend(Attend::new(layer_idx as i32, &ids, &lens, queries, out).append(keys, values))?;
            add(&mut x, &linear(&o, &layer.out, q, threads));
            let normed = normalized(&x, &layer.ffn_norm, c.rms_eps);
            let mut gate = linear(&normed, &layer.gate, c.hidden, threads);
            let up = linear(&normed, &layer.up, c.hidden, threads);
            gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
            add(&mut x, &linear(&gate, &layer.down, c.ffn, threads));
        }
        step.end()?;
        Ok(linear(&normalized(&x, &self.final_norm, c.rms_eps), &self.embedding, c.hidden, threads))
    }
}

/// Returns weight * x / sqrt(mean(x^2) + eps), row by row.
fn normalized(x: &[f32], weight: &[f32], eps: f64) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let sum: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
        let factor = (1.0 / (sum / weight.len() as f64 + eps).sqrt()) as f32;
        out.extend(row.iter().zip(weight).map(|(value, weight)| weight * (value * factor)));
    }
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Dot product by sixteen parallel sums, which a compiler turns into vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a, b) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    tail + sums.iter().sum::<f32>()
}

/// Returns y = x W^T for x `[n_rows, n_in]` and W `[n_out, n_in]`. Threads share the rows.
fn linear(x: &[f32], weight: &[f32], n_in: usize, n_threads: usize) -> Vec<f32> {
    let (n_rows, n_out) = (x.len() / n_in, weight.len() / n_in);
    let mut y = vec![0f32; n_rows * n_out];
    let rows_each = ((n_rows + n_threads - 1) / n_threads).max(1);
    let multiply = |x: &[f32], y: &mut [f32]| {
        // Blocks of four rows, so that a row of W is read once for four rows of x.
        for (x, y) in x.chunks(4 * n_in).zip(y.chunks_mut(4 * n_out)) {
            for (column, weight) in weight.chunks_exact(n_in).enumerate() {
                for (x, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
                    y[column] = dot(x, weight);
                }
            }
        }
    };
    if n_rows == 1 {
        multiply(x, &mut y);
        return y;
    }
    thread::scope(|scope| {
        for (x, y) in x.chunks(rows_each * n_in).zip(y.chunks_mut(rows_each * n_out)) {
            scope.spawn(move || multiply(x, y));
        }
    });
    y
}
