//! The operations' arguments, validated once for all backends.
//!
//! A backend calls `validate` first and may then rely on everything that it checks: frames lie inside their slab, views
//! inside their buffer, element indices below 2³², all buffers on this device.

pub use super::channels::Channels;
pub(crate) use super::ops_predict::also_project;
pub use super::ops_predict::{Matrices, Onto, Project, Score};
pub use super::ops_step::StepMemory;
use super::params::{AppendRun, FoldRow, MergeRow, Move, Row, Tile};
pub use super::view::View;
pub(crate) use super::view::{check_outputs, check_sum, copy_sides, on_device, range};
use super::{Caps, DeviceBuffer};
use crate::attention::{Grain, state_words};
use crate::record::Record;
use crate::{Error, Result};

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
    pub(super) fn validate(&self, caps: &Caps) -> Result<()> {
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

    pub(super) fn validate_frame(&self, frame: u32, record: &Record) -> Result<()> {
        self.validate_number("a frame", frame, record.frame_stride())
    }

    /// Checks that record `number` of `stride` bytes lies in its slab.
    pub(super) fn validate_number(&self, what: &'static str, number: u32, stride: u64) -> Result<()> {
        let (slab, index) = split_frame(number, self.slab_shift);
        let end = (u64::from(index) + 1) * stride;
        match self.slabs.get(slab as usize).map(DeviceBuffer::bytes) {
            Some(bytes) if end <= bytes => Ok(()),
            bytes => Err(Error::OutOfBounds { what, end, bytes: bytes.unwrap_or(0) }),
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
    /// The calibration of the layer's keys: given in quantised formats and in no other.
    pub channels: Option<Channels<'a, Buf>>,
    /// What goes where. No two runs write the same slot.
    pub runs: &'a [AppendRun],
    /// What the keys are projected on as well, exactly as [`Project`] does with them once they are stored.
    pub onto: Option<Onto<'a, Buf>>,
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
        Channels::validate(self.channels, "append", &self.record, caps)?;
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
        self.v.validate_span("V", v_end, caps)?;
        match self.projection(&self.project_runs()) {
            Some(project) => project.validate(caps).map(|_| ()),
            None => Ok(()),
        }
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
    /// The calibration that the layer's keys were written with: given in quantised formats and in no other.
    pub channels: Option<Channels<'a, Buf>>,
    /// Softmax scale.
    pub scale: f32,
    /// What a state covers, and a work item.
    pub grain: Grain,
    /// Every query row of the call, by row index.
    pub rows: &'a [Row],
    /// The work: see [`attention::plan`](crate::attention::plan).
    pub tiles: &'a [Tile],
    /// Receives the states: [`state_words`] f32 for each (state, q_head): `o[v_dim]`, `m`, `l`, `c`, 0, where
    /// m = max score × log2 e, l = Σ 2^(score − m), o = Σ 2^(score − m) × value. With calibrated keys, scores are those of
    /// keys less their mean, and c = query · mean × scale × log2 e is what all scores of the row and head lack; else c = 0.
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
        Channels::validate(self.channels, "attend", &self.record, caps)?;
        if self.grain == Grain::Whole && (caps.prefill)(&self.record, self.q.dtype).is_none() {
            let format = format!("{} pages, states of rows", self.record.format().name());
            return Err(Error::Unsupported { backend: caps.backend, operation: "attend", format });
        }
        let geometry = self.record.geometry();
        let shape = [self.rows.len() as u64, geometry.q_heads().into(), geometry.k_dim().into()];
        self.q.validate("Q", shape, caps)?;
        on_device(self.tables, "the page tables", caps)?;
        let page = u64::from(geometry.page_tokens());
        let (mut table_end, mut item) = (0u64, 0u64);
        let (tokens, most) = (self.grain.tokens(), u32::MAX / self.grain.tokens() + 1);
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
            if tile_end > u64::from(most) {
                let maximum = most.into();
                return Err(Error::TooLarge { what: "a tile's last split", value: tile_end, maximum });
            }
            if let Some(row) = rows.iter().find(|row| row.start < row.end && row.split != row.start / tokens) {
                let (got, expected) = (row.split.into(), (row.start / tokens).into());
                return Err(Error::Shape { what: "a row's first split", got, expected });
            }
            let end = rows.iter().map(|row| u64::from(row.end)).max().unwrap_or(0);
            table_end = table_end.max(u64::from(tile.table) + end.div_ceil(page));
        }
        if item > u64::from(u32::MAX) {
            return Err(Error::TooLarge { what: "the number of work items", value: item, maximum: u32::MAX.into() });
        }
        range(self.tables, 0, table_end * 4, "the page tables", caps)?;
        let end = |row: &Row| u64::from(row.state) + u64::from(self.grain.states(row.start, row.end));
        let states = self.rows.iter().map(end).max().unwrap_or(0);
        states_fit(self.states, states, geometry.q_heads(), geometry.v_dim(), caps)
    }
}

