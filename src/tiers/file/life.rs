//! The life of a store file: created or opened under a lock, in use, closed with its index.

use super::Shared;
use super::directory::Directory;
use super::disk::{Disk, Hook, read_at, write_at};
use super::engine::{Workers, start};
use super::format::{HEADER, Header, Identity, Layout, wrong};
use super::options::{FileOptions, Mode};
use super::progress::{Answer, Progress};
use super::run::{Batch, Run};
use super::stats::{Counters, FileStats};
use super::transfer::Transfer;
use crate::{Error, Result};
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of page records, open for this store alone.
///
/// Calls take `&self` and may come from many threads. A slot that an unfinished run writes may be in no other run: both
/// would go on side by side, and the slot would read as [`PageFault::Corrupt`](crate::PageFault::Corrupt). Dropping the file without [`close`](Self::close) ends its threads, and leaves it marked as not closed.
pub struct StoreFile {
    path: PathBuf,
    header: Header,
    mode: Mode,
    shared: Arc<Shared>,
    workers: Workers,
    disk: Arc<Disk>,
    lock: File,
}

/// What a file holds when it is put into use.
struct Content {
    header: Header,
    layout: Layout,
    directory: Directory,
    hook: Option<Arc<dyn Hook>>,
    /// The header block of a closed file, which comes back if no engine starts.
    old: Option<[u8; HEADER as usize]>,
}

impl StoreFile {
    /// Creates the file, or replaces the one of this name, with room for `slots` pages.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Geometry`] for arguments that make no sense, [`Error::Locked`] when a store has the
    /// file open, [`Error::File`] when the system refuses, for example for want of space, [`Error::OutOfMemory`] for the 16 bytes
    /// that each slot takes in memory, [`Error::Unavailable`] when the
    /// options ask for an engine that does not work here. A file that was there keeps its content when it is locked or
    /// when the space for the new one is known to be missing.
    pub fn create(path: impl AsRef<Path>, options: &FileOptions, identity: Identity, slots: u32) -> Result<Self> {
        Self::create_hooked(path.as_ref(), options, identity, slots, None)
    }

    /// [`create`](Self::create) with faults to come.
    #[cfg(any(test, feature = "conformance"))]
    #[doc(hidden)]
    pub fn create_with_faults(
        path: impl AsRef<Path>,
        options: &FileOptions,
        identity: Identity,
        slots: u32,
        faults: super::faults::Faults,
    ) -> Result<Self> {
        Self::create_hooked(path.as_ref(), options, identity, slots, Some(Arc::new(faults)))
    }

