//! How are `merge` and `fold` launched? Warps for each row and head, or several blocks where there are few rows of many
//! states.

use super::kernels::{Descriptors, Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::Result;
use crate::attention::state_words;
use crate::backend::ops::{Fold, Merge, StepMemory};
use crate::backend::params::{FoldParams, MergeParams, ViewParams};

/// Threads of a row and head: one for four elements, in whole warps.
fn width(v_dim: u32) -> u32 {
    (v_dim / 4).next_multiple_of(32)
}

/// States that the functions of `kernels/merge.cu` take at a time, in ascending order. Which one runs changes no bit.
pub(super) const MERGE_BATCHES: [u32; 3] = [4, 8, 16];
/// `THREADS` there.
const THREADS: u32 = 128;

/// `LONG_THREADS` and `SLICE` of `kernels/merge.cu`, and the states that one batch of the others does not take.
const LONG: (u32, u32) = (256, 16);
const LONG_FROM: u32 = MERGE_BATCHES[MERGE_BATCHES.len() - 1];

/// Launches a validated merge, of a decode step where its descriptors lie in memory.
pub(super) fn merge(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Merge<'_, CudaMemory>,
    at: Option<&StepMemory<'_, CudaMemory>>,
) -> Result<()> {
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
    let descriptors = match at {
        Some(at) => Descriptors::at(at.buffer.at(at.merge)),
        None => stream.descriptors(&[bytemuck::cast_slice(args.rows)])?,
    };
    let states = args.states.aligned("the address of the states")?;
    let out = args.out.buffer.at(args.out.offset);
    let lse = args.lse.map_or(0, |lse| lse.buffer.at(lse.offset));
    let outputs = u64::from(rows) * u64::from(args.q_heads);
    let now = args.rows.iter().map(|row| row.before + row.states).max().unwrap_or(0);
    let most = at.map_or(now, |at| at.states);
    let width = width(args.v_dim);
    let mut list = vec![arg(&params), arg(&states), arg(&out), arg(&lse)];
    // All give the same bits.
    let (function, blocks, threads) = if outputs <= kernels.multiprocessors && most > LONG_FROM {
        (&kernels.merge_long, outputs * u64::from(args.v_dim.div_ceil(LONG.1)), LONG.0)
    } else {
        let batch = MERGE_BATCHES.iter().position(|&batch| batch >= most).unwrap_or(MERGE_BATCHES.len() - 1);
        list.push(arg(&width));
        (&kernels.merge[batch], outputs.div_ceil((THREADS / width).into()), THREADS)
    };
    list.push(arg(&descriptors));
    // SAFETY: the parameters of these functions in kernels/merge.cu; states and views were validated. Before they wait, they
    // read descriptors alone: those in memory come from a copy, which has ended when the kernel starts.
    unsafe { kernels.launch_early(function, stream, blocks, (threads, 0), &mut list) }
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
    let list = &mut [arg(&params), arg(&states), arg(&descriptors)];
    // SAFETY: the parameters of `fold` in kernels/merge.cu; the states were validated.
    unsafe { launch(&kernels.fold, stream, u64::from(rows) * u64::from(args.q_heads), width(args.v_dim), list) }
}
