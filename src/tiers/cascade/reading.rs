//! How do pages get from the cache or the file back to frames? Hits straight from their cells; the others by runs from the
//! file, straight from the buffers of the runs where the device reaches those, else through cells.

use super::super::file::{Batch, Run, RunBuffer};
use super::super::{Landing, Lane, PageMove, Ticket, runs};
use super::Attached;
use crate::backend::Backend;
use crate::backend::params::Move;
use crate::{PageFault, Result};
use std::time::{Duration, Instant};

/// A read under way.
#[derive(Debug)]
pub(super) struct Read {
    pages: Vec<PageMove>,
    /// Pages that the cache has: index and cell.
    hits: Vec<(usize, u32)>,
    /// Indices of the others in the order of their slots, and what the file is reading.
    misses: Vec<usize>,
    pub(super) batch: Option<Batch>,
}

impl<B: Backend> Attached<B> {
    pub(super) fn read(&mut self, backend: &B, pages: &[PageMove]) -> Result<Ticket> {
        let (mut hits, mut misses) = (Vec::new(), Vec::new());
        for (at, page) in pages.iter().enumerate() {
            match self.cache.hit(page.slot, page.generation, self.record_bytes) {
                Some(cell) => hits.push((at, cell)),
                None => misses.push(at),
            }
            self.cache.count_read(page.slot);
        }
        misses.sort_unstable_by_key(|&at| pages[at].slot);
        let batch = self.ask(backend, pages, &misses);
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => {
                hits.iter().for_each(|&(at, _)| self.cache.done(pages[at].slot, pages[at].generation));
                return Err(error);
            }
        };
        self.hits += misses.len() as u64;
        let ticket = self.ticket();
        self.reads.insert(ticket, Read { pages: pages.to_vec(), hits, misses, batch });
        Ok(ticket)
    }

    /// Lets the file read runs of adjacent pages.
    fn ask(&mut self, backend: &B, pages: &[PageMove], misses: &[usize]) -> Result<Option<Batch>> {
        if misses.is_empty() {
            return Ok(None);
        }
        let moves: Vec<PageMove> = misses.iter().map(|&at| pages[at]).collect();
        let mut asked = Vec::new();
        for run in runs(&moves, self.run_pages) {
            let generations = moves[run.clone()].iter().map(|one| one.generation).collect();
            let buffer = self.buffers.take(backend, run.len())?;
            asked.push(Run { first: moves[run.start].slot, generations, buffer });
        }
        Ok(Some(self.store()?.read(asked)?))
    }

    pub(super) fn land(&mut self, mut lane: Lane<'_, B>, ticket: Ticket) -> Result<Landing<B>> {
        let begin = Instant::now();
        self.free_users(lane.backend, false)?;
        self.free_staging(lane.backend)?;
        let began = lane.backend.record(lane.stream)?;
        let Some(read) = self.reads.remove(&ticket) else {
            return Ok(Landing { outcome: Vec::new(), moved: None, waited: Duration::ZERO });
        };
        let runs = read.batch.map_or_else(Vec::new, Batch::wait);
        let waited = begin.elapsed();
        let closed = |page: &PageMove| Err(PageFault::Closed { slot: page.slot });
        let mut outcome: Vec<Result<(), PageFault>> = read.pages.iter().map(closed).collect();
        let mut ready = Ready::default();
        for (at, cell) in read.hits {
            let page = read.pages[at];
            outcome[at] = Ok(());
            ready.kept.push((page.frame, cell));
            ready.users.push((page.slot, page.generation));
        }
        let mut indices = read.misses.into_iter();
        let mut passed = Ok(());
        for mut run in runs {
            let (mut straight, lost) = (Vec::new(), run.buffer.is_empty());
            for (record, result) in (0..).zip(run.results) {
                let Some(at) = indices.next() else { break };
                if result.is_err() || !lost {
                    outcome[at] = result;
                }
                if outcome[at].is_ok() && passed.is_ok() {
                    passed = self.pass(&mut lane, read.pages[at], (&mut run.buffer, record), &mut straight, &mut ready);
                }
            }
            passed = passed.and_then(|()| self.buffers.swap(&mut lane, &run.buffer, &straight, false));
            if straight.is_empty() { self.buffers.give(run.buffer) } else { ready.buffers.push(run.buffer) }
        }
        let moved = passed.and_then(|()| self.send_in(&mut lane, &mut ready)).and_then(|()| {
            self.cache.cells.swap(&mut lane, &ready.kept, false)?;
            lane.backend.record(lane.stream)
        });
        match moved {
            Ok(ended) => {
                self.users.push_back((ended.clone(), ready.users));
                self.buffers.give_after(ended.clone(), ready.buffers);
                Ok(Landing { outcome, moved: Some((began, ended)), waited })
            }
            Err(error) => {
                lane.backend.synchronize(lane.stream)?;
                ready.staged.into_iter().for_each(|(_, cell)| self.staging.give(cell));
                ready.buffers.into_iter().for_each(|buffer| self.buffers.give(buffer));
                ready.users.into_iter().for_each(|(slot, generation)| self.cache.done(slot, generation));
                Err(error)
            }
        }
    }

    /// Sends a record that the file has read on its way: into a cell of the cache if that keeps it, else straight from the
    /// buffer (`straight`) or, where the device does not reach that, through a staging cell.
    fn pass(
        &mut self,
        lane: &mut Lane<'_, B>,
        page: PageMove,
        (buffer, index): (&mut RunBuffer, u32),
        straight: &mut Vec<Move>,
        ready: &mut Ready,
    ) -> Result<()> {
        let at = index as usize * self.store()?.stride();
        let used = u64::from(self.slots.used());
        if let Some(cell) = self.cache.keep(page.slot, page.generation, false, used, self.record_bytes) {
            if let Err(error) = self.cache.cells.write(lane.backend, cell, &buffer.bytes()[at..at + self.record_bytes])
            {
                // The cell does not hold the page: nobody may find it there.
                self.cache.done(page.slot, page.generation);
                self.cache.forget(page.slot);
                return Err(error);
            }
            ready.users.push((page.slot, page.generation));
            ready.kept.push((page.frame, cell));
            return Ok(());
        }
        if buffer.host::<B::Host>().is_some() {
            straight.push(Move { from: index, to: page.frame });
            return Ok(());
        }
        let cell = loop {
            if let Some(cell) = self.staging_cell(lane.backend)? {
                break cell;
            }
            // All cells are full: what waits in them goes on.
            if ready.staged.is_empty() {
                self.push_on(lane.backend)?;
            }
            self.send_in(lane, ready)?;
        };
        ready.staged.push((page.frame, cell));
        self.staging.write(lane.backend, cell, &buffer.bytes()[at..at + self.record_bytes])
    }

    /// Enqueues the moves from staging cells to frames.
    fn send_in(&mut self, lane: &mut Lane<'_, B>, ready: &mut Ready) -> Result<()> {
        if !ready.staged.is_empty() {
            self.staging.swap(lane, &ready.staged, false)?;
            let event = lane.backend.record(lane.stream)?;
            self.leaving.push_back((event, ready.staged.drain(..).map(|(_, cell)| cell).collect()));
        }
        Ok(())
    }

    /// Lets go of cells of the cache that the device has read; with `wait`, of all.
    pub(super) fn free_users(&mut self, backend: &B, wait: bool) -> Result<()> {
        while let Some((event, _)) = self.users.front() {
            if wait {
                backend.finish(event)?;
            } else if !backend.is_done(event)? {
                break;
            }
            let users = self.users.pop_front().map_or_else(Vec::new, |(_, users)| users);
            users.into_iter().for_each(|(slot, generation)| self.cache.done(slot, generation));
        }
        Ok(())
    }
}

/// Records in cells that are to go to frames: (frame, cell).
#[derive(Debug, Default)]
struct Ready {
    staged: Vec<(u32, u32)>,
    /// Buffers that the device reads.
    buffers: Vec<RunBuffer>,
    kept: Vec<(u32, u32)>,
    /// Slots and generations whose cells of the cache are in use.
    users: Vec<(u32, u64)>,
}
