//! `append`: binds K, V, the slabs and what int8 keys are calibrated by, one row of workgroups a run.

use super::WgpuBuffer;
use super::dispatch::{Dispatch, FOLD, fold};
use super::kernels::Kernel;
use super::memory::{channels_window, view_window};
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
    let channels = channels_window(args.channels, &args.record, "append", &shared)?;
    let workgroups = if channels.is_some() {
        let row_threads = u64::from((geometry.k_dim().max(geometry.v_dim()) / UNIT).next_power_of_two());
        (tokens * heads * 2).div_ceil(THREADS / row_threads)
    } else {
        (tokens * heads * u64::from((geometry.k_dim() + geometry.v_dim()) / UNIT)).div_ceil(THREADS)
    };
    let [y, z] = fold(args.runs.len() as u64);
    let buffers: Vec<_> = [k_window, v_window, counter].into_iter().chain(channels).collect();
    let dispatch = Dispatch {
        kernel: Kernel::append(&args.record),
        buffers: &buffers,
        slabs: args.arena.slabs,
        grid: [workgroups.min(FOLD), y, z],
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
