//! Where do the values of a case come from? A seeded generator, and tensors kept as the bits of their own type.

use crate::{Dtype, PageFormat, quantize};
use half::{bf16, f16};

/// SplitMix64: small, seeded, the same on every machine.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn word(&mut self) -> u32 {
        (self.bits() >> 32) as u32
    }

    /// A number below `n`.
    pub(super) fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(n)) >> 32) as u32
    }

    /// Standard normal, by Box and Muller.
    pub(super) fn normal(&mut self) -> f32 {
        let unit = |bits: u64| ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64;
        let (radius, angle) = (unit(self.bits()), unit(self.bits()));
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u32 + 1) as usize);
        }
    }
}

/// The bits of a value in a type, rounded to nearest even.
pub(super) fn encode(value: f32, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => value.to_bits(),
        Dtype::F16 => f16::from_f32(value).to_bits().into(),
        Dtype::Bf16 => bf16::from_f32(value).to_bits().into(),
    }
}

/// The value of an element's bits.
pub(super) fn decode(bits: u32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::F16 => f16::from_bits(bits as u16).to_f32(),
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f32(),
    }
}

/// An element's bits in another type; the same bits where the type is the same.
pub(super) fn convert(bits: u32, from: Dtype, to: Dtype) -> u32 {
    if from == to { bits } else { encode(decode(bits, from), to) }
}

/// Whether an element is infinite or NaN.
pub(super) fn is_non_finite(bits: u32, dtype: Dtype) -> bool {
    !decode(bits, dtype).is_finite()
}

/// The quiet NaN that poisons memory of a type.
pub(super) fn poison(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0x7fc0_0000,
        Dtype::F16 => 0x7e00,
        Dtype::Bf16 => 0x7fc0,
    }
}

/// A 32-bit word full of elements with these bits.
pub(super) fn word_of(bits: u32, dtype: Dtype) -> u32 {
    if dtype == Dtype::F32 { bits } else { bits | bits << 16 }
}

/// Element `at` of memory that is kept in words.
pub(super) fn element(words: &[u32], at: usize, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => words[at],
        _ => words[at / 2] >> (16 * (at % 2)) & 0xffff,
    }
}

/// Sets element `at` of memory that is kept in words.
pub(super) fn set_element(words: &mut [u32], at: usize, bits: u32, dtype: Dtype) {
    match dtype {
        Dtype::F32 => words[at] = bits,
        _ => {
            let shift = 16 * (at % 2);
            words[at / 2] = words[at / 2] & !(0xffff << shift) | bits << shift;
        }
    }
}

/// The element type of a native format, and one that others are well tested with.
pub(super) fn natural(format: PageFormat) -> Dtype {
    format.dtype().unwrap_or(Dtype::Bf16)
}

/// The word that poisons pages of a format: NaNs, or codes that no row has and scales of NaN.
pub(super) fn page_poison(format: PageFormat) -> u32 {
    format.dtype().map_or(0xff80_8080, |dtype| word_of(poison(dtype), dtype))
}

/// A row as int8, and the channels that it was calibrated by.
pub(super) struct Quantized<'a> {
    pub(super) codes: Vec<i8>,
    pub(super) scale: f32,
    channels: Option<(&'a [f32], &'a [f32])>,
}

impl<'a> Quantized<'a> {
    /// Quantises the elements of a row.
    pub(super) fn new(bits: &[u32], dtype: Dtype, channels: Option<(&'a [f32], &'a [f32])>) -> Self {
        let mut row: Vec<f32> = bits.iter().map(|&bits| decode(bits, dtype)).collect();
        if let Some((mean, scale)) = channels {
            let channels = mean.iter().zip(scale);
            row.iter_mut().zip(channels).filter(|(x, _)| x.is_finite()).for_each(|(x, (mean, scale))| {
                *x = (*x - mean) * (1.0 / scale);
            });
        }
        let mut codes = vec![0; row.len()];
        let scale = quantize::row(&row, &mut codes);
        Quantized { codes, scale, channels }
    }

