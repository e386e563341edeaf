//! Strided views of device memory, and what is checked about every range that an operation touches.

use super::params::ViewParams;
use super::{Caps, DeviceBuffer};
use crate::{Dtype, Error, Result};

/// A strided tensor `[row, head, element]` in device memory; rows are tokens or query rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View<Buf> {
    /// The memory it lies in.
    pub buffer: Buf,
    /// Bytes from the start of the buffer to element (0, 0, 0); a multiple of the element size.
    pub offset: u64,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements from one row, head and element to the next.
    pub strides: [u64; 3],
}

impl<Buf> View<Buf> {
    /// A dense `[rows, heads, dim]` tensor at the start of `buffer`.
    pub fn dense(buffer: Buf, dtype: Dtype, heads: u32, dim: u32) -> Self {
        View { buffer, offset: 0, dtype, strides: [u64::from(heads) * u64::from(dim), dim.into(), 1] }
    }

    /// A dense `[heads, rows, dim]` tensor at the start of `buffer`.
    pub fn head_major(buffer: Buf, dtype: Dtype, rows: u64, dim: u32) -> Self {
        View { buffer, offset: 0, dtype, strides: [dim.into(), rows.saturating_mul(dim.into()), 1] }
    }

    /// The same view from row `row` on.
    #[must_use]
    pub fn from_row(mut self, row: u64) -> Self {
        let further = row.saturating_mul(self.strides[0]).saturating_mul(self.dtype.bytes());
        // Saturated, the view lies outside every buffer, and validation says so.
        self.offset = self.offset.saturating_add(further) / self.dtype.bytes() * self.dtype.bytes();
        self
    }

    /// The same strides over another kind of buffer handle.
    pub fn try_map<Other>(self, f: impl FnOnce(Buf) -> Result<Other>) -> Result<View<Other>> {
        Ok(View { buffer: f(self.buffer)?, offset: self.offset, dtype: self.dtype, strides: self.strides })
    }

    /// Elements from the view's start to one past its last element, for a shape; `None` past 2⁶⁴.
    pub fn span(&self, shape: [u64; 3]) -> Option<u64> {
        if shape.contains(&0) {
            return Some(0);
        }
        let mut last = 0u64;
        for (extent, stride) in shape.iter().zip(self.strides) {
            last = last.checked_add((extent - 1).checked_mul(stride)?)?;
        }
        last.checked_add(1)
    }

    /// What kernels need, with `base` elements before element (0, 0, 0).
    ///
    /// Call it on a validated view only: strides are then below 2³².
    pub fn params(&self, base: u32) -> ViewParams {
        let [row, head, element] = self.strides.map(|s| u32::try_from(s).unwrap_or(u32::MAX));
        ViewParams { base, row, head, element }
    }
}

impl<Buf: DeviceBuffer> View<Buf> {
    /// Checks that a tensor of this shape lies inside the buffer, on this device, within 32-bit element indices.
    pub fn validate(&self, what: &'static str, shape: [u64; 3], caps: &Caps) -> Result<()> {
        let span = self.span(shape);
        self.validate_span(what, span.unwrap_or(u64::MAX), caps)
    }

    pub(super) fn validate_span(&self, what: &'static str, span: u64, caps: &Caps) -> Result<()> {
        on_device(&self.buffer, what, caps)?;
        let size = self.dtype.bytes();
        if !self.offset.is_multiple_of(size) {
            return Err(Error::Misaligned { what, value: self.offset, multiple: size });
        }
        let end = span.checked_mul(size).and_then(|bytes| bytes.checked_add(self.offset)).unwrap_or(u64::MAX);
        if end > self.buffer.bytes() {
            return Err(Error::OutOfBounds { what, end, bytes: self.buffer.bytes() });
        }
        // Rebasing a binding may add up to one alignment unit of elements in front.
        let need = span.saturating_mul(size).saturating_add(256);
        if need > caps.max_slab_bytes && span > 0 {
            let (adapter, have) = (caps.adapter.clone(), caps.max_slab_bytes);
            return Err(Error::Limit { adapter, limit: "max_slab_bytes", need, have, purpose: what });
        }
        let maximum = u64::from(u32::MAX) - 4096;
        match [span].into_iter().chain(self.strides).find(|&n| n > maximum) {
            Some(value) => Err(Error::TooLarge { what, value, maximum }),
            None => Ok(()),
        }
    }
}

