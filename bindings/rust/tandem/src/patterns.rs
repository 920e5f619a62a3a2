// SPDX-License-Identifier: MIT
//! What heads attend under the policy `"patterns"`, and pattern files.
use crate::error::{call, Error, Result};
use crate::options::pointer;
use std::ffi::CString;
use std::mem::size_of;
use std::ops::BitOr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tandem_sys as sys;

/// A set of pattern kinds, joined by `|`. The head attends the keys that any of them names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PatternKinds(u32);

impl PatternKinds {
    /// All tokens. A head without kinds also attends all.
    pub const FULL: Self = Self(sys::TANDEM_PATTERN_FULL);
    /// First tokens and a window.
    pub const A_SHAPE: Self = Self(sys::TANDEM_PATTERN_A_SHAPE);
    /// Columns and diagonals, chosen by attention weights.
    pub const VERTICAL_SLASH: Self = Self(sys::TANDEM_PATTERN_VERTICAL_SLASH);
    /// Blocks of 64 tokens, chosen by mean logits.
    pub const BLOCK_SPARSE: Self = Self(sys::TANDEM_PATTERN_BLOCK_SPARSE);

    /// Returns whether this set has all of `kinds`.
    pub const fn contains(self, kinds: Self) -> bool {
        self.0 & kinds.0 == kinds.0
    }
}

impl BitOr for PatternKinds {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Says which keys the queries of an append attend in one query head. Sizes of kinds that the head does not have are 0.
///
/// ```
/// # use tandem::{HeadPattern, PatternKinds};
/// let head = HeadPattern::new().kinds(PatternKinds::A_SHAPE).sink_tokens(4).window_tokens(1020);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HeadPattern {
    /// Kinds of patterns, whose keys are united; none: `FULL`.
    pub kinds: PatternKinds,
    /// First tokens, for `A_SHAPE`.
    pub sink_tokens: i64,
    /// Window, for `A_SHAPE`: 1 or more tokens.
    pub window_tokens: i64,
    /// Columns, for `VERTICAL_SLASH`.
    pub vertical_tokens: i64,
    /// Diagonals, for `VERTICAL_SLASH`.
    pub slash_tokens: i64,
    /// Blocks of 64 tokens, for `BLOCK_SPARSE`.
    pub n_blocks: i64,
}

setters! {
    HeadPattern {
        kinds: is PatternKinds,
        sink_tokens: is i64,
        window_tokens: is i64,
        vertical_tokens: is i64,
        slash_tokens: is i64,
        n_blocks: is i64,
    }
}

impl HeadPattern {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn raw(&self) -> sys::tandem_head_pattern {
        sys::tandem_head_pattern {
            struct_size: size_of::<sys::tandem_head_pattern>() as u32,
            kinds: self.kinds.0,
            sink_tokens: self.sink_tokens,
            window_tokens: self.window_tokens,
            vertical_tokens: self.vertical_tokens,
            slash_tokens: self.slash_tokens,
            n_blocks: self.n_blocks,
        }
    }

    fn from_raw(raw: &sys::tandem_head_pattern) -> Self {
        Self {
            kinds: PatternKinds(raw.kinds),
            sink_tokens: raw.sink_tokens,
            window_tokens: raw.window_tokens,
            vertical_tokens: raw.vertical_tokens,
            slash_tokens: raw.slash_tokens,
            n_blocks: raw.n_blocks,
        }
    }
}

/// Says how a file of head patterns is read. All members are for files of gates, because JSON files contain every size.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct PatternFileOptions {
    /// Query heads of a KV head; 0: 1.
    pub group_size: i64,
    /// Heads with a gate of at least this are `FULL`; -1: the median of the file's gates.
    pub threshold: f64,
    /// Sinks of the other heads; -1: 128.
    pub sink_tokens: i64,
    /// Window of the other heads; -1: 256.
    pub window_tokens: i64,
}

impl Default for PatternFileOptions {
    fn default() -> Self {
        Self { group_size: 0, threshold: -1.0, sink_tokens: -1, window_tokens: -1 }
    }
}

setters! {
    PatternFileOptions {
        group_size: is i64,
        threshold: is f64,
        sink_tokens: is i64,
        window_tokens: is i64,
    }
}

impl PatternFileOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn raw(&self) -> sys::tandem_pattern_file_options {
        sys::tandem_pattern_file_options {
            struct_size: size_of::<sys::tandem_pattern_file_options>() as u32,
            reserved: 0,
            group_size: self.group_size,
            threshold: self.threshold,
            sink_tokens: self.sink_tokens,
            window_tokens: self.window_tokens,
        }
    }
}

