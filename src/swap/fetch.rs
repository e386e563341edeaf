//! How do pages come back? Flights of pages that were asked for together, landed in the order they began.

use super::{HighSpeedSwap, Way};
use crate::backend::Backend;
use crate::tiers::{PageMove, Ticket};
use crate::{Error, PageFault, Result};

/// Pages that are worth a run of frames of their own.
const LANDING: u64 = 16;

/// Pages on their way to frames.
#[derive(Debug)]
pub(super) struct Flight {
    ticket: Ticket,
    pages: Vec<u32>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Begins to bring the pages that are neither on the device nor on their way; where there is no room for them nothing
    /// happens, and the frames needed are returned. They must not be evicted meanwhile: the caller has pinned them or does
    /// not mind.
    pub(super) fn fetch(&mut self, pages: &[u32]) -> Result<u64> {
        let residency = self.resident();
        let is_absent = |page: &u32| !residency.is_resident(*page) && !residency.is_arriving(*page);
        let mut absent: Vec<u32> = pages.iter().copied().filter(is_absent).collect();
        absent.sort_by_key(|&page| residency.slot(page));
        absent.dedup();
        let frames = absent.len() as u64;
        if absent.is_empty() {
            return Ok(0);
        }
        if frames >= LANDING && !self.policy.keeps_streamed() && !self.store.pool.has_frames(frames)? {
            self.residency().clear_run(frames as u32);
        }
        if !self.find_room(frames)? {
            return Ok(frames);
        }
        let copy = |&page: &u32| self.resident().slot(page).expect("a page that left has a slot");
        let copies: Vec<(u32, u64)> = absent.iter().map(copy).collect();
        absent.iter().for_each(|&page| self.store.pool.book.retain(page));
        let (landing, newest) = self.residency().arrive(&absent);
        let pairs = landing.into_iter().zip(copies);
        let moves: Vec<PageMove> =
            pairs.map(|(frame, (slot, generation))| PageMove { frame, slot, generation }).collect();
        match self.request(&moves, newest) {
            Ok(ticket) => {
                self.meter.fetched(moves.len());
                absent.iter().for_each(|page| drop(self.failed.remove(page)));
                self.flights.push_back(Flight { ticket, pages: absent });
                Ok(0)
            }
            Err(error) => {
                self.calm();
                absent.into_iter().for_each(|page| self.alight(page, false));
                Err(error)
            }
        }
    }

    /// Waits for moves that a failed call may have enqueued, so that their frames can be used anew.
    fn calm(&mut self) {
        let (_, lane) = self.lane(Way::In);
        if let Err(error) = lane.backend.synchronize(lane.stream) {
            tracing::warn!(%error, "after a failed fetch");
        }
    }

    /// Enqueues the read behind the last users of its frames.
    fn request(&mut self, moves: &[PageMove], newest: u64) -> Result<Ticket> {
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

    /// Lands the oldest flight: its pages are in their frames for everything enqueued from now on. Nothing is mapped where a
    /// page failed; its fault is kept for whoever wants the page.
    pub(super) fn land_front(&mut self) -> Result<()> {
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let landing = {
            let (tier, lane) = self.lane(Way::In);
            tier.land(lane, flight.ticket)
        };
        let landing = match landing {
            Ok(landing) => landing,
            Err(error) => {
                self.calm();
                flight.pages.into_iter().for_each(|page| self.alight(page, false));
                return Err(error);
            }
        };
        let ordered = self.order_landing(landing.moved.as_ref());
        if ordered.is_err() {
            self.calm();
        }
        self.meter.waited(landing.waited);
        let mut outcome = landing.outcome.into_iter();
        for page in flight.pages {
            let fault = match outcome.next() {
                Some(Ok(())) => None,
                Some(Err(fault)) => Some(fault),
                None => Some(self.closed(page)),
            };
            self.alight(page, fault.is_none() && ordered.is_ok());
            if let Some(fault) = fault {
                self.failed.insert(page, fault);
            }
        }
        self.reap();
        ordered
    }

    /// The fault of a page that its tier says nothing about.
    fn closed(&self, page: u32) -> PageFault {
        PageFault::Closed { slot: self.resident().slot(page).map_or(u32::MAX, |(slot, _)| slot) }
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

    /// Waits until everything enqueued from now on finds these pages in their frames. They are pinned and were
    /// [fetched](Self::fetch).
    ///
    /// # Errors
    /// [`Error::Page`] with the first page that did not come.
    pub(super) fn land(&mut self, layer: usize, pages: &[Wanted]) -> Result<()> {
        while pages.iter().any(|page| self.resident().is_arriving(page.number)) {
            self.land_front()?;
        }
        for &Wanted { number, sequence, page } in pages {
            if !self.resident().is_resident(number) {
                let fault = self.failed.remove(&number).unwrap_or_else(|| self.closed(number));
                return Err(Error::Page { sequence, layer, page, fault });
            }
        }
        self.project_landed(layer, pages)
    }

    /// Pins pages and begins to bring those that are not on the device.
    ///
    /// # Errors
    /// Also when there is no room for them; nothing is pinned then.
    pub(super) fn ask(&mut self, pages: &[Wanted]) -> Result<()> {
        let lacking = self.try_ask(pages)?;
        if lacking == 0 { Ok(()) } else { Err(self.no_room(lacking)) }
    }

    /// The same; where there is no room nothing is pinned, and the frames needed are returned.
    pub(super) fn try_ask(&mut self, pages: &[Wanted]) -> Result<u64> {
        pages.iter().for_each(|page| self.residency().pin(page.number));
        let numbers: Vec<u32> = pages.iter().map(|page| page.number).collect();
        let asked = self.fetch(&numbers);
        if !matches!(asked, Ok(0)) {
            self.let_go(pages);
        }
        asked
    }

    /// Takes the pins of [`ask`](Self::ask) away.
    pub(super) fn let_go(&mut self, pages: &[Wanted]) {
        pages.iter().for_each(|page| self.residency().unpin(page.number));
    }
}

/// A page that is wanted on the device, and what to call it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) number: u32,
    pub(super) sequence: u64,
    pub(super) page: u64,
}
