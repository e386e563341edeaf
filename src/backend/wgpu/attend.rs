//! `attend`: states of splits.

use super::WgpuBuffer;
use super::adapter::QUERY_TILE;
use super::dispatch::{Dispatch, fold};
use super::kernels::Kernel;
use super::memory::{channels_window, view_window};
use super::shapes::AttendShape;
use super::stream::WgpuStream;
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::Attend;
use crate::backend::params::AttendParams;
use crate::{Error, Result};
use std::f32::consts::LOG2_E;

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
    let own = [args.tables.whole(&shared)?, q_window, args.states.whole(&shared)?];
    let channels = channels_window(args.channels, &args.record, "attend", &shared)?;
    let buffers: Vec<_> = own.into_iter().chain(channels).collect();
    let dispatch = Dispatch {
        kernel: Kernel::Attend(AttendShape::new(&args.record, shared.processor)),
        buffers: &buffers,
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
        split_shift: args.grain.tokens().ilog2(),
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
