//! Host memory as device memory: shared 32-bit words, and elements read from and written into them.

use crate::backend::ops::{Arena, View, split_frame};
use crate::backend::{DeviceBuffer, DeviceId};
use crate::record::Record;
use crate::{Dtype, PageFormat};
use half::{bf16, f16};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Memory of the CPU backend.
///
/// The words are atomic (relaxed, so plain loads and stores to the machine) because handles are shared freely.
#[derive(Clone)]
pub struct CpuBuffer {
    words: Arc<Vec<AtomicU32>>,
    device: DeviceId,
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({} bytes)", self.bytes())
    }
}

impl DeviceBuffer for CpuBuffer {
    fn bytes(&self) -> u64 {
        self.words.len() as u64 * 4
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn same_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }
}

impl CpuBuffer {
    /// Zeroed memory, rounded up to whole words; `None` when there is not that much.
    pub(super) fn zeroed(device: DeviceId, bytes: u64) -> Option<Self> {
        let words = usize::try_from(bytes.div_ceil(4)).ok()?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(words).ok()?;
        memory.resize_with(words, || AtomicU32::new(0));
        Some(CpuBuffer { words: Arc::new(memory), device })
    }

    /// Word `at`.
    pub(super) fn get(&self, at: u64) -> u32 {
        self.words[at as usize].load(Relaxed)
    }

    /// Sets word `at`.
    pub(super) fn set(&self, at: u64, word: u32) {
        self.words[at as usize].store(word, Relaxed);
    }

    /// Adds to word `at`.
    pub(super) fn add(&self, at: u64, n: u32) {
        self.words[at as usize].fetch_add(n, Relaxed);
    }

    /// Copies whole words from byte `offset` on into `out`.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        let words = &self.words[(offset / 4) as usize..];
        out.chunks_exact_mut(4)
            .zip(words)
            .for_each(|(out, word)| out.copy_from_slice(&word.load(Relaxed).to_le_bytes()));
    }

    /// Copies whole words to byte `offset` on.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let words = &self.words[(offset / 4) as usize..];
        let value = |four: &[u8]| u32::from_le_bytes(four.try_into().expect("four bytes"));
        data.chunks_exact(4).zip(words).for_each(|(data, word)| word.store(value(data), Relaxed));
    }

    /// The 16 bits at half-word `at`.
    pub(super) fn get16(&self, at: u64) -> u16 {
        (self.get(at / 2) >> (16 * (at % 2))) as u16
    }

    /// The float in the word at byte `offset`.
    pub(super) fn float(&self, offset: u64) -> f32 {
        f32::from_bits(self.get(offset / 4))
    }

    /// A row of a page at byte `offset`: its elements, or its codes as numbers.
    pub(super) fn read_stored(&self, offset: u64, format: PageFormat, out: &mut [f32]) {
        match format.dtype() {
            Some(dtype) => self.read_row(offset, dtype, out),
            None => {
                for (four, word) in out.chunks_mut(4).zip(&self.words[(offset / 4) as usize..]) {
                    let codes = word.load(Relaxed).to_le_bytes();
                    four.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(code as i8));
                }
            }
        }
    }

    /// Decodes `out.len()` consecutive elements from byte `offset` on.
    pub(super) fn read_row(&self, offset: u64, dtype: Dtype, out: &mut [f32]) {
        let words = &self.words[(offset / 4) as usize..];
        match dtype {
            Dtype::F32 => out.iter_mut().zip(words).for_each(|(x, w)| *x = f32::from_bits(w.load(Relaxed))),
            Dtype::F16 | Dtype::Bf16 => {
                for (pair, word) in out.chunks_exact_mut(2).zip(words) {
                    let word = word.load(Relaxed);
                    pair[0] = decode16(word as u16, dtype);
                    pair[1] = decode16((word >> 16) as u16, dtype);
                }
            }
        }
    }
}

/// Copies words within or between buffers.
pub(super) fn copy_words(src: (&CpuBuffer, u64), dst: (&CpuBuffer, u64), words: u64) {
    (0..words).for_each(|at| dst.0.set(dst.1 + at, src.0.get(src.1 + at)));
}

fn decode16(bits: u16, dtype: Dtype) -> f32 {
    if dtype == Dtype::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
}

/// One element of a view as its own bits (`u32` for f32, zero-extended otherwise).
pub(super) fn load_bits(view: &View<CpuBuffer>, index: u64) -> u32 {
    match view.dtype {
        Dtype::F32 => view.buffer.get(view.offset / 4 + index),
        Dtype::F16 | Dtype::Bf16 => view.buffer.get16(view.offset / 2 + index).into(),
    }
}

/// The value of an element's bits.
pub(super) fn value_of(bits: u32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::F16 | Dtype::Bf16 => decode16(bits as u16, dtype),
    }
}

/// An element's bits in another type: the same bits for the same type, else rounded to nearest even.
pub(super) fn convert(bits: u32, from: Dtype, to: Dtype) -> u32 {
    if from == to { bits } else { encode(value_of(bits, from), to) }
}

/// The bits of a value in a type, rounded to nearest even.
pub(super) fn encode(value: f32, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => value.to_bits(),
        Dtype::F16 => f16::from_f32(value).to_bits().into(),
        Dtype::Bf16 => bf16::from_f32(value).to_bits().into(),
    }
}

/// Whether an element's bits are infinite or NaN.
pub(super) fn non_finite(bits: u32, dtype: Dtype) -> bool {
    let exponent = match dtype {
        Dtype::F32 => 0x7f80_0000,
        Dtype::F16 => 0x7c00,
        Dtype::Bf16 => 0x7f80,
    };
    bits & exponent == exponent
}

/// Slab and byte offset of a frame.
pub(super) fn frame<'a>(arena: &Arena<'a, CpuBuffer>, frame: u32, record: &Record) -> (&'a CpuBuffer, u64) {
    let (slab, index) = split_frame(frame, arena.slab_shift);
    (&arena.slabs[slab as usize], u64::from(index) * record.frame_stride())
}

/// Stores one row of elements, given as bits of their own type, at a byte offset.
pub(super) fn store_row(slab: &CpuBuffer, offset: u64, dtype: Dtype, bits: impl Iterator<Item = u32>) {
    match dtype {
        Dtype::F32 => bits.enumerate().for_each(|(i, b)| slab.set(offset / 4 + i as u64, b)),
        Dtype::F16 | Dtype::Bf16 => {
            let mut bits = bits.enumerate();
            while let (Some((i, low)), Some((_, high))) = (bits.next(), bits.next()) {
                slab.set(offset / 4 + i as u64 / 2, low | high << 16);
            }
        }
    }
}

/// Stores one row of codes at a byte offset.
pub(super) fn store_codes(slab: &CpuBuffer, offset: u64, codes: &[i8]) {
    for (four, at) in codes.chunks(4).zip(offset / 4..) {
        let mut bytes = [0; 4];
        bytes.iter_mut().zip(four).for_each(|(byte, code)| *byte = *code as u8);
        slab.set(at, u32::from_le_bytes(bytes));
    }
}
