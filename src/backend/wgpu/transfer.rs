//! `transfer`: copies, gathers and scatters records, one row of workgroups a move.

use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::Kernel;
use super::memory::Window;
use super::stream::WgpuStream;
use super::{Shared, WgpuBuffer};
use crate::backend::DeviceBuffer;
use crate::backend::ops::{Arena, Place, Transfer, split_frame};
use crate::backend::params::{Move, TransferParams};
use crate::record::Record;
use crate::{Error, Result};
use bytemuck::Zeroable;

/// Threads of a workgroup, each of which moves 16 bytes.
const THREADS: u64 = 128;

pub(super) fn transfer(stream: &mut WgpuStream, args: &Transfer<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    if args.moves.is_empty() {
        return Ok(());
    }
    let none = TransferParams::zeroed();
    match (&args.from, &args.to) {
        (Place::Frames(from), Place::Frames(to)) => {
            let (slabs, slab_shift, moves) = joined(from, to, args.moves, shared.caps.max_slabs)?;
            let arena = Arena { slabs: &slabs, slab_shift };
            run(stream, Kernel::Copy, &args.record, arena, &[], &moves, none)
        }
        (Place::Frames(arena), records) => {
            let indices = args.moves.iter().map(|one| one.to);
            let Some((window, to_base, to_stride)) = window(records, &args.record, indices, &shared)? else {
                return Ok(());
            };
            let params = TransferParams { to_base, to_stride, ..none };
            run(stream, Kernel::Gather, &args.record, *arena, &[window], args.moves, params)
        }
        (records, Place::Frames(arena)) => {
            let indices = args.moves.iter().map(|one| one.from);
            let Some((window, from_base, from_stride)) = window(records, &args.record, indices, &shared)? else {
                return Ok(());
            };
            let params = TransferParams { from_base, from_stride, ..none };
            run(stream, Kernel::Scatter, &args.record, *arena, &[window], args.moves, params)
        }
        // Refused by `validate`.
        (Place::Records { .. }, Place::Records { .. }) => Ok(()),
    }
}

fn run(
    stream: &mut WgpuStream,
    kernel: Kernel,
    record: &Record,
    arena: Arena<'_, WgpuBuffer>,
    buffers: &[Window<'_>],
    moves: &[Move],
    params: TransferParams,
) -> Result<()> {
    let [y, z] = fold(moves.len() as u64);
    let grid = [(record.bytes() / 16).div_ceil(THREADS).min(FOLD), y, z];
    let dispatch = Dispatch { kernel, buffers, slabs: arena.slabs, grid };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(moves)], |[moves_at]| TransferParams {
        record: record.params(arena.slab_shift),
        moves_at,
        moves: moves.len() as u32,
        ..params
    })
}

/// A binding over the records that moves name, with the words from its start to record 0 and from one to the next.
///
/// The binding starts at the first record named, so record 0 may lie before it: the kernel's 32-bit sums wrap to the
/// right word.
fn window<'a>(
    place: &Place<'a, WgpuBuffer>,
    record: &Record,
    indices: impl Iterator<Item = u32> + Clone,
    shared: &Shared,
) -> Result<Option<(Window<'a>, u32, u32)>> {
    let Place::Records { buffer, offset, stride } = *place else { return Ok(None) };
    let (Some(first), Some(last)) = (indices.clone().min(), indices.max()) else { return Ok(None) };
    let at = |index: u32| offset + u64::from(index) * stride;
    let (window, front) = buffer.window(at(first), at(last) + record.bytes(), shared)?;
    let base = (front / 4).wrapping_sub(u64::from(first) * (stride / 4));
    Ok(Some((window, base as u32, (stride / 4) as u32)))
}

/// Two arenas as one, so that a buffer that is in both is bound once: slabs, index bits and moves by its frame numbers.
fn joined(
    from: &Arena<'_, WgpuBuffer>,
    to: &Arena<'_, WgpuBuffer>,
    moves: &[Move],
    max_slabs: u32,
) -> Result<(Vec<WgpuBuffer>, u32, Vec<Move>)> {
    let mut slabs: Vec<WgpuBuffer> = Vec::new();
    let mut place = |arena: &Arena<'_, WgpuBuffer>, frame| {
        let (slab, index) = split_frame(frame, arena.slab_shift);
        let slab = &arena.slabs[slab as usize];
        let known = slabs.iter().position(|other| other.same_memory(slab));
        let at = known.unwrap_or_else(|| {
            slabs.push(slab.clone());
            slabs.len() - 1
        });
        (at as u32, index)
    };
    let places: Vec<_> = moves.iter().map(|one| (place(from, one.from), place(to, one.to))).collect();
    if slabs.len() as u64 > u64::from(max_slabs) {
        let value = slabs.len() as u64;
        return Err(Error::TooLarge { what: "the slabs of both sides", value, maximum: max_slabs.into() });
    }
    let largest = places.iter().map(|(from, to)| from.1.max(to.1)).max().unwrap_or(0);
    let slab_shift = u32::BITS - largest.leading_zeros();
    let frame = |(slab, index): (u32, u32)| slab << slab_shift | index;
    Ok((slabs, slab_shift, places.into_iter().map(|(from, to)| Move { from: frame(from), to: frame(to) }).collect()))
}
