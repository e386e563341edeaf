//! `project` and `score`: keys and queries in few dimensions, and the best product a page.

use super::channels::HeadChannels;
use super::memory::{CpuBuffer, frame, load_bits, value_of};
use crate::backend::ops::{Matrices, Project, Score, split_frame};
use crate::backend::params::ScoreEntry;
use crate::predictor::Projections;
use crate::{Dtype, Geometry};
use half::bf16;

pub(super) fn project(args: &Project<'_, CpuBuffer>, layout: &Projections) {
    let (record, geometry) = (&args.record, args.record.geometry());
    let mut key = vec![0.0; geometry.k_dim() as usize];
    for head in 0..geometry.kv_heads() {
        let matrix = matrix(&args.basis, geometry, args.rank, head);
        let channels = args.channels.map(|channels| HeadChannels::read(&channels, geometry, head));
        for run in args.runs {
            let (from, frame_at) = frame(&args.arena, run.frame, record);
            let (slab, index) = split_frame(run.page, args.projections.slab_shift);
            let (to, page_at) = (&args.projections.slabs[slab as usize], u64::from(index) * layout.stride());
            for slot in run.slot..run.slot + run.tokens {
                from.read_stored(frame_at + record.key(head, slot), record.format(), &mut key);
                if let Some(channels) = &channels {
                    channels.restore(&mut key, from.float(frame_at + record.key_scale(head, slot)));
                }
                let projected = times(&key, &matrix, args.rank);
                for (pair, at) in projected.chunks_exact(2).zip((page_at + layout.key(head, slot)) / 4..) {
                    let [low, high] = [pair[0], pair[1]].map(|x| u32::from(x.to_bits()));
                    to.set(at, low | high << 16);
                }
                to.set((page_at + layout.norm(head, slot)) / 4, 0);
            }
        }
    }
}

pub(super) fn score(args: &Score<'_, CpuBuffer>, layout: &Projections) {
    let geometry = &args.geometry;
    let [row_stride, head_stride, element] = args.q.strides;
    let (heads, rank) = (u64::from(geometry.q_heads()), u64::from(args.rank));
    for kv_head in 0..geometry.kv_heads() {
        let matrix = matrix(&args.basis, geometry, args.rank, kv_head);
        for row in 0..args.rows() {
            for head in u64::from(kv_head * geometry.group())..u64::from((kv_head + 1) * geometry.group()) {
                let first = row * row_stride + head * head_stride;
                let load = |d| value_of(load_bits(args.q, first + d * element), args.q.dtype);
                let query: Vec<f32> = (0..u64::from(geometry.k_dim())).map(load).collect();
                let projected = times(&query, &matrix, args.rank);
                let places = (row * heads + head) * rank..;
                projected.iter().zip(places).for_each(|(x, at)| args.queries.set(at, x.to_f32().to_bits()));
            }
        }
    }
    for (entry, at) in args.entries.iter().zip(0..) {
        args.out.set(at, best(args, layout, entry).to_bits());
    }
}

/// The largest finite product of an entry.
fn best(args: &Score<'_, CpuBuffer>, layout: &Projections, entry: &ScoreEntry) -> f32 {
    let (geometry, rank) = (&args.geometry, args.rank as usize);
    let (mut key, mut query) = (vec![0.0; rank], vec![0.0; rank]);
    let (slab, index) = split_frame(entry.page, args.projections.slab_shift);
    let mut best = -f32::MAX;
    for kv_head in 0..geometry.kv_heads() {
        for slot in 0..entry.tokens {
            let at = u64::from(index) * layout.stride() + layout.key(kv_head, slot);
            args.projections.slabs[slab as usize].read_row(at, Dtype::Bf16, &mut key);
            for head in kv_head * geometry.group()..(kv_head + 1) * geometry.group() {
                let vector = u64::from(entry.row) * u64::from(geometry.q_heads()) + u64::from(head);
                args.queries.read_row(vector * rank as u64 * 4, Dtype::F32, &mut query);
                let product: f32 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                if product.is_finite() && product > best {
                    best = product;
                }
            }
        }
    }
    best
}

/// A KV head's matrix, `[k_dim, rank]`.
fn matrix(basis: &Matrices<'_, CpuBuffer>, geometry: &Geometry, rank: u32, head: u32) -> Vec<f32> {
    let mut values = vec![0.0; (geometry.k_dim() * rank) as usize];
    let at = basis.offset + u64::from(head) * u64::from(basis.head_stride) * 2;
    basis.buffer.read_row(at, Dtype::Bf16, &mut values);
    values
}

/// xᵀP, summed in f32 in the order of the elements and rounded.
fn times(x: &[f32], matrix: &[f32], rank: u32) -> Vec<bf16> {
    let mut sums = vec![0.0f32; rank as usize];
    for (x, row) in x.iter().zip(matrix.chunks_exact(rank as usize)) {
        sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += x * p);
    }
    sums.into_iter().map(bf16::from_f32).collect()
}
