//! How do pages get from frames into the cache or the file? Out to cells of the cache, or straight into runs for the file;
//! where the device does not reach the memory of those, to staging cells, and from there, once the device is done, into runs.

use super::super::file::{Batch, Run};
use super::super::{Lane, Outcome, PageMove, Ticket, runs};
use super::{Attached, Until};
use crate::backend::Backend;
use crate::backend::params::Move;
use crate::{PageFault, Result};
use std::ops::Range;

/// A write under way.
#[derive(Debug)]
pub(super) struct Write<B: Backend> {
    pages: Vec<PageMove>,
    /// Pages that the cache keeps, by index.
    kept: Vec<usize>,
    /// Runs that the device may still be writing, with indices of their pages.
    straight: Vec<(Vec<usize>, Run)>,
    /// Pages in staging cells that the device may still be writing; the event comes after everything else too.
    staged: Option<Until<B, (usize, u32)>>,
    /// What the file is writing: index ranges of `through`, and the batch.
    sent: Vec<(Vec<usize>, Batch)>,
    outcome: Vec<Option<Result<(), PageFault>>>,
}

impl<B: Backend> Attached<B> {
    pub(super) fn write(&mut self, mut lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        let (mut kept, mut through) = (Vec::new(), Vec::new());
        let mut pairs = Vec::new();
        let used = u64::from(self.slots.used());
        for (at, page) in pages.iter().enumerate() {
            match self.cache.keep(page.slot, page.generation, true, used, self.record_bytes) {
                Some(cell) => {
                    kept.push(at);
                    pairs.push((page.frame, cell));
                }
                None => through.push(at),
            }
        }
        let outcome = pages.iter().map(|_| None).collect();
        let (straight, sent) = (Vec::new(), Vec::new());
        let mut write = Write { pages: pages.to_vec(), kept, straight, staged: None, sent, outcome };
        let kept = self.cache.cells.swap(&mut lane, &pairs, true);
        let straight = kept.and_then(|()| self.fill_straight(&mut lane, &mut write, through));
        let done = straight.and_then(|rest| self.stage(&mut lane, &mut write, &rest));
        if let Err(error) = done {
            // Nothing was acknowledged: what the file may still be writing is given back when it has stopped.
            lane.backend.synchronize(lane.stream)?;
            for &at in &write.kept {
                self.cache.done(pages[at].slot, pages[at].generation);
                self.cache.forget(pages[at].slot);
            }
            let cells = write.staged.take().into_iter().flat_map(|(_, staged)| staged);
            cells.for_each(|(_, cell)| self.staging.give(cell));
            write.straight.drain(..).for_each(|(_, run)| self.buffers.give(run.buffer));
            self.collect(&mut write, true)?;
            return Err(error);
        }
        let ticket = self.ticket();
        self.writes.insert(ticket, write);
        Ok(ticket)
    }

    /// Lets the device put pages into runs for the file; those for which there is no such memory are returned.
    fn fill_straight(
        &mut self,
        lane: &mut Lane<'_, B>,
        write: &mut Write<B>,
        mut through: Vec<usize>,
    ) -> Result<Vec<usize>> {
        through.sort_unstable_by_key(|&at| write.pages[at].slot);
        let pages: Vec<PageMove> = through.iter().map(|&at| write.pages[at]).collect();
        let mut rest = Vec::new();
        for run in runs(&pages, self.run_pages) {
            let (indices, pages) = (&through[run.clone()], &pages[run]);
            let Some(buffer) = self.buffers.take_direct(lane.backend, pages.len())? else {
                rest.extend_from_slice(indices);
                continue;
            };
            let moves: Vec<Move> = (0..).zip(pages).map(|(to, page)| Move { from: page.frame, to }).collect();
            let swapped = self.buffers.swap(lane, &buffer, &moves, true);
            let generations = pages.iter().map(|page| page.generation).collect();
            write.straight.push((indices.to_vec(), Run { first: pages[0].slot, generations, buffer }));
            swapped?;
        }
        Ok(rest)
    }