    /// What the row stands for, less the mean.
    pub(super) fn centred(&self) -> Vec<f32> {
        let scale = |d: usize| self.channels.map_or(1.0, |(_, scale)| f64::from(scale[d]));
        let codes = self.codes.iter().enumerate();
        codes.map(|(d, &code)| (f64::from(code) * f64::from(self.scale) * scale(d)) as f32).collect()
    }
}

/// A dense `[row, head, element]` tensor on the host.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) dtype: Dtype,
    pub(super) shape: [usize; 3],
    /// The elements' bits.
    pub(super) bits: Vec<u32>,
}

impl Tensor {
    /// A tensor of the values that `f(row, head, element)` gives.
    pub(super) fn of(dtype: Dtype, shape: [u32; 3], mut f: impl FnMut(u32, u32, u32) -> f32) -> Self {
        let [rows, heads, dim] = shape;
        let mut bits = Vec::with_capacity(shape.iter().map(|n| *n as usize).product());
        for row in 0..rows {
            for head in 0..heads {
                bits.extend((0..dim).map(|d| encode(f(row, head, d), dtype)));
            }
        }
        Tensor { dtype, shape: shape.map(|n| n as usize), bits }
    }

    /// Normally distributed values.
    pub(super) fn normal(dtype: Dtype, shape: [u32; 3], seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        Tensor::of(dtype, shape, |_, _, _| rng.normal())
    }

    /// A tensor of given bits.
    pub(super) fn raw(dtype: Dtype, shape: [u32; 3], bits: Vec<u32>) -> Self {
        Tensor { dtype, shape: shape.map(|n| n as usize), bits }
    }

    pub(super) fn rows(&self) -> u32 {
        self.shape[0] as u32
    }

    /// Rows `from..from + rows`.
    pub(super) fn slice(&self, from: usize, rows: usize) -> Self {
        let row = self.shape[1] * self.shape[2];
        let bits = self.bits[from * row..(from + rows) * row].to_vec();
        Tensor { dtype: self.dtype, shape: [rows, self.shape[1], self.shape[2]], bits }
    }

    /// The values that pages of this format hold once the tensor is written into them, `channels` (mean and scale of a
    /// head) being those of quantised keys.
    pub(super) fn stored<'a>(
        &self,
        format: PageFormat,
        channels: impl Fn(u32) -> Option<(&'a [f32], &'a [f32])>,
    ) -> Vec<f32> {
        let mut values = self.centred(format, &channels);
        let rows = values.chunks_exact_mut(self.shape[2]).zip((0..self.shape[1] as u32).cycle());
        for (row, head) in rows.filter(|_| format.is_quantized()) {
            let mean = channels(head).map_or(&[][..], |(mean, _)| mean);
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
        }
        values
    }

    /// The same, less the mean of calibrated keys.
    pub(super) fn centred<'a>(
        &self,
        format: PageFormat,
        channels: impl Fn(u32) -> Option<(&'a [f32], &'a [f32])>,
    ) -> Vec<f32> {
        if let Some(to) = format.dtype() {
            return self.bits.iter().map(|&b| decode(convert(b, self.dtype, to), to)).collect();
        }
        let rows = self.bits.chunks_exact(self.shape[2]).zip((0..self.shape[1] as u32).cycle());
        rows.flat_map(|(bits, head)| Quantized::new(bits, self.dtype, channels(head)).centred()).collect()
    }

    /// The values.
    pub(super) fn values(&self) -> Vec<f32> {
        self.bits.iter().map(|&b| decode(b, self.dtype)).collect()
    }

    /// Elements that are infinite or NaN.
    pub(super) fn non_finite(&self) -> u32 {
        self.bits.iter().filter(|&&b| is_non_finite(b, self.dtype)).count() as u32
    }
}
