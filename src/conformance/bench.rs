//! What do cases run on? A backend with a stream, tensors in any layout, and memory that is poisoned before use.

use super::values::{Tensor, element, poison, set_element, word_of};
use crate::backend::{Backend, DeviceBuffer};
use crate::{Dtype, Result, View};

/// How a `[row, head, element]` tensor lies in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Rows, heads and elements side by side.
    Dense,
    /// `[head, row, element]`.
    HeadMajor,
    /// A slice of a fused projection: starts at an odd element, and other tensors lie between its rows.
    Fused,
    /// `[element, head, row]`: the row is the fastest axis.
    Transposed,
    /// Every other element.
    Sparse,
    /// Gaps after every head and row, all even, so that 16-bit outputs can use it.
    Padded,
}

impl Layout {
    /// Layouts that inputs can have.
    pub(super) const INPUTS: [Layout; 5] =
        [Layout::Dense, Layout::Fused, Layout::HeadMajor, Layout::Transposed, Layout::Sparse];
    /// Layouts that outputs can have.
    pub(super) const OUTPUTS: [Layout; 3] = [Layout::Dense, Layout::Padded, Layout::HeadMajor];

    /// Element offset and strides for a shape.
    fn place(self, [rows, heads, dim]: [u64; 3]) -> (u64, [u64; 3]) {
        match self {
            Layout::Dense => (0, [heads * dim, dim, 1]),
            Layout::HeadMajor => (0, [dim, rows * dim, 1]),
            Layout::Fused => (heads * dim + 1, [3 * heads * dim + 5, dim, 1]),
            Layout::Transposed => (0, [1, rows, rows * heads]),
            Layout::Sparse => (3, [2 * heads * dim + 7, 2 * dim, 2]),
            Layout::Padded => (6, [heads * (dim + 2) + 4, dim + 2, 1]),
        }
    }
}

/// A backend under test and its stream.
#[derive(Debug)]
pub(super) struct Bench<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) stream: B::Stream,
}

impl<'a, B: Backend> Bench<'a, B> {
    pub(super) fn new(backend: &'a B) -> Result<Self> {
        Ok(Bench { backend, stream: backend.stream()? })
    }

    /// Memory of at least one word, full of `word`.
    pub(super) fn filled(&mut self, label: &str, words: usize, word: u32) -> Result<B::Buffer> {
        let buffer = self.backend.alloc(label, words.max(1) as u64 * 4)?;
        let bytes = buffer.bytes() / 4 * 4;
        self.backend.fill(&mut self.stream, &buffer, 0, bytes, word)?;
        Ok(buffer)
    }

    /// Memory that holds these words.
    pub(super) fn words(&mut self, label: &str, words: &[u32]) -> Result<B::Buffer> {
        let buffer = self.backend.alloc(label, words.len().max(1) as u64 * 4)?;
        self.backend.upload(&mut self.stream, &buffer, 0, bytemuck::cast_slice(words))?;
        Ok(buffer)
    }

    /// The first `words` words of a buffer.
    pub(super) fn read(&mut self, buffer: &B::Buffer, words: usize) -> Result<Vec<u32>> {
        let mut out = vec![0u32; words];
        self.backend.download(&mut self.stream, buffer, 0, bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }

    /// Puts a tensor on the device; poison lies around and between its rows.
    pub(super) fn tensor(&mut self, tensor: &Tensor, layout: Layout) -> Result<View<B::Buffer>> {
        let (view, words) = strided(tensor.dtype, tensor.shape, layout);
        let mut host = vec![word_of(poison(tensor.dtype), tensor.dtype); words];
        for (&bits, at) in tensor.bits.iter().zip(places(&view, tensor.shape)) {
            set_element(&mut host, at, bits, tensor.dtype);
        }
        let buffer = self.words("a tensor", &host)?;
        view.try_map(|()| Ok(buffer))
    }

    /// Poisoned memory for an output tensor.
    pub(super) fn output(&mut self, dtype: Dtype, shape: [usize; 3], layout: Layout) -> Result<Output<B>> {
        let (view, words) = strided(dtype, shape, layout);
        let buffer = self.filled("an output", words, word_of(poison(dtype), dtype))?;
        Ok(Output { view: view.try_map(|()| Ok(buffer))?, shape, words })
    }
}

/// An output tensor on the device.
#[derive(Debug)]
pub(super) struct Output<B: Backend> {
    pub(super) view: View<B::Buffer>,
    shape: [usize; 3],
    words: usize,
}

impl<B: Backend> Output<B> {
    /// The elements' bits in dense order, and whether the memory between them is untouched.
    pub(super) fn read(&self, bench: &mut Bench<'_, B>) -> Result<(Vec<u32>, bool)> {
        let mut words = bench.read(&self.view.buffer, self.words)?;
        let dtype = self.view.dtype;
        let mut bits = Vec::with_capacity(self.shape.iter().product());
        for at in places(&self.view, self.shape) {
            bits.push(element(&words, at, dtype));
            set_element(&mut words, at, poison(dtype), dtype);
        }
        let untouched = words.iter().all(|&word| word == word_of(poison(dtype), dtype));
        Ok((bits, untouched))
    }
}

/// A view without its buffer, and the words that the buffer needs.
fn strided(dtype: Dtype, shape: [usize; 3], layout: Layout) -> (View<()>, usize) {
    let (offset, strides) = layout.place(shape.map(|n| n as u64));
    let view = View { buffer: (), offset: offset * dtype.bytes(), dtype, strides };
    let elements = offset + view.span(shape.map(|n| n as u64)).unwrap_or(0);
    (view, (elements * dtype.bytes()).div_ceil(4) as usize)
}

/// Element numbers, from the start of the buffer, of a tensor's elements in dense order.
fn places<Buf>(view: &View<Buf>, [rows, heads, dim]: [usize; 3]) -> impl Iterator<Item = usize> + use<Buf> {
    let first = (view.offset / view.dtype.bytes()) as usize;
    let [row, head, element] = view.strides.map(|stride| stride as usize);
    (0..rows).flat_map(move |r| {
        (0..heads).flat_map(move |h| (0..dim).map(move |d| first + r * row + h * head + d * element))
    })
}