    /// Copies pages to staging cells; more pages than cells go on to the file in between.
    fn stage(&mut self, lane: &mut Lane<'_, B>, write: &mut Write<B>, through: &[usize]) -> Result<()> {
        let mut rest = through;
        loop {
            let mut staged = Vec::new();
            while let Some((&at, more)) = rest.split_first() {
                let Some(cell) = self.staging_cell(lane.backend)? else { break };
                staged.push((at, cell));
                rest = more;
            }
            let pairs: Vec<(u32, u32)> = staged.iter().map(|&(at, cell)| (write.pages[at].frame, cell)).collect();
            let enqueued = self.staging.swap(lane, &pairs, true).and_then(|()| lane.backend.record(lane.stream));
            match enqueued {
                Ok(event) => write.staged = Some((event, staged)),
                Err(error) => {
                    staged.into_iter().for_each(|(_, cell)| self.staging.give(cell));
                    return Err(error);
                }
            }
            if rest.is_empty() {
                return Ok(());
            }
            if pairs.is_empty() {
                // All cells wait for writes that began before: they go on first.
                self.push_on(lane.backend)?;
            }
            self.send(lane.backend, write, true)?;
        }
    }

    /// Moves every earlier write's pages from staging cells to the file.
    pub(super) fn push_on(&mut self, backend: &B) -> Result<()> {
        let tickets: Vec<Ticket> = self.writes.keys().copied().collect();
        for ticket in tickets {
            if let Some(mut write) = self.writes.remove(&ticket) {
                let sent = self.send(backend, &mut write, true);
                self.writes.insert(ticket, write);
                sent?;
            }
        }
        Ok(())
    }

    /// Hands pages to the file once the device has written them; `false` while it has not.
    fn send(&mut self, backend: &B, write: &mut Write<B>, wait: bool) -> Result<bool> {
        let Some((event, _)) = &write.staged else { return Ok(true) };
        if wait {
            backend.finish(event)?;
        } else if !backend.is_done(event)? {
            return Ok(false);
        }
        let mut staged = write.staged.take().map_or_else(Vec::new, |(_, staged)| staged);
        staged.sort_unstable_by_key(|&(at, _)| write.pages[at].slot);
        let moves: Vec<PageMove> = staged.iter().map(|&(at, _)| write.pages[at]).collect();
        let cells: Vec<u32> = staged.iter().map(|&(_, cell)| cell).collect();
        let filled = runs(&moves, self.run_pages).into_iter().map(|run| self.fill(backend, &moves, &cells, run, true));
        let filled = filled.collect::<Result<Vec<Run>>>();
        cells.into_iter().for_each(|cell| self.staging.give(cell));
        let mut filled = filled?;
        let mut indices: Vec<usize> = staged.into_iter().map(|(at, _)| at).collect();
        for (pages, run) in write.straight.drain(..) {
            indices.extend(pages);
            filled.push(run);
        }
        if filled.is_empty() {
            return Ok(true);
        }
        let batch = self.store()?.write(filled)?;
        self.writing.extend(indices.iter().map(|&at| write.pages[at].slot));
        write.sent.push((indices, batch));
        Ok(true)
    }

    /// A run for the file, filled from cells (of the staging or of the cache).
    fn fill(
        &mut self,
        backend: &B,
        moves: &[PageMove],
        cells: &[u32],
        run: Range<usize>,
        staging: bool,
    ) -> Result<Run> {
        let stride = self.store()?.stride();
        let mut buffer = self.buffers.take(backend, run.len())?;
        for (record, at) in buffer.bytes().chunks_exact_mut(stride).zip(run.clone()) {
            let from = if staging { &mut self.staging } else { &mut self.cache.cells };
            from.read(backend, cells[at], &mut record[..self.record_bytes])?;
        }
        let generations = moves[run.clone()].iter().map(|one| one.generation).collect();
        Ok(Run { first: moves[run.start].slot, generations, buffer })
    }

