// SPDX-License-Identifier: MIT
//! Options of the policy `"hip"`.
use crate::error::Result;
use crate::options::{c_text, pointer};
use std::ffi::CString;
use std::mem::size_of;
use tandem_sys as sys;

/// The way in which a stage scores a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Judge {
    /// The logit of one key, which each query head finds by halving the chunk. Reads few keys; may miss a single strong key.
    Descent = sys::TANDEM_JUDGE_DESCENT,
    /// An upper bound of the chunk's logits. For these bounds the library keeps 4 * `k_head_dim` bytes per chunk and KV
    /// head.
    Bounds = sys::TANDEM_JUDGE_BOUNDS,
    /// The largest logit in the chunk. Reads every key.
    Exact = sys::TANDEM_JUDGE_EXACT,
}

/// A stage scores chunks of tokens and keeps the best.
///
/// ```
/// # use tandem::{Judge, PruningStage};
/// let stage = PruningStage::new(Judge::Bounds, 8, 2048).refresh_interval(4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PruningStage {
    /// How chunks are scored.
    pub judge: Judge,
    /// Queries of an append that share a list: a power of two up to 64, at most that of the stage before; 0: 64.
    pub query_block: i32,
    /// Last stage only: half of `keep_tokens` is kept by score, and with each such chunk the next one.
    pub plus_next: bool,
    /// Tokens of a chunk: a power of two up to 256, at most that of the stage before.
    pub chunk_tokens: i64,
    /// Tokens that the stage keeps: a multiple of `chunk_tokens`; with `plus_next` of twice `chunk_tokens`.
    pub keep_tokens: i64,
    /// Tokens between two runs in decode calls; 0: 1, in every call.
    pub refresh_interval: i64,
    /// The stage applies to queries that see at least this many tokens.
    pub from_tokens: i64,
    /// The stage applies to queries that see fewer tokens than this; 0: no limit.
    pub to_tokens: i64,
}

setters! {
    PruningStage {
        judge: is Judge,
        query_block: is i32,
        plus_next: is bool,
        chunk_tokens: is i64,
        keep_tokens: is i64,
        refresh_interval: is i64,
        from_tokens: is i64,
        to_tokens: is i64,
    }
}

impl PruningStage {
    /// A stage for queries of every length, which runs in every decode call.
    pub const fn new(judge: Judge, chunk_tokens: i64, keep_tokens: i64) -> Self {
        Self {
            judge,
            query_block: 0,
            plus_next: false,
            chunk_tokens,
            keep_tokens,
            refresh_interval: 0,
            from_tokens: 0,
            to_tokens: 0,
        }
    }

    fn raw(&self) -> sys::tandem_pruning_stage {
        sys::tandem_pruning_stage {
            struct_size: size_of::<sys::tandem_pruning_stage>() as u32,
            judge: self.judge as i32,
            query_block: self.query_block,
            plus_next: self.plus_next.into(),
            chunk_tokens: self.chunk_tokens,
            keep_tokens: self.keep_tokens,
            refresh_interval: self.refresh_interval,
            from_tokens: self.from_tokens,
            to_tokens: self.to_tokens,
        }
    }
}

/// Says which keys a layer's queries attend: sinks, window, and the chunks that the last stage has kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PruningRecord {
    /// First tokens, always attended: a multiple of the largest `chunk_tokens`; -1: 64.
    pub sink_tokens: i64,
    /// Newest tokens, always attended: at least twice the largest `chunk_tokens` plus the longest
    /// `refresh_interval` - 1; -1: 1024.
    pub window_tokens: i64,
    /// 1 to 8 stages, in order.
    pub stages: Vec<PruningStage>,
}

impl Default for PruningRecord {
    fn default() -> Self {
        Self { sink_tokens: -1, window_tokens: -1, stages: Vec::new() }
    }
}

setters! {
    PruningRecord {
        sink_tokens: is i64,
        window_tokens: is i64,
        stages: from Vec<PruningStage>,
    }
}

impl PruningRecord {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn raw(&self, stages: &[sys::tandem_pruning_stage]) -> sys::tandem_pruning_record {
        sys::tandem_pruning_record {
            struct_size: size_of::<sys::tandem_pruning_record>() as u32,
            reserved: 0,
            sink_tokens: self.sink_tokens,
            window_tokens: self.window_tokens,
            stages: stages.as_ptr(),
            n_stages: stages.len() as i64,
        }
    }
}

