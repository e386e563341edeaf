//! The operations' arguments, validated once for all backends.
//!
//! A backend calls `validate` first and may then rely on everything that it checks: frames lie inside their slab, views
//! inside their buffer, element indices below 2³², all buffers on this device.

use super::params::{AppendRun, MergeRow, Move, Row, Tile, ViewParams};
use super::{Caps, DeviceBuffer};
use crate::attention::{SPLIT, state_words};
use crate::record::Record;
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

    fn validate_span(&self, what: &'static str, span: u64, caps: &Caps) -> Result<()> {
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

/// The frames of a store: slabs of equal frames, addressed by frame number (see [`record`](crate::record)).
#[derive(Debug)]
pub struct Arena<'a, Buf> {
    /// The slabs, in order.
    pub slabs: &'a [Buf],
    /// Index bits of a frame number.
    pub slab_shift: u32,
}

impl<Buf> Clone for Arena<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for Arena<'_, Buf> {}

impl<Buf: DeviceBuffer> Arena<'_, Buf> {
    fn validate(&self, caps: &Caps) -> Result<()> {
        let (got, expected) = (self.slabs.len() as u64, u64::from(caps.max_slabs));
        if got > expected {
            return Err(Error::TooLarge { what: "the number of slabs", value: got, maximum: expected });
        }
        if self.slab_shift >= 32 {
            let value = self.slab_shift.into();
            return Err(Error::TooLarge { what: "the index bits of a frame number", value, maximum: 31 });
        }
        self.slabs.iter().try_for_each(|slab| on_device(slab, "a slab", caps))
    }

    fn validate_frame(&self, frame: u32, record: &Record) -> Result<()> {
        let (slab, index) = split_frame(frame, self.slab_shift);
        let end = (u64::from(index) + 1) * record.frame_stride();
        match self.slabs.get(slab as usize).map(DeviceBuffer::bytes) {
            Some(bytes) if end <= bytes => Ok(()),
            bytes => Err(Error::OutOfBounds { what: "a frame", end, bytes: bytes.unwrap_or(0) }),
        }
    }
}

/// Slab and index in the slab of a frame number.
pub const fn split_frame(frame: u32, slab_shift: u32) -> (u32, u32) {
    (frame >> slab_shift, frame & ((1 << slab_shift) - 1))
}

/// Writes new tokens into pages.
#[derive(Debug)]
pub struct Append<'a, Buf> {
    /// The layout of the pages.
    pub record: Record,
    /// The frames.
    pub arena: Arena<'a, Buf>,
    /// Keys `[token, kv_head, k_dim]`; a run's tokens start `k_offset` elements in.
    pub k: &'a View<Buf>,
    /// Values `[token, kv_head, v_dim]`; a run's tokens start `v_offset` elements in.
    pub v: &'a View<Buf>,
    /// What goes where. No two runs write the same slot.
    pub runs: &'a [AppendRun],
    /// One u32 that grows by the number of infinite or NaN elements met.
    pub non_finite: &'a Buf,
    /// `false`: count non-finite elements and write nothing.
    pub write: bool,
}

impl<Buf: DeviceBuffer> Append<'_, Buf> {
    /// Checks shapes, ranges and devices.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        self.record.geometry().validate()?;
        self.arena.validate(caps)?;
        range(self.non_finite, 0, 4, "the non-finite counter", caps)?;
        if self.k.dtype != self.v.dtype {
            let [got, expected] = [self.v.dtype, self.k.dtype].map(|d| d.code().into());
            return Err(Error::Shape { what: "the dtype code of V", got, expected });
        }
        if self.arena.slabs.iter().any(|slab| slab.same_memory(&self.k.buffer) || slab.same_memory(&self.v.buffer)) {
            let format = "K or V in the memory of the pages".into();
            return Err(Error::Unsupported { backend: caps.backend, operation: "append", format });
        }
        let geometry = self.record.geometry();
        let (mut k_end, mut v_end) = (0u64, 0u64);
        for run in self.runs {
            self.arena.validate_frame(run.frame, &self.record)?;
            let end = u64::from(run.slot) + u64::from(run.tokens);
            if run.tokens == 0 || end > u64::from(geometry.page_tokens()) {
                let expected = geometry.page_tokens().into();
                return Err(Error::Shape { what: "the last slot of a run", got: end, expected });
            }
            let heads = u64::from(geometry.kv_heads());
            let span = |view: &View<Buf>, offset: u32, dim: u32| {
                let shape = [u64::from(run.tokens), heads, u64::from(dim)];
                view.span(shape).and_then(|s| s.checked_add(offset.into())).unwrap_or(u64::MAX)
            };
            k_end = k_end.max(span(self.k, run.k_offset, geometry.k_dim()));
            v_end = v_end.max(span(self.v, run.v_offset, geometry.v_dim()));
        }
        self.k.validate_span("K", k_end, caps)?;
        self.v.validate_span("V", v_end, caps)
    }
}

