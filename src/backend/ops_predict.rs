//! What are `project` and `score` given? The arguments of the predictor's operations, validated once for all backends.

use super::channels::Channels;
use super::ops::{Append, Arena, View, range};
use super::params::{AppendRun, ProjectRun, ScoreEntry};
use super::{Backend, Caps, DeviceBuffer};
use crate::predictor::Projections;
use crate::record::Record;
use crate::{Error, Geometry, Result};

/// The matrices P `[k_dim, rank]` of one layer, row-major in bf16: one a KV head, or one for all.
#[derive(Debug)]
pub struct Matrices<'a, Buf> {
    /// The memory they lie in.
    pub buffer: &'a Buf,
    /// Bytes before the first KV head's matrix, a multiple of 16.
    pub offset: u64,
    /// Elements from one KV head's matrix to the next, a multiple of 8; 0 when all share one.
    pub head_stride: u32,
}

impl<Buf> Clone for Matrices<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for Matrices<'_, Buf> {}

impl<Buf: DeviceBuffer> Matrices<'_, Buf> {
    /// Bytes from [`offset`](Self::offset) to the end of the last matrix.
    pub(super) fn bytes(&self, geometry: &Geometry, rank: u32) -> u64 {
        let before = u64::from(geometry.kv_heads() - 1) * u64::from(self.head_stride);
        2 * (before + u64::from(geometry.k_dim()) * u64::from(rank))
    }

    fn validate(&self, geometry: &Geometry, rank: u32, caps: &Caps) -> Result<()> {
        let stride = u64::from(self.head_stride) * 2;
        if let Some(value) = [self.offset, stride].into_iter().find(|n| !n.is_multiple_of(16)) {
            return Err(Error::Misaligned { what: "the basis", value, multiple: 16 });
        }
        let bytes = self.bytes(geometry, rank);
        if bytes > u64::from(u32::MAX) {
            return Err(Error::TooLarge { what: "the bytes of a basis", value: bytes, maximum: u32::MAX.into() });
        }
        range(self.buffer, self.offset, bytes, "the basis", caps)
    }
}

/// Projects stored keys: A\[slot\] = bf16(kᵀP) with sums in f32, and a residual norm of zero, in the layout of
/// [`Projections`].
///
/// The keys are read as the pages hold them, so any append before it on the stream will do. How slots are cut into runs
/// changes no bit of the result.
#[derive(Debug)]
pub struct Project<'a, Buf> {
    /// The layout of the pages.
    pub record: Record,
    /// The frames that are read.
    pub arena: Arena<'a, Buf>,
    /// The calibration that the layer's keys were written with: given in quantised formats and in no other.
    pub channels: Option<Channels<'a, Buf>>,
    /// Dimensions of a projected key.
    pub rank: u32,
    /// What keys are projected on.
    pub basis: Matrices<'a, Buf>,
    /// The records that are written, in memory of their own.
    pub projections: Arena<'a, Buf>,
    /// Which. No two runs write the same slot of a record.
    pub runs: &'a [ProjectRun],
}

impl<Buf: DeviceBuffer> Project<'_, Buf> {
    /// Checks shapes, ranges and devices, and gives the layout of what is written.
    pub fn validate(&self, caps: &Caps) -> Result<Projections> {
        let geometry = self.record.geometry();
        let layout = Projections::new(geometry, self.rank)?;
        self.arena.validate(caps)?;
        self.projections.validate(caps)?;
        self.basis.validate(geometry, self.rank, caps)?;
        Channels::validate(self.channels, "project", &self.record, caps)?;
        let read = || self.arena.slabs.iter().chain([self.basis.buffer]);
        if self.projections.slabs.iter().any(|to| read().any(|from| from.same_memory(to))) {
            return Err(shared_memory("project", caps));
        }
        for run in self.runs {
            self.arena.validate_frame(run.frame, &self.record)?;
            self.projections.validate_number("a record of projections", run.page, layout.stride())?;
            let end = u64::from(run.slot) + u64::from(run.tokens);
            if run.tokens == 0 || end > u64::from(geometry.page_tokens()) {
                let expected = geometry.page_tokens().into();
                return Err(Error::Shape { what: "the last slot of a run", got: end, expected });
            }
        }
        Ok(layout)
    }
}

/// What the keys of an append are projected on: the records are those that its runs name.
#[derive(Debug)]
pub struct Onto<'a, Buf> {
    /// Dimensions of a projected key.
    pub rank: u32,
    /// The matrices of the layer.
    pub basis: Matrices<'a, Buf>,
    /// The records that are written, in memory of their own.
    pub projections: Arena<'a, Buf>,
}

impl<Buf> Clone for Onto<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for Onto<'_, Buf> {}

