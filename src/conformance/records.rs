//! What do the predictor's cases run on? Records of projected keys in shuffled slabs, and matrices to project on.

use super::bench::Bench;
use super::check::Check;
use super::values::{Rng, decode, encode};
use crate::backend::Backend;
use crate::backend::ops::{Arena, Matrices, split_frame};
use crate::predictor::Projections;
use crate::{Dtype, Geometry, Result};

/// Two bf16 NaNs.
pub(super) const NANS: u32 = 0x7fc0_7fc0;
/// The score of nothing.
pub(super) const LOWEST: u32 = 0xff7f_ffff;

/// An arena of records and the words that it must hold.
#[derive(Debug)]
pub(super) struct Records<B: Backend> {
    pub(super) layout: Projections,
    pub(super) slabs: Vec<B::Buffer>,
    pub(super) shift: u32,
    /// The words of each slab.
    pub(super) host: Vec<Vec<u32>>,
    /// Numbers of all records, shuffled.
    pub(super) numbers: Vec<u32>,
}

impl<B: Backend> Records<B> {
    /// At least `count` records full of `word`, in up to three slabs.
    pub(super) fn new(bench: &mut Bench<'_, B>, geometry: &Geometry, rank: u32, count: u32, word: u32) -> Result<Self> {
        let layout = Projections::new(geometry, rank)?;
        let slabs = bench.backend.caps().max_slabs.clamp(1, 3);
        let per_slab = count.max(1).div_ceil(slabs);
        let shift = per_slab.next_power_of_two().trailing_zeros();
        let words = per_slab as usize * layout.stride() as usize / 4;
        let mut numbers: Vec<u32> = (0..slabs * per_slab).map(|n| ((n / per_slab) << shift) | (n % per_slab)).collect();
        Rng::new(61).shuffle(&mut numbers);
        let host = vec![vec![word; words]; slabs as usize];
        let slabs = (0..slabs).map(|_| bench.filled("records", words, word)).collect::<Result<_>>()?;
        Ok(Records { layout, slabs, shift, host, numbers })
    }

    pub(super) fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.shift }
    }

    /// The slab of a record, and the word there that a byte of the record lies in.
    pub(super) fn place(&self, record: u32, byte: u64) -> (usize, usize) {
        let (slab, index) = split_frame(record, self.shift);
        (slab as usize, ((u64::from(index) * self.layout.stride() + byte) / 4) as usize)
    }

    /// Sets the projected key of a slot on the host.
    pub(super) fn set(&mut self, record: u32, head: u32, slot: u32, key: &[f32]) {
        let (slab, at) = self.place(record, self.layout.key(head, slot));
        for (word, pair) in self.host[slab][at..].iter_mut().zip(key.chunks_exact(2)) {
            *word = encode(pair[0], Dtype::Bf16) | encode(pair[1], Dtype::Bf16) << 16;
        }
    }

    /// The projected key of a slot in words like [`host`](Self::host).
    pub(super) fn key(&self, words: &[Vec<u32>], record: u32, head: u32, slot: u32) -> Vec<f32> {
        let (slab, at) = self.place(record, self.layout.key(head, slot));
        let row = &words[slab][at..][..self.layout.rank() as usize / 2];
        row.iter().flat_map(|word| [word & 0xffff, word >> 16]).map(|bits| decode(bits, Dtype::Bf16)).collect()
    }

    /// Copies the host's words to the device.
    pub(super) fn upload(&self, bench: &mut Bench<'_, B>) -> Result<()> {
        for (slab, words) in self.slabs.iter().zip(&self.host) {
            bench.backend.upload(&mut bench.stream, slab, 0, bytemuck::cast_slice(words))?;
        }
        Ok(())
    }

    /// The device's words.
    pub(super) fn read(&self, bench: &mut Bench<'_, B>) -> Result<Vec<Vec<u32>>> {
        self.slabs.iter().zip(&self.host).map(|(slab, host)| bench.read(slab, host.len())).collect()
    }
}

