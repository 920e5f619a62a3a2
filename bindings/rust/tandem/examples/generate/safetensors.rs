// SPDX-License-Identifier: MIT
//! Reads safetensors: a length, a JSON header, and the data of the tensors that the header lists. As in the format's
//! reference implementation, no key may appear twice, and the tensors cover the data without overlaps or holes.
use crate::json::{brief, Json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const MAX_HEADER_BYTES: usize = 100_000_000; // the format's own limit

struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

pub struct Weights {
    path: String,
    tensors: BTreeMap<String, Tensor>,
    data: Vec<u8>,
}

/// Reads a regular file. Other kinds are refused: reading a pipe would wait for a writer, and a device may have no end.
pub fn read_regular(path: &Path) -> Result<Vec<u8>, String> {
    let wrong = |what: &str| format!("{}: {what}", path.display());
    if !std::fs::metadata(path).map_err(|error| wrong(&error.to_string()))?.is_file() {
        return Err(wrong("is not a regular file"));
    }
    std::fs::read(path).map_err(|error| wrong(&error.to_string()))
}

fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => Some(1),
        _ => None,
    }
}

/// Parses an entry of the header and checks it against the length of the data.
fn tensor(entry: &Json, n_data_bytes: usize) -> Result<Tensor, String> {
    let dtype = entry.get("dtype").and_then(Json::text).ok_or("has no dtype")?;
    let size = element_bytes(dtype).ok_or_else(|| format!("has dtype {}, which is unknown", brief(dtype)))?;
    let shape = entry.get("shape").and_then(Json::lengths).ok_or("has no shape of lengths")?;
    let n_bytes = shape.iter().try_fold(size, |n, length| n.checked_mul(*length)).ok_or("has a shape too large")?;
    let offsets = entry.get("data_offsets").and_then(Json::lengths).unwrap_or_default();
    let [first, end] = offsets[..] else { return Err("has no data_offsets".to_string()) };
    if first > end || end > n_data_bytes {
        return Err(format!("has data_offsets {offsets:?} outside the {n_data_bytes} bytes of data"));
    }
    if end - first != n_bytes {
        return Err(format!("has data_offsets {offsets:?}, but its shape of {dtype} takes {n_bytes} bytes"));
    }
    Ok(Tensor { dtype: dtype.to_string(), shape, bytes: first..end })
}

/// Checks that the tensors follow one another from the first byte of the data to the last.
fn check_cover(tensors: &BTreeMap<String, Tensor>, n_data_bytes: usize) -> Result<(), String> {
    let hole = |first, end| Err(format!("bytes {first} to {end} of the data belong to no tensor"));
    let mut ranges: Vec<_> = tensors.iter().map(|(name, tensor)| (tensor.bytes.start, tensor.bytes.end, name)).collect();
    ranges.sort_unstable();
    let (mut covered, mut before) = (0, "");
    for (first, end, name) in ranges {
        if first < covered {
            return Err(format!("tensor {} overlaps tensor {}", brief(name), brief(before)));
        }
        if first > covered {
            return hole(covered, first);
        }
        (covered, before) = (end, name);
    }
    if covered < n_data_bytes {
        return hole(covered, n_data_bytes);
    }
    Ok(())
}

impl Weights {
    pub fn open(path: &Path) -> Result<Self, String> {
        let data = read_regular(path)?;
        let name = path.display().to_string();
        Self::parse(name.clone(), data).map_err(|what| format!("{name}: {what}"))
    }

    fn parse(path: String, mut data: Vec<u8>) -> Result<Self, String> {
        let length = data.get(..8).ok_or("too short for a header length")?;
        let length = length.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        let length = usize::try_from(length).ok().filter(|&length| length <= MAX_HEADER_BYTES);
        let begin = length.map(|length| length + 8).filter(|&begin| begin <= data.len()).ok_or("header beyond the end")?;
        let text = std::str::from_utf8(&data[8..begin]).map_err(|error| error.to_string())?;
        let Json::Object(header) = Json::parse(text)? else { return Err("header is not a JSON object".to_string()) };
        data.drain(..begin);
        let mut tensors = BTreeMap::new();
        for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let tensor = tensor(entry, data.len()).map_err(|what| format!("tensor {} {what}", brief(name)))?;
            tensors.insert(name.clone(), tensor);
        }
        check_cover(&tensors, data.len())?;
        Ok(Self { path, tensors, data })
    }

    /// Returns the bytes and type of a tensor, which must have this shape.
    pub fn find(&self, name: &str, shape: &[usize]) -> Result<(&[u8], &str), String> {
        let tensor = self.tensors.get(name).ok_or_else(|| format!("{}: tensor {name} is missing", self.path))?;
        if tensor.shape != shape {
            let found = &tensor.shape;
            return Err(format!("{}: tensor {name} has shape {found:?}, config.json asks for {shape:?}", self.path));
        }
        Ok((&self.data[tensor.bytes.clone()], &tensor.dtype))
    }

    /// Returns a tensor widened to f32.
    pub fn read_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let (bytes, dtype) = self.find(name, shape)?;
        match dtype {
            "F32" => Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            "BF16" => Ok(bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect()),
            other => Err(format!("{}: tensor {name} has dtype {other} (F32 and BF16 are read)", self.path)),
        }
    }
}
