//! `merge` and `fold`: states into outputs, and into states.

use super::WgpuBuffer;
use super::dispatch::{self, Dispatch};
use super::kernels::Kernel;
use super::memory::view_window;
use super::stream::WgpuStream;
use crate::Result;
use crate::attention::{SECTION, state_words};
use crate::backend::DeviceBuffer;
use crate::backend::ops::{Fold, Merge};
use crate::backend::params::{FoldParams, MergeParams, ViewParams};
use bytemuck::Zeroable;

/// Bytes that kernels read of states at once, at least.
const STATE_UNIT: u64 = 16;
/// States of a row that one thread folds as fast as many.
const FEW: u32 = 4;
/// Those that are many to one thread even where there are [`ENOUGH`] others.
const MANY: u32 = 64;
/// Workgroups that keep a device busy while each waits for one state after the other.
const ENOUGH: u64 = 512;
/// Elements that a workgroup of `merge.wgsl` folds: four for each thread.
const SHORT_ELEMENTS: u64 = 256;
/// Elements of a head that a workgroup of `merge_long.wgsl` folds, which knows sections of one state and of four.
const LONG_ELEMENTS: u64 = 16;
const _: () = assert!(SECTION == 4);

/// The kernel for these rows, and its workgroups.
fn shape(args: &Merge<'_, WgpuBuffer>) -> (Kernel, u64) {
    let most = args.rows.iter().map(|row| row.states).max().unwrap_or(0);
    let outputs = args.rows.len() as u64 * u64::from(args.q_heads);
    let short = (outputs * u64::from(args.v_dim)).div_ceil(SHORT_ELEMENTS);
    if most <= FEW || (most <= MANY && short >= ENOUGH) {
        return (Kernel::Merge, short);
    }
    (Kernel::MergeLong, outputs * u64::from(args.v_dim).div_ceil(LONG_ELEMENTS))
}

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
    // Where no row has a state there may be no room for one.
    let states = if args.states.bytes() < STATE_UNIT { &shared.spare } else { args.states };
    let (kernel, workgroups) = shape(args);
    let [x, y] = dispatch::fold(workgroups);
    let dispatch =
        Dispatch { kernel, buffers: &[states.whole(&shared)?, out_window, lse_window], slabs: &[], grid: [x, y, 1] };
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
