//! The engine for Linux: one thread that keeps many I/Os in flight through io_uring, and leaves it to others to check what
//! was read.
//!
//! The thread owns every buffer from before its I/O goes out until after its completion has come back. Callers wake it
//! through a pipe that it polls on the same ring.

use super::disk::{Disk, Op, Verdict};
use super::queue::{Bell, Next, Queue, Served};
use super::transfer::Transfer;
use crate::aligned::AlignedBuffer;
use io_uring::{IoUring, opcode, squeue, types::Fd};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Completion of the poll on the bell's pipe; others carry the number of their flight.
const BELL: u64 = u64::MAX;
/// `POLLIN` of poll(2).
const READABLE: u32 = 1;

/// An I/O that the system has.
struct Flight {
    transfer: Transfer,
    op: Op,
    /// Told to the transfer instead of what came out.
    report: Option<usize>,
}

/// A ring and the I/Os in flight on it.
pub(super) struct Ring {
    ring: IoUring,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Reads that are to be checked.
    checks: Arc<Queue>,
}

impl Ring {
    /// A ring for `depth` I/Os in flight; what it has read goes to `checks`.
    pub(super) fn new(depth: u32, checks: Arc<Queue>) -> io::Result<Ring> {
        // One entry more, for the bell.
        let ring = IoUring::builder().dontfork().setup_clamp().build(depth + 1)?;
        let depth = (depth as usize).min(ring.params().sq_entries() as usize - 1).max(1);
        Ok(Ring { ring, flights: (0..depth).map(|_| None).collect(), free: (0..depth).collect(), checks })
    }

    /// Writes `block` to the start of `file` and reads it back.
    pub(super) fn probe(&mut self, file: &File, block: &AlignedBuffer) -> io::Result<()> {
        let (mut back, len) = (AlignedBuffer::new(block.len()), block.len() as u32);
        // Copies, so that the system never has the caller's memory.
        let mut copy = block.clone();
        let write = opcode::Write::new(Fd(file.as_raw_fd()), copy.as_ptr(), len).offset(0).build();
        let read = opcode::Read::new(Fd(file.as_raw_fd()), back.as_mut_ptr(), len).offset(0).build();
        for entry in [write, read] {
            // SAFETY: `copy` and `back` outlive the I/O: `answer_to` returns `Ok` only after its completion, and on any
            // other way out both are leaked. Nothing else touches them meanwhile.
            let moved = match unsafe { self.answer_to(&entry) } {
                Ok(result) => result,
                Err(error) => {
                    std::mem::forget((copy, back));
                    return Err(error);
                }
            };
            match moved {
                moved if moved < 0 => return Err(io::Error::from_raw_os_error(-moved)),
                moved if moved as u32 != len => return Err(io::Error::other(format!("{moved} of {len} bytes moved"))),
                _ => {}
            }
        }
        copy.fill(0);
        if back[..] == block[..] { Ok(()) } else { Err(io::Error::other("other bytes were read than written")) }
    }

    /// Submits one entry on an idle ring and waits for its completion.
    ///
    /// # Safety
    /// The memory of `entry` must stay valid and untouched until this returns `Ok`, and for ever if it does not.
    unsafe fn answer_to(&mut self, entry: &squeue::Entry) -> io::Result<i32> {
        // SAFETY: the caller keeps the memory.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)?;
        loop {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            if let Some(completion) = self.ring.completion().next() {
                return Ok(completion.result());
            }
        }
    }

    /// Hands the system the next I/O of a run, or passes the run on when it has ended.
    fn go_on(&mut self, disk: &Disk, mut transfer: Transfer, number: usize) {
        while let Some(op) = transfer.next() {
            let (len, report) = match disk.verdict(&op) {
                Verdict::Answer(answer) => {
                    transfer.answer(answer);
                    continue;
                }
                Verdict::Pass { len, report } => (len, report),
            };
            let bytes = &mut transfer.buffer()[op.range.start..op.range.start + len];
            let (memory, size) = (bytes.as_mut_ptr(), bytes.len() as u32);
            let file = Fd(disk.handle(op.offset, memory, len).as_raw_fd());
            let entry = match op.write {
                true => opcode::Write::new(file, memory, size).offset(op.offset).build(),
                false => opcode::Read::new(file, memory, size).offset(op.offset).build(),
            };
            // SAFETY: `memory` is the run's alone and does not move with `transfer`: its owner is boxed. `transfer` goes
            // into `flights` right below and stays there, untouched, until this I/O's completion has come back; `Drop`
            // waits for that too, or leaks the memory. `disk`, and so the file, outlives the ring.
            if unsafe { self.ring.submission().push(&entry.user_data(number as u64)) }.is_err() {
                transfer.answer(Err(io::Error::other("the submission queue is full")));
                continue;
            }
            disk.meter.begin();
            self.flights[number] = Some(Flight { transfer, op, report });
            return;
        }
        self.free.push(number);
        if transfer.is_read() { self.checks.push(vec![transfer]) } else { transfer.finish() }
    }

