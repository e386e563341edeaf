//! Which work on the compute stream came before what? Numbered events, so that a frame is written from another stream only
//! after its last user.

use crate::Result;
use crate::backend::Backend;
use std::collections::VecDeque;

/// Events kept: a frame whose last user is older waits for the oldest one kept, which came later.
const KEPT: usize = 64;

/// Marks on the compute stream. Without streams that overlap there is nothing to order, and no event is recorded.
#[derive(Debug)]
pub(super) struct Marks<B: Backend> {
    overlap: bool,
    /// The number of the mark that work enqueued now will come before.
    next: u64,
    events: VecDeque<(u64, B::Event)>,
}

impl<B: Backend> Marks<B> {
    pub(super) fn new(overlap: bool) -> Self {
        Marks { overlap, next: 1, events: VecDeque::new() }
    }

    /// The mark that work enqueued now comes before.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Sets the next mark behind everything enqueued so far.
    pub(super) fn set(&mut self, backend: &B, stream: &mut B::Stream) -> Result<()> {
        if self.overlap {
            self.events.push_back((self.next, backend.record(stream)?));
            self.events.drain(..self.events.len().saturating_sub(KEPT));
        }
        self.next += 1;
        Ok(())
    }

    /// Makes another stream wait for everything before a mark that has been set (0: nothing).
    pub(super) fn wait(&self, backend: &B, stream: &mut B::Stream, mark: u64) -> Result<()> {
        let after = self.events.iter().find(|(number, _)| *number >= mark).filter(|_| mark > 0);
        after.map_or(Ok(()), |(_, event)| backend.wait(stream, event))
    }
}