/// One side of a [`Transfer`].
#[derive(Debug)]
pub enum Place<'a, Buf> {
    /// Frames of an arena, by frame number.
    Frames(Arena<'a, Buf>),
    /// Records side by side in one buffer, by index.
    Records {
        /// The buffer.
        buffer: &'a Buf,
        /// Bytes before record 0, a multiple of 4.
        offset: u64,
        /// Bytes from one record to the next, a multiple of 4 and no less than the record.
        stride: u64,
    },
}

impl<Buf: DeviceBuffer> Place<'_, Buf> {
    fn validate(&self, indices: impl Iterator<Item = u32>, record: &Record, caps: &Caps) -> Result<()> {
        match *self {
            Place::Frames(arena) => {
                arena.validate(caps)?;
                indices.into_iter().try_for_each(|frame| arena.validate_frame(frame, record))
            }
            Place::Records { buffer, offset, stride } => {
                let Some(last) = indices.max() else { return on_device(buffer, "the records", caps) };
                if stride < record.bytes() {
                    return Err(Error::Shape { what: "the record stride", got: stride, expected: record.bytes() });
                }
                on_device(buffer, "the records", caps)?;
                if let Some(value) = [offset, stride].into_iter().find(|n| !n.is_multiple_of(4)) {
                    return Err(Error::Misaligned { what: "the records", value, multiple: 4 });
                }
                let end = u64::from(last)
                    .checked_mul(stride)
                    .and_then(|b| b.checked_add(offset)?.checked_add(record.bytes()))
                    .unwrap_or(u64::MAX);
                if end > buffer.bytes() {
                    return Err(Error::OutOfBounds { what: "a record", end, bytes: buffer.bytes() });
                }
                let maximum = u64::from(u32::MAX) * 4;
                if end > maximum {
                    return Err(Error::TooLarge { what: "the end of the records", value: end, maximum });
                }
                Ok(())
            }
        }
    }
}

/// Moves whole records: frame to frame (copy), frames to a buffer (gather), a buffer to frames (scatter).
#[derive(Debug)]
pub struct Transfer<'a, Buf> {
    /// The layout of the pages.
    pub record: Record,
    /// Where records are.
    pub from: Place<'a, Buf>,
    /// Where they go.
    pub to: Place<'a, Buf>,
    /// Which. No destination is named twice, and none is also a source.
    pub moves: &'a [Move],
}

impl<Buf: DeviceBuffer> Transfer<'_, Buf> {
    /// Checks ranges and devices.
    ///
    /// # Errors
    /// Also when both sides are records: that is a plain [`copy`](super::Backend::copy).
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        self.record.geometry().validate()?;
        if let (Place::Records { .. }, Place::Records { .. }) = (&self.from, &self.to) {
            let format = "records to records".into();
            return Err(Error::Unsupported { backend: caps.backend, operation: "transfer", format });
        }
        self.from.validate(self.moves.iter().map(|m| m.from), &self.record, caps)?;
        self.to.validate(self.moves.iter().map(|m| m.to), &self.record, caps)
    }
}

/// Attends query rows over pages: one mergeable state per row, query head and split.
#[derive(Debug)]
pub struct Attend<'a, Buf> {
    /// The layout of the pages.
    pub record: Record,
    /// The frames.
    pub arena: Arena<'a, Buf>,
    /// Page tables: u32 frame numbers.
    pub tables: &'a Buf,
    /// Queries `[row, q_head, k_dim]`.
    pub q: &'a View<Buf>,
    /// Softmax scale.
    pub scale: f32,
    /// Every query row of the call, by row index.
    pub rows: &'a [Row],
    /// The work: see [`attention::plan`](crate::attention::plan).
    pub tiles: &'a [Tile],
    /// Receives the states: [`state_words`] f32 for each (state, q_head): `o[v_dim]`, `m`, `l`, 0, 0, where
    /// m = max score × log2 e, l = Σ 2^(score − m), o = Σ 2^(score − m) × value.
    pub states: &'a Buf,
}