/// Checks that a 16-bit output can be written word by word: unit element stride, even head and row strides.
fn word_aligned<Buf>(view: &View<Buf>, what: &'static str) -> Result<()> {
    let [row, head, element] = view.strides;
    if element != 1 {
        return Err(Error::Shape { what: "the output's element stride", got: element, expected: 1 });
    }
    let bytes = view.dtype.bytes();
    match [view.offset, row * bytes, head * bytes].into_iter().find(|b| !b.is_multiple_of(4)) {
        Some(value) => Err(Error::Misaligned { what, value, multiple: 4 }),
        None => Ok(()),
    }
}

/// Checks that a buffer lives on this device.
pub(crate) fn on_device<Buf: DeviceBuffer>(buffer: &Buf, what: &'static str, caps: &Caps) -> Result<()> {
    if buffer.device() == caps.device { Ok(()) } else { Err(Error::WrongDevice { what }) }
}

/// Checks the two sides of a sum.
pub(crate) fn check_sum<Buf: DeviceBuffer>(src: &Buf, bytes: u64, total: &Buf, caps: &Caps) -> Result<()> {
    if !bytes.is_multiple_of(16) {
        return Err(Error::Misaligned { what: "the bytes of a sum", value: bytes, multiple: 16 });
    }
    range(src, 0, bytes, "the words of a sum", caps)?;
    range(total, 0, 4, "a sum", caps)?;
    if src.same_memory(total) {
        let format = "inputs and outputs in one buffer".into();
        return Err(Error::Unsupported { backend: caps.backend, operation: "sum", format });
    }
    Ok(())
}

/// Checks both sides of a copy: their ranges, and that they are different buffers.
pub(crate) fn copy_sides<Buf: DeviceBuffer>(src: (&Buf, u64), dst: (&Buf, u64), bytes: u64, caps: &Caps) -> Result<()> {
    range(src.0, src.1, bytes, "the source of a copy", caps)?;
    range(dst.0, dst.1, bytes, "the destination of a copy", caps)?;
    if src.0.same_memory(dst.0) {
        let format = "one buffer as source and destination".into();
        return Err(Error::Unsupported { backend: caps.backend, operation: "copy", format });
    }
    Ok(())
}

/// Checks a byte range of a buffer: on this device, word-aligned, inside.
pub(crate) fn range<Buf: DeviceBuffer>(
    buffer: &Buf,
    offset: u64,
    bytes: u64,
    what: &'static str,
    caps: &Caps,
) -> Result<()> {
    on_device(buffer, what, caps)?;
    if let Some(value) = [offset, bytes].into_iter().find(|n| !n.is_multiple_of(4)) {
        return Err(Error::Misaligned { what, value, multiple: 4 });
    }
    match offset.checked_add(bytes) {
        Some(end) if end <= buffer.bytes() => Ok(()),
        end => Err(Error::OutOfBounds { what, end: end.unwrap_or(u64::MAX), bytes: buffer.bytes() }),
    }
}

/// Checks the output view `[row, q_head, v_dim]` and the log-sum-exp view `[row, q_head]` of a merge.
pub(crate) fn check_outputs<Buf: DeviceBuffer>(
    out: &View<Buf>,
    lse: Option<&View<Buf>>,
    shape: [u64; 3],
    caps: &Caps,
) -> Result<()> {
    out.validate("the output", shape, caps)?;
    word_aligned(out, "the output")?;
    apart(out, shape, "the output's strides")?;
    let Some(lse) = lse else { return Ok(()) };
    if lse.dtype != Dtype::F32 {
        let [got, expected] = [lse.dtype, Dtype::F32].map(|d| d.code().into());
        return Err(Error::Shape { what: "the dtype code of the log-sum-exp", got, expected });
    }
    lse.validate("the log-sum-exp", [shape[0], shape[1], 1], caps)?;
    apart(lse, [shape[0], shape[1], 1], "the log-sum-exp's strides")
}

/// Checks that no two (row, head) pairs of an output share an element.
fn apart<Buf>(view: &View<Buf>, [rows, heads, dim]: [u64; 3], what: &'static str) -> Result<()> {
    let mut axes = [(view.strides[0], rows), (view.strides[1], heads)];
    axes.sort_unstable();
    let mut reach = dim;
    for (stride, extent) in axes.into_iter().filter(|(_, extent)| *extent > 1) {
        if stride < reach {
            return Err(Error::Shape { what, got: stride, expected: reach });
        }
        reach = stride.saturating_mul(extent - 1).saturating_add(reach);
    }
    Ok(())
}
