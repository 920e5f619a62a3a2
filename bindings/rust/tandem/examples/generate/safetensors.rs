// SPDX-License-Identifier: MIT
//! Reads safetensors: a length, a JSON header, the data of the tensors that it lists.
use crate::json::Json;
use std::path::Path;

pub struct Weights {
    path: String,
    header: Json,
    data: Vec<u8>,
}

impl Weights {
    pub fn open(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let wrong = |what: &str| format!("{name}: {what}");
        let mut data = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        let Some(length) = data.first_chunk::<8>() else { return Err(wrong("too short for a header length")) };
        let begin = usize::try_from(u64::from_le_bytes(*length)).ok().and_then(|length| length.checked_add(8));
        let Some(begin) = begin.filter(|&begin| begin <= data.len()) else { return Err(wrong("header beyond the end")) };
        let text = std::str::from_utf8(&data[8..begin]).map_err(|error| wrong(&error.to_string()))?;
        let header = Json::parse(text).map_err(|error| wrong(&error))?;
        data.drain(..begin);
        Ok(Self { path: name, header, data })
    }

    /// The bytes of a tensor of this shape, and its type.
    pub fn find(&self, name: &str, shape: &[usize]) -> Result<(&[u8], &str), String> {
        let wrong = |what: String| format!("{}: tensor {name} {what}", self.path);
        let entry = self.header.get(name).ok_or_else(|| wrong("is missing".to_string()))?;
        let found = entry.get("shape").and_then(Json::lengths).ok_or_else(|| wrong("has no shape".to_string()))?;
        if found != shape {
            return Err(wrong(format!("has shape {found:?}, config.json asks for {shape:?}")));
        }
        let offsets = entry.get("data_offsets").and_then(Json::lengths).unwrap_or_default();
        let [first, end] = offsets[..] else { return Err(wrong("has no data_offsets".to_string())) };
        let bytes = self.data.get(first..end).ok_or_else(|| wrong("lies beyond the end".to_string()))?;
        Ok((bytes, entry.get("dtype").and_then(Json::text).unwrap_or("")))
    }

    /// The same widened to f32.
    pub fn read_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let (bytes, dtype) = self.find(name, shape)?;
        let values: Vec<f32> = match dtype {
            "F32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            "BF16" => bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect(),
            other => return Err(format!("{}: tensor {name} has dtype {other} (F32 and BF16 are read)", self.path)),
        };
        if values.len() != shape.iter().product::<usize>() {
            return Err(format!("{}: tensor {name} has {} values for shape {shape:?}", self.path, values.len()));
        }
        Ok(values)
    }
}
