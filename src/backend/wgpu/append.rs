//! `append`: binds K, V, the slabs and what int8 keys are calibrated by, one row of workgroups a run. Where the kernel that
//! projects the keys too can be bound, it also binds the basis and the records.

use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::{Kernel, Source};
use super::memory::{Window, channels_window, view_window};
use super::predict::{basis_window, by_slab};
use super::stream::WgpuStream;
use super::{Shared, WgpuBuffer};
use crate::Result;
use crate::backend::ops::{Append, Onto, View};
use crate::backend::params::{AppendParams, AppendProjectParams, AppendRun, ViewParams};
use crate::predictor::Projections;

/// Elements that a thread writes.
const UNIT: u32 = 8;
const THREADS: u64 = 64;
/// Bytes of a quad.
const QUAD: u64 = 16;
/// Tokens that a workgroup of `append_project_int8.wgsl` takes.
const TILE: u64 = 8;

/// Appends, and says whether that has projected the keys as well, where they are to be.
pub(super) fn append(stream: &mut WgpuStream, args: &Append<'_, WgpuBuffer>) -> Result<bool> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    if args.runs.is_empty() {
        return Ok(false);
    }
    let bound = Bound::new(args, &shared)?;
    if let (Some(onto), Some(kernel), true) =
        (&args.onto, Kernel::append_project(&args.record, bound.source), args.write)
        && kernel.fits(args.arena.slabs.len(), &shared.limits)
        && append_project(stream, args, &bound, onto, kernel)?
    {
        return Ok(true);
    }
    let geometry = args.record.geometry();
    let (tokens, heads) = (longest(args.runs), u64::from(geometry.kv_heads()));
    let row_threads = u64::from((geometry.k_dim().max(geometry.v_dim()) / UNIT).next_power_of_two());
    // int8 takes keys and values one after the other: a row's threads wait for each other.
    let rows = tokens * heads * if bound.channels.is_some() { 2 } else { 1 };
    let workgroups = rows.div_ceil(THREADS / row_threads);
    let [y, z] = fold(args.runs.len() as u64);
    let buffers: Vec<_> = bound.own.into_iter().chain(bound.channels).collect();
    let dispatch = Dispatch {
        kernel: Kernel::append(&args.record, bound.source),
        buffers: &buffers,
        slabs: args.arena.slabs,
        grid: [workgroups.min(FOLD), y, z],
    };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(args.runs)], |[runs_at]| AppendParams {
        record: args.record.params(args.arena.slab_shift),
        k: bound.k,
        v: bound.v,
        dtype: args.k.dtype.code(),
        runs_at,
        runs: args.runs.len() as u32,
        write: args.write.into(),
    })?;
    Ok(false)
}

/// Appends and projects in one dispatch for each slab of projections, of which there are few; `false`, and nothing done, where
/// memory is read and written that two dispatches may share and one may not.
fn append_project(
    stream: &mut WgpuStream,
    args: &Append<'_, WgpuBuffer>,
    bound: &Bound<'_>,
    onto: &Onto<'_, WgpuBuffer>,
    kernel: Kernel,
) -> Result<bool> {
    let shared = stream.shared.clone();
    let geometry = args.record.geometry();
    let layout = Projections::new(geometry, onto.rank)?;
    let (basis, basis_base) = basis_window(&onto.basis, geometry, onto.rank, &shared)?;
    let with_page = |run: &AppendRun, page| AppendRun { page, ..*run };
    let calls = by_slab(args.runs, onto.projections.slab_shift, |run| run.page, with_page)
        .into_iter()
        .map(|(slab, runs)| {
            let own = bound.own.into_iter().chain([basis, onto.projections.slabs[slab as usize].whole(&shared)?]);
            Ok((own.chain(bound.channels).collect(), runs))
        })
        .collect::<Result<Vec<(Vec<_>, Vec<_>)>>>()?;
    let dispatches = calls.iter().map(|(buffers, runs)| {
        let tiles = 2 * longest(runs).div_ceil(TILE) * u64::from(geometry.kv_heads());
        let [y, z] = fold(runs.len() as u64);
        (Dispatch { kernel, buffers, slabs: args.arena.slabs, grid: [tiles.min(FOLD), y, z] }, runs)
    });
    if dispatches.clone().any(|(dispatch, _)| dispatch.conflicts()) {
        return Ok(false);
    }
    for (dispatch, runs) in dispatches {
        stream.dispatch(&dispatch, [bytemuck::cast_slice(runs)], |[runs_at]| AppendProjectParams {
            record: args.record.params(args.arena.slab_shift),
            k: bound.k,
            v: bound.v,
            projections: layout.params(0),
            basis_base,
            basis_stride: onto.basis.head_stride / 2,
            dtype: args.k.dtype.code(),
            runs_at,
            runs: runs.len() as u32,
            reserved: [0; 3],
        })?;
    }
    Ok(true)
}

/// What both ways bind.
struct Bound<'a> {
    /// K, V and the counter.
    own: [Window<'a>; 3],
    channels: Option<Window<'a>>,
    k: ViewParams,
    v: ViewParams,
    source: Source,
}

impl<'a> Bound<'a> {
    fn new(args: &Append<'a, WgpuBuffer>, shared: &Shared) -> Result<Self> {
        let geometry = args.record.geometry();
        let heads = u64::from(geometry.kv_heads());
        let span = |view: &View<WgpuBuffer>, dim: u32, offset: fn(&AppendRun) -> u32| {
            let end = |run: &AppendRun| {
                let tokens = view.span([run.tokens.into(), heads, dim.into()]).unwrap_or(u64::MAX);
                u64::from(offset(run)) + tokens
            };
            args.runs.iter().map(end).max().unwrap_or(0)
        };
        let k_span = span(args.k, geometry.k_dim(), |run| run.k_offset);
        let v_span = span(args.v, geometry.v_dim(), |run| run.v_offset);
        let (k_window, k) = view_window(args.k, k_span, shared)?;
        let (v_window, v) = view_window(args.v, v_span, shared)?;
        let (counter, _) = args.non_finite.window(0, 4, shared)?;
        let channels = channels_window(args.channels, &args.record, "append", shared)?;
        let quads = shared.align.is_multiple_of(QUAD)
            && in_quads(args.k, args.runs, |run| run.k_offset)
            && in_quads(args.v, args.runs, |run| run.v_offset);
        let source = if quads { Source::Quads } else { Source::Words };
        Ok(Bound { own: [k_window, v_window, counter], channels, k, v, source })
    }
}

/// Whether the elements of every row lie side by side, from a multiple of 16 bytes on. Rows are whole quads, so what is bound
/// ends with one.
fn in_quads(view: &View<WgpuBuffer>, runs: &[AppendRun], offset: fn(&AppendRun) -> u32) -> bool {
    let ([row, head, element], size) = (view.strides, view.dtype.bytes());
    let whole = |elements: u64| elements.is_multiple_of(QUAD / size);
    element == 1
        && view.offset.is_multiple_of(QUAD)
        && whole(row)
        && whole(head)
        && runs.iter().all(|run| whole(offset(run).into()))
}

/// Tokens of the longest run.
fn longest(runs: &[AppendRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.tokens)).max().unwrap_or(0)
}
