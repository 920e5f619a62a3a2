// SPDX-License-Identifier: MIT
//! Sequences in files.
use crate::cache::{Cache, SequenceId};
use crate::error::{call, Error, Result};
use crate::session::Session;
use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_void, CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::raw::c_char;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{mem, process, ptr, slice};
use tandem_sys as sys;

/// Says what is saved beside the rows of a sequence.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Saving<'a> {
    /// A session of the cache; what it has learned of the sequence is saved too.
    pub session: Option<&'a Session>,
    /// A number for the model's weights; loading compares it.
    pub model_id: u64,
    /// More bytes, by name.
    pub blobs: Vec<(&'a str, &'a [u8])>,
}

impl<'a> Saving<'a> {
    /// Saves the rows alone.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`session`](#structfield.session).
    #[must_use]
    pub fn session(mut self, session: &'a Session) -> Self {
        self.session = Some(session);
        self
    }
    /// Sets [`model_id`](#structfield.model_id).
    #[must_use]
    pub fn model_id(mut self, model_id: u64) -> Self {
        self.model_id = model_id;
        self
    }
    /// Adds one of [`blobs`](#structfield.blobs).
    #[must_use]
    pub fn blob(mut self, name: &'a str, bytes: &'a [u8]) -> Self {
        self.blobs.push((name, bytes));
        self
    }
}

/// Says what is taken from a saved sequence beside its rows.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Loading<'a> {
    /// A session of the cache that gets what the saved session had learned. `None`: that is skipped.
    pub session: Option<&'a Session>,
    /// The number that was saved.
    pub model_id: u64,
    /// Receives the blobs. `None`: they are skipped.
    pub blobs: Option<&'a mut BTreeMap<String, Vec<u8>>>,
}

impl<'a> Loading<'a> {
    /// Loads the rows alone.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`session`](#structfield.session).
    #[must_use]
    pub fn session(mut self, session: &'a Session) -> Self {
        self.session = Some(session);
        self
    }
    /// Sets [`model_id`](#structfield.model_id).
    #[must_use]
    pub fn model_id(mut self, model_id: u64) -> Self {
        self.model_id = model_id;
        self
    }
    /// Sets [`blobs`](#structfield.blobs).
    #[must_use]
    pub fn blobs(mut self, blobs: &'a mut BTreeMap<String, Vec<u8>>) -> Self {
        self.blobs = Some(blobs);
        self
    }
}

/// A reader or writer that the library calls, and how that failed.
struct Stream<S> {
    stream: S,
    failed: Option<io::Error>,
    panic: Option<Box<dyn Any + Send>>,
}

impl<S> Stream<S> {
    fn new(stream: S) -> Self {
        Self { stream, failed: None, panic: None }
    }
    /// Runs a callback of the caller. Returns `None` if it failed.
    fn run<T>(&mut self, body: impl FnOnce(&mut S) -> io::Result<T>) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| body(&mut self.stream))) {
            Ok(Ok(value)) => return Some(value),
            Ok(Err(failed)) => self.failed = Some(failed),
            Err(panic) => self.panic = Some(panic),
        }
        None
    }
    /// Returns the call's result, or the stream's error if it failed. Continues the stream's panic.
    fn finish(&mut self, function: &str, field: &str, result: Result<()>) -> Result<()> {
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
        match (result, self.failed.take()) {
            (Err(_), Some(failed)) => Err(Error::of_io(function, field, &failed)),
            (result, _) => result,
        }
    }
}

unsafe extern "C" fn write_entry(data: *const c_void, n_bytes: i64, user: *mut c_void) -> i32 {
    // SAFETY: the `Stream` of `save_to`, which this call alone holds, and n_bytes bytes of the library.
    let (stream, bytes) =
        unsafe { (&mut *user.cast::<Stream<&mut dyn Write>>(), slice::from_raw_parts(data.cast::<u8>(), n_bytes as usize)) };
    stream.run(|writer| writer.write_all(bytes)).is_none().into()
}

unsafe extern "C" fn read_entry(data: *mut c_void, n_bytes: i64, user: *mut c_void) -> i64 {
    // SAFETY: the `Stream` of `load_from`, which this call alone holds, and room for n_bytes bytes.
    let (stream, room) = unsafe {
        ptr::write_bytes(data.cast::<u8>(), 0, n_bytes as usize); // a reader may look at the buffer
        (&mut *user.cast::<Stream<&mut dyn Read>>(), slice::from_raw_parts_mut(data.cast::<u8>(), n_bytes as usize))
    };
    let read = stream.run(|reader| loop {
        match reader.read(room) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    });
    read.map_or(-1, |n| n.min(n_bytes as usize) as i64)
}

unsafe extern "C" fn blob_entry(name: *const c_char, data: *const c_void, n_bytes: i64, user: *mut c_void) -> i32 {
    // SAFETY: the map of `load_from`; a text and n_bytes bytes that live until this returns.
    let (blobs, name) = unsafe { (&mut *user.cast::<BTreeMap<String, Vec<u8>>>(), CStr::from_ptr(name)) };
    let bytes = match n_bytes {
        0 => Vec::new(),
        // SAFETY: as above.
        n => unsafe { slice::from_raw_parts(data.cast::<u8>(), n as usize) }.to_vec(),
    };
    blobs.insert(name.to_string_lossy().into_owned(), bytes);
    0
}