/// Matrices on the device and on the host.
#[derive(Debug)]
pub(super) struct Bases<B: Backend> {
    buffer: B::Buffer,
    offset: u64,
    head_stride: u32,
    rank: usize,
    /// `[k_dim, rank]`, one a KV head or one for all.
    each: Vec<Vec<f32>>,
}

impl<B: Backend> Bases<B> {
    /// Random matrices behind an offset and with gaps, all of NaNs: one for all heads when `shared`.
    pub(super) fn random(bench: &mut Bench<'_, B>, geometry: &Geometry, rank: u32, shared: bool) -> Result<Self> {
        let mut rng = Rng::new(u64::from(rank) << 8 | 62);
        let scale = 1.0 / (geometry.k_dim() as f32).sqrt();
        let value = |_| decode(encode(rng.normal() * scale, Dtype::Bf16), Dtype::Bf16);
        let one = (geometry.k_dim() * rank) as usize;
        let values: Vec<f32> = (0..one * if shared { 1 } else { geometry.kv_heads() as usize }).map(value).collect();
        Self::of(bench, rank, values.chunks_exact(one).map(<[f32]>::to_vec).collect())
    }

    /// These matrices.
    pub(super) fn of(bench: &mut Bench<'_, B>, rank: u32, each: Vec<Vec<f32>>) -> Result<Self> {
        let (front, gap) = (24, 4);
        let mut words = vec![NANS; front];
        for matrix in &each {
            words.extend(matrix.chunks_exact(2).map(|p| encode(p[0], Dtype::Bf16) | encode(p[1], Dtype::Bf16) << 16));
            words.extend([NANS; 4]);
        }
        let head_stride = if each.len() == 1 { 0 } else { each[0].len() as u32 + 2 * gap };
        let buffer = bench.words("a basis", &words)?;
        Ok(Bases { buffer, offset: front as u64 * 4, head_stride, rank: rank as usize, each })
    }

    pub(super) fn args(&self) -> Matrices<'_, B::Buffer> {
        Matrices { buffer: &self.buffer, offset: self.offset, head_stride: self.head_stride }
    }

    /// xᵀP in float64, and the sum of the magnitudes that it is made of.
    pub(super) fn times(&self, head: u32, x: &[f32]) -> Vec<(f64, f64)> {
        let mut sums = vec![(0.0, 0.0); self.rank];
        for (x, row) in x.iter().zip(self.each[head as usize % self.each.len()].chunks_exact(self.rank)) {
            for (sum, p) in sums.iter_mut().zip(row) {
                let product = f64::from(*x) * f64::from(*p);
                *sum = (sum.0 + product, sum.1 + product.abs());
            }
        }
        sums
    }
}

/// How close projected vectors are to float64.
#[derive(Debug, Default)]
pub(super) struct Closeness {
    elements: u32,
    off: u32,
}

impl Closeness {
    /// Compares bf16 elements with what [`Bases::times`] gives: each within its rounding and that of an f32 sum, and the
    /// vector's relative L2 distance.
    pub(super) fn vector(&mut self, check: &mut Check, got: &[f32], want: &[(f64, f64)], place: impl Fn() -> String) {
        let (mut distance, mut norm) = (0.0, 0.0);
        for (d, (&got, &(want, size))) in got.iter().zip(want).enumerate() {
            let bound = want.abs() / 256.0 + size * 2f64.powi(-17);
            let error = (f64::from(got) - want).abs();
            let place = || format!("{}, element {d}: {got:e}, not {want:e}", place());
            check.error("element of a projection", error, bound, place);
            self.elements += 1;
            self.off += u32::from(got != decode(encode(want as f32, Dtype::Bf16), Dtype::Bf16));
            distance += error * error;
            norm += want * want;
        }
        check.error("L2 of a projection", (distance / norm).sqrt(), 4e-3, &place);
    }

    /// Nearly all elements are float64's, rounded.
    pub(super) fn done(&self, check: &mut Check) {
        let share = f64::from(self.off) / f64::from(self.elements.max(1));
        check.error("share of elements that are not float64's rounded", share, 0.01, || format!("{self:?}"));
    }
}
