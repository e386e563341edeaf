//! How is `append` launched? One thread for eight elements of a key and of its value, in blocks that each take a part of one
//! run; where it quantises, the threads of a row are a power of two.

use super::kernels::{ArenaArg, Kernels, arg, channels_address, launch};
use super::memory::CudaMemory;
use super::predict::{PROJECT_THREADS, TILE, project_blocks};
use super::stream::CudaStream;
use crate::backend::ops::{Append, Onto, StepMemory};
use crate::backend::params::{AppendParams, AppendRun, ProjectParams};
use crate::predictor::Projections;
use crate::{Geometry, Result};

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
    // Counting alone has nothing to do with the format.
    let quantizes = args.write && args.record.format().is_quantized();
    let share = Share::new(kernels, geometry, params.runs, longest, quantizes);
    let rows = [args.k.strides[0], args.v.strides[0]].map(|row| row as u32);
    let stretched = stretch(args.runs, geometry.page_tokens(), rows);
    let runs = stretched.as_deref().unwrap_or(bytemuck::cast_slice(args.runs));
    let descriptors = stream.descriptors(&[runs])?;
    let stretch = u32::from(stretched.is_some());
    let (k, v) = (args.k.buffer.at(args.k.offset), args.v.buffer.at(args.v.offset));
    let counter = args.non_finite.address();
    if quantizes {
        let channels = channels_address(args.channels)?;
        let list = &mut [
            arg(&params),
            arg(&k),
            arg(&v),
            arg(&channels),
            arg(&counter),
            arg(&share.blocks),
            arg(&stretch),
            arg(&arena),
            arg(&descriptors),
        ];
        // SAFETY: the parameters of `append_int8` in kernels/append.cu; frames, slots, views, channels and counter were
        // validated.
        return unsafe { launch(&kernels.append_int8, stream, share.total, THREADS, list) };
    }
    let list = &mut [
        arg(&params),
        arg(&k),
        arg(&v),
        arg(&counter),
        arg(&share.blocks),
        arg(&share.sides),
        arg(&stretch),
        arg(&arena),
        arg(&descriptors),
    ];
    // SAFETY: the parameters of `append` in kernels/append.cu; frames, slots, views and counter were validated.
    unsafe { launch(&kernels.append, stream, share.total, THREADS, list) }
}

/// Launches a validated append of a decode step: a token for each row, where `at` says.
pub(super) fn append_step(
    kernels: &Kernels,
    stream: &CudaStream,
    args: &Append<'_, CudaMemory>,
    at: &StepMemory<'_, CudaMemory>,
) -> Result<()> {
    let (arena, geometry) = (ArenaArg::new(&args.arena)?, args.record.geometry());
    let params = AppendParams {
        record: args.record.params(args.arena.slab_shift),
        k: args.k.params(0),
        v: args.v.params(0),
        dtype: args.k.dtype.code(),
        runs_at: 0,
        runs: super::count(at.count as usize, "the rows of a step")?,
        write: args.write.into(),
    };
    let quantizes = args.record.format().is_quantized();
    let share = Share::new(kernels, geometry, params.runs, 1, quantizes);
    let (tables, tiles, rows) = (at.buffer.address(), at.buffer.at(at.tiles), at.buffer.at(at.rows));
    let (k, v) = (args.k.buffer.at(args.k.offset), args.v.buffer.at(args.v.offset));
    let (channels, counter) = (channels_address(args.channels)?, args.non_finite.address());
    let mut list = vec![arg(&params), arg(&arena), arg(&tables), arg(&tiles), arg(&rows), arg(&k), arg(&v)];
    let function = if quantizes {
        list.extend([arg(&channels), arg(&counter), arg(&share.blocks)]);
        &kernels.append_next_int8
    } else {
        list.extend([arg(&counter), arg(&share.blocks), arg(&share.sides)]);
        &kernels.append_next
    };
    // SAFETY: the parameters of these functions in kernels/append.cu; views, channels, counter and the places of descriptors
    // were validated, and what tables and rows say is the store's to keep valid. Every block waits before it touches
    // anything but descriptors and tables, which come from a copy that has ended when the kernel starts.
    unsafe { kernels.launch_early(function, stream, share.total, (THREADS, 0), &mut list) }
}

/// How an append is shared among blocks.
struct Share {
    /// That cover the longest run.
    blocks: u32,
    /// 2 where keys and values of a native format have blocks of their own.
    sides: u32,
    total: u64,
}

