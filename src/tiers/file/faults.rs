//! A disk that fails on request: the same faults for either engine, for tests.

use super::disk::{Hook, Op, Verdict};
use super::format::Layout;
use super::lock;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// For ever, where a fault says how often.
pub const ALWAYS: u32 = u32::MAX;

/// What goes wrong with an I/O that touches a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Reads end with this error number.
    Read(i32),
    /// Writes end with this error number.
    Write(i32),
    /// This bit of the record (bit 0 of byte 0 first) comes back flipped.
    Flip(u64),
    /// A write is reported done, and nothing is written: what was there before is there still.
    Lost,
    /// A write is reported done, and only its first half is written.
    Torn,
}

#[derive(Default)]
struct Script {
    layout: Option<Layout>,
    /// Slot, fault, how often still.
    faults: Vec<(u32, Fault, u32)>,
    cap: Option<usize>,
    end: Option<u64>,
    every: Option<(u64, i32)>,
    delay: Duration,
    held: bool,
}

#[derive(Default)]
struct State {
    script: Mutex<Script>,
    released: Condvar,
    calls: AtomicU64,
}

/// A script of faults; clones share it, so that a test keeps one and changes it while the file is in use.
#[derive(Clone, Default)]
pub struct Faults {
    state: Arc<State>,
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faults")
    }
}

impl Faults {
    /// No faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// `fault` for the next `times` I/Os that touch `slot` ([`ALWAYS`]: for ever). A run that fails as a whole is tried
    /// again page by page: once fails a run of one page only.
    pub fn slot(&self, slot: u32, fault: Fault, times: u32) {
        lock(&self.state.script).faults.push((slot, fault, times));
    }

    /// Every I/O moves at most this many bytes.
    pub fn cap(&self, bytes: usize) {
        lock(&self.state.script).cap = Some(bytes.max(1));
    }

    /// Reads find the file to end before this byte of it.
    pub fn end_at(&self, byte: u64) {
        lock(&self.state.script).end = Some(byte);
    }

    /// Where a byte of a slot is in the file.
    pub fn offset(&self, slot: u32, byte: u64) -> u64 {
        lock(&self.state.script).layout.map_or(0, |layout| layout.offset(slot) + byte)
    }

    /// Every `nth` I/O ends with this error number (4: `EINTR`).
    pub fn every(&self, nth: u64, errno: i32) {
        lock(&self.state.script).every = Some((nth.max(1), errno));
    }

    /// Every I/O takes this much longer. With io_uring one delay comes after the other.
    pub fn delay(&self, by: Duration) {
        lock(&self.state.script).delay = by;
    }

    /// I/O stands still until [`release`](Self::release), and so does whoever drops or closes the file.
    pub fn hold(&self) {
        lock(&self.state.script).held = true;
    }

    /// I/O goes on.
    pub fn release(&self) {
        lock(&self.state.script).held = false;
        self.state.released.notify_all();
    }

    /// No faults any more.
    pub fn clear(&self) {
        let mut script = lock(&self.state.script);
        *script = Script { layout: script.layout, ..Script::default() };
        self.state.released.notify_all();
    }

    /// I/Os seen so far.
    pub fn calls(&self) -> u64 {
        self.state.calls.load(Relaxed)
    }
}

impl Script {
    /// Takes one of the faults that wait for this I/O.
    fn strike(&mut self, op: &Op, is: impl Fn(Fault) -> bool) -> Option<Fault> {
        let layout = self.layout?;
        let touched = |slot| {
            let (start, end) = (layout.offset(slot), layout.offset(slot) + layout.stride as u64);
            op.offset < end && start < op.offset + op.range.len() as u64
        };
        let found = self.faults.iter_mut().find(|(slot, fault, times)| *times > 0 && touched(*slot) && is(*fault))?;
        if found.2 != ALWAYS {
            found.2 -= 1;
        }
        Some(found.1)
    }
}

impl Hook for Faults {
    fn attach(&self, layout: Layout) {
        lock(&self.state.script).layout = Some(layout);
    }

    fn before(&self, op: &Op) -> Verdict {
        let script = lock(&self.state.script);
        let mut script =
            self.state.released.wait_while(script, |script| script.held).unwrap_or_else(PoisonError::into_inner);
        let call = self.state.calls.fetch_add(1, Relaxed) + 1;
        if !script.delay.is_zero() {
            let delay = script.delay;
            drop(script);
            std::thread::sleep(delay);
            script = lock(&self.state.script);
        }
        if let Some((_, errno)) = script.every.filter(|(nth, _)| call.is_multiple_of(*nth)) {
            return Verdict::Answer(Err(io::Error::from_raw_os_error(errno)));
        }
        let len = op.range.len().min(script.cap.unwrap_or(usize::MAX));
        if !op.write {
            if let Some(Fault::Read(errno)) = script.strike(op, |fault| matches!(fault, Fault::Read(_))) {
                return Verdict::Answer(Err(io::Error::from_raw_os_error(errno)));
            }
            let left = script.end.map_or(u64::MAX, |end| end.saturating_sub(op.offset));
            return match len.min(usize::try_from(left).unwrap_or(usize::MAX)) {
                0 => Verdict::Answer(Ok(0)),
                len => Verdict::Pass { len, report: None },
            };
        }
        match script.strike(op, |fault| matches!(fault, Fault::Write(_) | Fault::Lost | Fault::Torn)) {
            Some(Fault::Write(errno)) => Verdict::Answer(Err(io::Error::from_raw_os_error(errno))),
            Some(Fault::Lost) => Verdict::Answer(Ok(len)),
            Some(Fault::Torn) if len < 2 => Verdict::Answer(Ok(len)),
            Some(Fault::Torn) => Verdict::Pass { len: len / 2, report: Some(len) },
            _ => Verdict::Pass { len, report: None },
        }
    }

    fn after_read(&self, op: &Op, bytes: &mut [u8]) {
        let mut script = lock(&self.state.script);
        let Some(layout) = script.layout else { return };
        for at in 0..script.faults.len() {
            let (slot, fault, times) = script.faults[at];
            let Fault::Flip(bit) = fault else { continue };
            let byte = (layout.offset(slot) + bit / 8).checked_sub(op.offset);
            let Some(byte) = byte.and_then(|byte| bytes.get_mut(byte as usize)).filter(|_| times > 0) else { continue };
            *byte ^= 1 << (bit % 8);
            if times != ALWAYS {
                script.faults[at].2 -= 1;
            }
        }
    }
}
