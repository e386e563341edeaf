//! Where pages live that are not on the device: host memory, a file, or a cascade of both, behind one trait.
//!
//! A [`Tier`] moves batches of page records between frames and *slots*. Both directions are asynchronous: a write is
//! acknowledged later, page by page, and a read is landed when its pages are wanted. What goes wrong is said of the page
//! that it went wrong with.

mod cascade;
pub(crate) mod extents;
pub mod file;
mod host;

pub use cascade::FileTier;
pub use host::HostTier;

use crate::backend::Backend;
use crate::backend::ops::Arena;
use crate::record::Record;
use crate::{PageFault, Result};
use std::fmt;
use std::time::Duration;

/// What a tier works with while it moves pages: the device, the stream to enqueue on, and the frames.
#[derive(Debug)]
pub struct Lane<'a, B: Backend> {
    /// The device.
    pub backend: &'a B,
    /// The stream that page moves are enqueued on, in the order of the calls.
    pub stream: &'a mut B::Stream,
    /// The frames.
    pub arena: Arena<'a, B::Buffer>,
    /// The layout of a page.
    pub record: Record,
}

/// One page that moves between a frame and a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageMove {
    /// The frame on the device.
    pub frame: u32,
    /// The slot of the tier.
    pub slot: u32,
    /// Distinguishes what a slot holds from what it held before: a read of another generation is refused.
    pub generation: u64,
}

/// Names a batch that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What became of each page of a batch, in its order.
pub type Outcome = Vec<Result<(), PageFault>>;

/// A read whose good pages are on their way to their frames.
#[derive(Debug)]
pub struct Landing<B: Backend> {
    /// What became of each page. Nothing was written to the frame of a page that failed.
    pub outcome: Outcome,
    /// Events on the lane's stream before and after the moves; `None` when nothing was enqueued.
    pub moved: Option<(B::Event, B::Event)>,
    /// Host time that the caller was kept waiting.
    pub waited: Duration,
}

/// Counters of a tier or of one level of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct TierStats {
    /// `host` or `file`.
    pub tier: &'static str,
    /// How it works: kind of memory, I/O engine and mode, and why not a better one.
    pub mode: String,
    /// Pages that it may hold.
    pub capacity_pages: u64,
    /// Bytes that each of them takes in it: in a file, the page's record and the padding behind it.
    pub page_bytes: u64,
    /// Pages that it holds.
    pub used_pages: u64,
    /// Pages written to it.
    pub pages_in: u64,
    /// Pages read from it.
    pub pages_out: u64,
    /// Bytes written to it; in a file with the padding behind each record.
    pub bytes_in: u64,
    /// Bytes read from it; from a file with the padding.
    pub bytes_out: u64,
    /// Reads that this level could answer by itself.
    pub hits: u64,
    /// Time that its own I/O was busy (not counted where the device moves the bytes by itself).
    pub busy: Duration,
}

/// A place for pages that are not in frames.
///
/// The caller promises: a page's slot was [taken](Self::take) and is given back once; a slot is not written while a batch that
/// reads it is under way (the lane's streams are ordered by the caller where slots are used anew).
pub trait Tier<B: Backend>: fmt::Debug + Send {
    /// Prepares for pages of this layout on this device; called once, before anything else.
    ///
    /// # Errors
    /// What cannot work is refused here: too little memory for one page, a file of another geometry.
    fn attach(&mut self, backend: &B, record: Record) -> Result<()>;

    /// What the tier is called in errors.
    fn name(&self) -> String;

    /// Slots, free and taken.
    fn capacity(&self) -> u64;

    /// Free slots.
    fn free(&self) -> u64;

    /// Takes a slot, the one next to `after` where possible, so that pages which are read together lie together.
    fn take(&mut self, after: Option<u32>) -> Option<u32>;

    /// Gives a slot back. A slot that is not taken is left alone.
    fn give(&mut self, slot: u32);

    /// Begins to write pages. Their frames stay as they are until the batch is acknowledged.
    fn write(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket>;

    /// What became of a write, once that is known; with `wait`, not before. A page whose write failed has left the slot
    /// without contents.
    fn poll_write(&mut self, backend: &B, ticket: Ticket, wait: bool) -> Result<Option<Outcome>>;

    /// Begins to read pages.
    fn read(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket>;

    /// Waits until the pages of a read can go to their frames and enqueues that.
    fn land(&mut self, lane: Lane<'_, B>, ticket: Ticket) -> Result<Landing<B>>;

    /// Tiles that should be under way while one is attended, where nobody says otherwise: enough to keep the tier busy.
    fn tiles_ahead(&self) -> u32 {
        2
    }

    /// Counters, one entry a level.
    fn stats(&self) -> Vec<TierStats>;

    /// Keeps a slot's contents for the next [`Tier::restore`]: part of closing a store. `None` where the tier forgets.
    fn close(&mut self, backend: &B, index: &[u8]) -> Result<()> {
        let _ = (backend, index);
        let operation = "close";
        Err(crate::Error::Unsupported {
            backend: "tier",
            operation,
            format: "a tier that does not outlive the store".into(),
        })
    }

    /// The index that the tier was closed with, when it was opened from an earlier store's: taken once.
    fn restore(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Marks a slot of an earlier store as taken; `false` when it is not free.
    fn claim(&mut self, slot: u32) -> bool {
        let _ = slot;
        false
    }
}

/// Runs of moves whose slots follow each other, as index ranges: each is one I/O.
pub(crate) fn runs(pages: &[PageMove], most: usize) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, page) in pages.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if pages[run.end - 1].slot.checked_add(1) == Some(page.slot) && run.len() < most.max(1) => {
                run.end = at + 1;
            }
            _ => runs.push(at..at + 1),
        }
    }
    runs
}
