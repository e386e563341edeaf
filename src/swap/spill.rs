//! How do full pages get to the tier, and who gives up a frame when one is needed?

use super::{HighSpeedSwap, Way, WriteOut};
use crate::backend::Backend;
use crate::tiers::{PageMove, Ticket};
use crate::{Error, Result};
use std::collections::HashSet;

/// Pages on their way to the tier.
#[derive(Debug)]
pub(super) struct Departure {
    ticket: Ticket,
    pages: Vec<u32>,
    moves: Vec<PageMove>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Takes note of what has arrived in the tier, and sends on what should go. Called by every append and attention.
    pub(super) fn pump(&mut self) -> Result<()> {
        self.reap();
        self.settle(false)?;
        self.meter.resolve(&self.store.pool.backend)?;
        let eager = self.config.write_out == WriteOut::Eager;
        while !self.queue.is_empty() && (eager || self.is_pressed()) {
            if self.depart(self.config.tile_pages as usize)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Whether fewer than a quarter of the frames are free, clean or about to be.
    fn is_pressed(&self) -> bool {
        let residency = self.resident();
        let held = residency.frames.capacity() - residency.frames.free();
        let leaving: usize = self.departures.iter().map(|departure| departure.pages.len()).sum();
        residency.limit - held + residency.clean() + (leaving as u64) < residency.limit / 4
    }

    /// Begins to write out up to `most` queued pages; returns how many.
    pub(super) fn depart(&mut self, most: usize) -> Result<usize> {
        let mut pages = Vec::new();
        let mut moves: Vec<PageMove> = Vec::new();
        while pages.len() < most {
            let Some(&(page, before)) = self.queue.front() else { break };
            let residency = self.resident();
            if pages.contains(&page) || !residency.wants_out(page) {
                self.queue.pop_front();
                continue;
            }
            let near = |before: u32| {
                let leaving = pages.iter().position(|&page| page == before).map(|at: usize| moves[at].slot);
                leaving.or_else(|| self.leaving_to(before)).or_else(|| residency.slot(before).map(|(slot, _)| slot))
            };
            let Some(slot) = self.tier.take(before.and_then(near)) else { break };
            self.generation += 1;
            self.queue.pop_front();
            moves.push(PageMove { frame: self.resident().frame(page), slot, generation: self.generation });
            pages.push(page);
        }
        if pages.is_empty() {
            return Ok(0);
        }
        match self.send(&moves) {
            Ok(ticket) => {
                for &page in &pages {
                    self.residency().depart(page);
                    self.store.pool.book.retain(page);
                }
                let sent = pages.len();
                self.departures.push_back(Departure { ticket, pages, moves });
                Ok(sent)
            }
            Err(error) => {
                moves.iter().for_each(|one| self.tier.give(one.slot));
                pages.iter().rev().for_each(|&page| self.queue.push_front((page, None)));
                Err(error)
            }
        }
    }

    /// Where a page that is on its way out is going.
    fn leaving_to(&self, page: u32) -> Option<u32> {
        let newest = self.departures.iter().rev();
        newest
            .flat_map(|departure| departure.pages.iter().zip(&departure.moves).rev())
            .find_map(|(&leaving, one)| (leaving == page).then_some(one.slot))
    }

    /// Enqueues the write behind the kernels that wrote the pages.
    fn send(&mut self, moves: &[PageMove]) -> Result<Ticket> {
        let pool = &mut self.store.pool;
        if let Some(spill) = &mut self.lanes.spill {
            let written = pool.backend.record(&mut pool.stream)?;
            pool.backend.wait(spill, &written)?;
            // A slot given back may still be read by a fetch under way.
            if let (true, Some(fetched)) = (self.lanes.slots_freed, &self.lanes.fetched) {
                pool.backend.wait(spill, fetched)?;
            }
        }
        self.lanes.slots_freed = false;
        let _span = tracing::trace_span!("kvtide.write_out", pages = moves.len()).entered();
        let (tier, lane) = self.lane(Way::Out);
        tier.write(lane, moves)
    }

    /// Takes note of acknowledged writes; with `wait`, of all under way.
    pub(super) fn settle(&mut self, wait: bool) -> Result<()> {
        while self.settle_one(wait)? {}
        Ok(())
    }

    /// Takes note of the oldest write, if it is acknowledged or waited for.
    fn settle_one(&mut self, wait: bool) -> Result<bool> {
        let Some(front) = self.departures.front() else { return Ok(false) };
        let backend = &self.store.pool.backend;
        let Some(outcome) = self.tier.poll_write(backend, front.ticket, wait)? else { return Ok(false) };
        let Some(departure) = self.departures.pop_front() else { return Ok(false) };
        let mut outcome = outcome.into_iter();
        for (page, one) in departure.pages.into_iter().zip(departure.moves) {
            // A tier that says nothing of a page has not acknowledged it.
            let fault = match outcome.next() {
                Some(Ok(())) => None,
                Some(Err(fault)) => Some(fault),
                None => Some(crate::PageFault::Closed { slot: one.slot }),
            };
            let copy = fault.is_none().then_some((one.slot, one.generation));
            self.fault.take_if(|(failed, _)| *failed == page && fault.is_none());
            self.residency().departed(page, copy);
            if let Some(fault) = fault {
                self.tier.give(one.slot);
                self.queue.push_back((page, None));
                let origin = self.resident().origin(page);
                let (sequence, layer, index) = (origin.sequence, origin.layer as usize, origin.index.into());
                tracing::warn!(%fault, sequence, layer, page = index, "a page was not written out");
                self.fault.get_or_insert((page, Error::Page { sequence, layer, page: index, fault }));
            }
            self.store.pool.give(page);
        }
        self.reap();
        Ok(true)
    }

    /// Makes `frames` frames free: pages give theirs up in the policy's order, after the tier has acknowledged them.
    ///
    /// # Errors
    /// At once, never a wait without end: [`Error::NothingEvictable`] when too many pages are pinned or partial,
    /// [`Error::TierFull`], or the fault of the page that could not be written.
    pub(super) fn make_room(&mut self, frames: u64) -> Result<()> {
        if self.find_room(frames)? { Ok(()) } else { Err(self.no_room(frames)) }
    }

    /// The same; `false` where it is not possible.
    pub(super) fn find_room(&mut self, frames: u64) -> Result<bool> {
        // Every page that waits may be tried twice: one that cannot be written keeps no other from going.
        let leaving: usize = self.departures.iter().map(|departure| departure.pages.len()).sum();
        let mut tries = 2 * (self.queue.len() + leaving);
        while !self.store.pool.has_frames(frames)? {
            let (step, policy) = (self.step, &mut *self.policy);
            let residency = self.store.pool.residency.as_mut().expect("made by the builder");
            if residency.evict(step, policy) {
                continue;
            }
            if self.settle_one(true)? {
                continue;
            }
            let sent = self.depart(tries.min(self.config.tile_pages as usize))?;
            if sent > 0 {
                tries -= sent;
                continue;
            }
            if !self.flights.is_empty() {
                self.land_front()?;
                continue;
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// Queue entries there may be before those of pages that are gone or named twice are thrown away.
    pub(super) fn queue_limit(&self) -> usize {
        2 * self.resident().limit as usize + 64
    }

    /// Keeps the queue as short as the device is small, also while nothing needs to leave.
    pub(super) fn tidy_queue(&mut self) {
        if self.queue.len() > self.queue_limit() {
            let (mut queue, mut seen) = (std::mem::take(&mut self.queue), HashSet::new());
            queue.retain(|(page, _)| self.resident().wants_out(*page) && seen.insert(*page));
            self.queue = queue;
        }
    }

    /// Pages that should go to the tier and are not on their way.
    pub(super) fn waiting(&self) -> u64 {
        let pages: HashSet<u32> = self.queue.iter().map(|(page, _)| *page).collect();
        pages.into_iter().filter(|&page| self.resident().wants_out(page)).count() as u64
    }

    /// Why there was no room.
    pub(super) fn no_room(&mut self, frames: u64) -> Error {
        if let Some((_, fault)) = self.fault.take() {
            return fault;
        }
        let waiting = self.waiting();
        if waiting > 0 && self.tier.free() == 0 {
            let (tier, free, capacity) = (self.tier.name(), self.tier.free(), self.tier.capacity());
            return Error::TierFull { tier, required: waiting, free, capacity };
        }
        self.resident().shortage(frames)
    }
}
