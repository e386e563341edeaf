//! Attention of many rows over a long sequence, whose states do not fit together: split after split in token order, so that
//! each page comes once for all rows.
//!
//! A row's states fold into two that are carried along: the sections that are whole, and what has come of the next one. That
//! is the order in which states fold that are all kept, so the bits are theirs.

use super::HighSpeedSwap;
use super::attend::Cast;
use super::plan::{Need, Piece, Span, parts};
use crate::Result;
use crate::attention::{Batch, Grain, SECTION, SPLIT, Visible};
use crate::backend::Backend;
use crate::backend::params::{FoldRow, MergeRow, Row};
use crate::store::Query;
use std::ops::Range;

/// States that a row carries along: of its whole sections, and of the splits of a section that is not whole yet.
const CARRIED: u32 = 2;

/// How a row's states of some splits, all of one section, join those that it carries.
struct Folds {
    into_section: FoldRow,
    /// Where the row sees no more of the section.
    into_total: Option<FoldRow>,
}

impl Folds {
    /// `row` is cut to a window and sees `visible` in all; nothing where it sees none of the splits.
    fn of(row: &Row, visible: &Visible, splits: &Range<u32>) -> Option<Self> {
        let states = Grain::Split.states(row.start, row.end);
        let (from, to) = (splits.start.max(row.split), splits.end.min(row.split + states));
        if states == 0 || from >= to {
            return None;
        }
        let (total, section) = (row.state - CARRIED, row.state - CARRIED + 1);
        let (first, section_start) = (visible.start / SPLIT, from / SECTION * SECTION);
        // A section that has begun in an earlier window goes on in this one with the row's first split, which it precedes.
        let begun = u32::from(first.max(section_start) < from);
        let into_section = FoldRow {
            state: row.state + from - row.split - begun,
            states: to - from + begun,
            to: section,
            reserved: 0,
        };
        let ends = to.is_multiple_of(SECTION) || to == visible.end.div_ceil(SPLIT);
        let earlier = u32::from(first < section_start);
        let into_total = FoldRow { state: section - earlier, states: 1 + earlier, to: total, reserved: 0 };
        Some(Folds { into_section, into_total: ends.then_some(into_total) })
    }
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Attends all rows of a call, sequence by sequence.
    pub(super) fn attend_in_order(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        visible: &[Visible],
    ) -> Result<()> {
        // Room for the carried states and at least one split more of every row.
        let most = (self.store.max_states() / (CARRIED + 1)).max(1) as usize;
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
        let room = (self.store.max_states() / rows.len() as u32).saturating_sub(CARRIED).max(1);
        let width = (self.tile_size().missing * page_size / SPLIT).clamp(1, room);
        let windows: Vec<Range<u32>> =
            (from..to).step_by(width as usize).map(|split| split..(split + width).min(to)).collect();
        // What is missing is asked when a window is fetched.
        let tile =
            |window: &Range<u32>| Piece { spans: vec![Span { sequence: 0, splits: window.clone() }], missing: 0 };
        let tiles = windows.iter().map(tile).collect();
        let mut cast = Cast { ids: vec![id], needs: vec![Need { splits: from..to, pages }], ..Cast::default() };
        cast.by_table.extend(rows.iter().map(|row| (row.table, 0)));
        self.in_turn(layer, &cast, tiles, 1, |swap, tile| {
            let splits = &tile.spans[0].splits;
            let batch = swap.window(first_row, rows, splits, width);
            swap.attend_piece(layer, query, &batch, &cast, &tile.spans)?;
            for part in parts(splits, SECTION) {
                let folds = batch.rows.iter().zip(rows).filter_map(|(row, visible)| Folds::of(row, visible, &part));
                let folds: Vec<Folds> = folds.collect();
                let into_section: Vec<FoldRow> = folds.iter().map(|folds| folds.into_section).collect();
                let into_total: Vec<FoldRow> = folds.iter().filter_map(|folds| folds.into_total).collect();
                for folds in [into_section, into_total].iter().filter(|folds| !folds.is_empty()) {
                    swap.store.enqueue_fold(&batch, folds)?;
                }
            }
            Ok(())
        })?;
        let mut batch = self.window(first_row, rows, &(from..from), width);
        batch.grain = Grain::Section;
        for (merge, row) in batch.merge.iter_mut().zip(rows) {
            merge.states = u32::from(row.start < row.end);
        }
        self.store.enqueue_merge(query, &batch)
    }

    /// The rows as one window of splits shows them: each has the carried states and then `width` of its own.
    fn window(&self, first_row: usize, rows: &[Visible], window: &Range<u32>, width: u32) -> Batch {
        let (low, high) = (window.start.saturating_mul(SPLIT), window.end.saturating_mul(SPLIT));
        let cut = |row: &Visible| {
            let (start, end) = (row.start.max(low), row.end.min(high));
            if start < end { Visible { start, end, ..*row } } else { Visible { start: 0, end: 0, ..*row } }
        };
        let cut: Vec<Visible> = rows.iter().map(cut).collect();
        let planned = crate::attention::plan(&cut, self.store.rows_per_tile(), u32::MAX, Grain::Split);
        let mut batch = planned.into_iter().next().unwrap_or_else(|| unreachable!("there is a row"));
        batch.first_row = first_row;
        for (at, (row, merge)) in (0..).zip(batch.rows.iter_mut().zip(&mut batch.merge)) {
            row.state = at * (CARRIED + width) + CARRIED;
            *merge = MergeRow { state: at * (CARRIED + width), states: 0, before: 0 };
        }
        batch.states = rows.len() as u32 * (CARRIED + width);
        batch
    }
}
