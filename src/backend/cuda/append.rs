//! How is `append` launched? One thread for eight elements, in blocks that each take a part of one run; where it
//! quantises, the threads of a row are a power of two, and those of K and of V whole warps.

use super::kernels::{ArenaArg, Kernels, arg, channels_address, launch};
use super::memory::CudaMemory;
use super::predict::{PROJECT_THREADS, TILE};
use super::stream::CudaStream;
use crate::Result;
use crate::backend::ops::{Append, Onto};
use crate::backend::params::{AppendParams, ProjectParams};
use crate::predictor::Projections;

/// `THREADS` and `CHUNK` of `kernels/append.cu`.
const THREADS: u32 = 256;
const CHUNK: u32 = 8;

/// Launches a validated append.
pub(super) fn append(kernels: &Kernels, stream: &mut CudaStream, args: &Append<'_, CudaMemory>) -> Result<()> {
    let Some(longest) = args.runs.iter().map(|run| run.tokens).max() else { return Ok(()) };
    let arena = ArenaArg::new(&args.arena)?;
    let geometry = args.record.geometry();
    let params = AppendParams {
        record: args.record.params(args.arena.slab_shift),
        k: args.k.params(0),
        v: args.v.params(0),
        dtype: args.k.dtype.code(),
        runs_at: 0,
        runs: super::count(args.runs.len(), "the number of runs")?,
        write: args.write.into(),
    };
    if let Some(onto) = args.onto.filter(|_| args.write) {
        return append_project(kernels, stream, args, &params, &onto, longest);
    }
    let rows = geometry.kv_heads() * longest;
    // Counting alone has nothing to do with the format.
    let quantizes = args.write && args.record.format().is_quantized();
    let threads = |dim: u32| match dim / CHUNK {
        chunks if quantizes => (rows * chunks.next_power_of_two()).next_multiple_of(32),
        chunks => rows * chunks,
    };
    let parts = (threads(geometry.k_dim()) + threads(geometry.v_dim())).div_ceil(THREADS);
    let blocks = u64::from(params.runs) * u64::from(parts);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.runs)])?;
    let (k, v) = (args.k.buffer.at(args.k.offset), args.v.buffer.at(args.v.offset));
    let counter = args.non_finite.address();
    if quantizes {
        let channels = channels_address(args.channels)?;
        let list = &mut [
            arg(&params),
            arg(&arena),
            arg(&descriptors),
            arg(&k),
            arg(&v),
            arg(&channels),
            arg(&counter),
            arg(&parts),
        ];
        // SAFETY: the parameters of `append_int8` in kernels/append.cu; frames, slots, views, channels and counter were
        // validated.
        return unsafe { launch(&kernels.append_int8, stream, blocks, THREADS, list) };
    }
    let list = &mut [arg(&params), arg(&arena), arg(&descriptors), arg(&k), arg(&v), arg(&counter), arg(&parts)];
    // SAFETY: the parameters of `append` in kernels/append.cu; frames, slots, views and counter were validated.
    unsafe { launch(&kernels.append, stream, blocks, THREADS, list) }
}

/// Launches an append that projects its keys too: a block for each sixteen tokens of a run and KV head.
fn append_project(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Append<'_, CudaMemory>,
    append: &AppendParams,
    onto: &Onto<'_, CudaMemory>,
    longest: u32,
) -> Result<()> {
    let layout = Projections::new(args.record.geometry(), onto.rank)?;
    let (arena, projections) = (ArenaArg::new(&args.arena)?, ArenaArg::new(&onto.projections)?);
    let project = ProjectParams {
        record: append.record,
        projections: layout.params(onto.projections.slab_shift),
        basis_base: 0,
        basis_stride: onto.basis.head_stride / 2,
        runs_at: append.runs_at,
        runs: append.runs,
    };
    let tiles = longest.div_ceil(TILE);
    let blocks = u64::from(append.runs) * u64::from(append.record.kv_heads) * u64::from(tiles);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.runs)])?;
    let (k, v) = (args.k.buffer.at(args.k.offset), args.v.buffer.at(args.v.offset));
    let (basis, channels) = (onto.basis.buffer.at(onto.basis.offset), channels_address(args.channels)?);
    let counter = args.non_finite.address();
    let list = &mut [
        arg(append),
        arg(&project),
        arg(&arena),
        arg(&projections),
        arg(&descriptors),
        arg(&k),
        arg(&v),
        arg(&basis),
        arg(&channels),
        arg(&counter),
        arg(&tiles),
    ];
    // SAFETY: the parameters of `append_project` in kernels/project.cu; frames, slots, views, records, basis, channels and
    // counter were validated.
    unsafe { launch(&kernels.append_project, stream, blocks, PROJECT_THREADS, list) }
}