    fn create_hooked(
        path: &Path,
        options: &FileOptions,
        identity: Identity,
        slots: u32,
        hook: Option<Arc<dyn Hook>>,
    ) -> Result<Self> {
        options.validate()?;
        if slots == 0 {
            return Err(Error::Config { field: "slots", value: "0".to_owned(), rule: "it must be 1 or more" });
        }
        let layout = Layout::new(identity.geometry, slots)?;
        let is_new = !path.exists();
        let file = open_locked(path, true)?;
        let made = preallocate(&file, path, layout.end()).and_then(|()| {
            let (header, directory) = (Header::new(identity, &layout), Directory::new(&layout)?);
            Self::start(path, file, options, Content { header, layout, directory, hook, old: None })
        });
        if made.is_err() && is_new {
            // Nothing of it is of use, and the error that counts is on its way.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Opens a file that was closed, and marks it as in use; also gives the bytes that [`close`](Self::close) was given.
    ///
    /// # Errors
    /// [`Error::WrongFile`] naming the part of the file that is not as expected: magic, version, a field of the geometry,
    /// fingerprint, state (not closed), length, a checksum. [`Error::Locked`] when a store has it open. [`Error::File`]
    /// and [`Error::Unavailable`] as for [`create`](Self::create). The file stays as it is.
    pub fn open(path: impl AsRef<Path>, options: &FileOptions, identity: Identity) -> Result<(Self, Vec<u8>)> {
        let path = path.as_ref();
        let name = path.display().to_string();
        options.validate()?;
        identity.geometry.validate()?;
        let file = open_locked(path, false)?;
        let length = file.metadata().map_err(|error| refused(path, "size", error))?.len();
        let mut block = [0; HEADER as usize];
        if length < HEADER {
            return Err(wrong(&name, "length", length, format!("at least {HEADER}")));
        }
        read_all(&file, &mut block, 0).map_err(|error| refused(path, "read of the header", error))?;
        let mut header = Header::decode(&name, &block)?;
        let (layout, index) = header.check(&name, identity)?;
        let end = index.offset.saturating_add(index.bytes);
        if length < end {
            return Err(wrong(&name, "length", length, format!("at least {end}")));
        }
        let size = usize::try_from(index.bytes).map_err(|_| wrong(&name, "index length", index.bytes, usize::MAX))?;
        let mut bytes = vec![0; size];
        read_all(&file, &mut bytes, index.offset).map_err(|error| refused(path, "read of the index", error))?;
        let (directory, blob) = Directory::decode(&name, &layout, &index, bytes)?;
        header.index = None;
        let content = Content { header, layout, directory, hook: None, old: Some(block) };
        Ok((Self::start(path, file, options, content)?, blob))
    }

    fn start(path: &Path, file: File, options: &FileOptions, content: Content) -> Result<Self> {
        let Content { header, layout, directory, hook, old } = content;
        if let Some(hook) = &hook {
            hook.attach(layout);
        }
        // The probe of the engine writes the header: the file is in use from here on.
        let started = start(&file, path, options, &header.encode(), hook);
        if let (Err(_), Some(old)) = (&started, old) {
            write_all(&file, &old, 0).map_err(|error| refused(path, "write of the header", error))?;
        }
        let (disk, workers, mode) = started?;
        file.sync_all().map_err(|error| refused(path, "sync", error))?;
        tracing::debug!(path = %path.display(), slots = layout.slots, %mode, "store file in use");
        let shared = Arc::new(Shared { layout, directory, counters: Counters::default() });
        Ok(StoreFile { path: path.to_owned(), header, mode, shared, workers, disk, lock: file })
    }

    /// Ends all I/O, then writes what the slots hold and the caller's `index` behind them, and marks the file as closed.
    ///
    /// # Errors
    /// [`Error::File`] when the system refuses; the file is then not closed, and can't be opened again.
    pub fn close(mut self, index: &[u8]) -> Result<()> {
        self.workers.end(false);
        let (bytes, place) = self.shared.directory.encode(&self.shared.layout, index);
        let put = |bytes: &[u8], offset, what| {
            write_all(&self.lock, bytes, offset).map_err(|error| refused(&self.path, what, error))?;
            self.lock.sync_all().map_err(|error| refused(&self.path, "sync", error))
        };
        put(&bytes, place.offset, "write of the index")?;
        // What a longer index left behind; without it the file is only larger than it must be.
        let _ = self.lock.set_len(place.offset + place.bytes);
        self.header.index = Some(place);
        put(&self.header.encode(), 0, "write of the header")
    }

    /// Writes runs; returns at once. A slot that is written loses what it held, also when the write fails.
    ///
    /// Adjacent pages are one I/O (up to 8 MiB). A run that fails as a whole is tried again page by page.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Shape`] or [`Error::Config`] for a run that reaches past the slots, whose buffer is
    /// too small, or that names generation 0; no run is begun then.
    pub fn write(&self, runs: Vec<Run>) -> Result<Batch> {
        self.submit(true, runs)
    }

    /// Reads runs; returns at once. Each page is checked: what comes back is what was written as the generation given.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(&self, runs: Vec<Run>) -> Result<Batch> {
        self.submit(false, runs)
    }

    fn submit(&self, write: bool, mut runs: Vec<Run>) -> Result<Batch> {
        runs.iter_mut().try_for_each(|run| run.check(&self.shared.layout))?;
        let (batch, tickets) = Batch::new(runs.len());
        let transfers = runs.into_iter().zip(tickets);
        let transfers = transfers.map(|(run, ticket)| Transfer::new(self.shared.clone(), write, run, ticket));
        self.workers.push(transfers.collect());
        Ok(batch)
    }

    /// Bytes from one page to the next in a buffer: the record rounded up to 4096.
    pub fn stride(&self) -> usize {
        self.shared.layout.stride
    }

    /// Slots of the file.
    pub fn slots(&self) -> u32 {
        self.shared.layout.slots
    }

    /// The generation that a slot holds; none when nothing in it can be read.
    pub fn generation(&self, slot: u32) -> Option<u64> {
        Some(self.shared.directory.generation(slot)).filter(|&generation| generation != 0)
    }

    /// What moves the bytes, and why nothing better.
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// What was done so far.
    pub fn stats(&self) -> FileStats {
        self.shared.counters.read(self.disk.meter.busy())
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        self.workers.end(true);
        // A process that is being started may still hold copies of the handles, and with them the lock.
        let _ = self.lock.unlock();
    }
}

impl std::fmt::Debug for StoreFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreFile({}, {} slots, {})", self.path.display(), self.slots(), self.mode)
    }
}

