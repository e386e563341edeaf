//! Attention over a store's pages: which tokens each query row sees, planned, then attended and merged.

use super::calibration::channels_of;
use super::{PagedStore, Sequence};
use crate::attention::{Batch, Grain, Visible, plan, plan_chunks};
use crate::backend::ops::{self, Arena, View};
use crate::backend::params::{FoldRow, Tile};
use crate::backend::{Backend, Caps};
use crate::{Dtype, Error, Geometry, Result};

/// Consecutive query rows of one sequence, and what they see of it.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    pub(crate) seq: &'a Sequence,
    pub(crate) count: u32,
    /// Position of the first row; `None`: the last row is the sequence's last token.
    first: Option<u64>,
    causal: bool,
    window: Option<u64>,
}

impl<'a> Rows<'a> {
    /// One row: the sequence's last token, which sees the whole sequence.
    pub fn decode(seq: &'a Sequence) -> Self {
        Rows::tail(seq, 1)
    }

    /// `count` rows, the sequence's last tokens: a prefill chunk or a verification of draft tokens. Each sees the
    /// tokens up to itself; rows before the sequence's start see nothing.
    pub fn tail(seq: &'a Sequence, count: u32) -> Self {
        Rows { seq, count, first: None, causal: true, window: None }
    }

    /// `count` rows at positions `first`, `first + 1`, …; each sees the tokens up to its position, its own included, so
    /// those must have been appended.
    pub fn at(seq: &'a Sequence, first: u64, count: u32) -> Self {
        Rows { first: Some(first), ..Rows::tail(seq, count) }
    }

    /// Every row sees the whole sequence.
    #[must_use]
    pub fn full(mut self) -> Self {
        self.causal = false;
        self
    }

    /// No row sees further back than `tokens` tokens up to its position (its own included). With [`full`](Self::full) it
    /// still sees all later ones.
    #[must_use]
    pub fn window(mut self, tokens: u64) -> Self {
        self.window = Some(tokens);
        self
    }

    /// The visible tokens of each row, for a sequence of `len` tokens whose page table starts at word `table`.
    fn visible(self, table: u32, len: u64) -> impl Iterator<Item = Visible> {
        let (len, count) = (len as i128, i128::from(self.count));
        let first = self.first.map_or(len - count, i128::from);
        (first..first + count).map(move |position| {
            let end = if self.causal { (position + 1).clamp(0, len) } else { len };
            let start = self.window.map_or(0, |window| (position + 1 - i128::from(window)).clamp(0, end));
            Visible { table, start: start as u32, end: end as u32 }
        })
    }
}

/// Queries of one layer: the rows of one or many sequences, in one tensor.
#[derive(Debug, Clone)]
pub struct Query<'a, Buf> {
    pub(crate) rows: &'a [Rows<'a>],
    q: View<Buf>,
    out: View<Buf>,
    lse: Option<View<Buf>>,
    scale: Option<f32>,
}

impl<'a, Buf> Query<'a, Buf> {
    /// `q` is `[row, q_head, k_dim]` and `out` `[row, q_head, v_dim]`, with the rows of `rows` one after the other.
    ///
    /// `out` has unit element stride, and its heads and rows start on 4-byte boundaries.
    pub fn new(rows: &'a [Rows<'a>], q: View<Buf>, out: View<Buf>) -> Self {
        Query { rows, q, out, lse: None, scale: None }
    }

    /// The queries of a [`Step`](super::Step), which has the rows.
    pub fn of_step(q: View<Buf>, out: View<Buf>) -> Self {
        Query::new(&[], q, out)
    }

    /// Also write the natural log-sum-exp of each row and head, f32 `[row, q_head]`; −∞ where nothing is visible.
    #[must_use]
    pub fn lse(mut self, lse: View<Buf>) -> Self {
        self.lse = Some(lse);
        self
    }

    pub(crate) fn q(&self) -> &View<Buf> {
        &self.q
    }

    /// Where outputs and log-sum-exps go.
    pub(super) fn outputs(&self) -> (&View<Buf>, Option<&View<Buf>>) {
        (&self.out, self.lse.as_ref())
    }

    /// Softmax scale, instead of 1 / √k_dim.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }
}