/// Says what heads attend under the policy `"patterns"`: [`SessionOptions::patterns`](crate::SessionOptions::patterns).
///
/// ```no_run
/// # use tandem::{PatternFileOptions, Patterns, SessionOptions};
/// let patterns = Patterns::read("patterns.json", &PatternFileOptions::default())?;
/// let options = SessionOptions::new().policy("patterns").patterns(patterns);
/// # Ok::<(), tandem::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Patterns {
    /// One pattern for each query head of each layer.
    pub layers: Vec<Vec<HeadPattern>>,
    /// Keys farther from their query are attended as if at this distance; 0: no limit. The limit needs library RoPE and
    /// heads of kind `A_SHAPE` alone.
    pub max_distance: i64,
}

/// The C struct, and the heads that it points to.
pub(crate) struct RawPatterns {
    pub(crate) raw: sys::tandem_patterns,
    _heads: Vec<sys::tandem_head_pattern>,
}

setters! {
    Patterns {
        layers: from Vec<Vec<HeadPattern>>,
    }
}

impl Patterns {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a file of head patterns: JSON as MInference publishes it, or gates as DuoAttention publishes them.
    ///
    /// # Errors
    /// `Io` (`path`: it cannot be opened or read), `InvalidArgument` (`path`: the message names the layer and the head, or the
    /// line; an option).
    pub fn read(path: impl AsRef<Path>, options: &PatternFileOptions) -> Result<Self> {
        let path = path.as_ref();
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::refuse("tandem_patterns_read", "path", format_args!("= {path:?} has a zero byte")))?;
        let (raw, mut heads) = (options.raw(), Vec::new());
        let (mut n_heads, mut n_layers) = (0, 0);
        loop {
            let capacity = heads.len() as i64;
            call(|error| {
                let (to, path) = (heads.as_mut_ptr(), name.as_ptr());
                // SAFETY: `capacity` structs with their sizes; two numbers; a text; options.
                unsafe { sys::tandem_patterns_read(to, capacity, &mut n_heads, &mut n_layers, path, &raw, error) }
            })?;
            if n_heads <= capacity {
                break;
            }
            heads = vec![HeadPattern::default().raw(); n_heads as usize]; // room for all, unless the file grows
        }
        let known: Vec<_> = heads[..n_heads as usize].iter().map(HeadPattern::from_raw).collect();
        Ok(Self { layers: known.chunks((n_heads / n_layers) as usize).map(<[_]>::to_vec).collect(), max_distance: 0 })
    }

    pub(crate) fn raw(&self) -> Result<RawPatterns> {
        let heads: Vec<_> = self.layers.iter().flatten().map(HeadPattern::raw).collect();
        let raw = sys::tandem_patterns {
            struct_size: size_of::<sys::tandem_patterns>() as u32,
            reserved: 0,
            heads: pointer(Some(&heads[..]).filter(|heads| !heads.is_empty())),
            n_heads: heads.len() as i64,
            max_distance: self.max_distance,
        };
        Ok(RawPatterns { raw, _heads: heads })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::initialised;

    #[test]
    fn defaults_are_the_library_s() {
        let head = initialised(sys::tandem_head_pattern_init);
        assert_eq!(format!("{:?}", HeadPattern::default().raw()), format!("{head:?}"));
        let patterns = initialised(sys::tandem_patterns_init);
        assert_eq!(format!("{:?}", Patterns::default().raw().unwrap().raw), format!("{patterns:?}"));
        let options = initialised(sys::tandem_pattern_file_options_init);
        assert_eq!(format!("{:?}", PatternFileOptions::default().raw()), format!("{options:?}"));
    }

    #[test]
    fn the_library_gets_every_head() {
        let a_shape = HeadPattern { kinds: PatternKinds::A_SHAPE, sink_tokens: 4, window_tokens: 8, ..Default::default() };
        let kinds = PatternKinds::VERTICAL_SLASH | PatternKinds::BLOCK_SPARSE;
        let union = HeadPattern { kinds, vertical_tokens: 1, slash_tokens: 2, n_blocks: 3, ..Default::default() };
        let layers = vec![vec![a_shape], vec![HeadPattern::default(), union]];
        let made = Patterns { layers, max_distance: 5 }.raw().unwrap();
        assert_eq!((made.raw.n_heads, made.raw.heads, made.raw.max_distance), (3, made._heads.as_ptr(), 5));
        let got: Vec<_> = made._heads.iter().map(HeadPattern::from_raw).collect();
        assert_eq!(got, [a_shape, HeadPattern::default(), union]);
    }
}
