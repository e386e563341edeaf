//! Which engine moves the bytes: the best of what the options allow and the system does, found by trying it.

use super::disk::{Disk, Hook, Meter, open_direct};
use super::format::HEADER;
use super::options::{Engine, FileOptions, Mode, first_that_works};
use super::queue::Queue;
use super::threads;
use super::transfer::Transfer;
use crate::aligned::AlignedBuffer;
use crate::{Error, Result};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Threads that check what io_uring has read: one does some 7 GB/s from memory, a disk up to 14.
#[cfg(target_os = "linux")]
const CHECKS: u32 = 2;

/// The threads of an engine. Dropping it ends them: runs that wait end as [`PageFault::Closed`](crate::PageFault::Closed).
pub(super) struct Workers {
    /// Queues and the threads that serve them; each passes runs on to the next.
    stages: Vec<(Arc<Queue>, Vec<JoinHandle<()>>)>,
}

impl Workers {
    /// Hands runs to the engine.
    pub(super) fn push(&self, runs: Vec<Transfer>) {
        self.stages[0].0.push(runs);
    }

    /// Ends the threads; `abandon`: runs that wait end as [`PageFault::Closed`](crate::PageFault::Closed).
    pub(super) fn end(&mut self, abandon: bool) {
        for (queue, threads) in &mut self.stages {
            queue.close(abandon);
            // A thread that panicked has delivered its runs as closed.
            threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.end(true);
    }
}

/// Starts the best engine that works. Each try writes the header block to the file and reads it back.
///
/// # Errors
/// [`Error::Unavailable`] with the reason of every step that was tried.
pub(super) fn start(
    plain: &File,
    path: &Path,
    options: &FileOptions,
    header: &[u8; HEADER as usize],
    hook: Option<Arc<dyn Hook>>,
) -> Result<(Arc<Disk>, Workers, Mode)> {
    let started = first_that_works(options, |engine, direct| {
        let mut block = AlignedBuffer::new(header.len());
        block.copy_from_slice(header);
        let second = if direct { Some(open_direct(plain, path)?) } else { None };
        let plain = plain.try_clone().map_err(|error| error.to_string())?;
        let disk = Disk { plain, direct: second, hook: hook.clone(), meter: Meter::default() };
        let disk = Arc::new(disk);
        let workers = match engine {
            Engine::Uring => ring(&disk, options.queue_depth, &block)?,
            Engine::Threads => pool(&disk, options.threads, &mut block)?,
        };
        Ok((disk, workers))
    });
    let ((disk, workers), mode) = started.map_err(|reason| Error::Unavailable { backend: "store file", reason })?;
    Ok((disk, workers, mode))
}

fn pool(disk: &Arc<Disk>, threads: u32, block: &mut AlignedBuffer) -> Result<Workers, String> {
    threads::probe(disk.direct.as_ref().unwrap_or(&disk.plain), block).map_err(|error| error.to_string())?;
    let queue = Arc::new(Queue::default());
    let threads = threads::start(disk, &queue, threads).map_err(|error| error.to_string())?;
    Ok(Workers { stages: vec![(queue, threads)] })
}

#[cfg(target_os = "linux")]
fn ring(disk: &Arc<Disk>, depth: u32, block: &AlignedBuffer) -> Result<Workers, String> {
    let start = || {
        let checks = Arc::new(Queue::default());
        let mut ring = super::uring::Ring::new(depth, checks.clone())?;
        ring.probe(disk.direct.as_ref().unwrap_or(&disk.plain), block)?;
        let bell = Arc::new(super::queue::Bell::new()?);
        let queue = Arc::new(Queue::with_bell(bell.clone()));
        let mut workers = Workers { stages: vec![(queue.clone(), Vec::new()), (checks.clone(), Vec::new())] };
        workers.stages[1].1 = threads::start_checks(&checks, CHECKS)?;
        workers.stages[0].1.push(super::uring::start(ring, disk, &queue, bell)?);
        Ok(workers)
    };
    start().map_err(|error: std::io::Error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn ring(_: &Arc<Disk>, _: u32, _: &AlignedBuffer) -> Result<Workers, String> {
    Err("only on Linux".to_owned())
}
