//! How are `merge` and `fold` launched? A block for each row and head, or several where there are few.

use super::kernels::{Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::Result;
use crate::attention::state_words;
use crate::backend::ops::{Fold, Merge};
use crate::backend::params::{FoldParams, MergeParams, ViewParams};

/// Threads of a block: one for four elements, in whole warps.
fn threads(v_dim: u32) -> u32 {
    (v_dim / 4).next_multiple_of(32)
}

/// `LONG_THREADS` and `SLICE` of `kernels/merge.cu`.
const LONG: (u32, u32) = (256, 16);

/// Launches a validated merge.
pub(super) fn merge(kernels: &Kernels, stream: &mut CudaStream, args: &Merge<'_, CudaMemory>) -> Result<()> {
    let rows = super::count(args.rows.len(), "the number of output rows")?;
    if rows == 0 || args.q_heads == 0 {
        return Ok(());
    }
    let params = MergeParams {
        out: args.out.params(0),
        lse: args.lse.map_or(ViewParams { base: 0, row: 0, head: 0, element: 0 }, |lse| lse.params(0)),
        out_dtype: args.out.dtype.code(),
        q_heads: args.q_heads,
        v_dim: args.v_dim,
        state_words: state_words(args.v_dim),
        rows_at: 0,
        rows,
        with_lse: args.lse.is_some().into(),
        section: args.section(),
    };
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.rows)])?;
    let states = args.states.aligned("the address of the states")?;
    let out = args.out.buffer.at(args.out.offset);
    let lse = args.lse.map_or(0, |lse| lse.buffer.at(lse.offset));
    let list = &mut [arg(&params), arg(&descriptors), arg(&states), arg(&out), arg(&lse)];
    let outputs = u64::from(rows) * u64::from(args.q_heads);
    // Both give the same bits.
    let (function, blocks, threads) = if outputs > kernels.multiprocessors {
        (&kernels.merge, outputs, threads(args.v_dim))
    } else {
        (&kernels.merge_long, outputs * u64::from(args.v_dim.div_ceil(LONG.1)), LONG.0)
    };
    // SAFETY: the parameters of both in kernels/merge.cu; states and views were validated. Before they wait, they read
    // descriptors alone: those in memory come from a copy, which has ended when the kernel starts.
    unsafe { kernels.launch_early(function, stream, blocks, threads, list) }
}

/// Launches a validated fold.
pub(super) fn fold(kernels: &Kernels, stream: &mut CudaStream, args: &Fold<'_, CudaMemory>) -> Result<()> {
    let rows = super::count(args.rows.len(), "the number of folded states")?;
    if rows == 0 || args.q_heads == 0 {
        return Ok(());
    }
    let params = FoldParams {
        q_heads: args.q_heads,
        v_dim: args.v_dim,
        state_words: state_words(args.v_dim),
        rows_at: 0,
        rows,
        reserved: [0; 3],
    };
    let states = args.states.aligned("the address of the states")?;
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.rows)])?;
    let list = &mut [arg(&params), arg(&descriptors), arg(&states)];
    // SAFETY: the parameters of `fold` in kernels/merge.cu; the states were validated.
    unsafe { launch(&kernels.fold, stream, u64::from(rows) * u64::from(args.q_heads), threads(args.v_dim), list) }
}
