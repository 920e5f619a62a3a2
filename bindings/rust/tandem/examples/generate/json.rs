// SPDX-License-Identifier: MIT
//! A JSON parser for model files. It supports what these files contain.
use std::collections::BTreeMap;

/// Quotes a text for a message, cut to 60 characters.
pub fn brief(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parser = Parser { text, at: 0 };
        let value = parser.value(0)?;
        parser.space();
        if parser.at < text.len() {
            return Err(parser.wrong("the end"));
        }
        Ok(value)
    }
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members.get(key),
            _ => None,
        }
    }
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
    /// The numbers of a list, if all are lengths or offsets.
    pub fn lengths(&self) -> Option<Vec<usize>> {
        let Self::List(values) = self else { return None };
        values.iter().map(|value| value.number().filter(|n| *n >= 0.0 && n.fract() == 0.0).map(|n| n as usize)).collect()
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn wrong(&self, expected: &str) -> String {
        format!("JSON: expected {expected} at byte {}", self.at)
    }
    fn peek(&self) -> u8 {
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }
    fn space(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
    }
    fn take(&mut self, token: &str) -> bool {
        self.space();
        let taken = self.text[self.at..].starts_with(token);
        self.at += if taken { token.len() } else { 0 };
        taken
    }
    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > 32 {
            return Err(self.wrong("less depth"));
        }
        for (token, value) in [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))] {
            if self.take(token) {
                return Ok(value);
            }
        }
        match self.peek() {
            b'"' => self.string().map(Json::Text),
            b'[' => self.list(depth),
            b'{' => self.object(depth),
            _ => self.number(),
        }
    }
    fn list(&mut self, depth: usize) -> Result<Json, String> {
        let mut values = Vec::new();
        self.at += 1;
        if self.take("]") {
            return Ok(Json::List(values));
        }
        loop {
            values.push(self.value(depth + 1)?);
            if self.take("]") {
                return Ok(Json::List(values));
            }
            if !self.take(",") {
                return Err(self.wrong("',' or ']'"));
            }
        }
    }
    fn object(&mut self, depth: usize) -> Result<Json, String> {
        let mut members = BTreeMap::new();
        self.at += 1;
        if self.take("}") {
            return Ok(Json::Object(members));
        }
        loop {
            self.space();
            let key = self.string()?;
            if !self.take(":") {
                return Err(self.wrong("':'"));
            }
            let value = self.value(depth + 1)?;
            if members.contains_key(&key) {
                return Err(format!("JSON: an object has the key {} twice", brief(&key)));
            }
            members.insert(key, value);
            if self.take("}") {
                return Ok(Json::Object(members));
            }
            if !self.take(",") {
                return Err(self.wrong("',' or '}'"));
            }
        }
    }
    /// Parses a string, such as a tensor's name. Only escapes of one character are supported.
    fn string(&mut self) -> Result<String, String> {
        if self.peek() != b'"' {
            return Err(self.wrong("'\"'"));
        }
        let mut out = String::new();
        let mut characters = self.text[self.at + 1..].char_indices();
        while let Some((i, c)) = characters.next() {
            match c {
                '"' => {
                    self.at += i + 2;
                    return Ok(out);
                }
                '\\' => match characters.next() {
                    Some((_, 'n')) => out.push('\n'),
                    Some((_, 't')) => out.push('\t'),
                    Some((_, c @ ('"' | '\\' | '/'))) => out.push(c),
                    _ => return Err(self.wrong("an escape of one character")),
                },
                c => out.push(c),
            }
        }
        Err(self.wrong("the end of a string"))
    }
    fn number(&mut self) -> Result<Json, String> {
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let number = rest[..end].parse().map_err(|_| self.wrong("a value"))?;
        self.at += end;
        Ok(Json::Number(number))
    }
}