impl Share {
    fn new(kernels: &Kernels, geometry: &Geometry, runs: u32, longest: u32, quantizes: bool) -> Self {
        let row_threads = (geometry.k_dim().max(geometry.v_dim()) / CHUNK).next_power_of_two();
        let threads = geometry.kv_heads() * longest * row_threads;
        let blocks = if quantizes { 2 * threads.next_multiple_of(32) } else { threads }.div_ceil(THREADS);
        let total = u64::from(runs) * u64::from(blocks);
        // What leaves multiprocessors idle is over sooner in more blocks.
        let sides = if !quantizes && total < kernels.multiprocessors { 2 } else { 1 };
        Share { blocks, sides, total: total * u64::from(sides) }
    }
}

/// The words of runs of one sequence over page after page, which differ in their frames alone: `Runs` of
/// `kernels/append.cuh`. `rows` are the elements from one token of K and of V to the next.
fn stretch(runs: &[AppendRun], page: u32, rows: [u32; 2]) -> Option<Vec<u32>> {
    let [first, _, ..] = runs else { return None };
    let total = runs.iter().map(|run| run.tokens).sum::<u32>();
    let mut before = 0u32;
    for (at, run) in runs.iter().enumerate() {
        let slot = if at == 0 { first.slot } else { 0 };
        let [k_offset, v_offset] = rows.map(|row| before.wrapping_mul(row));
        let expected = AppendRun {
            k_offset: first.k_offset.wrapping_add(k_offset),
            v_offset: first.v_offset.wrapping_add(v_offset),
            slot,
            tokens: (page - slot).min(total - before),
            ..*run
        };
        if *run != expected {
            return None;
        }
        before += run.tokens;
    }
    let head = [first.k_offset, first.v_offset, first.slot, total];
    Some(head.into_iter().chain(runs.iter().map(|run| run.frame)).collect())
}

/// Launches an append that projects its keys too: each block takes sixteen tokens after sixteen of one KV head.
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
    let format = args.record.format();
    let parts = u64::from(append.runs) * u64::from(tiles);
    let blocks = project_blocks(kernels, format, parts, append.record.kv_heads.into());
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
    let function = &kernels.append_project[format.code() as usize];
    // SAFETY: the parameters of `append_project` in kernels/project.cu; frames, slots, views, records, basis, channels and
    // counter were validated.
    unsafe { launch(function, stream, blocks, PROJECT_THREADS, list) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tokens` tokens from slot `slot` on, over pages of 16; rows of 100 and 200 elements.
    fn runs(slot: u32, tokens: u32) -> Vec<AppendRun> {
        let (mut runs, mut done, mut slot) = (Vec::new(), 0, slot);
        while done < tokens {
            let here = (16 - slot).min(tokens - done);
            let frame = 7 * (runs.len() as u32 + 3) % 64;
            let (k_offset, v_offset) = (5 + done * 100, 9 + done * 200);
            runs.push(AppendRun { k_offset, v_offset, frame, slot, tokens: here, page: 1, reserved: [0; 2] });
            (done, slot) = (done + here, 0);
        }
        runs
    }

    #[test]
    fn runs_of_one_sequence_are_a_stretch() {
        for (slot, tokens) in [(0, 17), (0, 32), (15, 2), (3, 500), (8, 24)] {
            let runs = runs(slot, tokens);
            let words = stretch(&runs, 16, [100, 200]).unwrap();
            assert_eq!(words[..4], [5, 9, slot, tokens]);
            assert_eq!(words[4..], runs.iter().map(|run| run.frame).collect::<Vec<_>>());
        }
    }

    #[test]
    fn other_runs_are_not() {
        assert_eq!(stretch(&[], 16, [100, 200]), None);
        assert_eq!(stretch(&runs(0, 16), 16, [100, 200]), None, "a lone run is as short");
        assert_eq!(stretch(&runs(0, 48), 16, [100, 201]), None);
        assert_eq!(stretch(&runs(0, 48), 32, [100, 200]), None);
        for change in [
            |run: &mut AppendRun| run.k_offset += 1,
            |run: &mut AppendRun| run.v_offset += 1,
            |run: &mut AppendRun| run.slot += 1,
            |run: &mut AppendRun| run.tokens -= 1,
        ] {
            let mut changed = runs(3, 40);
            change(&mut changed[1]);
            assert_eq!(stretch(&changed, 16, [100, 200]), None);
        }
        let twice: Vec<AppendRun> = [runs(0, 24), runs(0, 24)].concat();
        assert_eq!(stretch(&twice, 16, [100, 200]), None, "two sequences");
    }
}
