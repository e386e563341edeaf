//! `swap_out` and `swap_in`: frames to host memory and back, in runs.
//!
//! A copy costs microseconds whatever its size, so pages are never copied one by one: they lie side by side in a device
//! buffer, the *staging*, in the order of their host records. One kernel moves a stagingful between there and the frames,
//! and each run of consecutive host records is one copy.

use super::host::upload;
use super::memory::alloc;
use super::stream::WgpuStream;
use super::tier::{Bytes, Memory, Records, WgpuHost, lock};
use super::transfer::transfer;
use super::{Shared, WgpuBuffer};
use crate::Result;
use crate::backend::ops::{Place, Transfer};
use crate::backend::params::Move;
use crate::backend::{DeviceBuffer, Swap, by_host, sides};
use crate::record::Record;
use ::wgpu::Buffer;

/// Bytes of the staging; one record where that is more.
const STAGING_BYTES: u64 = 16 << 20;

type Args<'a> = Swap<'a, WgpuBuffer, WgpuHost>;

pub(super) fn swap_out(stream: &mut WgpuStream, args: &Args<'_>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(true, &shared.caps)?;
    if args.moves.is_empty() {
        return Ok(());
    }
    let (moves, staging) = (by_host(args.moves, true), Staging::of(stream, &args.record)?);
    for moves in moves.chunks(staging.records) {
        let gather: Vec<_> = moves.iter().zip(0..).map(|(one, to)| Move { from: one.from, to }).collect();
        let (from, to) = (Place::Frames(args.arena), staging.place());
        transfer(stream, &Transfer { record: args.record, from, to, moves: &gather })?;
        match &args.host.memory {
            Memory::Buffer(host) => staging.copies(stream, host, moves, args, true),
            Memory::Bytes(bytes) => {
                let mut bytes = lock(bytes);
                let size = staging.stride * moves.len() as u64;
                let landing = bytes.landing_buffer(&shared, size)?;
                stream.encoder().copy_buffer_to_buffer(staging.buffer.raw(), 0, &landing, 0, size);
                stream.flush()?;
                let to = moves.iter().map(|one| args.host_offset(one.to)).collect();
                let records = Records { stride: staging.stride, bytes: args.record.bytes(), to };
                if let Some(last) = stream.last.clone() {
                    bytes.expect(&shared, landing, last, records)?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn swap_in(stream: &mut WgpuStream, args: &Args<'_>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(false, &shared.caps)?;
    if args.moves.is_empty() {
        return Ok(());
    }
    let (moves, staging) = (by_host(args.moves, false), Staging::of(stream, &args.record)?);
    for moves in moves.chunks(staging.records) {
        match &args.host.memory {
            Memory::Buffer(host) => staging.copies(stream, host, moves, args, false),
            Memory::Bytes(bytes) => {
                let data = staged(&mut lock(bytes), &shared, moves, args)?;
                upload(stream, &staging.buffer, 0, &data)?;
            }
        }
        let scatter: Vec<_> = moves.iter().zip(0..).map(|(one, from)| Move { from, to: one.to }).collect();
        let (from, to) = (staging.place(), Place::Frames(args.arena));
        transfer(stream, &Transfer { record: args.record, from, to, moves: &scatter })?;
    }
    Ok(())
}

/// Host records as they lie in the staging, once everything under way has landed.
fn staged(bytes: &mut Bytes, shared: &Shared, moves: &[Move], args: &Args<'_>) -> Result<Vec<u8>> {
    bytes.land(shared, 0)?;
    let (stride, record) = (args.record.frame_stride() as usize, args.record.bytes() as usize);
    let mut data = vec![0; stride * moves.len()];
    for (to, one) in data.chunks_exact_mut(stride).zip(moves) {
        to[..record].copy_from_slice(bytes.at(args.host_offset(one.from), record));
    }
    Ok(data)
}

/// Device memory that records lie in side by side, as they do in frames.
struct Staging {
    buffer: WgpuBuffer,
    /// How many records it holds.
    records: usize,
    /// Bytes from one to the next.
    stride: u64,
}

impl Staging {
    /// The stream's staging, made at its first swap.
    fn of(stream: &mut WgpuStream, record: &Record) -> Result<Self> {
        let stride = record.frame_stride();
        let bytes = STAGING_BYTES.min(stream.shared.caps.max_slab_bytes).max(stride);
        let buffer = match stream.staging.take().filter(|buffer| buffer.bytes() >= bytes) {
            Some(buffer) => buffer,
            None => alloc(&stream.shared, "kvtide staging", bytes)?,
        };
        stream.staging = Some(buffer.clone());
        Ok(Staging { records: (bytes / stride) as usize, buffer, stride })
    }

    fn place(&self) -> Place<'_, WgpuBuffer> {
        Place::Records { buffer: &self.buffer, offset: 0, stride: self.stride }
    }

    /// Copies the records of moves, which are in host order, to a host buffer (`out`) or from it.
    fn copies(&self, stream: &mut WgpuStream, host: &Buffer, moves: &[Move], args: &Args<'_>, out: bool) {
        let index = |one: &Move| sides(one, out).1;
        // A run takes the padding behind each record along. Where host records lie further apart than frames, other records
        // may lie between them.
        let run = |a: &Move, b: &Move| args.stride == self.stride && index(a).checked_add(1) == Some(index(b));
        let mut at = 0;
        for run in moves.chunk_by(run) {
            let bytes = (run.len() as u64 - 1) * self.stride + args.record.bytes();
            let (staging, host) = ((self.buffer.raw(), at), (host, args.host_offset(index(&run[0]))));
            let (from, to) = if out { (staging, host) } else { (host, staging) };
            stream.encoder().copy_buffer_to_buffer(from.0, from.1, to.0, to.1, bytes);
            at += run.len() as u64 * self.stride;
        }
    }
}
