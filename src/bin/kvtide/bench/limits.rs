//! What the device's memory, its link to the host and the disk can do at best: a plain read, one long copy, one plain direct
//! read.

use super::timer::{Flush, Timer};
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

/// The time of a plain read of so many bytes of device memory. More than one binding can hold are read in part, and the time
/// scaled.
pub(super) fn read_us(timer: &mut Timer<'_>, flush: Flush, bytes: u64) -> anyhow::Result<f64> {
    let device = timer.device;
    let part = bytes.min(device.caps().max_slab_bytes).max(16) / 16 * 16;
    let whole = device.alloc("bench read", part)?;
    device.fill(&mut timer.stream, &whole, 0, part, 0x3f81_3f80)?;
    Ok(timer.read_us(flush, &whole, part)? * bytes as f64 / part as f64)
}

/// Which pages a measured swap moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spread {
    /// Side by side in both places.
    Contiguous,
    /// Frames anywhere, host records side by side.
    Frames,
    /// Anywhere in both places.
    Both,
}

/// Bytes a second of one contiguous copy from host memory to the device, and back.
pub(super) fn link(device: &Device, geometry: Geometry) -> anyhow::Result<(f64, f64)> {
    let pages = (COPY_BYTES / Record::new(geometry).frame_stride()) as u32;
    swap(device, geometry, pages, Spread::Contiguous)
}

/// Bytes a second of a swap of `pages` pages in, and out.
pub(super) fn swap(device: &Device, geometry: Geometry, pages: u32, spread: Spread) -> anyhow::Result<(f64, f64)> {
    let record = Record::new(geometry);
    let most = (COPY_BYTES.min(device.caps().max_slab_bytes) / record.frame_stride()).max(1) as u32;
    let (pages, bytes) = (pages.clamp(1, most), u64::from(most) * record.frame_stride());
    let slab = device.alloc("copy", bytes)?;
    let host = device.alloc_host("copy", bytes, COPY_MEMORY)?;
    // A permutation without pattern: multiples of a number that has no divisor in common with their count.
    let odd = (0..).map(|step| 2_654_435_769 + 2 * step).find(|odd| gcd(*odd, u64::from(most)) == 1).unwrap_or(1);
    let shuffled = |page: u32| (u64::from(page) * odd % u64::from(most)) as u32;
    let frame = |page| if spread == Spread::Contiguous { page } else { shuffled(page) };
    let place = |page| if spread == Spread::Both { shuffled(most - 1 - page) } else { page };
    let (frame_of, place_of): (Vec<u32>, Vec<u32>) = (0..pages).map(|page| (frame(page), place(page))).unzip();
    let mut stream = device.stream()?;
    let mut time = |out: bool| -> anyhow::Result<f64> {
        let pairs = frame_of.iter().zip(&place_of);
        let moves: Vec<Move> =
            pairs.map(|(&f, &p)| if out { Move { from: f, to: p } } else { Move { from: p, to: f } }).collect();
        let mut times = Vec::new();
        for _ in 0..15 {
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

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
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
