//! `project` and `score`: binds the basis and the records, a thread for each four tokens and eight columns, half a workgroup
//! for each page.

use super::Shared;
use super::WgpuBuffer;
use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::Kernel;
use super::memory::{Window, channels_window, view_window};
use super::stream::WgpuStream;
use crate::backend::ops::{Matrices, Project, Score, split_frame};
use crate::backend::params::{ProjectParams, ProjectRun, QueryParams, ScoreParams};
use crate::predictor::Projections;
use crate::{Geometry, Result};
use std::collections::BTreeMap;

/// Tokens of a run, and columns of the basis, that a thread projects.
const TOKENS: u64 = 4;
const COLUMNS: u64 = 8;
/// Entries that a workgroup of `score` takes.
const ENTRIES: u64 = 2;
/// Threads of a workgroup of `project`.
const THREADS: u64 = 64;

/// One dispatch for each slab of projections, of which there are few: the pages' slabs take the other bindings.
pub(super) fn project(stream: &mut WgpuStream, args: &Project<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    let layout = args.validate(&shared.caps)?;
    let geometry = args.record.geometry();
    let with_page = |run: &ProjectRun, page| ProjectRun { page, ..*run };
    let by_slab = by_slab(args.runs, args.projections.slab_shift, |run| run.page, with_page);
    let (basis, basis_base) = basis_window(&args.basis, geometry, args.rank, &shared)?;
    let channels = channels_window(args.channels, &args.record, "project", &shared)?;
    for (slab, runs) in by_slab {
        let longest = runs.iter().map(|run| u64::from(run.tokens)).max().unwrap_or(0);
        let parts = longest.div_ceil(TOKENS) * u64::from(geometry.kv_heads()) * u64::from(args.rank) / COLUMNS;
        let [y, z] = fold(runs.len() as u64);
        let own = [basis, args.projections.slabs[slab as usize].whole(&shared)?];
        let buffers: Vec<_> = own.into_iter().chain(channels).collect();
        let dispatch = Dispatch {
            kernel: Kernel::project(&args.record),
            buffers: &buffers,
            slabs: args.arena.slabs,
            grid: [parts.div_ceil(THREADS).min(FOLD), y, z],
        };
        stream.dispatch(&dispatch, [bytemuck::cast_slice(&runs)], |[runs_at]| ProjectParams {
            record: args.record.params(args.arena.slab_shift),
            projections: layout.params(0),
            basis_base,
            basis_stride: args.basis.head_stride / 2,
            runs_at,
            runs: runs.len() as u32,
        })?;
    }
    Ok(())
}

/// Runs by the slab of their records, each with the record's index there.
pub(super) fn by_slab<Run>(
    runs: &[Run],
    slab_shift: u32,
    page: impl Fn(&Run) -> u32,
    with_page: impl Fn(&Run, u32) -> Run,
) -> BTreeMap<u32, Vec<Run>> {
    let mut by_slab: BTreeMap<u32, Vec<Run>> = BTreeMap::new();
    for run in runs {
        let (slab, index) = split_frame(page(run), slab_shift);
        by_slab.entry(slab).or_default().push(with_page(run, index));
    }
    by_slab
}

pub(super) fn score(stream: &mut WgpuStream, args: &Score<'_, WgpuBuffer>) -> Result<()> {
    let layout = args.validate(&stream.shared.caps)?;
    if args.entries.is_empty() {
        return Ok(());
    }
    project_queries(stream, args)?;
    score_entries(stream, args, &layout)
}

fn project_queries(stream: &mut WgpuStream, args: &Score<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    let geometry = &args.geometry;
    let (rows, heads) = (args.rows(), u64::from(geometry.q_heads()));
    let span = args.q.span([rows, heads, geometry.k_dim().into()]).unwrap_or(u64::MAX);
    let (q_window, q) = view_window(args.q, span, &shared)?;
    let (basis, basis_base) = basis_window(&args.basis, geometry, args.rank, &shared)?;
    let [x, y] = fold(rows * heads);
    let buffers = &[q_window, basis, query_window(args, &shared)?];
    let dispatch = Dispatch { kernel: Kernel::Queries, buffers, slabs: &[], grid: [x, y, 1] };
    stream.dispatch(&dispatch, [], |[]| QueryParams {
        q,
        q_dtype: args.q.dtype.code(),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        k_dim: geometry.k_dim(),
        rank: args.rank,
        basis_base,
        basis_stride: args.basis.head_stride / 2,
        rows: rows as u32,
    })
}

fn score_entries(stream: &mut WgpuStream, args: &Score<'_, WgpuBuffer>, layout: &Projections) -> Result<()> {
    let shared = stream.shared.clone();
    let (out, _) = args.out.window(0, args.entries.len() as u64 * 4, &shared)?;
    let [x, y] = fold((args.entries.len() as u64).div_ceil(ENTRIES));
    let buffers = &[query_window(args, &shared)?, out];
    let dispatch = Dispatch { kernel: Kernel::Score, buffers, slabs: args.projections.slabs, grid: [x, y, 1] };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(args.entries)], |[entries_at]| ScoreParams {
        projections: layout.params(args.projections.slab_shift),
        q_heads: args.geometry.q_heads(),
        group: args.geometry.group(),
        entries_at,
        entries: args.entries.len() as u32,
    })
}

/// The projected queries.
fn query_window<'a>(args: &Score<'a, WgpuBuffer>, shared: &Shared) -> Result<Window<'a>> {
    let bytes = Score::<WgpuBuffer>::query_bytes(args.rows(), args.geometry.q_heads(), args.rank);
    Ok(args.queries.window(0, bytes, shared)?.0)
}

/// A binding over the matrices, and the words from its start to the first.
pub(super) fn basis_window<'a>(
    basis: &Matrices<'a, WgpuBuffer>,
    geometry: &Geometry,
    rank: u32,
    shared: &Shared,
) -> Result<(Window<'a>, u32)> {
    let (window, front) = basis.buffer.window(basis.offset, basis.offset + basis.bytes(geometry, rank), shared)?;
    // `front` is less than the binding alignment.
    Ok((window, (front / 4) as u32))
}