impl<Buf> Append<'_, Buf> {
    /// The runs of [`projection`](Self::projection); none where nothing is projected.
    pub(super) fn project_runs(&self) -> Vec<ProjectRun> {
        let runs = self.runs.iter().filter(|_| self.onto.is_some());
        runs.map(|&AppendRun { frame, page, slot, tokens, .. }| ProjectRun { frame, page, slot, tokens }).collect()
    }

    /// The projection that goes with the append, over [its runs](Self::project_runs).
    pub(super) fn projection<'a>(&'a self, runs: &'a [ProjectRun]) -> Option<Project<'a, Buf>> {
        let (record, arena, channels) = (self.record, self.arena, self.channels);
        let project =
            |Onto { rank, basis, projections }| Project { record, arena, channels, rank, basis, projections, runs };
        self.onto.map(project)
    }
}

/// Projects the keys that an append has just written, where it asks for that: for backends whose `append` does not do it by
/// itself.
pub(crate) fn also_project<B: Backend>(
    backend: &B,
    stream: &mut B::Stream,
    args: &Append<'_, B::Buffer>,
) -> Result<()> {
    let runs = args.project_runs();
    match args.projection(&runs).filter(|_| args.write && !runs.is_empty()) {
        Some(project) => backend.project(stream, &project),
        None => Ok(()),
    }
}

/// Scores pages: for each entry the largest ⟨bf16(qᵀP), A\[slot\]⟩, in f32, over the query heads of its row (each with the
/// projected keys of its own KV head) and over the page's first `tokens` slots.
///
/// A score is always a finite number. A product that is NaN or infinite is passed over: it neither wins nor spoils the
/// others. (Keys and queries below 10¹⁵ in magnitude over a basis below 1 give no such product.) Where nothing is left, and for an entry
/// of no tokens, the score is `-f32::MAX`. It depends on the entry's own row and page alone, to the bit.
#[derive(Debug)]
pub struct Score<'a, Buf> {
    /// The model: its KV and query heads, `k_dim` and page size.
    pub geometry: Geometry,
    /// Dimensions of a projected key.
    pub rank: u32,
    /// The records that [`Project`] wrote.
    pub projections: Arena<'a, Buf>,
    /// Queries `[row, q_head, k_dim]`: a row for each number that entries name, from 0 on.
    pub q: &'a View<Buf>,
    /// What queries are projected on.
    pub basis: Matrices<'a, Buf>,
    /// Scratch memory of [`query_bytes`](Self::query_bytes) bytes: receives the projected queries `[row, q_head, rank]`, bf16
    /// numbers held as f32.
    pub queries: &'a Buf,
    /// The pages that are scored; only their records are read.
    pub entries: &'a [ScoreEntry],
    /// Receives one f32 for each entry, in their order.
    pub out: &'a Buf,
}

impl<Buf> Score<'_, Buf> {
    /// Bytes of scratch memory for projected queries.
    pub fn query_bytes(rows: u64, q_heads: u32, rank: u32) -> u64 {
        rows.saturating_mul(u64::from(q_heads) * u64::from(rank) * 4)
    }

    /// Query rows: one more than the largest that an entry names.
    pub fn rows(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.row) + 1).max().unwrap_or(0)
    }
}

impl<Buf: DeviceBuffer> Score<'_, Buf> {
    /// Checks shapes, ranges and devices, and gives the layout of what is read.
    pub fn validate(&self, caps: &Caps) -> Result<Projections> {
        let geometry = &self.geometry;
        let layout = Projections::new(geometry, self.rank)?;
        self.projections.validate(caps)?;
        self.basis.validate(geometry, self.rank, caps)?;
        let (rows, q_heads) = (self.rows(), geometry.q_heads());
        self.q.validate("Q", [rows, q_heads.into(), geometry.k_dim().into()], caps)?;
        let scratch = Self::query_bytes(rows, q_heads, self.rank);
        for (what, bytes) in [("the projected queries", scratch), ("the scores", self.entries.len() as u64 * 4)] {
            if bytes / 4 > u64::from(u32::MAX) {
                return Err(Error::TooLarge { what, value: bytes / 4, maximum: u32::MAX.into() });
            }
        }
        range(self.queries, 0, scratch, "the projected queries", caps)?;
        range(self.out, 0, self.entries.len() as u64 * 4, "the scores", caps)?;
        let read = || self.projections.slabs.iter().chain([&self.q.buffer, self.basis.buffer]);
        let written = [self.queries, self.out];
        if written.iter().any(|to| read().any(|from| from.same_memory(to))) || self.out.same_memory(self.queries) {
            return Err(shared_memory("score", caps));
        }
        for entry in self.entries {
            if entry.tokens > geometry.page_tokens() {
                let (got, expected) = (entry.tokens.into(), geometry.page_tokens().into());
                return Err(Error::Shape { what: "the tokens of a scored page", got, expected });
            }
            if entry.tokens > 0 {
                self.projections.validate_number("a record of projections", entry.page, layout.stride())?;
            }
        }
        Ok(layout)
    }
}

fn shared_memory(operation: &'static str, caps: &Caps) -> Error {
    Error::Unsupported { backend: caps.backend, operation, format: "inputs and outputs in one buffer".into() }
}
