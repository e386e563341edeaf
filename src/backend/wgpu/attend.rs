//! `attend` and `merge`: states of splits, and their fold.

use super::WgpuBuffer;
use super::adapter::QUERY_TILE;
use super::dispatch::{Dispatch, fold};
use super::kernels::Kernel;
use super::memory::view_window;
use super::stream::WgpuStream;
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::{Attend, Merge};
use crate::backend::params::{AttendParams, MergeParams, ViewParams};
use crate::{Error, Result};
use bytemuck::Zeroable;
use std::f32::consts::LOG2_E;

/// Threads of a workgroup of `merge`, and elements that each of them folds.
const MERGE_THREADS: u64 = 64;
const MERGE_ELEMENTS: u64 = 4;

// The arrays of `shaders/attend.wgsl` hold this many tokens.
const _: () = assert!(SPLIT == 256);

pub(super) fn attend(stream: &mut WgpuStream, args: &Attend<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    let geometry = args.record.geometry();
    let items = args.tiles.last().map_or(0, |tile| tile.item + tile.splits);
    let vectors = args.tiles.iter().map(|tile| u64::from(tile.rows) * u64::from(geometry.group())).max().unwrap_or(0);
    let pairs = u64::from(items) * u64::from(geometry.kv_heads());
    if pairs == 0 || vectors == 0 {
        return Ok(());
    }
    if pairs > u64::from(u32::MAX) {
        return Err(Error::TooLarge { what: "the work items × KV heads", value: pairs, maximum: u32::MAX.into() });
    }
    let shape = [args.rows.len() as u64, geometry.q_heads().into(), geometry.k_dim().into()];
    let (q_window, q) = view_window(args.q, args.q.span(shape).unwrap_or(u64::MAX), &shared)?;
    let [y, z] = fold(pairs);
    let dispatch = Dispatch {
        kernel: Kernel::Attend(args.record.format()),
        buffers: &[args.tables.whole(&shared)?, q_window, args.states.whole(&shared)?],
        slabs: args.arena.slabs,
        grid: [vectors.div_ceil(QUERY_TILE.into()), y, z],
    };
    let descriptors = [bytemuck::cast_slice(args.tiles), bytemuck::cast_slice(args.rows)];
    stream.dispatch(&dispatch, descriptors, |[tiles_at, rows_at]| AttendParams {
        record: args.record.params(args.arena.slab_shift),
        q,
        q_dtype: args.q.dtype.code(),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        split_shift: SPLIT.ilog2(),
        scale_log2: args.scale * LOG2_E,
        tiles_at,
        tiles: args.tiles.len() as u32,
        rows_at,
        items,
        state_words: state_words(geometry.v_dim()),
        query_tile: QUERY_TILE,
        first_item: 0,
    })
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
    let threads = rows * heads * u64::from(args.v_dim) / MERGE_ELEMENTS;
    let [x, y] = fold(threads.div_ceil(MERGE_THREADS));
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
        reserved: 0,
    })
}
