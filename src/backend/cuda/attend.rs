//! How is `attend` launched? A block for each work item, KV head and group of query vectors.

use super::kernels::{ArenaArg, Kernels, arg, channels_address, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::Attend;
use crate::backend::params::AttendParams;
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
    let descriptors =
        stream.upload_descriptors(&[bytemuck::cast_slice(args.tiles), bytemuck::cast_slice(args.rows)])?;
    let tables = args.tables.address();
    let q = args.q.buffer.at(args.q.offset);
    let channels = channels_address(args.channels)?;
    let list = &mut [
        arg(&params),
        arg(&arena),
        arg(&descriptors),
        arg(&tables),
        arg(&q),
        arg(&channels),
        arg(&states),
        arg(&vector_tiles),
    ];
    // SAFETY: the parameters of `attend_…` in kernels/attend.cu; tiles, rows, queries, channels and states were validated,
    // and table entries are the store's to keep valid.
    unsafe { launch(function, stream, blocks, THREADS, list) }
}
