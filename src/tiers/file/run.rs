//! What a caller hands in and gets back: runs of pages, and batches to wait for.

use super::buffer::RunBuffer;
use super::format::Layout;
use super::lock;
use crate::{Error, PageFault, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Pages in adjacent slots, to be written or read by one I/O.
#[derive(Debug)]
pub struct Run {
    /// The slot of the first page.
    pub first: u32,
    /// One generation a page, 1 or more: what it is written as, or must have been written as.
    pub generations: Vec<u64>,
    /// At least `pages × stride` bytes: page `i`'s record starts at byte `i × stride`.
    pub buffer: RunBuffer,
}

/// A run whose I/O has ended.
#[derive(Debug)]
pub struct RunDone {
    /// The slot of the first page.
    pub first: u32,
    /// The run's buffer; bytes of a page that could not be read mean nothing. Empty when the engine broke down while the
    /// system had the memory.
    pub buffer: RunBuffer,
    /// What came of each page.
    pub results: Vec<Result<(), PageFault>>,
}

impl Run {
    /// Refuses a run that does not fit the file or its own buffer.
    pub(super) fn check(&mut self, layout: &Layout) -> Result<()> {
        let end = u64::from(self.first) + self.generations.len() as u64;
        if end > layout.slots.into() {
            return Err(Error::TooLarge { what: "end of a run of slots", value: end, maximum: layout.slots.into() });
        }
        let (got, expected) = (self.buffer.bytes().len() as u64, self.generations.len() as u64 * layout.stride as u64);
        if got < expected {
            return Err(Error::Shape { what: "bytes of a run's buffer", got, expected });
        }
        if self.generations.contains(&0) {
            return Err(Error::Config {
                field: "generation",
                value: "0".to_owned(),
                rule: "it must be 1 or more: 0 says that a slot holds nothing",
            });
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct State {
    done: Mutex<(Vec<Option<RunDone>>, usize)>,
    ready: Condvar,
}

/// Runs on their way. Dropping it is fine: their I/O ends on its own, and their buffers are freed then. Whoever wants to
/// use the slots of a write for something else keeps its batch until it [is done](Self::is_done).
#[derive(Debug)]
pub struct Batch {
    state: Arc<State>,
}

/// Where the outcome of one run of a batch goes.
#[derive(Debug)]
pub(in crate::tiers) struct Ticket {
    state: Arc<State>,
    index: usize,
}

impl Batch {
    /// A batch of `runs` runs, and where their outcomes go.
    pub(in crate::tiers) fn new(runs: usize) -> (Batch, impl Iterator<Item = Ticket>) {
        let done = Mutex::new(((0..runs).map(|_| None).collect(), runs));
        let state = Arc::new(State { done, ready: Condvar::new() });
        let tickets = (0..runs).map({
            let state = state.clone();
            move |index| Ticket { state: state.clone(), index }
        });
        (Batch { state }, tickets)
    }

    /// Whether every run has ended.
    pub fn is_done(&self) -> bool {
        lock(&self.state.done).1 == 0
    }

    /// Waits until every run has ended; their outcomes, in the order of the runs.
    pub fn wait(self) -> Vec<RunDone> {
        let done = lock(&self.state.done);
        let mut done = self.state.ready.wait_while(done, |done| done.1 > 0).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut done.0).into_iter().flatten().collect()
    }
}

impl Ticket {
    /// The run has ended.
    pub(in crate::tiers) fn deliver(self, outcome: RunDone) {
        let mut done = lock(&self.state.done);
        done.0[self.index] = Some(outcome);
        done.1 -= 1;
        if done.1 == 0 {
            self.state.ready.notify_all();
        }
    }
}
