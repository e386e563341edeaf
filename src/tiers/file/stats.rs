//! What a store file has done so far.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// What a [`StoreFile`](super::StoreFile) has done since it was created or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileStats {
    /// Pages read and found to be what was written.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Bytes that reads moved.
    pub bytes_read: u64,
    /// Bytes that writes moved.
    pub bytes_written: u64,
    /// I/Os that reads took.
    pub reads: u64,
    /// I/Os that writes took.
    pub writes: u64,
    /// Pages that could not be read or written.
    pub faults: u64,
    /// How long at least one I/O was in flight.
    pub busy: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) pages_read: AtomicU64,
    pub(super) pages_written: AtomicU64,
    pub(super) faults: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Counters {
    /// One I/O that moved `bytes`.
    pub(super) fn io(&self, write: bool, bytes: usize) {
        let (ios, moved) = if write { (&self.writes, &self.bytes_written) } else { (&self.reads, &self.bytes_read) };
        ios.fetch_add(1, Relaxed);
        moved.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn read(&self, busy: Duration) -> FileStats {
        FileStats {
            pages_read: self.pages_read.load(Relaxed),
            pages_written: self.pages_written.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
            reads: self.reads.load(Relaxed),
            writes: self.writes.load(Relaxed),
            faults: self.faults.load(Relaxed),
            busy,
        }
    }
}