/// A temporary file that replaces another file once it is complete and on disk.
struct Part {
    path: PathBuf,
    file: File,
}

impl Part {
    fn beside(path: &Path) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.{}.part", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let path = PathBuf::from(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Self { path, file })
    }
    fn put_in_place(&self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // fails after the rename, as it should
    }
}

impl Cache {
    /// Writes a sequence to a file. All its layers must have the same length. `save` first writes a temporary file (`.part`)
    /// beside the path, flushes it to disk and then renames it. So the path holds the old file, or none, until the new one
    /// is complete. If the process is killed, the `.part` file stays. Other sequences can be used meanwhile.
    ///
    /// # Errors
    /// `Io` ([`Error::underlying`] is the system's code), `Busy`, `InvalidState`.
    pub fn save(&self, sequence: SequenceId, path: impl AsRef<Path>, saving: &Saving<'_>) -> Result<()> {
        let (path, failed) = (path.as_ref(), |error: io::Error| Error::of_io("tandem_sequence_save", "path", &error));
        let mut part = Part::beside(path).map_err(failed)?;
        self.save_to(sequence, &mut part.file, saving)?;
        part.put_in_place(path).map_err(failed)
    }

    /// Writes a sequence to a writer. After an error, the bytes written are no valid saved sequence.
    ///
    /// # Errors
    /// As [`Cache::save`].
    pub fn save_to(&self, sequence: SequenceId, writer: &mut dyn Write, saving: &Saving<'_>) -> Result<()> {
        const FUNCTION: &str = "tandem_sequence_save";
        let mut names = Vec::new();
        for (name, _) in &saving.blobs {
            let refuse = |_| Error::refuse(FUNCTION, "blobs", format_args!("= {name:?} has a zero byte"));
            names.push(CString::new(*name).map_err(refuse)?);
        }
        let blobs: Vec<_> = (names.iter().zip(&saving.blobs))
            .map(|(name, (_, bytes))| sys::tandem_saved_blob {
                struct_size: mem::size_of::<sys::tandem_saved_blob>() as u32,
                reserved: 0,
                name: name.as_ptr(),
                data: bytes.as_ptr().cast(),
                n_bytes: bytes.len() as i64,
            })
            .collect();
        let options = sys::tandem_save_options {
            struct_size: mem::size_of::<sys::tandem_save_options>() as u32,
            reserved: 0,
            session: saving.session.map_or(ptr::null_mut(), Session::as_ptr),
            model_id: saving.model_id,
            blobs: if blobs.is_empty() { ptr::null() } else { blobs.as_ptr() },
            n_blobs: blobs.len() as i64,
        };
        let mut stream = Stream::new(writer);
        let user = ptr::addr_of_mut!(stream).cast();
        // SAFETY: live handles; options and what they point to, and the stream, live during the call.
        let result = call(|error| unsafe {
            sys::tandem_sequence_save(self.as_ptr(), sequence.to_raw(), Some(write_entry), user, &options, error)
        });
        stream.finish(FUNCTION, "write", result)
    }

    /// Makes a sequence of a file that [`Cache::save`] has written. On an error, the cache is unchanged.
    ///
    /// # Errors
    /// `Io`, `Corrupt` (cut off, changed, or no saved sequence), `InvalidArgument` (another model, other storage types, or a
    /// session with another policy; the field names the member), `Unsupported` (a later format), `Capacity`, `OutOfMemory`.
    pub fn load(&self, path: impl AsRef<Path>, loading: Loading<'_>) -> Result<SequenceId> {
        let failed = |error: io::Error| Error::of_io("tandem_sequence_load", "path", &error);
        let mut file = File::open(path).map_err(failed)?;
        let n_bytes = file.metadata().map_err(failed)?.len() as i64;
        self.load_all(&mut file, n_bytes, loading)
    }

    /// The same from a reader. No byte behind the sequence is read.
    ///
    /// # Errors
    /// As [`Cache::load`].
    pub fn load_from(&self, reader: &mut dyn Read, loading: Loading<'_>) -> Result<SequenceId> {
        self.load_all(reader, -1, loading)
    }

    fn load_all(&self, reader: &mut dyn Read, file_bytes: i64, loading: Loading<'_>) -> Result<SequenceId> {
        let mut found = BTreeMap::<String, Vec<u8>>::new();
        let takes_blobs = loading.blobs.is_some();
        let options = sys::tandem_load_options {
            struct_size: mem::size_of::<sys::tandem_load_options>() as u32,
            reserved: 0,
            session: loading.session.map_or(ptr::null_mut(), Session::as_ptr),
            model_id: loading.model_id,
            file_bytes,
            blob: if takes_blobs { Some(blob_entry) } else { None },
            blob_user: if takes_blobs { ptr::addr_of_mut!(found).cast() } else { ptr::null_mut() },
        };
        let mut stream = Stream::new(reader);
        let (user, mut id) = (ptr::addr_of_mut!(stream).cast(), 0);
        // SAFETY: live handles; options and what they point to, and the stream, live during the call.
        let result = call(|error| unsafe {
            sys::tandem_sequence_load(&mut id, self.as_ptr(), Some(read_entry), user, &options, error)
        });
        stream.finish("tandem_sequence_load", "read", result)?;
        if let Some(blobs) = loading.blobs {
            blobs.append(&mut found);
        }
        Ok(SequenceId::from_raw(id))
    }
}
