//! The file tier, and the cascade of host memory over it: one preallocated file of checked records, with as much host
//! memory in front as it is given.
//!
//! Pages pass between frames and the file through *buffers*: the file reads and writes host memory that the device reaches
//! by itself. Where there is no such memory, or no more of it, buffers are on the heap, and pages are copied between them and
//! *staging* cells of host memory. A cascade has *cache* cells too: a page
//! that is written while one is free is acknowledged from there and reaches the file later (write-back), and a page that
//! is read from the file takes a free one (promotion). Like the frames above it, the cache keeps a stable subset: a page
//! gives up its cell only when two sweeps over everything have passed it by.

mod buffers;
mod cache;
mod cells;
mod reading;
#[cfg(all(test, feature = "conformance"))]
mod tests;
mod writing;

use super::extents::{Extents, extent};
use super::file::{FileOptions, Identity, StoreFile};
use super::{Landing, Lane, Outcome, PageMove, Ticket, Tier, TierStats};
use crate::backend::Backend;
use crate::record::Record;
use crate::{Error, Result};
use buffers::Buffers;
use cache::Cache;
use cells::Cells;
use reading::Read;
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use writing::Write;

/// Bytes of one I/O at most: enough for a disk's full speed, few enough that several are in flight.
const RUN_BYTES: usize = 4 << 20;

/// Pages in a file, checked when they come back; with [`host_cache`](Self::host_cache) a cascade of host memory over it.
#[derive(Debug)]
pub struct FileTier<B: Backend> {
    path: PathBuf,
    /// Bytes of records; `None`: an existing file, which knows.
    bytes: Option<u64>,
    fingerprint: u64,
    options: FileOptions,
    staging_bytes: u64,
    cache_bytes: u64,
    #[cfg(any(test, feature = "conformance"))]
    faults: Option<super::file::faults::Faults>,
    attached: Option<Attached<B>>,
}

/// What the device works on until an event.
type Until<B, T> = (<B as Backend>::Event, Vec<T>);

#[derive(Debug)]
struct Attached<B: Backend> {
    /// `None` once closed.
    file: Option<StoreFile>,
    slots: Extents,
    record_bytes: usize,
    /// Pages of one I/O at most.
    run_pages: usize,
    staging: Cells<B>,
    cache: Cache<B>,
    writes: HashMap<Ticket, Write<B>>,
    reads: HashMap<Ticket, Read>,
    next: u64,
    /// Staging cells that the device still reads, oldest first.
    leaving: VecDeque<Until<B, u32>>,
    /// Pages (slot, generation) whose cells of the cache the device still reads, oldest first.
    users: VecDeque<Until<B, (u32, u64)>>,
    /// Slots that the file is writing, and those among them that were given back meanwhile.
    writing: HashSet<u32>,
    given: HashSet<u32>,
    /// Memory for I/O.
    buffers: Buffers<B>,
    /// What an earlier store left.
    index: Option<Vec<u8>>,
    hits: u64,
}

impl<B: Backend> FileTier<B> {
    /// A new file at `path` for at most `bytes` bytes of pages, preallocated when the cache is built. A file that is there
    /// is replaced, unless a store has it open.
    ///
    /// In the file a page takes whole blocks of 4,096 bytes ([`Record::file_stride`]), which `bytes` counts, as do the bytes
    /// of [`TierStats`]. In bf16 pages are mostly whole blocks. Int8 pages often are not: 8 KV heads of 128 elements and 16
    /// tokens are 33,792 bytes and take 36,864. [`Geometry::snug_page_size`](crate::Geometry::snug_page_size) names the page
    /// size without padding (64 tokens here).
    pub fn create(path: impl Into<PathBuf>, bytes: u64) -> Self {
        FileTier {
            path: path.into(),
            bytes: Some(bytes),
            fingerprint: 0,
            options: FileOptions::default(),
            staging_bytes: 512 << 20,
            cache_bytes: 0,
            #[cfg(any(test, feature = "conformance"))]
            faults: None,
            attached: None,
        }
    }

