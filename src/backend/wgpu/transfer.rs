//! `transfer`: copies, gathers and scatters records, one row of workgroups a move.

use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::Kernel;
use super::memory::Window;
use super::stream::WgpuStream;
use super::{Shared, WgpuBuffer};
use crate::Result;
use crate::backend::DeviceBuffer;
use crate::backend::ops::{Arena, Place, Transfer, split_frame};
use crate::backend::params::{Move, TransferParams};
use crate::record::Record;
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
        (Place::Frames(from), Place::Frames(to)) if same(from, to) => {
            run(stream, Kernel::Copy, &args.record, *from, &[], args.moves, none)
        }
        (Place::Frames(from), Place::Frames(to)) => {
            for call in calls(from, to, args.moves, shared.caps.max_slabs as usize) {
                let arena = Arena { slabs: &call.slabs, slab_shift: call.slab_shift };
                run(stream, Kernel::Copy, &args.record, arena, &[], &call.moves, none)?;
            }
            Ok(())
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

fn same(a: &Arena<'_, WgpuBuffer>, b: &Arena<'_, WgpuBuffer>) -> bool {
    let slabs = || a.slabs.iter().zip(b.slabs).all(|(a, b)| a.same_memory(b));
    a.slab_shift == b.slab_shift && a.slabs.len() == b.slabs.len() && slabs()
}

/// Moves within one arena.
struct Call {
    slabs: Vec<WgpuBuffer>,
    slab_shift: u32,
    moves: Vec<Move>,
}

impl Call {
    /// The frame of this call's arena that is frame `index` of a buffer.
    fn frame(&mut self, slab: &WgpuBuffer, index: u32) -> u32 {
        let known = self.slabs.iter().position(|other| other.same_memory(slab));
        let at = known.unwrap_or_else(|| {
            self.slabs.push(slab.clone());
            self.slabs.len() - 1
        });
        (at as u32) << self.slab_shift | index
    }
}

/// Moves between two arenas as moves within one, where a buffer that is in both is bound once; more than one call when
/// a kernel cannot bind all slabs.
fn calls(from: &Arena<'_, WgpuBuffer>, to: &Arena<'_, WgpuBuffer>, moves: &[Move], max_slabs: usize) -> Vec<Call> {
    let place = |one: &Move| (split_frame(one.from, from.slab_shift), split_frame(one.to, to.slab_shift));
    let largest = moves.iter().map(|one| place(one).0.1.max(place(one).1.1)).max().unwrap_or(0);
    let slab_shift = u32::BITS - largest.leading_zeros();
    // Moves are independent: in the order of their slabs, few calls are enough.
    let mut moves = moves.to_vec();
    moves.sort_by_key(|one| (place(one).0.0, place(one).1.0));
    let mut calls: Vec<Call> = Vec::new();
    for one in &moves {
        let ((from_slab, from_index), (to_slab, to_index)) = place(one);
        let slabs = [&from.slabs[from_slab as usize], &to.slabs[to_slab as usize]];
        let fits = |call: &Call| {
            let new = slabs.iter().filter(|slab| !call.slabs.iter().any(|known| known.same_memory(slab))).count();
            call.slabs.len() + new <= max_slabs
        };
        if !calls.last().is_some_and(fits) {
            calls.push(Call { slabs: Vec::new(), slab_shift, moves: Vec::new() });
        }
        if let Some(call) = calls.last_mut() {
            let [from, to] = [call.frame(slabs[0], from_index), call.frame(slabs[1], to_index)];
            call.moves.push(Move { from, to });
        }
    }
    calls
}
