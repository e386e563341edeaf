//! How is `append` launched? One thread for eight elements, in blocks that each take a part of one run.

use super::kernels::{ArenaArg, Kernels, arg, launch};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::Result;
use crate::backend::ops::Append;
use crate::backend::params::AppendParams;

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
    let chunks = geometry.kv_heads() * longest * ((geometry.k_dim() + geometry.v_dim()) / CHUNK);
    let parts = chunks.div_ceil(THREADS);
    let descriptors = stream.descriptors(&[bytemuck::cast_slice(args.runs)])?;
    let (k, v) = (args.k.buffer.at(args.k.offset), args.v.buffer.at(args.v.offset));
    let counter = args.non_finite.address();
    let list = &mut [arg(&params), arg(&arena), arg(&descriptors), arg(&k), arg(&v), arg(&counter), arg(&parts)];
    // SAFETY: the parameters of `append` in kernels/append.cu; frames, slots, views and counter were validated.
    unsafe { launch(&kernels.append, stream, u64::from(params.runs) * u64::from(parts), THREADS, list) }
}