    /// The file that an earlier store has [closed](crate::swap::HighSpeedSwap::close), with its sequences.
    pub fn open(path: impl Into<PathBuf>) -> Self {
        FileTier { bytes: None, ..Self::create(path, 0) }
    }

    /// Whose K and V the file holds: a number that changes with the model's weights. A file with another one is refused.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: u64) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// How the file is read and written.
    #[must_use]
    pub fn options(mut self, options: FileOptions) -> Self {
        self.options = options;
        self
    }

    /// Bytes of host memory that pages pass through on their way, taken as it is needed: 512 MiB unless told otherwise. Reads
    /// and writes use it in place where the device reaches it by itself; what is under way beyond it, or where there is no
    /// such memory, is on the heap, and pages are copied through as many bytes of cells at most (and at least one page's).
    #[must_use]
    pub fn staging(mut self, bytes: u64) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// Bytes of host memory that keep pages in front of the file: a cascade.
    #[must_use]
    pub fn host_cache(mut self, bytes: u64) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// A file whose I/O fails as told.
    #[cfg(any(test, feature = "conformance"))]
    #[doc(hidden)]
    #[must_use]
    pub fn faults(mut self, faults: super::file::faults::Faults) -> Self {
        self.faults = Some(faults);
        self
    }

    fn file(&self, identity: Identity, slots: u32) -> Result<(StoreFile, Option<Vec<u8>>)> {
        #[cfg(any(test, feature = "conformance"))]
        if let (Some(faults), Some(_)) = (&self.faults, self.bytes) {
            let file = StoreFile::create_with_faults(&self.path, &self.options, identity, slots, faults.clone())?;
            return Ok((file, None));
        }
        match self.bytes {
            Some(_) => Ok((StoreFile::create(&self.path, &self.options, identity, slots)?, None)),
            None => StoreFile::open(&self.path, &self.options, identity).map(|(file, index)| (file, Some(index))),
        }
    }

    fn attached(&mut self) -> Result<&mut Attached<B>> {
        self.attached.as_mut().ok_or_else(|| Error::Unavailable { backend: "file", reason: "not attached".into() })
    }
}

impl<B: Backend> Attached<B> {
    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    fn store(&self) -> Result<&StoreFile> {
        self.file.as_ref().ok_or_else(|| Error::Unavailable { backend: "file", reason: "closed".into() })
    }

    /// Takes staging cells back that the device has read.
    fn free_staging(&mut self, backend: &B) -> Result<()> {
        while let Some((event, _)) = self.leaving.front() {
            if !backend.is_done(event)? {
                break;
            }
            let cells = self.leaving.pop_front().map_or_else(Vec::new, |(_, cells)| cells);
            cells.into_iter().for_each(|cell| self.staging.give(cell));
        }
        Ok(())
    }

    /// A staging cell; waits for the oldest that the device still reads, `None` when there is none to wait for.
    fn staging_cell(&mut self, backend: &B) -> Result<Option<u32>> {
        loop {
            if let Some(cell) = self.staging.take() {
                return Ok(Some(cell));
            }
            let Some((event, cells)) = self.leaving.pop_front() else { return Ok(None) };
            backend.finish(&event)?;
            cells.into_iter().for_each(|cell| self.staging.give(cell));
        }
    }

    /// Gives a slot up, now or when the file has stopped writing it.
    fn give(&mut self, slot: u32) {
        self.cache.forget(slot);
        if self.writing.contains(&slot) {
            self.given.insert(slot);
        } else {
            self.slots.give(slot);
        }
    }

    /// The file has stopped writing a slot.
    fn written(&mut self, slot: u32) {
        self.writing.remove(&slot);
        if self.given.remove(&slot) {
            self.slots.give(slot);
        }
    }
}