    /// Submits what is new and waits until something has come back; the flights that have, and whether the bell rang.
    fn wait(&mut self) -> io::Result<(Vec<(usize, i32)>, bool)> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The system is short of memory, or has completions to hand over first.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ResourceBusy) => {
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(error) => return Err(error),
        }
        let (mut back, mut rung) = (Vec::new(), false);
        for completion in self.ring.completion() {
            match completion.user_data() {
                BELL => rung = true,
                number => back.push((number as usize, completion.result())),
            }
        }
        Ok((back, rung))
    }

    /// Takes a flight whose completion has come back.
    fn land(&mut self, disk: &Disk, number: usize, result: i32) -> Option<Transfer> {
        let Flight { mut transfer, op, report } = self.flights.get_mut(number)?.take()?;
        disk.meter.end();
        let answer = match usize::try_from(result) {
            Ok(moved) => {
                disk.after(&op, transfer.buffer(), moved);
                Ok(report.unwrap_or(moved))
            }
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        transfer.answer(answer);
        Some(transfer)
    }

    /// Takes runs from the queue while there is room for them; whether the queue is closed and empty.
    fn fill(&mut self, disk: &Disk, queue: &Queue) -> bool {
        while let Some(&number) = self.free.last() {
            match queue.look() {
                Next::Run(mut transfer) => {
                    self.free.pop();
                    transfer.start();
                    self.go_on(disk, *transfer, number);
                    // The device gets it now and not after the checksums of the next run; `wait` tries again.
                    let _ = self.ring.submit();
                }
                Next::Empty => return false,
                Next::Closed => return true,
            }
        }
        false
    }

    /// Serves the queue until it is closed and empty and every I/O is back.
    fn serve(&mut self, disk: &Disk, queue: &Queue, bell: &Bell) -> io::Result<()> {
        let (mut polled, mut closed) = (false, false);
        loop {
            closed = closed || self.fill(disk, queue);
            if closed && self.free.len() == self.flights.len() {
                return Ok(());
            }
            if !polled && !closed {
                let poll = opcode::PollAdd::new(Fd(bell.as_raw_fd()), READABLE).build().user_data(BELL);
                // SAFETY: a poll uses no memory of ours.
                polled = unsafe { self.ring.submission().push(&poll) }.is_ok();
            }
            let (back, rung) = self.wait()?;
            if rung {
                polled = false;
                bell.hush()?;
            }
            for (number, result) in back {
                if let Some(transfer) = self.land(disk, number, result) {
                    self.go_on(disk, transfer, number);
                    closed = closed || self.fill(disk, queue);
                }
            }
        }
    }
}

impl Drop for Ring {
    /// After a failure or a panic: waits for what is still in flight, so that no buffer is freed under the system.
    fn drop(&mut self) {
        while self.flights.iter().any(Option::is_some) {
            match self.wait() {
                Ok((back, _)) => back.into_iter().for_each(|(number, _)| self.flights[number] = None),
                Err(_) => {
                    self.flights.iter_mut().filter_map(Option::take).for_each(|flight| flight.transfer.abandon());
                }
            }
        }
    }
}

/// Starts the thread that owns the ring; `bell` is the queue's.
pub(super) fn start(ring: Ring, disk: &Arc<Disk>, queue: &Arc<Queue>, bell: Arc<Bell>) -> io::Result<JoinHandle<()>> {
    let (disk, queue) = (disk.clone(), queue.clone());
    std::thread::Builder::new().name("kvtide-file-ring".to_owned()).spawn(move || {
        // Dropped after the ring.
        let queue = Served(queue);
        let mut ring = ring;
        if let Err(error) = ring.serve(&disk, &queue.0, &bell) {
            tracing::error!(%error, "the io_uring of a store file failed; the file is closed");
        }
    })
}
