//! Attention of many rows over a long sequence, whose states do not fit together: split after split in token order, so that
//! each page comes once for all rows.
//!
//! A row's states fold into one that is carried along. Folding is left to right in token order either way, so the bits are
//! those of states that are all kept.

use super::HighSpeedSwap;
use super::attend::Cast;
use super::plan::{Need, Piece, Span};
use crate::Result;
use crate::attention::{Batch, SPLIT, Visible};
use crate::backend::Backend;
use crate::backend::ops::splits;
use crate::backend::params::{FoldRow, MergeRow};
use crate::store::Query;
use std::ops::Range;

impl<B: Backend> HighSpeedSwap<B> {
    /// Attends all rows of a call, sequence by sequence.
    pub(super) fn attend_in_order(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        visible: &[Visible],
    ) -> Result<()> {
        // Half of the states is enough for the carried ones and at least one split more of every row.
        let most = (self.store.max_states() / 2).max(1) as usize;
        let mut first = 0;
        let owners: Vec<u64> =
            query.rows.iter().flat_map(|rows| std::iter::repeat_n(rows.seq.id(), rows.count as usize)).collect();
        while first < visible.len() {
            let same = owners[first..].iter().take(most).take_while(|&&id| id == owners[first]).count();
            self.attend_rows(layer, query, owners[first], first, &visible[first..first + same])?;
            first += same;
        }
        Ok(())
    }

    /// Attends consecutive rows of one sequence.
    fn attend_rows(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        id: u64,
        first_row: usize,
        rows: &[Visible],
    ) -> Result<()> {
        let (page_size, pages) = (self.geometry().page_tokens(), self.table(id, layer).len() as u32);
        let seen = rows.iter().filter(|row| row.start < row.end);
        let from = seen.clone().map(|row| row.start / SPLIT).min().unwrap_or(0);
        let to = seen.map(|row| row.end.div_ceil(SPLIT)).max().unwrap_or(0);
        let room = (self.store.max_states() / rows.len() as u32).saturating_sub(1).max(1);
        let width = (self.tile_size().missing * page_size / SPLIT).clamp(1, room);
        let windows: Vec<Range<u32>> =
            (from..to).step_by(width as usize).map(|split| split..(split + width).min(to)).collect();
        // What is missing is asked when a window is fetched.
        let tile =
            |window: &Range<u32>| Piece { spans: vec![Span { sequence: 0, splits: window.clone() }], missing: 0 };
        let tiles = windows.iter().map(tile).collect();
        let mut cast = Cast { ids: vec![id], needs: vec![Need { splits: from..to, pages }], ..Cast::default() };
        cast.by_table.extend(rows.iter().map(|row| (row.table, 0)));
        self.in_turn(layer, &cast, tiles, |swap, tile| {
            let splits_seen = &tile.spans[0].splits;
            let batch = swap.window(first_row, rows, splits_seen, width);
            swap.attend_piece(layer, query, &batch, &cast, &tile.spans)?;
            let seen = |row: &Visible, split: u32| row.start < row.end && row.start / SPLIT < split;
            let folds = batch.rows.iter().zip(rows).filter(|(row, _)| splits(row) > 0).map(|(row, visible)| {
                // The carried state stands before the row's others; it is there once an earlier window was seen.
                let carried = u32::from(seen(visible, splits_seen.start));
                let (state, states) = (row.state - carried, splits(row) + carried);
                FoldRow { state, states, to: row.state - 1, reserved: 0 }
            });
            let folds: Vec<FoldRow> = folds.collect();
            if folds.is_empty() { Ok(()) } else { swap.store.enqueue_fold(&batch, &folds) }
        })?;
        let mut batch = self.window(first_row, rows, &(from..from), width);
        for (merge, row) in batch.merge.iter_mut().zip(rows) {
            merge.states = u32::from(row.start < row.end);
        }
        self.store.enqueue_merge(query, &batch)
    }

    /// The rows as one window of splits shows them: each has `width + 1` states, the carried one first.
    fn window(&self, first_row: usize, rows: &[Visible], window: &Range<u32>, width: u32) -> Batch {
        let (low, high) = (window.start.saturating_mul(SPLIT), window.end.saturating_mul(SPLIT));
        let cut = |row: &Visible| {
            let (start, end) = (row.start.max(low), row.end.min(high));
            if start < end { Visible { start, end, ..*row } } else { Visible { start: 0, end: 0, ..*row } }
        };
        let cut: Vec<Visible> = rows.iter().map(cut).collect();
        let planned = crate::attention::plan(&cut, self.store.rows_per_tile(), u32::MAX);
        let mut batch = planned.into_iter().next().unwrap_or_else(|| unreachable!("there is a row"));
        batch.first_row = first_row;
        for (at, (row, merge)) in (0..).zip(batch.rows.iter_mut().zip(&mut batch.merge)) {
            row.state = at * (width + 1) + 1;
            *merge = MergeRow { state: at * (width + 1), states: 0 };
        }
        batch.states = rows.len() as u32 * (width + 1);
        batch
    }
}
