//! What are pages and queries filled with? Noise, of the type that the pages have.

use kvtide::backend::DeviceMemory;
use kvtide::{Backend, Device, Dtype, PageFormat, View};

/// The type of the tensors that an engine has beside pages of this format.
pub(super) fn natural(format: PageFormat) -> Dtype {
    format.dtype().unwrap_or(Dtype::Bf16)
}

/// Xorshift: numbers without a pattern.
pub(super) fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// A word of finite elements from `random`: sign, mantissa and the last bit of the exponent, those of 0.5 to 2.
fn elements(dtype: Dtype, random: u32) -> u32 {
    match dtype {
        Dtype::F32 => random & 0x80ff_ffff | 0x3f00_0000,
        Dtype::F16 => random & 0x87ff_87ff | 0x3800_3800,
        Dtype::Bf16 => random & 0x80ff_80ff | 0x3f00_3f00,
    }
}

/// Finite random elements in device memory: `rows × heads × dim`.
pub(super) fn tensor(
    device: &Device,
    dtype: Dtype,
    rows: u64,
    [heads, dim]: [u32; 2],
    seed: u64,
) -> anyhow::Result<View<DeviceMemory>> {
    let words = rows * u64::from(heads) * u64::from(dim) * dtype.bytes() / 4;
    let mut next = noise(seed);
    let word = || elements(dtype, (next() >> 16) as u32);
    let data: Vec<u32> = std::iter::repeat_with(word).take(words as usize).collect();
    let buffer = device.alloc("bench", words * 4)?;
    let mut stream = device.stream()?;
    device.upload(&mut stream, &buffer, 0, bytemuck::cast_slice(&data))?;
    device.synchronize(&mut stream)?;
    Ok(View::dense(buffer, dtype, heads, dim))
}

#[cfg(test)]
#[test]
fn elements_are_of_magnitudes_from_a_half_to_two() {
    let mut next = noise(3);
    for _ in 0..1000 {
        let random = (next() >> 16) as u32;
        let wide = f32::from_bits(elements(Dtype::F32, random));
        let [half, brain] = [Dtype::F16, Dtype::Bf16].map(|dtype| elements(dtype, random).to_le_bytes());
        let halves = half.chunks_exact(2).map(|b| f32::from(half::f16::from_le_bytes([b[0], b[1]])));
        let brains = brain.chunks_exact(2).map(|b| f32::from(half::bf16::from_le_bytes([b[0], b[1]])));
        for x in halves.chain(brains).chain([wide]) {
            assert!((0.5..2.0).contains(&x.abs()), "{x}");
        }
    }
}
