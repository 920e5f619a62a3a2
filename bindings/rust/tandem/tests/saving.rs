// SPDX-License-Identifier: MIT
//! Tests calls on loaded sequences, and refusals.
mod common;
use common::*;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use tandem::*;

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tandem-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
    fn names(&self) -> Vec<String> {
        let name = |entry: io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        std::fs::read_dir(&self.0).unwrap().map(name).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn step(session: &mut Session, sequence: SequenceId, seed: u64) -> Vec<f32> {
    let (q, k, v) = (numbers(Q_HEADS * DIM, seed), numbers(KV_HEADS * DIM, seed + 1), numbers(KV_HEADS * DIM, seed + 2));
    let mut o = vec![f32::NAN; Q_HEADS * DIM];
    session.attend(Attend::new(0, &[sequence], &[1], heads(&q), heads_mut(&mut o)).append(kv(&k), kv(&v))).unwrap();
    o
}

#[test]
fn text_goes_on_from_a_file() {
    let (world, folder) = (World::new(200, 1), Folder::new("goes-on"));
    let mut session = world.session("hgca");
    for i in 0..20 {
        step(&mut session, world.sequence, 100 + i);
    }
    let path = folder.0.join("sequence");
    let saving = Saving::new().session(&session).model_id(7).blob("state", b"123").blob("empty", b"");
    world.cache.save(world.sequence, &path, &saving).unwrap();
    assert_eq!(folder.names(), ["sequence"]);
    let mut blobs = BTreeMap::new();
    let loading = Loading::new().session(&session).model_id(7).blobs(&mut blobs);
    let loaded = world.cache.load(&path, loading).unwrap();
    assert_eq!(blobs["state"], b"123");
    assert_eq!(blobs.len(), 2);
    assert_eq!(world.cache.digest(loaded).unwrap(), world.cache.digest(world.sequence).unwrap());
    for i in 0..20 {
        assert_eq!(step(&mut session, loaded, 200 + i), step(&mut session, world.sequence, 200 + i));
    }
    refused(world.cache.load(&path, Loading::new()), Status::InvalidArgument, "model_id", "7 in the file");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refused(world.cache.load(&path, Loading::new().model_id(7)), Status::Corrupt, "header", "but the file has");
}

#[test]
fn readers_and_writers() {
    let world = World::new(40, 1);
    let mut bytes = Vec::new();
    for _ in 0..2 {
        world.cache.save_to(world.sequence, &mut bytes, &Saving::new()).unwrap();
    }
    let mut reader = &bytes[..];
    for i in 0..2 {
        let loaded = world.cache.load_from(&mut reader, Loading::new()).unwrap();
        assert_eq!(reader.len(), bytes.len() / 2 * (1 - i));
        assert_eq!(world.cache.digest(loaded).unwrap(), world.cache.digest(world.sequence).unwrap());
    }
    refused(world.cache.load_from(&mut reader, Loading::new()), Status::Corrupt, "header", "ends at byte 0");
}

struct Broken(bool);

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        assert!(!self.0, "of the test");
        Err(io::Error::from_raw_os_error(28))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        assert!(!self.0, "of the test");
        Err(io::Error::from_raw_os_error(5))
    }
}

#[test]
fn what_fails_is_said() {
    let (world, folder) = (World::new(40, 1), Folder::new("fails"));
    let save = |broken: &mut Broken| world.cache.save_to(world.sequence, broken, &Saving::new());
    let load = |broken: &mut Broken| world.cache.load_from(broken, Loading::new());
    assert_eq!(save(&mut Broken(false)).unwrap_err().underlying(), 28);
    refused(save(&mut Broken(false)), Status::Io, "write", "os error 28");
    refused(load(&mut Broken(false)), Status::Io, "read", "os error 5");
    assert!(catch_unwind(AssertUnwindSafe(|| save(&mut Broken(true)))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| load(&mut Broken(true)))).is_err());
    refused(world.cache.load(folder.0.join("none"), Loading::new()), Status::Io, "path", "os error 2");
    let none = folder.0.join("none").join("sequence");
    refused(world.cache.save(world.sequence, none, &Saving::new()), Status::Io, "path", "os error 2");
    let path = folder.0.join("sequence");
    let unknown = SequenceId::from_raw(99);
    refused(world.cache.save(unknown, &path, &Saving::new()), Status::NotFound, "sequence", "99");
    refused(
        world.cache.save(world.sequence, &path, &Saving::new().blob("a\0b", b"")),
        Status::InvalidArgument,
        "blobs",
        "a zero byte",
    );
    assert!(folder.names().is_empty());
    assert_eq!(world.cache.stats().unwrap().n_sequences, 1);
}
