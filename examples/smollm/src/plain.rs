//! What should paged attention return? Softmax attention over contiguous keys and values.

use std::num::NonZero;
use std::thread;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use half::{bf16, f16};

use kvtide::{KeyCalibration, PageFormat, quantize};

use crate::attention::{Attention, Footprint, Heads};

/// The number format of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Int8,
}

impl Format {
    /// Lower-case name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// The same format as kvtide names it.
    pub(crate) fn pages(self) -> PageFormat {
        match self {
            Self::F32 => PageFormat::F32,
            Self::F16 => PageFormat::F16,
            Self::Bf16 => PageFormat::Bf16,
            Self::Int8 => PageFormat::Int8,
        }
    }

    /// Turns the elements of one head and token into those that this format can hold.
    fn round(self, row: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::F16 => row.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => row.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            Self::Int8 => {
                let mut codes = vec![0; row.len()];
                let scale = quantize::row(row, &mut codes);
                row.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(code) * scale);
            }
        }
    }
}

/// Keys and values without pages: rounded to a format, but held as `f32`.
pub(crate) struct Plain {
    heads: Heads,
    format: Format,
    calibration: Option<KeyCalibration>,
    /// One for each layer and key/value head.
    lines: Vec<Line>,
}

/// The keys and the values of one head, each `[tokens, dim]`.
#[derive(Clone, Default)]
struct Line {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Plain {
    pub(crate) fn new(heads: Heads, format: Format, calibration: Option<KeyCalibration>) -> Self {
        Self { heads, format, calibration, lines: vec![Line::default(); heads.layers * heads.kv] }
    }

    /// A key as the format holds it, where that is after it was centred and scaled.
    fn round_key(&self, layer: usize, head: usize, key: &mut [f32]) {
        let Some(calibration) = &self.calibration else { return self.format.round(key) };
        let (layer, head) = (layer as u32, head as u32);
        let channels = || calibration.mean(layer, head).iter().zip(calibration.scale(layer, head));
        key.iter_mut().zip(channels()).for_each(|(x, (mean, scale))| *x = (*x - mean) * scale.recip());
        self.format.round(key);
        key.iter_mut().zip(channels()).for_each(|(x, (mean, scale))| *x = mean + *x * scale);
    }
}

impl Attention for Plain {
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>> {
        let heads = self.heads;
        let first = layer * heads.kv;
        ensure!(self.lines[first].keys.len() == position * heads.dim, "tokens must be appended in order");
        for (index, (k, v)) in k.chunks(heads.dim).zip(v.chunks(heads.dim)).enumerate() {
            let (head, mut k, mut v) = (index % heads.kv, k.to_vec(), v.to_vec());
            self.round_key(layer, head, &mut k);
            self.format.round(&mut v);
            let line = &mut self.lines[first + head];
            line.keys.extend(k);
            line.values.extend(v);
        }
        let lines = &self.lines[first..][..heads.kv];

        // A piece of work is one query of one head. Pieces lie in `q` and in the output in the
        // same order, so that each thread can take a stretch of both.
        let mut output = vec![0.0; rows * heads.query * heads.dim];
        let pieces = rows * heads.query;
        let stretch = pieces.div_ceil(threads(pieces * (position + rows) * heads.dim));
        thread::scope(|scope| {
            let outputs = output.chunks_mut(stretch * heads.dim);
            let stretches = q.chunks(stretch * heads.dim).zip(outputs);
            for (index, (q, output)) in stretches.enumerate() {
                let mut work = move || {
                    let mut weights = Vec::new();
                    let pairs = q.chunks(heads.dim).zip(output.chunks_mut(heads.dim));
                    for (piece, (q, output)) in (index * stretch..).zip(pairs) {
                        let (row, head) = (piece / heads.query, piece % heads.query);
                        let line = &lines[head * heads.kv / heads.query];
                        line.attend(position + row + 1, q, &mut weights, output);
                    }
                };
                if stretch == pieces {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        Ok(output)
    }

    fn footprint(&mut self) -> Result<Footprint> {
        let numbers: usize = self.lines.iter().map(|l| l.keys.len() + l.values.len()).sum();
        Ok(Footprint {
            backend: "plain".into(),
            adapter: "contiguous f32 on the CPU".into(),
            pages: None,
            kv_bytes: numbers * size_of::<f32>(),
            swap: None,
        })
    }
}

impl Line {
    /// Adds to `output` what `q` gathers from the first `visible` tokens.
    fn attend(&self, visible: usize, q: &[f32], weights: &mut Vec<f32>, output: &mut [f32]) {
        let scale = (q.len() as f32).sqrt().recip();
        let keys = self.keys.chunks_exact(q.len()).take(visible);
        weights.clear();
        weights.extend(keys.map(|key| dot(q, key) * scale));
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0_f64;
        for weight in weights.iter_mut() {
            *weight = (*weight - largest).exp();
            total += f64::from(*weight);
        }
        for (weight, value) in weights.iter().zip(self.values.chunks_exact(q.len())) {
            output.iter_mut().zip(value).for_each(|(sum, x)| *sum += weight * x);
        }
        output.iter_mut().for_each(|x| *x = (f64::from(*x) / total) as f32);
    }
}

/// The inner product, in lanes that the compiler can keep in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// How many threads to use for that many multiplications: none is started for a small job.
fn threads(multiplications: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    cores.min(multiplications / 250_000).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between -1 and 1 without an obvious order.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i + seed) * 7919 % 2003) as f32 / 1001.0 - 1.0).collect()
    }

    #[test]
    fn chunks_agree_with_the_definition() -> Result<()> {
        let heads = Heads { layers: 1, query: 6, kv: 2, dim: 24 };
        let tokens = 40;
        let (query, kv) = (heads.query * heads.dim, heads.kv * heads.dim);
        let q = numbers(tokens * query, 1);
        let (k, v) = (numbers(tokens * kv, 2), numbers(tokens * kv, 3));

        let mut plain = Plain::new(heads, Format::F16, None);
        let mut outputs = Vec::new();
        for rows in [0..17, 17..18, 18..tokens] {
            let part = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
            let (q, k, v) = (part(&q, query), part(&k, kv), part(&v, kv));
            outputs.extend(plain.attend(0, rows.start, rows.len(), &q, &k, &v)?);
        }

        let stored = |x: &[f32], token: usize, head: usize, i: usize| {
            f64::from(f16::from_f32(x[token * kv + head / 3 * heads.dim + i]).to_f32())
        };
        for (index, &output) in outputs.iter().enumerate() {
            let (row, head, element) = (index / query, index % query / heads.dim, index % heads.dim);
            let weight = |token: usize| {
                let q = &q[row * query + head * heads.dim..][..heads.dim];
                let score: f64 = (0..heads.dim).map(|i| f64::from(q[i]) * stored(&k, token, head, i)).sum();
                (score / (heads.dim as f64).sqrt()).exp()
            };
            let total: f64 = (0..=row).map(weight).sum();
            let sum: f64 = (0..=row).map(|token| weight(token) * stored(&v, token, head, element)).sum();
            assert!((f64::from(output) - sum / total).abs() < 1e-5, "row {row}, head {head}");
        }
        Ok(())
    }
}
