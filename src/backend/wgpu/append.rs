//! `append`: binds K, V and the slabs, one row of workgroups a run.

use super::WgpuBuffer;
use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::Kernel;
use super::memory::view_window;
use super::stream::WgpuStream;
use crate::Result;
use crate::backend::ops::{Append, View};
use crate::backend::params::{AppendParams, AppendRun};

/// Elements that a thread writes.
const UNIT: u32 = 8;
const THREADS: u64 = 64;

pub(super) fn append(stream: &mut WgpuStream, args: &Append<'_, WgpuBuffer>) -> Result<()> {
    let shared = stream.shared.clone();
    args.validate(&shared.caps)?;
    if args.runs.is_empty() {
        return Ok(());
    }
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
    let (k_window, k) = view_window(args.k, k_span, &shared)?;
    let (v_window, v) = view_window(args.v, v_span, &shared)?;
    let (counter, _) = args.non_finite.window(0, 4, &shared)?;
    let tokens = args.runs.iter().map(|run| u64::from(run.tokens)).max().unwrap_or(0);
    let units = tokens * heads * u64::from((geometry.k_dim() + geometry.v_dim()) / UNIT);
    let [y, z] = fold(args.runs.len() as u64);
    let dispatch = Dispatch {
        kernel: Kernel::Append,
        buffers: &[k_window, v_window, counter],
        slabs: args.arena.slabs,
        grid: [units.div_ceil(THREADS).min(FOLD), y, z],
    };
    stream.dispatch(&dispatch, [bytemuck::cast_slice(args.runs)], |[runs_at]| AppendParams {
        record: args.record.params(args.arena.slab_shift),
        k,
        v,
        dtype: args.k.dtype.code(),
        runs_at,
        runs: args.runs.len() as u32,
        write: args.write.into(),
    })
}
