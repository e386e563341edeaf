//! How do pages come back? Flights of pages that were asked for together, landed in the order they began.

use super::{HighSpeedSwap, Way};
use crate::backend::Backend;
use crate::tiers::{PageMove, Ticket};
use crate::{Error, PageFault, Result};

/// Pages on their way to frames.
#[derive(Debug)]
pub(super) struct Flight {
    ticket: Ticket,
    pages: Vec<u32>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Begins to bring the pages that are neither on the device nor on their way. They must not be evicted meanwhile: the
    /// caller has pinned them or does not mind.
    pub(super) fn fetch(&mut self, pages: &[u32]) -> Result<()> {
        let lacking = self.try_fetch(pages)?;
        if lacking == 0 { Ok(()) } else { Err(self.no_room(lacking)) }
    }

    /// The same where there is room; otherwise nothing happens, and the frames needed are returned.
    pub(super) fn try_fetch(&mut self, pages: &[u32]) -> Result<u64> {
        let residency = self.resident();
        let mut absent: Vec<u32> = Vec::new();
        for &page in pages {
            if !residency.is_resident(page) && !residency.is_arriving(page) && absent.last() != Some(&page) {
                absent.push(page);
            }
        }
        absent.sort_by_key(|&page| residency.slot(page));
        absent.dedup();
        if absent.is_empty() {
            return Ok(0);
        }
        let frames = absent.len() as u64;
        if !self.find_room(frames)? {
            return Ok(frames);
        }
        let mut newest = 0;
        let mut moves = Vec::with_capacity(absent.len());
        let mut before = None;
        for &page in &absent {
            let (slot, generation) = self.resident().slot(page).expect("a page that left has a slot");
            let (frame, mark) = self.residency().arrive(page, before);
            self.store.pool.book.retain(page);
            (newest, before) = (newest.max(mark), Some(page));
            moves.push(PageMove { frame, slot, generation });
        }
        match self.ask(&moves, newest) {
            Ok(ticket) => {
                self.meter.fetched(moves.len());
                self.lost.retain(|page, _| !absent.contains(page));
                self.flights.push_back(Flight { ticket, pages: absent });
                Ok(0)
            }
            Err(error) => {
                absent.into_iter().for_each(|page| self.alight(page, false));
                Err(error)
            }
        }
    }

    /// Enqueues the read behind the last users of its frames.
    fn ask(&mut self, moves: &[PageMove], newest: u64) -> Result<Ticket> {
        if newest >= self.marks.next() {
            self.set_mark()?;
        }
        let pool = &mut self.store.pool;
        if let Some(fetch) = &mut self.lanes.fetch {
            self.marks.wait(&pool.backend, fetch, newest)?;
        }
        let _span = tracing::trace_span!("kvtide.fetch", pages = moves.len()).entered();
        let (tier, lane) = self.lane(Way::In);
        tier.read(lane, moves)
    }

    pub(super) fn set_mark(&mut self) -> Result<()> {
        let pool = &mut self.store.pool;
        self.marks.set(&pool.backend, &mut pool.stream)
    }

    fn alight(&mut self, page: u32, well: bool) {
        self.residency().arrived(page, well);
        self.store.pool.give(page);
    }

    /// Lands the oldest flight: its pages are in their frames for everything enqueued from now on. Returns the pages that
    /// failed; nothing is mapped where they should be.
    pub(super) fn land_front(&mut self) -> Result<Vec<(u32, PageFault)>> {
        let Some(flight) = self.flights.pop_front() else { return Ok(Vec::new()) };
        let landing = {
            let (tier, lane) = self.lane(Way::In);
            tier.land(lane, flight.ticket)
        };
        let landing = match landing {
            Ok(landing) => landing,
            Err(error) => {
                flight.pages.into_iter().for_each(|page| self.alight(page, false));
                return Err(error);
            }
        };
        let ordered = self.order_landing(landing.moved.as_ref());
        self.meter.waited(landing.waited);
        let mut failed = Vec::new();
        let mut outcome = landing.outcome.into_iter();
        for page in flight.pages {
            let fault = match outcome.next() {
                Some(Ok(())) => None,
                Some(Err(fault)) => Some(fault),
                None => Some(PageFault::Closed { slot: self.resident().slot(page).map_or(u32::MAX, |(slot, _)| slot) }),
            };
            self.alight(page, fault.is_none() && ordered.is_ok());
            failed.extend(fault.map(|fault| (page, fault)));
        }
        self.reap();
        ordered.map(|()| failed)
    }

    /// Makes the compute stream wait for the end of a landing.
    fn order_landing(&mut self, moved: Option<&(B::Event, B::Event)>) -> Result<()> {
        let Some((began, ended)) = moved else { return Ok(()) };
        self.lanes.fetched = Some(ended.clone());
        if self.lanes.fetch.is_none() {
            return Ok(());
        }
        let pool = &mut self.store.pool;
        let ready = pool.backend.record(&mut pool.stream)?;
        pool.backend.wait(&mut pool.stream, ended)?;
        let resumed = pool.backend.record(&mut pool.stream)?;
        self.meter.moved([began.clone(), ended.clone(), ready, resumed]);
        Ok(())
    }

    /// Brings pages of one sequence's layer to the device (page numbers with their places in the sequence) and waits for
    /// the device to have them before anything enqueued later. They must be pinned. A page that failed in a flight which
    /// landed elsewhere is asked for once more, where there is room.
    ///
    /// # Errors
    /// [`Error::Page`] with the first page that did not come.
    pub(super) fn land(&mut self, pages: &[(u32, u64)], sequence: u64, layer: usize) -> Result<()> {
        let mut faults: Vec<(u32, PageFault)> = Vec::new();
        loop {
            while pages.iter().any(|&(page, _)| self.resident().is_arriving(page)) {
                faults.extend(self.land_front()?);
            }
            let absent = pages.iter().map(|&(page, _)| page).filter(|&page| !self.resident().is_resident(page));
            let absent: Vec<u32> = absent.collect();
            let failed = absent.iter().all(|page| faults.iter().any(|(failed, _)| failed == page));
            if failed || self.try_fetch(&absent)? > 0 {
                break;
            }
        }
        for &(number, page) in pages {
            if !self.resident().is_resident(number) {
                let fault = faults.into_iter().find(|(failed, _)| *failed == number).map(|(_, fault)| fault);
                let fault = fault.or_else(|| self.lost.remove(&number));
                let slot = self.resident().slot(number).map_or(u32::MAX, |(slot, _)| slot);
                let fault = fault.unwrap_or(PageFault::Closed { slot });
                return Err(Error::Page { sequence, layer, page, fault });
            }
        }
        Ok(())
    }
}