/// Configures the policy `"hip"`: [`SessionOptions::pruning`](crate::SessionOptions::pruning).
///
/// ```
/// # use tandem::{Judge, Pruning, PruningRecord, PruningStage, SessionOptions};
/// let paper = Pruning::new().preset("3k-fast");
/// let own = paper.decode([PruningRecord::new().stages([PruningStage::new(Judge::Bounds, 16, 2048)])]);
/// let options = SessionOptions::new().policy("hip").pruning(own);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Pruning {
    /// `true`: all KV heads share one list. `false`: each has its own.
    pub shared_lists: bool,
    /// Where `decode` or `append` is empty, the records of this preset: `"small"` (the default), or the paper's `"3k"`,
    /// `"3k-fast"`, `"3k-flash"`, `"5k"`, `"3k-5k"`, `"16k-shallow"`.
    pub preset: String,
    /// Records of calls with one query in a sequence, and of speculative tokens: one for all layers or one per layer. Empty:
    /// the preset's.
    pub decode: Vec<PruningRecord>,
    /// The same for calls with several queries in a sequence.
    pub append: Vec<PruningRecord>,
}

impl Default for Pruning {
    fn default() -> Self {
        Self { shared_lists: false, preset: "small".to_string(), decode: Vec::new(), append: Vec::new() }
    }
}

/// The C structs of records, and the stages that they point to.
struct RawRecords {
    raw: Vec<sys::tandem_pruning_record>,
    _stages: Vec<sys::tandem_pruning_stage>,
}

impl RawRecords {
    fn new(records: &[PruningRecord]) -> Self {
        let stages: Vec<_> = records.iter().flat_map(|record| &record.stages).map(PruningStage::raw).collect();
        let mut rest = &stages[..];
        let raw = records.iter().map(|record| {
            let (own, others) = rest.split_at(record.stages.len());
            rest = others;
            record.raw(own)
        });
        Self { raw: raw.collect(), _stages: stages }
    }
    fn as_ptr(&self) -> *const sys::tandem_pruning_record {
        pointer(Some(&self.raw[..]).filter(|records| !records.is_empty()))
    }
}

/// The C struct, and the texts and records that it points to.
pub(crate) struct RawPruning {
    pub(crate) raw: sys::tandem_pruning,
    _preset: CString,
    _records: [RawRecords; 2],
}

setters! {
    Pruning {
        shared_lists: is bool,
        preset: from String,
        decode: from Vec<PruningRecord>,
        append: from Vec<PruningRecord>,
    }
}

impl Pruning {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn raw(&self) -> Result<RawPruning> {
        let preset = c_text("tandem_session_create", "pruning.preset", &self.preset)?;
        let records = [&self.decode, &self.append].map(|records| RawRecords::new(records));
        let raw = sys::tandem_pruning {
            struct_size: size_of::<sys::tandem_pruning>() as u32,
            shared_lists: self.shared_lists.into(),
            preset: preset.as_ptr(),
            decode: records[0].as_ptr(),
            n_decode: self.decode.len() as i64,
            append: records[1].as_ptr(),
            n_append: self.append.len() as i64,
        };
        Ok(RawPruning { raw, _preset: preset, _records: records })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::initialised;

    #[test]
    fn defaults_are_the_library_s() {
        let mut stage = initialised(sys::tandem_pruning_stage_init);
        (stage.judge, stage.chunk_tokens, stage.keep_tokens) = (Judge::Exact as i32, 8, 64);
        assert_eq!(format!("{:?}", PruningStage::new(Judge::Exact, 8, 64).raw()), format!("{stage:?}"));
        let mut record = initialised(sys::tandem_pruning_record_init);
        assert!(record.stages.is_null());
        let made = PruningRecord::default().raw(&[]);
        record.stages = made.stages; // never read, because there are no stages
        assert_eq!(format!("{made:?}"), format!("{record:?}"));
        let mut pruning = initialised(sys::tandem_pruning_init);
        assert!(pruning.preset.is_null()); // NULL means "small"
        let made = Pruning::default().raw().unwrap();
        pruning.preset = made.raw.preset;
        assert_eq!(format!("{:?}", made.raw), format!("{pruning:?}"));
    }
}