    pub(super) fn poll_write(&mut self, backend: &B, ticket: Ticket, wait: bool) -> Result<Option<Outcome>> {
        let Some(mut write) = self.writes.remove(&ticket) else { return Ok(Some(Vec::new())) };
        let sent = self.send(backend, &mut write, wait);
        let done = sent.and_then(|sent| Ok(sent && self.collect(&mut write, wait)?));
        match done {
            Ok(true) => {}
            Ok(false) => {
                self.writes.insert(ticket, write);
                return Ok(None);
            }
            Err(error) => {
                self.writes.insert(ticket, write);
                return Err(error);
            }
        }
        for at in write.kept {
            let PageMove { slot, generation, .. } = write.pages[at];
            self.cache.done(slot, generation);
            write.outcome[at] = Some(Ok(()));
        }
        if let Err(error) = self.free_users(backend, false).and_then(|()| self.clean_some(backend)) {
            // The pages stay in the cache; this write is acknowledged all the same.
            tracing::warn!(%error, "the host cache was not written down");
        }
        let outcome = write.outcome.into_iter().zip(&write.pages);
        let closed = |slot| Err(PageFault::Closed { slot });
        Ok(Some(outcome.map(|(outcome, page)| outcome.unwrap_or(closed(page.slot))).collect()))
    }

    /// Takes what the file has finished; `false` while something is under way.
    fn collect(&mut self, write: &mut Write<B>, wait: bool) -> Result<bool> {
        while let Some((_, batch)) = write.sent.first() {
            if !wait && !batch.is_done() {
                return Ok(false);
            }
            let (indices, batch) = write.sent.remove(0);
            let mut indices = indices.into_iter();
            for run in batch.wait() {
                for result in run.results {
                    let Some(at) = indices.next() else { break };
                    self.written(write.pages[at].slot);
                    write.outcome[at] = Some(result);
                }
                self.buffers.give(run.buffer);
            }
        }
        Ok(true)
    }

    /// Lets the file catch up when too much of the cache is news to it.
    fn clean_some(&mut self, backend: &B) -> Result<()> {
        if self.cache.wants_cleaning() {
            let most = self.run_pages * 4;
            self.clean(backend, most)?;
        }
        Ok(())
    }

    /// Writes everything to the file that only the cache has.
    pub(super) fn clean_all(&mut self, backend: &B) -> Result<()> {
        while self.clean(backend, self.run_pages * 16)? > 0 {}
        Ok(())
    }

    /// Writes up to `most` pages of the cache to the file and waits. A page that cannot be written stays in the cache.
    fn clean(&mut self, backend: &B, most: usize) -> Result<usize> {
        let dirty = self.cache.dirty(most);
        let moves: Vec<PageMove> =
            dirty.iter().map(|&(slot, generation, _)| PageMove { frame: 0, slot, generation }).collect();
        let cells: Vec<u32> = dirty.iter().map(|&(_, _, cell)| cell).collect();
        let filled = runs(&moves, self.run_pages).into_iter().map(|run| self.fill(backend, &moves, &cells, run, false));
        let filled = filled.collect::<Result<Vec<Run>>>();
        let written = filled.and_then(|filled| Ok(self.store()?.write(filled)?.wait()));
        let mut first_fault = None;
        let mut cleaned = 0;
        for (run, results) in written.iter().flatten().map(|run| (run.first, &run.results)) {
            for (slot, result) in (run..).zip(results) {
                let generation = moves.iter().find(|one| one.slot == slot).map_or(0, |one| one.generation);
                match result {
                    Ok(()) => {
                        self.cache.cleaned(slot, generation);
                        cleaned += 1;
                    }
                    Err(fault) => {
                        tracing::warn!(%fault, "a page stays in host memory");
                        first_fault.get_or_insert_with(|| fault.clone());
                    }
                }
            }
        }
        moves.iter().for_each(|one| self.cache.done(one.slot, one.generation));
        for run in written? {
            self.buffers.give(run.buffer);
        }
        match first_fault {
            Some(fault) if cleaned == 0 => {
                let (operation, message) = ("write pages of the host cache", fault.to_string());
                let path = self.store()?.path().display().to_string();
                Err(crate::Error::File { path, operation, message })
            }
            _ => Ok(cleaned),
        }
    }
}