impl<B: Backend> PagedStore<B> {
    /// Attends query rows of one or many sequences over a layer's pages.
    ///
    /// The answer of a row depends on its query, its sequence and the scale alone, to the last bit: not on the other
    /// rows, nor on where pages lie.
    ///
    /// # Errors
    /// Unknown sequences or layers, causal rows at positions past the end, views that do not fit, a scale that is not finite and positive, device errors.
    pub fn attend(&mut self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()> {
        self.reap();
        let count = self.check_query(layer, query)?;
        let _span = tracing::trace_span!("kvtide.attend", layer, rows = count).entered();
        for rows in query.rows {
            let pages = &mut self.sequences.get_mut(&rows.seq.id()).expect("looked up before")[layer];
            self.pool.upload_table(pages)?;
        }
        for batch in self.batches(&self.visible(layer, query), query.q.dtype) {
            self.enqueue_attend(layer, query, &batch, &batch.tiles)?;
            self.enqueue_merge(query, &batch)?;
        }
        self.counters.attended_rows += count;
        Ok(())
    }

    /// Refuses what any part of the call would refuse; returns the number of rows.
    pub(crate) fn check_query(&self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<u64> {
        self.check_layer(layer)?;
        for rows in query.rows {
            let len = self.pages(rows.seq, layer)?.len;
            let end = rows.first.map_or(0, |first| first.saturating_add(rows.count.into()));
            if rows.causal && end > len {
                return Err(Error::OffsetPastEnd { layer, offset: end, len });
            }
        }
        let count: u64 = query.rows.iter().map(|rows| u64::from(rows.count)).sum();
        check_query(query, count, self.geometry(), self.pool.backend.caps())?;
        Ok(count)
    }

    /// What each row of a call sees, once the tables have their places.
    pub(crate) fn visible(&self, layer: usize, query: &Query<'_, B::Buffer>) -> Vec<Visible> {
        let rows = query.rows.iter().flat_map(|rows| {
            let pages = &self.sequences[&rows.seq.id()][layer];
            rows.visible(pages.span.map_or(0, |span| span.base), pages.len)
        });
        rows.collect()
    }

    /// The plan of a call with queries of type `q`.
    pub(crate) fn batches(&self, visible: &[Visible], q: Dtype) -> Vec<Batch> {
        plan_chunks(visible, &self.record, q, self.pool.backend.caps(), self.max_states())
    }

    /// The plan of a call whose states cover what `grain` says.
    pub(crate) fn batches_of(&self, visible: &[Visible], grain: Grain) -> Vec<Batch> {
        plan(visible, self.rows_per_tile(), self.max_states(), grain)
    }

    /// Rows that a work item takes.
    pub(crate) fn rows_per_tile(&self) -> u32 {
        self.pool.backend.caps().rows_per_tile(self.geometry())
    }

    /// States that the configured bytes hold.
    pub(crate) fn max_states(&self) -> u32 {
        (self.config.state_bytes / self.pool.state_bytes()).clamp(1, u32::MAX.into()) as u32
    }

    /// Attends some tiles of a batch: all of them, or those whose pages are on the device.
    pub(crate) fn enqueue_attend(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        batch: &Batch,
        tiles: &[Tile],
    ) -> Result<()> {
        if tiles.is_empty() {
            return Ok(());
        }
        let (states, tables) = (self.pool.states(batch.states)?, self.pool.tables()?);
        self.pool.ready_channels()?;
        let pool = &mut self.pool;
        let attend = ops::Attend {
            record: self.record,
            arena: Arena { slabs: &pool.slabs, slab_shift: pool.shift() },
            channels: channels_of(&pool.channels, layer),
            tables: &tables,
            q: &query.q.clone().from_row(batch.first_row as u64),
            scale: scale_of(query, self.record.geometry()),
            grain: batch.grain,
            rows: &batch.rows,
            tiles,
            states: &states,
        };
        pool.backend.attend(&mut pool.stream, &attend)
    }

    /// Folds states of a batch into states.
    pub(crate) fn enqueue_fold(&mut self, batch: &Batch, rows: &[FoldRow]) -> Result<()> {
        let states = self.pool.states(batch.states)?;
        let (geometry, pool) = (self.record.geometry(), &mut self.pool);
        let (q_heads, v_dim) = (geometry.q_heads(), geometry.v_dim());
        pool.backend.fold(&mut pool.stream, &ops::Fold { states: &states, rows, q_heads, v_dim })
    }

    /// Writes the outputs of a batch, all of whose tiles have been attended.
    pub(crate) fn enqueue_merge(&mut self, query: &Query<'_, B::Buffer>, batch: &Batch) -> Result<()> {
        let states = self.pool.states(batch.states)?;
        let from = |view: &View<B::Buffer>| view.clone().from_row(batch.first_row as u64);
        let (lse, geometry, pool) = (query.lse.as_ref().map(from), self.record.geometry(), &mut self.pool);
        let merge = ops::Merge {
            states: &states,
            grain: batch.grain,
            rows: &batch.merge,
            q_heads: geometry.q_heads(),
            v_dim: geometry.v_dim(),
            out: &from(&query.out),
            lse: lse.as_ref(),
        };
        pool.backend.merge(&mut pool.stream, &merge)
    }
}

pub(super) fn scale_of<Buf>(query: &Query<'_, Buf>, geometry: &Geometry) -> f32 {
    query.scale.unwrap_or_else(|| 1.0 / (geometry.k_dim() as f32).sqrt())
}

/// What every batch of the call would refuse, before the first one has run.
pub(super) fn check_query<Buf: crate::DeviceBuffer>(
    query: &Query<'_, Buf>,
    rows: u64,
    geometry: &Geometry,
    caps: &Caps,
) -> Result<()> {
    let scale = scale_of(query, geometry);
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::Scale { scale });
    }
    let heads = u64::from(geometry.q_heads());
    query.q.validate("Q", [rows, heads, geometry.k_dim().into()], caps)?;
    ops::check_outputs(&query.out, query.lse.as_ref(), [rows, heads, geometry.v_dim().into()], caps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sequence::{Graveyard, StoreId};

    fn seen(rows: impl FnOnce(Rows<'_>) -> Rows<'_>, count: u32, first: Option<u64>, len: u64) -> Vec<(u32, u32)> {
        let seq = Sequence::new(0, StoreId::unique(), Graveyard::default());
        let base = first.map_or_else(|| Rows::tail(&seq, count), |first| Rows::at(&seq, first, count));
        rows(base).visible(0, len).map(|v| (v.start, v.end)).collect()
    }

    #[test]
    fn rows_see_what_their_position_and_window_allow() {
        assert_eq!(seen(|r| r, 1, None, 7), [(0, 7)]);
        assert_eq!(seen(|r| r, 3, None, 7), [(0, 5), (0, 6), (0, 7)]);
        assert_eq!(seen(|r| r, 4, None, 2), [(0, 0), (0, 0), (0, 1), (0, 2)]);
        assert_eq!(seen(|r| r, 2, Some(3), 10), [(0, 4), (0, 5)]);
        assert_eq!(seen(|r| r, 2, Some(9), 10), [(0, 10), (0, 10)]);
        assert_eq!(seen(|r| r.full(), 2, None, 5), [(0, 5), (0, 5)]);
        assert_eq!(seen(|r| r.window(2), 3, None, 4), [(0, 2), (1, 3), (2, 4)]);
        assert_eq!(seen(|r| r, 1, None, 0), [(0, 0)]);
    }
}
