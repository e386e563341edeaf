//! `merge` and `fold`: states into outputs, and into states.

use super::WgpuBuffer;
use super::dispatch::{self, Dispatch};
use super::kernels::Kernel;
use super::memory::view_window;
use super::stream::WgpuStream;
use crate::Result;
use crate::attention::state_words;
use crate::backend::ops::{Fold, Merge};
use crate::backend::params::{FoldParams, MergeParams, ViewParams};
use bytemuck::Zeroable;

/// Threads of a workgroup of `merge`, and elements that each of them folds.
const MERGE_THREADS: u64 = 64;
const MERGE_ELEMENTS: u64 = 4;

pub(super) fn merge(stream: &mut WgpuStream, args: &Merge<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    let (rows, heads) = (args.rows.len() as u64, u64::from(args.q_heads));
    if rows * heads == 0 {
        return Ok(());
    }
    let span = args.out.span([rows, heads, args.v_dim.into()]).unwrap_or(u64::MAX);
    let (out_window, out) = view_window(args.out, span, &shared)?;
    let (lse_window, lse) = match args.lse {
        Some(view) => view_window(view, view.span([rows, heads, 1]).unwrap_or(u64::MAX), &shared)?,
        None => (shared.spare.whole(&shared)?, ViewParams::zeroed()),
    };
    let threads = rows * heads * u64::from(args.v_dim) / MERGE_ELEMENTS;
    let [x, y] = dispatch::fold(threads.div_ceil(MERGE_THREADS));
    let dispatch = Dispatch {
        kernel: Kernel::Merge,
        buffers: &[args.states.whole(&shared)?, out_window, lse_window],
        slabs: &[],
        grid: [x, y, 1],
    };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(args.rows)], |[rows_at]| MergeParams {
        out,
        lse,
        out_dtype: args.out.dtype.code(),
        q_heads: args.q_heads,
        v_dim: args.v_dim,
        state_words: state_words(args.v_dim),
        rows_at,
        rows: args.rows.len() as u32,
        with_lse: args.lse.is_some().into(),
        section: args.section(),
    })
}

pub(super) fn fold(stream: &mut WgpuStream, args: &Fold<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    let groups = args.rows.len() as u64 * u64::from(args.q_heads);
    if groups == 0 {
        return Ok(());
    }
    let [x, y] = dispatch::fold(groups);
    let dispatch =
        Dispatch { kernel: Kernel::Fold, buffers: &[args.states.whole(&shared)?], slabs: &[], grid: [x, y, 1] };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(args.rows)], |[rows_at]| FoldParams {
        q_heads: args.q_heads,
        v_dim: args.v_dim,
        state_words: state_words(args.v_dim),
        rows_at,
        rows: args.rows.len() as u32,
        reserved: [0; 3],
    })
}
