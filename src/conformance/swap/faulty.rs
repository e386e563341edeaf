//! What does a tier do on a bad day? One that works as another does, but for faults that a case asks for.

use crate::backend::Backend;
use crate::record::Record;
use crate::tiers::{Landing, Lane, Outcome, PageMove, Ticket, Tier, TierStats};
use crate::{Error, PageFault, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// What goes wrong with a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The page that moves from or to this slot.
    Slot(u32),
    /// The page that comes after so many others.
    Nth(u64),
    /// The whole batch is refused with an error.
    Batch,
    /// The last page of a batch does not move, and nothing is said of it.
    Short,
}

/// What is to go wrong.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) read: Option<Fault>,
    pub(super) write: Option<Fault>,
    /// Whether a fault happens again and again.
    pub(super) always: bool,
    /// How often a write is asked about in vain.
    pub(super) delay: u32,
    /// Faults that have happened.
    pub(super) happened: u64,
}

/// The handle by which a case arms faults.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults(Arc<Mutex<Plan>>);

impl Faults {
    pub(super) fn plan(&self) -> MutexGuard<'_, Plan> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pages of a batch that fail; `Err` when the batch does.
    fn strike(&self, out: bool, pages: &[PageMove]) -> Result<(Vec<bool>, bool)> {
        let mut plan = self.plan();
        let armed = if out { &mut plan.write } else { &mut plan.read };
        let mut failing = vec![false; pages.len()];
        match armed {
            None => return Ok((failing, false)),
            Some(Fault::Slot(slot)) => failing.iter_mut().zip(pages).for_each(|(f, page)| *f = page.slot == *slot),
            Some(Fault::Nth(n)) if *n < pages.len() as u64 => failing[*n as usize] = true,
            Some(Fault::Nth(n)) => *n -= pages.len() as u64,
            Some(Fault::Short) => failing.iter_mut().last().into_iter().for_each(|f| *f = true),
            Some(Fault::Batch) => {}
        }
        let (batch, short) = (*armed == Some(Fault::Batch), *armed == Some(Fault::Short));
        if batch || failing.contains(&true) {
            plan.happened += 1;
            if !plan.always {
                let armed = if out { &mut plan.write } else { &mut plan.read };
                *armed = None;
            }
        }
        let message = "the tier is having a bad day".into();
        if batch { Err(Error::Device { backend: "tier", message }) } else { Ok((failing, short)) }
    }
}

/// What is to be said of a batch under way.
#[derive(Debug)]
struct Batch {
    pages: Vec<PageMove>,
    failing: Vec<bool>,
    short: bool,
    polls: u32,
}

/// A tier with faults.
#[derive(Debug)]
pub(super) struct FaultyTier<B: Backend> {
    inner: Box<dyn Tier<B>>,
    faults: Faults,
    writes: HashMap<Ticket, Batch>,
    reads: HashMap<Ticket, Batch>,
    /// Where the tier's file lives, as long as the tier does.
    _folder: Option<TempDir>,
}

impl<B: Backend> FaultyTier<B> {
    pub(super) fn new(inner: Box<dyn Tier<B>>, folder: Option<TempDir>) -> (Self, Faults) {
        let faults = Faults::default();
        let (writes, reads) = (HashMap::new(), HashMap::new());
        (FaultyTier { inner, faults: faults.clone(), writes, reads, _folder: folder }, faults)
    }

    fn begin(&self, out: bool, pages: &[PageMove]) -> Result<(Vec<PageMove>, Batch)> {
        let (failing, short) = self.faults.strike(out, pages)?;
        let good = pages.iter().zip(&failing).filter(|(_, fails)| !**fails).map(|(page, _)| *page).collect();
        Ok((good, Batch { pages: pages.to_vec(), failing, short, polls: self.faults.plan().delay }))
    }
}

impl Batch {
    /// What the inner tier said of the good pages, with the faults between.
    fn outcome(self, good: Outcome, operation: &'static str) -> Outcome {
        let mut good = good.into_iter();
        let mut outcome = Outcome::new();
        for (page, fails) in self.pages.iter().zip(self.failing) {
            let (slot, message) = (page.slot, "a bad day".into());
            match fails {
                true if self.short => {}
                true => outcome.push(Err(PageFault::Io { operation, slot, message, code: Some(5) })),
                false => outcome.extend(good.next()),
            }
        }
        outcome
    }
}

impl<B: Backend> Tier<B> for FaultyTier<B> {
    fn attach(&mut self, backend: &B, record: Record) -> Result<()> {
        self.inner.attach(backend, record)
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn free(&self) -> u64 {
        self.inner.free()
    }

    fn take(&mut self, after: Option<u32>) -> Option<u32> {
        self.inner.take(after)
    }

    fn give(&mut self, slot: u32) {
        self.inner.give(slot);
    }

    fn write(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        let (good, batch) = self.begin(true, pages)?;
        let ticket = self.inner.write(lane, &good)?;
        self.writes.insert(ticket, batch);
        Ok(ticket)
    }

    fn poll_write(&mut self, backend: &B, ticket: Ticket, wait: bool) -> Result<Option<Outcome>> {
        if let Some(batch) = self.writes.get_mut(&ticket).filter(|batch| !wait && batch.polls > 0) {
            batch.polls -= 1;
            return Ok(None);
        }
        let Some(good) = self.inner.poll_write(backend, ticket, wait)? else { return Ok(None) };
        let batch = self.writes.remove(&ticket);
        Ok(Some(batch.map_or_else(Vec::new, |batch| batch.outcome(good, "write"))))
    }

    fn read(&mut self, lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        let (good, batch) = self.begin(false, pages)?;
        let ticket = self.inner.read(lane, &good)?;
        self.reads.insert(ticket, batch);
        Ok(ticket)
    }

    fn land(&mut self, lane: Lane<'_, B>, ticket: Ticket) -> Result<Landing<B>> {
        let landing = self.inner.land(lane, ticket)?;
        let batch = self.reads.remove(&ticket);
        let outcome = batch.map_or_else(Vec::new, |batch| batch.outcome(landing.outcome, "read"));
        Ok(Landing { outcome, ..landing })
    }

    fn stats(&self) -> Vec<TierStats> {
        self.inner.stats()
    }
}
