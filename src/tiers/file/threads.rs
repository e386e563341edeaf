//! The engine that runs anywhere: a pool of threads with positioned reads and writes.

use super::disk::Disk;
use super::queue::{Queue, Served};
use super::transfer::Transfer;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Starts threads that take one run after the other until the queue is closed and empty.
pub(super) fn start(disk: &Arc<Disk>, queue: &Arc<Queue>, threads: u32) -> io::Result<Vec<JoinHandle<()>>> {
    let disk = disk.clone();
    serve(queue, threads, "kvtide-file", move |mut transfer| {
        transfer.start();
        while let Some(op) = transfer.next() {
            let answer = disk.perform(&op, transfer.buffer());
            transfer.answer(answer);
        }
        transfer.finish();
    })
}

/// Starts threads that finish runs whose bytes another engine has moved.
#[cfg(target_os = "linux")]
pub(super) fn start_checks(queue: &Arc<Queue>, threads: u32) -> io::Result<Vec<JoinHandle<()>>> {
    serve(queue, threads, "kvtide-check", Transfer::finish)
}

fn serve(
    queue: &Arc<Queue>,
    threads: u32,
    name: &str,
    work: impl Fn(Transfer) + Clone + Send + 'static,
) -> io::Result<Vec<JoinHandle<()>>> {
    let mut started = Vec::new();
    for number in 0..threads {
        let (queue, work) = (queue.clone(), work.clone());
        let serve = move || {
            let queue = Served(queue);
            while let Some(transfer) = queue.0.wait() {
                work(transfer);
            }
        };
        match std::thread::Builder::new().name(format!("{name}-{number}")).spawn(serve) {
            Ok(thread) => started.push(thread),
            // Some threads are enough.
            Err(_) if !started.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(started)
}

/// Writes `block` to the start of `file` and reads it back.
pub(super) fn probe(file: &File, block: &mut [u8]) -> io::Result<()> {
    let written = super::disk::write_at(file, block, 0)?;
    let expected = block.to_vec();
    block.fill(0);
    let read = super::disk::read_at(file, block, 0)?;
    if (written, read) == (block.len(), block.len()) && block == expected {
        return Ok(());
    }
    block.copy_from_slice(&expected);
    Err(io::Error::other(format!("a probe of {} bytes wrote {written} and read {read}", expected.len())))
}
