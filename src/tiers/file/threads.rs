//! The engine that runs anywhere: a pool of threads with positioned reads and writes.

use super::disk::Disk;
use super::queue::{Queue, Served};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Starts the threads; each takes one run after the other until the queue is closed and empty.
pub(super) fn start(disk: &Arc<Disk>, queue: &Arc<Queue>, threads: u32) -> io::Result<Vec<JoinHandle<()>>> {
    let mut started = Vec::new();
    for number in 0..threads {
        let (disk, served) = (disk.clone(), Served(queue.clone()));
        let builder = std::thread::Builder::new().name(format!("kvtide-file-{number}"));
        match builder.spawn(move || work(&disk, &served.0)) {
            Ok(thread) => started.push(thread),
            // Some threads are enough.
            Err(_) if !started.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(started)
}

fn work(disk: &Disk, queue: &Queue) {
    while let Some(mut transfer) = queue.wait() {
        transfer.start();
        while let Some(op) = transfer.next() {
            let answer = disk.perform(&op, transfer.buffer());
            transfer.answer(answer);
        }
    }
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