fn states_fit<Buf: DeviceBuffer>(states: &Buf, count: u64, heads: u32, v_dim: u32, caps: &Caps) -> Result<()> {
    let words = count.checked_mul(heads.into()).and_then(|n| n.checked_mul(state_words(v_dim).into()));
    let words = words.unwrap_or(u64::MAX);
    if words > u64::from(u32::MAX) {
        return Err(Error::TooLarge { what: "the words of the states", value: words, maximum: u32::MAX.into() });
    }
    range(states, 0, words * 4, "the states", caps)
}

/// Folds states in order, those of a section first, and writes outputs: out = o / l and log-sum-exp = (m + log2 l + c) × ln 2; zeros and −∞ where
/// nothing was visible. All states of a row and head have the same c.
#[derive(Debug)]
pub struct Merge<'a, Buf> {
    /// The states, as [`Attend::states`] describes them.
    pub states: &'a Buf,
    /// What each of them covers. States of sections, or of whatever else is not a split, fold left to right.
    pub grain: Grain,
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
    /// States of a section.
    pub fn section(&self) -> u32 {
        self.grain.states_of_a_section()
    }

    /// Checks shapes, ranges and devices.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        if self.v_dim == 0 || !self.v_dim.is_multiple_of(8) || self.v_dim > 256 {
            return Err(Error::Shape { what: "v_dim (a multiple of 8)", got: self.v_dim.into(), expected: 256 });
        }
        let states = self.rows.iter().map(|row| u64::from(row.state) + u64::from(row.states)).max().unwrap_or(0);
        if let Some(row) = self.rows.iter().find(|row| row.before >= self.section()) {
            let (got, expected) = (row.before.into(), (self.section() - 1).into());
            return Err(Error::Shape { what: "states of a section before a row's first", got, expected });
        }
        states_fit(self.states, states, self.q_heads, self.v_dim, caps)?;
        let shape = [self.rows.len() as u64, self.q_heads.into(), self.v_dim.into()];
        check_outputs(self.out, self.lse, shape, caps)
    }
}

/// Folds states in order into one state each, exactly as [`Merge`] would on the way to its output: folding some states
/// first and the result with the others later gives the same bits as folding all at once. (Left to right: states of splits
/// are those of one section, or the answer is not that of [`Merge`].)
#[derive(Debug)]
pub struct Fold<'a, Buf> {
    /// The states, as [`Attend::states`] describes them; read and written.
    pub states: &'a Buf,
    /// One entry a folded state. The target is the row's first source or no source of any row.
    pub rows: &'a [FoldRow],
    /// Query heads.
    pub q_heads: u32,
    /// Elements of an output head.
    pub v_dim: u32,
}

impl<Buf: DeviceBuffer> Fold<'_, Buf> {
    /// Checks shapes, ranges and devices.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        if self.v_dim == 0 || !self.v_dim.is_multiple_of(8) || self.v_dim > 256 {
            return Err(Error::Shape { what: "v_dim (a multiple of 8)", got: self.v_dim.into(), expected: 256 });
        }
        let end = |row: &FoldRow| (u64::from(row.state) + u64::from(row.states)).max(u64::from(row.to) + 1);
        let states = self.rows.iter().map(end).max().unwrap_or(0);
        states_fit(self.states, states, self.q_heads, self.v_dim, caps)
    }
}
