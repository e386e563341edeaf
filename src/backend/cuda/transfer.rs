//! How is `transfer` launched? Blocks that each copy a part of one record; either side is frames or records.

use super::kernels::{ArenaArg, Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::backend::ops::{Arena, Place, Transfer};
use crate::backend::params::{Move, TransferParams};
use crate::record::Record;
use crate::{Error, Result};
use cudarc::driver::sys;

/// `THREADS` and `PART` of `kernels/transfer.cu`.
const THREADS: u32 = 256;
const PART: u32 = THREADS * 16;

/// Launches a validated transfer.
pub(super) fn transfer(kernels: &Kernels, stream: &mut CudaStream, args: &Transfer<'_, CudaMemory>) -> Result<()> {
    if args.moves.is_empty() {
        return Ok(());
    }
    let (from, to) = (Side::new(&args.from)?, Side::new(&args.to)?);
    // SAFETY: frames and records were validated.
    unsafe { run(kernels, stream, &args.record, [&from, &to], args.moves, u64::MAX) }
}

/// One launch of the kernel, of at most `blocks` blocks.
///
/// # Safety
/// Every frame and record that the moves name lies in memory that the stream's context reaches and that outlives the
/// kernel.
pub(super) unsafe fn run(
    kernels: &Kernels,
    stream: &mut CudaStream,
    record: &Record,
    [from, to]: [&Side; 2],
    moves: &[Move],
    blocks: u64,
) -> Result<()> {
    let params = TransferParams {
        // Each side has its own slab shift, which goes with its slabs.
        record: record.params(0),
        from_base: 0,
        from_stride: from.stride,
        to_base: 0,
        to_stride: to.stride,
        moves_at: 0,
        moves: super::count(moves.len(), "the number of moves")?,
        reserved: [0; 2],
    };
    let parts = params.record.record_words.div_ceil(PART);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(moves)])?;
    let list = &mut [arg(&params), arg(&from.slabs), arg(&to.slabs), arg(&descriptors), arg(&parts)];
    let blocks = blocks.min(u64::from(params.moves) * u64::from(parts));
    // SAFETY: the parameters of `transfer` in kernels/transfer.cu; the caller vouches for the addresses.
    unsafe { launch(&kernels.transfer, stream, blocks, THREADS, list) }
}

/// One side of a transfer.
pub(super) struct Side {
    slabs: ArenaArg,
    /// Words from one record to the next; 0 says that it is frames.
    stride: u32,
}

impl Side {
    fn new(place: &Place<'_, CudaMemory>) -> Result<Self> {
        match *place {
            Place::Frames(arena) => Self::frames(&arena),
            Place::Records { buffer, offset, stride } => Self::records(buffer.at(offset), stride),
        }
    }

    pub(super) fn frames(arena: &Arena<'_, CudaMemory>) -> Result<Self> {
        Ok(Side { slabs: ArenaArg::new(arena)?, stride: 0 })
    }

    /// Records `stride` bytes apart, a multiple of 4.
    pub(super) fn records(address: sys::CUdeviceptr, stride: u64) -> Result<Self> {
        let value = stride / 4;
        let beyond = |_| Error::TooLarge { what: "the record stride in words", value, maximum: u32::MAX.into() };
        Ok(Side { slabs: ArenaArg::of_records(address), stride: u32::try_from(value).map_err(beyond)? })
    }
}

/// `THREADS` and `LOADS` of `kernels/sum.cu`, in bytes.
const SUM_BYTES: u64 = 256 * 4 * 16;

/// Launches a validated sum.
pub(super) fn sum(
    kernels: &Kernels,
    stream: &mut CudaStream,
    src: &CudaMemory,
    bytes: u64,
    total: &CudaMemory,
) -> Result<()> {
    let (from, units, total) = (src.aligned("the words of a sum")?, bytes / 16, total.address());
    let list = &mut [arg(&from), arg(&units), arg(&total)];
    // SAFETY: the parameters of `sum` in kernels/sum.cu; both ranges were validated.
    unsafe { launch(&kernels.sum, stream, bytes.div_ceil(SUM_BYTES), 256, list) }
}
