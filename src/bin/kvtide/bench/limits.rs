//! What the link between host and device, and the disk, can do at best: one long copy, one plain direct read.

use super::{COPY_MEMORY, median};
use anyhow::Context;
use kvtide::backend::ops::Arena;
use kvtide::backend::params::Move;
use kvtide::backend::{Backend, Swap};
use kvtide::record::Record;
use kvtide::tiers::file::AlignedBuffer;
use kvtide::{Device, Geometry};
use std::io::Read;
use std::path::Path;
use std::time::Instant;

/// Bytes of the copy.
const COPY_BYTES: u64 = 256 << 20;
/// Bytes of one read.
const READ_BYTES: usize = 16 << 20;

/// Bytes a second of one contiguous copy from host memory to the device, and back.
pub(super) fn link(device: &Device, geometry: Geometry) -> anyhow::Result<(f64, f64)> {
    let record = Record::new(geometry);
    let pages = (COPY_BYTES.min(device.caps().max_slab_bytes) / record.frame_stride()).max(1) as u32;
    let bytes = u64::from(pages) * record.frame_stride();
    let slab = device.alloc("copy", bytes)?;
    let host = device.alloc_host("copy", bytes, COPY_MEMORY)?;
    let moves: Vec<Move> = (0..pages).map(|page| Move { from: page, to: page }).collect();
    let mut stream = device.stream()?;
    let mut time = |out: bool| -> anyhow::Result<f64> {
        let mut times = Vec::new();
        for _ in 0..12 {
            let arena = Arena { slabs: std::slice::from_ref(&slab), slab_shift: 31 };
            let args = Swap { record, arena, host: &host, offset: 0, stride: record.frame_stride(), moves: &moves };
            device.synchronize(&mut stream)?;
            let (begin, began) = (Instant::now(), device.record(&mut stream)?);
            if out {
                device.swap_out(&mut stream, &args)?
            } else {
                device.swap_in(&mut stream, &args)?
            }
            let ended = device.record(&mut stream)?;
            device.finish(&ended)?;
            let wall = begin.elapsed();
            times.push(device.elapsed(&began, &ended)?.unwrap_or(wall).as_secs_f64());
        }
        Ok(f64::from(pages) * record.bytes() as f64 / median(times))
    };
    let out = time(true)?;
    Ok((time(false)?, out))
}

/// Bytes a second of plain reads of a file from its start, past the page cache where the system can.
pub(super) fn disk(path: &Path, bytes: u64) -> anyhow::Result<f64> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::DIRECT.bits() as i32);
    let mut file = options.open(path).with_context(|| format!("{} for plain reads", path.display()))?;
    let mut buffer = AlignedBuffer::new(READ_BYTES);
    let begin = Instant::now();
    let mut read = 0u64;
    while read < bytes {
        match file.read(&mut buffer)? {
            0 => break,
            n => read += n as u64,
        }
    }
    Ok(read as f64 / begin.elapsed().as_secs_f64())
}