impl<B: Backend> Tier<B> for FileTier<B> {
    fn attach(&mut self, backend: &B, record: Record) -> Result<()> {
        let identity = Identity { geometry: *record.geometry(), fingerprint: self.fingerprint };
        let slots = self.bytes.map_or(0, |bytes| (bytes / record.file_stride()).min(u64::from(u32::MAX) / 2));
        if self.bytes.is_some() && slots == 0 {
            let value = self.bytes.unwrap_or(0).to_string();
            return Err(Error::Config { field: "tier.bytes", value, rule: "it must hold at least one page" });
        }
        let (file, index) = self.file(identity, slots as u32)?;
        let (slots, stride) = (file.slots(), record.file_stride());
        let run_pages = (RUN_BYTES / stride as usize).max(1);
        let cells = |bytes: u64| u32::try_from(bytes / record.frame_stride()).unwrap_or(u32::MAX);
        let staging = Cells::new(backend, "staging of the file tier", record, cells(self.staging_bytes).max(1));
        let cache = Cells::new(backend, "host cache of the file tier", record, cells(self.cache_bytes));
        self.attached = Some(Attached {
            slots: Extents::new(slots, extent(slots)),
            record_bytes: record.bytes() as usize,
            run_pages,
            file: Some(file),
            staging,
            cache: Cache::new(cache),
            writes: HashMap::new(),
            reads: HashMap::new(),
            next: 0,
            leaving: VecDeque::new(),
            users: VecDeque::new(),
            writing: HashSet::new(),
            given: HashSet::new(),
            buffers: Buffers::new(stride as usize, run_pages, self.staging_bytes),
            index,
            hits: 0,
        });
        Ok(())
    }

    fn name(&self) -> String {
        format!("the file tier {}", self.path.display())
    }

    fn capacity(&self) -> u64 {
        self.attached.as_ref().map_or(0, |tier| tier.slots.capacity().into())
    }

    fn free(&self) -> u64 {
        self.attached.as_ref().map_or(0, |tier| (tier.slots.free() + tier.given.len() as u32).into())
    }

    fn take(&mut self, after: Option<u32>) -> Option<u32> {
        self.attached.as_mut()?.slots.take(after)
    }

    fn give(&mut self, slot: u32) {
        if let Some(tier) = &mut self.attached {
            tier.give(slot);
        }
    }

    fn write(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        self.attached()?.write(lane, pages)
    }

    fn poll_write(&mut self, backend: &B, ticket: Ticket, wait: bool) -> Result<Option<Outcome>> {
        self.attached()?.poll_write(backend, ticket, wait)
    }

    fn read(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        self.attached()?.read(lane.backend, pages)
    }

    fn land(&mut self, lane: Lane<'_, B>, ticket: Ticket) -> Result<Landing<B>> {
        self.attached()?.land(lane, ticket)
    }

    /// A disk reaches its speed with many reads in flight.
    fn tiles_ahead(&self) -> u32 {
        16
    }

    fn stats(&self) -> Vec<TierStats> {
        let Some(tier) = &self.attached else { return Vec::new() };
        let mut levels = Vec::new();
        if tier.cache.capacity() > 0 {
            levels.push(tier.cache.stats());
        }
        if let Some(file) = &tier.file {
            let stats = file.stats();
            levels.push(TierStats {
                tier: "file",
                mode: file.mode().to_string(),
                capacity_pages: tier.slots.capacity().into(),
                used_pages: tier.slots.used().into(),
                page_bytes: file.stride() as u64,
                pages_in: stats.pages_written,
                pages_out: stats.pages_read,
                bytes_in: stats.bytes_written,
                bytes_out: stats.bytes_read,
                hits: tier.hits,
                busy: stats.busy,
            });
        }
        levels
    }

    fn close(&mut self, backend: &B, index: &[u8]) -> Result<()> {
        let tier = self.attached()?;
        tier.free_users(backend, true)?;
        tier.clean_all(backend)?;
        if tier.cache.is_dirty() {
            let (operation, message) = ("close", "pages of the host cache are not in the file".into());
            return Err(Error::File { path: tier.store()?.path().display().to_string(), operation, message });
        }
        let Some(file) = tier.file.take() else { return Ok(()) };
        file.close(index)
    }

    fn restore(&mut self) -> Option<Vec<u8>> {
        self.attached.as_mut()?.index.take()
    }

    fn claim(&mut self, slot: u32) -> bool {
        self.attached.as_mut().is_some_and(|tier| tier.slots.claim(slot))
    }
}
