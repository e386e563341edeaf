//! How are `project` and `score` launched? As many blocks as run at a time, each for a KV head and 32 columns of its basis,
//! whose warps take sixteen tokens after sixteen; a block for each query vector, then up to four warps for each scored page.

use super::kernels::{ArenaArg, Kernels, arg, channels_address, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::backend::ops::{Project, Score};
use crate::backend::params::{ProjectParams, QueryParams, ScoreParams};
use crate::predictor::Projections;
use crate::{PageFormat, Result};

/// `PROJECT_THREADS`, `PROJECT_WARPS`, `TILE` and `SPAN` of `kernels/project.cuh`.
pub(super) const PROJECT_THREADS: u32 = 128;
const PROJECT_WARPS: u64 = 4;
pub(super) const TILE: u32 = 16;
const SPAN: u32 = 32;
/// `THREADS`, `WARPS` and `BLOCKS` of `kernels/score.cu`.
const SCORE_THREADS: u32 = 128;
const WARPS: u32 = SCORE_THREADS / 32;
const SCORE_BLOCKS: u64 = 5;
/// Bytes of projected keys that a warp takes at once.
const WARP_BYTES: u64 = 4096;

/// Blocks that take `parts` together for each of `sides`: no more than run at a time, since each stages a basis first.
pub(super) fn project_blocks(kernels: &Kernels, format: PageFormat, parts: u64, sides: u64) -> u64 {
    // `PROJECT_BLOCKS` of `kernels/project.cuh`.
    let each = if matches!(format, PageFormat::Bf16 | PageFormat::Int8) { 4 } else { 3 };
    let at_once = kernels.multiprocessors * each;
    parts.min((at_once / sides).max(1)) * sides
}

/// Launches a validated projection.
pub(super) fn project(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Project<'_, CudaMemory>,
    layout: &Projections,
) -> Result<()> {
    let Some(longest) = args.runs.iter().map(|run| run.tokens).max() else { return Ok(()) };
    let (arena, projections) = (ArenaArg::new(&args.arena)?, ArenaArg::new(&args.projections)?);
    let params = ProjectParams {
        record: args.record.params(args.arena.slab_shift),
        projections: layout.params(args.projections.slab_shift),
        basis_base: 0,
        basis_stride: args.basis.head_stride / 2,
        runs_at: 0,
        runs: super::count(args.runs.len(), "the number of runs")?,
    };
    let tiles = longest.div_ceil(TILE);
    let sides = u64::from(params.record.kv_heads) * u64::from(args.rank.div_ceil(SPAN));
    let parts = (u64::from(params.runs) * u64::from(tiles)).div_ceil(PROJECT_WARPS);
    let format = args.record.format();
    let blocks = project_blocks(kernels, format, parts, sides);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.runs)])?;
    let basis = args.basis.buffer.at(args.basis.offset);
    let channels = channels_address(args.channels)?;
    let list = &mut [
        arg(&params),
        arg(&arena),
        arg(&projections),
        arg(&descriptors),
        arg(&basis),
        arg(&channels),
        arg(&tiles),
    ];
    let function = &kernels.project[format.code() as usize];
    // SAFETY: the parameters of `project` in kernels/project.cu; frames, records, slots, basis and channels were validated.
    unsafe { launch(function, stream, blocks, PROJECT_THREADS, list) }
}

/// Launches a validated score.
pub(super) fn score(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Score<'_, CudaMemory>,
    layout: &Projections,
) -> Result<()> {
    if args.entries.is_empty() {
        return Ok(());
    }
    let geometry = &args.geometry;
    let arena = ArenaArg::new(&args.projections)?;
    let queries = args.queries.aligned("the address of the projected queries")?;
    let params = QueryParams {
        q: args.q.params(0),
        q_dtype: args.q.dtype.code(),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        k_dim: geometry.k_dim(),
        rank: args.rank,
        basis_base: 0,
        basis_stride: args.basis.head_stride / 2,
        // The projected queries lie in a buffer that 32 bits count the words of.
        rows: args.rows() as u32,
    };
    let score = ScoreParams {
        projections: layout.params(args.projections.slab_shift),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        entries_at: 0,
        entries: super::count(args.entries.len(), "the number of scored pages")?,
    };
    // Warps that share a page, where there are few pages. Which of them takes what changes no bit of a maximum.
    let at_once = kernels.multiprocessors * SCORE_BLOCKS;
    let entries = u64::from(score.entries);
    let share: u32 = match (layout.norm_base() / WARP_BYTES).min(at_once * u64::from(WARPS) / entries) {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => WARPS,
    };
    let blocks = entries.div_ceil((WARPS / share).into()).min(at_once);
    // Before both kernels: a copy between them would keep the second from coming early.
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.entries)])?;
    let (q, basis) = (args.q.buffer.at(args.q.offset), args.basis.buffer.at(args.basis.offset));
    let vectors = u64::from(params.rows) * u64::from(params.q_heads);
    let list = &mut [arg(&params), arg(&q), arg(&basis), arg(&queries)];
    // SAFETY: the parameters of `project_queries` in kernels/score.cu; queries, basis and scratch were validated.
    unsafe { launch(&kernels.project_queries, stream, vectors, SCORE_THREADS, list) }?;
    let out = args.out.address();
    let list = &mut [arg(&score), arg(&arena), arg(&descriptors), arg(&queries), arg(&out), arg(&share)];
    // SAFETY: the parameters of `score` in kernels/score.cu; records, rows and scores were validated. Every block waits before it
    // reads projected queries or writes; the entries come from a copy, and the records from kernels, before `project_queries`,
    // which was not launched early.
    unsafe { kernels.launch_early(&kernels.score, stream, blocks, (SCORE_THREADS, 0), list) }
}
