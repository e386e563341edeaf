//! How is `transfer` launched? Blocks that each copy a part of one record; either side is frames or records.

use super::kernels::{ArenaArg, Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::backend::ops::{Place, Transfer};
use crate::backend::params::TransferParams;
use crate::{Error, Result};

/// `THREADS` and `PART` of `kernels/transfer.cu`.
const THREADS: u32 = 256;
const PART: u32 = THREADS * 16;

/// Launches a validated transfer.
pub(super) fn transfer(kernels: &Kernels, stream: &mut CudaStream, args: &Transfer<'_, CudaMemory>) -> Result<()> {
    if args.moves.is_empty() {
        return Ok(());
    }
    let (from, from_stride) = side(&args.from)?;
    let (to, to_stride) = side(&args.to)?;
    let params = TransferParams {
        // Each side has its own slab shift, which goes with its slabs.
        record: args.record.params(0),
        from_base: 0,
        from_stride,
        to_base: 0,
        to_stride,
        moves_at: 0,
        moves: super::count(args.moves.len(), "the number of moves")?,
        reserved: [0; 2],
    };
    let parts = params.record.record_words.div_ceil(PART);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.moves)])?;
    let list = &mut [arg(&params), arg(&from), arg(&to), arg(&descriptors), arg(&parts)];
    // SAFETY: the parameters of `transfer` in kernels/transfer.cu; frames and records were validated.
    unsafe { launch(&kernels.transfer, stream, u64::from(params.moves) * u64::from(parts), THREADS, list) }
}

/// The addresses of one side, and its record stride in words: 0 says that it is frames.
fn side(place: &Place<'_, CudaMemory>) -> Result<(ArenaArg, u32)> {
    match *place {
        Place::Frames(arena) => Ok((ArenaArg::new(&arena)?, 0)),
        Place::Records { buffer, offset, stride } => {
            let what = "the record stride in words";
            let words = u32::try_from(stride / 4).map_err(|_| Error::TooLarge {
                what,
                value: stride / 4,
                maximum: u32::MAX.into(),
            })?;
            Ok((ArenaArg::of_records(buffer.at(offset)), words))
        }
    }
}
