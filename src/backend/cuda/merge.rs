//! How are `merge` and `fold` launched? A block for each row and head.

use super::kernels::{Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::Result;
use crate::attention::state_words;
use crate::backend::ops::{Fold, Merge};
use crate::backend::params::{FoldParams, MergeParams, ViewParams};

/// Threads of a block: one for two elements, in whole warps.
fn threads(v_dim: u32) -> u32 {
    (v_dim / 2).next_multiple_of(32)
}

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
        reserved: 0,
    };
    let descriptors = stream.upload_descriptors(&[bytemuck::cast_slice(args.rows)])?;
    let states = args.states.aligned("the address of the states")?;
    let out = args.out.buffer.at(args.out.offset);
    let lse = args.lse.map_or(0, |lse| lse.buffer.at(lse.offset));
    let list = &mut [arg(&params), arg(&descriptors), arg(&states), arg(&out), arg(&lse)];
    // SAFETY: the parameters of `merge` in kernels/merge.cu; states and views were validated.
    unsafe { launch(&kernels.merge, stream, u64::from(rows) * u64::from(args.q_heads), threads(args.v_dim), list) }
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
    let descriptors = stream.upload_descriptors(&[bytemuck::cast_slice(args.rows)])?;
    let list = &mut [arg(&params), arg(&descriptors), arg(&states)];
    // SAFETY: the parameters of `fold` in kernels/merge.cu; the states were validated.
    unsafe { launch(&kernels.fold, stream, u64::from(rows) * u64::from(args.q_heads), threads(args.v_dim), list) }
}
