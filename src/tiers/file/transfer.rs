//! The life of one run, the same for every engine: checksums, I/O by I/O, one page at a time after a failure, the answer.

use super::Shared;
use super::directory::checksum;
use super::disk::Op;
use super::progress::{Answer, Progress};
use super::run::{Run, RunDone, Ticket};
use crate::PageFault;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A run on its way. Dropping it delivers what has come of it: pages that did not get their turn, or are not checked, are
/// [`PageFault::Closed`].
pub(super) struct Transfer {
    file: Arc<Shared>,
    write: bool,
    run: Run,
    checksums: Vec<u64>,
    results: Vec<Result<(), PageFault>>,
    /// Pages all of whose bytes were moved.
    moved: Vec<usize>,
    /// The pages under way: all of them, or the one whose turn it is.
    pages: Range<usize>,
    progress: Progress,
    ticket: Option<Ticket>,
}

impl Transfer {
    /// A run that fits the file.
    pub(super) fn new(file: Arc<Shared>, write: bool, run: Run, ticket: Ticket) -> Self {
        let pages = 0..run.generations.len();
        let results = pages.clone().map(|page| Err(PageFault::Closed { slot: run.first + page as u32 })).collect();
        let progress = Progress::new(pages.len() * file.layout.stride);
        let (checksums, moved) = (Vec::new(), Vec::new());
        Transfer { file, write, run, checksums, results, moved, pages, progress, ticket: Some(ticket) }
    }

    /// Before the first I/O: a write takes checksums, clears the padding, and its slots lose what they held.
    pub(super) fn start(&mut self) {
        for page in self.pages.clone().filter(|_| self.write) {
            let slot = self.slot(page);
            self.file.directory.clear(slot);
            let (start, end) = (self.at(page), self.at(page + 1));
            let (record, padding) = self.run.buffer.bytes()[start..end].split_at_mut(self.file.layout.record);
            padding.fill(0);
            self.checksums.push(checksum(slot, self.run.generations[page], record));
        }
    }

    /// The next I/O; none when the run has ended and is to be [finished](Self::finish).
    pub(super) fn next(&self) -> Option<Op> {
        if self.pages.is_empty() {
            return None;
        }
        let (range, base) = (self.progress.next(), self.at(self.pages.start));
        let offset = self.file.layout.offset(self.slot(self.pages.start)) + range.start as u64;
        Some(Op { write: self.write, offset, range: base + range.start..base + range.end })
    }

    /// The memory that [`Op::range`] counts in.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        self.run.buffer.bytes()
    }

    /// Takes the answer to the I/O of [`next`](Self::next).
    pub(super) fn answer(&mut self, answer: io::Result<usize>) {
        self.file.counters.io(self.write, answer.as_ref().map_or(0, |&bytes| bytes));
        let page = self.pages.start;
        match self.progress.answer(answer) {
            Answer::More => {}
            Answer::Done => {
                self.moved.extend(self.pages.clone());
                self.turn(self.pages.end);
            }
            Answer::End(_) | Answer::Failed(_) if self.pages.len() > 1 => self.turn(page),
            Answer::End(got) if !self.write && got >= self.file.layout.record => {
                self.moved.push(page);
                self.turn(page + 1);
            }
            Answer::End(got) => {
                self.results[page] = Err(self.short(page, got));
                self.turn(page + 1);
            }
            Answer::Failed(error) => {
                self.results[page] = Err(self.refused(page, &error));
                self.turn(page + 1);
            }
        }
    }

    /// Checks what was read, or notes what was written, and delivers the run.
    pub(super) fn finish(mut self) {
        for page in std::mem::take(&mut self.moved) {
            self.results[page] = self.complete(page);
        }
    }

    /// Whether [`finish`](Self::finish) goes over every byte.
    #[cfg(target_os = "linux")]
    pub(super) fn is_read(&self) -> bool {
        !self.write
    }

    /// Gives the run up while the system may still use its memory, which is never freed.
    #[cfg(target_os = "linux")]
    pub(super) fn abandon(mut self) {
        std::mem::forget(std::mem::take(&mut self.run.buffer));
    }

    /// From here on one page at a time.
    fn turn(&mut self, page: usize) {
        self.pages = page..self.results.len().min(page + 1);
        self.progress = Progress::new(self.file.layout.stride);
    }

    /// All bytes of a page were moved.
    fn complete(&mut self, page: usize) -> Result<(), PageFault> {
        let (slot, generation) = (self.slot(page), self.run.generations[page]);
        if self.write {
            self.file.directory.set(slot, generation, self.checksums[page]);
            return Ok(());
        }
        let (start, len) = (self.at(page), self.file.layout.record);
        self.file.directory.verify(slot, generation, &self.run.buffer.bytes()[start..start + len])
    }

    fn short(&self, page: usize, got: usize) -> PageFault {
        let slot = self.slot(page);
        if self.write {
            return PageFault::NoSpace { slot, message: format!("{got} bytes of {} taken", self.file.layout.stride) };
        }
        PageFault::Short { slot, got: got as u64, expected: self.file.layout.record as u64 }
    }

    fn refused(&self, page: usize, error: &io::Error) -> PageFault {
        let (slot, message) = (self.slot(page), error.to_string());
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => PageFault::NoSpace { slot, message },
            _ => {
                let operation = if self.write { "write" } else { "read" };
                PageFault::Io { operation, slot, message, code: error.raw_os_error() }
            }
        }
    }

    fn slot(&self, page: usize) -> u32 {
        self.run.first + page as u32
    }

    /// Where a page starts in the buffer.
    fn at(&self, page: usize) -> usize {
        page * self.file.layout.stride
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let good = self.results.iter().filter(|result| result.is_ok()).count() as u64;
        let counters = &self.file.counters;
        if self.write { &counters.pages_written } else { &counters.pages_read }.fetch_add(good, Relaxed);
        counters.faults.fetch_add(self.results.len() as u64 - good, Relaxed);
        if let Some(ticket) = self.ticket.take() {
            let buffer = std::mem::take(&mut self.run.buffer);
            ticket.deliver(RunDone { first: self.run.first, buffer, results: std::mem::take(&mut self.results) });
        }
    }
}
