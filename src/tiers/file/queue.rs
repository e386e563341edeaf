//! Runs that wait for an engine, and how its threads are woken and ended.

use super::lock;
use super::transfer::Transfer;
use std::collections::VecDeque;
#[cfg(target_os = "linux")]
use std::io::{self, PipeReader, PipeWriter, Read, Write};
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

#[derive(Default)]
struct State {
    waiting: VecDeque<Transfer>,
    closed: bool,
}

/// Runs that wait.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    #[cfg(target_os = "linux")]
    bell: Option<Arc<Bell>>,
}

impl Queue {
    /// A queue that also rings a bell when there is something new.
    #[cfg(target_os = "linux")]
    pub(super) fn with_bell(bell: Arc<Bell>) -> Self {
        Queue { bell: Some(bell), ..Queue::default() }
    }

    /// Adds runs; on a closed queue they end as [`PageFault::Closed`](crate::PageFault::Closed).
    pub(super) fn push(&self, runs: Vec<Transfer>) {
        let mut state = lock(&self.state);
        let refused = if state.closed {
            runs
        } else {
            state.waiting.extend(runs);
            Vec::new()
        };
        drop(state);
        drop(refused);
        self.wake();
    }

    /// Ends the threads once the queue is empty; `abandon` empties it, so that waiting runs end as
    /// [`PageFault::Closed`](crate::PageFault::Closed).
    pub(super) fn close(&self, abandon: bool) {
        let mut state = lock(&self.state);
        state.closed = true;
        let abandoned = if abandon { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
        drop(state);
        drop(abandoned);
        self.wake();
    }

    /// Waits for the next run; none when the queue is closed and empty.
    pub(super) fn wait(&self) -> Option<Transfer> {
        let waits = |state: &mut State| state.waiting.is_empty() && !state.closed;
        let mut state = self.ready.wait_while(lock(&self.state), waits).unwrap_or_else(PoisonError::into_inner);
        state.waiting.pop_front()
    }

    /// The next run, without waiting.
    #[cfg(target_os = "linux")]
    pub(super) fn look(&self) -> Next {
        let mut state = lock(&self.state);
        match state.waiting.pop_front() {
            Some(run) => Next::Run(Box::new(run)),
            None if state.closed => Next::Closed,
            None => Next::Empty,
        }
    }

    fn wake(&self) {
        self.ready.notify_all();
        #[cfg(target_os = "linux")]
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

/// Closes the queue when the thread that serves it ends, also by a panic: nobody waits for a thread that is gone.
pub(super) struct Served(pub(super) Arc<Queue>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.close(true);
    }
}

/// What a look into the queue finds.
#[cfg(target_os = "linux")]
pub(super) enum Next {
    /// A run.
    Run(Box<Transfer>),
    /// Nothing yet.
    Empty,
    /// Nothing any more.
    Closed,
}

/// Wakes a thread that waits for the system and not for the queue: a pipe that the thread polls.
#[cfg(target_os = "linux")]
pub(super) struct Bell {
    reader: PipeReader,
    writer: PipeWriter,
    rung: AtomicBool,
}

#[cfg(target_os = "linux")]
impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Bell { reader, writer, rung: AtomicBool::new(false) })
    }

    fn ring(&self) {
        if !self.rung.swap(true, SeqCst) {
            // At most one byte is in the pipe and its reader lives: this neither blocks nor fails.
            let _ = (&self.writer).write(&[1]);
        }
    }

    /// After the pipe has become readable, and before the next look into the queue.
    pub(super) fn hush(&self) -> io::Result<()> {
        (&self.reader).read_exact(&mut [0])?;
        self.rung.store(false, SeqCst);
        Ok(())
    }
}

#[cfg(target_os = "linux")]
impl std::os::fd::AsRawFd for Bell {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.reader.as_raw_fd()
    }
}