impl<Buf: DeviceBuffer> Attend<'_, Buf> {
    /// Checks shapes, ranges and devices. Table entries are the store's to keep valid.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        self.record.geometry().validate()?;
        self.arena.validate(caps)?;
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(Error::Scale { scale: self.scale });
        }
        let geometry = self.record.geometry();
        let shape = [self.rows.len() as u64, geometry.q_heads().into(), geometry.k_dim().into()];
        self.q.validate("Q", shape, caps)?;
        on_device(self.tables, "the page tables", caps)?;
        let page = u64::from(geometry.page_tokens());
        let (mut table_end, mut item) = (0u64, 0u64);
        for tile in self.tiles {
            let rows_end = u64::from(tile.row) + u64::from(tile.rows);
            if rows_end > self.rows.len() as u64 {
                return Err(Error::Shape {
                    what: "a tile's last row",
                    got: rows_end,
                    expected: self.rows.len() as u64,
                });
            }
            if u64::from(tile.item) != item {
                return Err(Error::Shape { what: "a tile's first item", got: tile.item.into(), expected: item });
            }
            item += u64::from(tile.splits);
            let rows = &self.rows[tile.row as usize..rows_end as usize];
            let tile_end = u64::from(tile.split) + u64::from(tile.splits);
            if tile_end > u64::from(u32::MAX / SPLIT + 1) {
                let maximum = (u32::MAX / SPLIT + 1).into();
                return Err(Error::TooLarge { what: "a tile's last split", value: tile_end, maximum });
            }
            if let Some(row) = rows.iter().find(|row| row.start < row.end && row.split != row.start / SPLIT) {
                let (got, expected) = (row.split.into(), (row.start / SPLIT).into());
                return Err(Error::Shape { what: "a row's first split", got, expected });
            }
            let end = rows.iter().map(|row| u64::from(row.end)).max().unwrap_or(0);
            table_end = table_end.max(u64::from(tile.table) + end.div_ceil(page));
        }
        if item > u64::from(u32::MAX) {
            return Err(Error::TooLarge { what: "the number of work items", value: item, maximum: u32::MAX.into() });
        }
        range(self.tables, 0, table_end * 4, "the page tables", caps)?;
        let states = self.rows.iter().map(|row| u64::from(row.state) + u64::from(splits(row))).max().unwrap_or(0);
        states_fit(self.states, states, geometry.q_heads(), geometry.v_dim(), caps)
    }
}

/// Number of splits that a row's visible tokens touch.
pub const fn splits(row: &Row) -> u32 {
    if row.end > row.start { row.end.div_ceil(SPLIT) - row.start / SPLIT } else { 0 }
}

fn states_fit<Buf: DeviceBuffer>(states: &Buf, count: u64, heads: u32, v_dim: u32, caps: &Caps) -> Result<()> {
    let words = count.checked_mul(heads.into()).and_then(|n| n.checked_mul(state_words(v_dim).into()));
    let words = words.unwrap_or(u64::MAX);
    if words > u64::from(u32::MAX) {
        return Err(Error::TooLarge { what: "the words of the states", value: words, maximum: u32::MAX.into() });
    }
    range(states, 0, words * 4, "the states", caps)
}

/// Folds states in order and writes outputs: out = o / l and log-sum-exp = (m + log2 l) × ln 2; zeros and −∞ where
/// nothing was visible.
#[derive(Debug)]
pub struct Merge<'a, Buf> {
    /// The states, as [`Attend::states`] describes them.
    pub states: &'a Buf,
    /// One entry an output row.
    pub rows: &'a [MergeRow],
    /// Query heads.
    pub q_heads: u32,
    /// Elements of an output head.
    pub v_dim: u32,
    /// Receives the output `[row, q_head, v_dim]`; unit element stride, rows and heads on 4-byte boundaries.
    pub out: &'a View<Buf>,
    /// Receives the log-sum-exp `[row, q_head]` in f32, when wanted.
    pub lse: Option<&'a View<Buf>>,
}

impl<Buf: DeviceBuffer> Merge<'_, Buf> {
    /// Checks shapes, ranges and devices.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        if self.v_dim == 0 || !self.v_dim.is_multiple_of(8) || self.v_dim > 256 {
            return Err(Error::Shape { what: "v_dim (a multiple of 8)", got: self.v_dim.into(), expected: 256 });
        }
        let states = self.rows.iter().map(|row| u64::from(row.state) + u64::from(row.states)).max().unwrap_or(0);
        states_fit(self.states, states, self.q_heads, self.v_dim, caps)?;
        let shape = [self.rows.len() as u64, self.q_heads.into(), self.v_dim.into()];
        check_outputs(self.out, self.lse, shape, caps)
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