fn refused(path: &Path, operation: &'static str, error: impl std::fmt::Display) -> Error {
    Error::File { path: path.display().to_string(), operation, message: error.to_string() }
}

/// Opens a regular file for this handle alone; nothing in it changes.
fn open_locked(path: &Path, create: bool) -> Result<File> {
    let operation = if create { "create" } else { "open" };
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(refused(path, operation, "not a regular file"));
    }
    let file = File::options().read(true).write(true).create(create).truncate(false).open(path);
    let file = file.map_err(|error| refused(path, operation, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { path: path.display().to_string() }),
        Err(TryLockError::Error(error)) => Err(refused(path, "lock", error)),
    }
}

/// Empties the file and gives it `bytes` bytes of storage.
fn preallocate(file: &File, path: &Path, bytes: u64) -> Result<()> {
    let fail = |error: io::Error| {
        let message = format!("no room for {bytes} bytes: {error}");
        Error::File { path: path.display().to_string(), operation: "preallocate", message }
    };
    #[cfg(unix)]
    if let (Ok(system), Ok(old)) = (rustix::fs::fstatvfs(file), rustix::fs::fstat(file)) {
        // Known before anything is lost, and before a shared disk runs full.
        let available = system.f_bavail.saturating_mul(system.f_frsize).saturating_add(old.st_blocks as u64 * 512);
        if system.f_blocks > 0 && available < bytes {
            return Err(fail(io::Error::other(format!("{available} bytes are available"))));
        }
    }
    file.set_len(0).map_err(fail)?;
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => {}
        Err(error) => {
            let _ = file.set_len(0);
            return Err(fail(error.into()));
        }
    }
    file.set_len(bytes).map_err(fail)
}

/// Moves all of `len` bytes, a part at a time.
fn all(len: usize, mut part: impl FnMut(std::ops::Range<usize>) -> io::Result<usize>) -> io::Result<()> {
    let mut progress = Progress::new(len);
    while !progress.next().is_empty() {
        match progress.answer(part(progress.next())) {
            Answer::More | Answer::Done => {}
            Answer::End(done) => return Err(io::Error::other(format!("only {done} of {len} bytes"))),
            Answer::Failed(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_all(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    all(bytes.len(), |range| read_at(file, &mut bytes[range.clone()], offset + range.start as u64))
}

fn write_all(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    all(bytes.len(), |range| write_at(file, &bytes[range.clone()], offset + range.start as u64))
}
