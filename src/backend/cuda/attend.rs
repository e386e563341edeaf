//! How are `attend` and `merge` launched? A block for each work item, KV head and group of query vectors; then a block
//! for each output row and head.

use super::kernels::{ArenaArg, Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::{Attend, Merge};
use crate::backend::params::{AttendParams, MergeParams, ViewParams};
use crate::{Error, Result};
use std::f32::consts::LOG2_E;

/// `THREADS` of `kernels/attend.cu`.
const THREADS: u32 = 128;

/// Launches a validated attend.
pub(super) fn attend(kernels: &Kernels, stream: &mut CudaStream, args: &Attend<'_, CudaMemory>) -> Result<()> {
    let Some(last) = args.tiles.last() else { return Ok(()) };
    let arena = ArenaArg::new(&args.arena)?;
    let states = args.states.aligned("the address of the states")?;
    let geometry = args.record.geometry();
    let rows = args.tiles.iter().map(|tile| tile.rows).max().unwrap_or(0);
    let vectors = u64::from(rows) * u64::from(geometry.group());
    let (function, query_tile) = kernels.attend(args.record.format(), vectors);
    let vector_tiles = vectors.div_ceil(query_tile.into());
    let vector_tiles = u32::try_from(vector_tiles).map_err(|_| Error::TooLarge {
        what: "the query vectors of a tile",
        value: vectors,
        maximum: u64::from(u32::MAX) * u64::from(query_tile),
    })?;
    let tiles = super::count(args.tiles.len(), "the number of tiles")?;
    let params = AttendParams {
        record: args.record.params(args.arena.slab_shift),
        q: args.q.params(0),
        q_dtype: args.q.dtype.code(),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        split_shift: SPLIT.trailing_zeros(),
        scale_log2: args.scale * LOG2_E,
        tiles_at: 0,
        tiles,
        rows_at: tiles * 8,
        items: last.item + last.splits,
        state_words: state_words(geometry.v_dim()),
        query_tile,
        first_item: 0,
    };
    let blocks = u64::from(params.items) * u64::from(geometry.kv_heads()) * u64::from(vector_tiles);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.tiles), bytemuck::cast_slice(args.rows)])?;
    let tables = args.tables.address();
    let q = args.q.buffer.at(args.q.offset);
    let list =
        &mut [arg(&params), arg(&arena), arg(&descriptors), arg(&tables), arg(&q), arg(&states), arg(&vector_tiles)];
    // SAFETY: the parameters of `attend_…` in kernels/attend.cu; tiles, rows, queries and states were validated, and table
    // entries are the store's to keep valid.
    unsafe { launch(function, stream, blocks, THREADS, list) }
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
    // A thread takes two elements.
    let threads = (args.v_dim / 2).next_multiple_of(32);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.rows)])?;
    let states = args.states.aligned("the address of the states")?;
    let out = args.out.buffer.at(args.out.offset);
    let lse = args.lse.map_or(0, |lse| lse.buffer.at(lse.offset));
    let list = &mut [arg(&params), arg(&descriptors), arg(&states), arg(&out), arg(&lse)];
    // SAFETY: the parameters of `merge` in kernels/merge.cu; states and views were validated.
    unsafe { launch(&kernels.merge, stream, u64::from(rows) * u64::from(args.q_heads), threads, list) }
}
