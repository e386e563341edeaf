//! Which work items attend which rows: cuts rows into tiles, and tiles into batches that fit the state buffer.

use super::Grain;
use crate::backend::Caps;
use crate::backend::params::{MergeRow, Row, Tile};
use crate::record::Record;
use crate::{Dtype, Geometry};

/// What one query row sees: tokens `start..end` of the sequence whose page table starts at word `table`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visible {
    /// First word of the page table.
    pub table: u32,
    /// First visible token.
    pub start: u32,
    /// One past the last visible token; nothing is visible when it is not above `start`.
    pub end: u32,
}

/// One `attend` and one `merge`: consecutive rows whose states fit the state buffer together.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The first row, counted over the whole call; the batch's own rows count from 0.
    pub first_row: usize,
    /// What the rows see and where their states go.
    pub rows: Vec<Row>,
    /// The tiles of `attend`.
    pub tiles: Vec<Tile>,
    /// What `merge` folds.
    pub merge: Vec<MergeRow>,
    /// States of the batch, for each query head.
    pub states: u32,
    /// What each of them covers.
    pub grain: Grain,
}

impl Batch {
    fn new(first_row: usize, grain: Grain) -> Self {
        Batch { first_row, rows: Vec::new(), tiles: Vec::new(), merge: Vec::new(), states: 0, grain }
    }

    /// Work items for each KV head, where one takes up to `query_tile` query vectors, `group` a row.
    fn work(&self, group: u32, query_tile: u32) -> u64 {
        let of = |tile: &Tile| {
            u64::from(tile.splits) * (u64::from(tile.rows) * u64::from(group)).div_ceil(query_tile.into())
        };
        self.tiles.iter().map(of).sum()
    }

    /// Work items of the batch.
    fn items(&self) -> u32 {
        self.tiles.last().map_or(0, |tile| tile.item + tile.splits)
    }

    fn push(&mut self, tile: &[Visible]) {
        let first = u32::try_from(self.rows.len()).expect("a batch holds at most max_states rows");
        let (mut from, mut to) = (u32::MAX, 0);
        let tokens = self.grain.tokens();
        for visible in tile {
            let mut row = Row { start: visible.start, end: visible.end, state: self.states, split: 0 };
            if row.end > row.start {
                row.split = row.start / tokens;
                from = from.min(row.split);
                to = to.max(row.end.div_ceil(tokens));
            } else {
                (row.start, row.end) = (0, 0);
            }
            let states = self.grain.states(row.start, row.end);
            self.states += states;
            self.merge.push(MergeRow {
                state: row.state,
                states,
                before: row.split % self.grain.states_of_a_section(),
            });
            self.rows.push(row);
        }
        if to > from {
            let (table, rows, item) = (tile[0].table, self.rows.len() as u32 - first, self.items());
            self.tiles.push(Tile { table, row: first, rows, split: from, splits: to - from, item, reserved: [0; 2] });
        }
    }
}

/// Plans rows for a device: work items are sections where there are enough of them, else splits.
pub fn plan_for(rows: &[Visible], geometry: &Geometry, caps: &Caps, max_states: u32) -> Vec<Batch> {
    let planned = |grain| plan(rows, caps.rows_per_tile(geometry), max_states, grain);
    let sections = planned(Grain::Section);
    let items = sections.iter().map(|batch| batch.work(geometry.group(), caps.query_tile)).max().unwrap_or(0);
    if items * u64::from(geometry.kv_heads()) < caps.at_once { planned(Grain::Split) } else { sections }
}

/// Plans rows for a device that may have something faster for chunks of prompts ([`Caps::prefill`]), for queries of type
/// `q`: rows of one sequence that make up half a work item of it have batches of their own.
pub fn plan_chunks(rows: &[Visible], record: &Record, q: Dtype, caps: &Caps, max_states: u32) -> Vec<Batch> {
    let geometry = record.geometry();
    let Some(vectors) = (caps.prefill)(record, q) else { return plan_for(rows, geometry, caps, max_states) };
    let is_chunk = |rows: &[Visible]| 2 * rows.len() as u64 * u64::from(geometry.group()) >= u64::from(vectors);
    let mut batches: Vec<Batch> = Vec::new();
    let mut at = 0;
    while at < rows.len() {
        let mut end = at;
        let mut chunk = None;
        for run in rows[at..].chunk_by(|a, b| a.table == b.table) {
            if *chunk.get_or_insert(is_chunk(run)) != is_chunk(run) {
                break;
            }
            end += run.len();
        }
        let of_chunk =
            chunk.and_then(|chunk| chunk.then(|| plan_chunk(&rows[at..end], vectors, geometry, caps, max_states)));
        let planned = of_chunk.flatten().unwrap_or_else(|| plan_for(&rows[at..end], geometry, caps, max_states));
        batches.extend(planned.into_iter().map(|batch| Batch { first_row: batch.first_row + at, ..batch }));
        at = end;
    }
    batches
}

/// Work items of up to `vectors` query vectors: of whole rows where they fill the device as often as they come, else of
/// sections; `None` where even those leave most of it idle.
fn plan_chunk(rows: &[Visible], vectors: u32, geometry: &Geometry, caps: &Caps, max_states: u32) -> Option<Vec<Batch>> {
    let planned = |grain| {
        let batches = plan(rows, (vectors / geometry.group()).max(1), max_states, grain);
        let items = batches.iter().map(|batch| batch.work(geometry.group(), vectors)).max().unwrap_or(0);
        (batches, items * u64::from(geometry.kv_heads()))
    };
    let (whole, items) = planned(Grain::Whole);
    if 5 * items >= 4 * items.next_multiple_of(caps.at_once) {
        return Some(whole);
    }
    let (sections, items) = planned(Grain::Section);
    (2 * items >= caps.at_once).then_some(sections)
}

/// Plans rows in their order: consecutive rows of one sequence share tiles of up to `rows_per_tile` rows, and a batch
/// ends before it would hold more than `max_states` states (a row that alone has more gets a batch of its own).
pub fn plan(rows: &[Visible], rows_per_tile: u32, max_states: u32, grain: Grain) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut batch = Batch::new(0, grain);
    let mut at = 0;
    while at < rows.len() {
        let tile = rows[at..].iter().take(rows_per_tile as usize).take_while(|row| row.table == rows[at].table).count();
        let mut tile = &rows[at..at + tile];
        let count = |tile: &[Visible]| tile.iter().map(|v| u64::from(grain.states(v.start, v.end))).sum::<u64>();
        while tile.len() > 1 && count(tile) > u64::from(max_states) {
            tile = &tile[..tile.len() - 1];
        }
        let states = count(tile);
        let rows_full = batch.rows.len() + tile.len() > max_states as usize;
        if !batch.rows.is_empty() && (rows_full || u64::from(batch.states) + states > u64::from(max_states)) {
            batches.push(std::mem::replace(&mut batch, Batch::new(at, grain)));
        }
        batch.push(tile);
        at += tile.len();
    }
    if !batch.rows.is_empty() {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(table: u32, len: u32) -> Visible {
        Visible { table, start: 0, end: len }
    }

    #[test]
    fn states_follow_each_other_in_row_and_token_order() {
        let rows = [decode(0, 1), decode(8, 257), decode(16, 0), decode(24, 256)];
        let [batch] = &plan(&rows, 4, 1000, Grain::Split)[..] else { panic!("one batch") };
        let merge: Vec<_> = batch.merge.iter().map(|m| (m.state, m.states)).collect();
        assert_eq!(merge, [(0, 1), (1, 2), (3, 0), (3, 1)]);
        assert_eq!(batch.states, 4);
        let tiles: Vec<_> = batch.tiles.iter().map(|t| (t.row, t.rows, t.split, t.splits, t.item)).collect();
        assert_eq!(tiles, [(0, 1, 0, 1, 0), (1, 1, 0, 2, 1), (3, 1, 0, 1, 3)]);
    }

    #[test]
    fn a_chunk_shares_tiles_and_windows_skip_leading_splits() {
        let rows: Vec<_> = (0..5).map(|i| Visible { table: 3, start: 600 + i, end: 1020 + i }).collect();
        let [batch] = &plan(&rows, 4, 1000, Grain::Split)[..] else { panic!("one batch") };
        let tiles: Vec<_> = batch.tiles.iter().map(|t| (t.row, t.rows, t.split, t.splits)).collect();
        assert_eq!(tiles, [(0, 4, 2, 2), (4, 1, 2, 2)]);
        assert!(batch.rows.iter().all(|row| row.split == 2));
    }

    #[test]
    fn batches_are_cut_by_states_and_cover_every_row_once() {
        let rows: Vec<_> = (0..100).map(|i| decode(i / 7 * 100, i * 50)).collect();
        for max in [1, 5, 64, 10_000] {
            let batches = plan(&rows, 4, max, Grain::Split);
            let mut next = 0;
            for batch in &batches {
                assert_eq!(batch.first_row, next);
                next += batch.rows.len();
                assert!(batch.states <= max || batch.rows.len() == 1, "{} states", batch.states);
            }
            assert_eq!(next, 100);
        }
    }

    /// A device that takes 128 vectors of a chunk at a time and is full with ten work items.
    fn plan_of_chunks(rows: &[Visible], max_states: u32) -> Vec<Batch> {
        let geometry = Geometry::new(1, 8, 2, 128).format(crate::PageFormat::Bf16);
        let record = Record::new(geometry);
        let cpu = crate::backend::cpu::CpuBackend::new();
        let mut caps = crate::backend::Backend::caps(&cpu).clone();
        (caps.query_tile, caps.at_once) = (8, 10);
        caps.prefill = |_, q| (q == Dtype::Bf16).then_some(128);
        plan_chunks(rows, &record, Dtype::Bf16, &caps, max_states)
    }

    #[test]
    fn chunks_have_batches_of_their_own() {
        let chunk = |table, len: u32| (0..320).map(move |row| Visible { table, start: 0, end: len - 319 + row });
        let rows: Vec<_> = [decode(0, 9000), decode(100, 5000)].into_iter().chain(chunk(200, 3000)).collect();
        let rows: Vec<_> = rows.into_iter().chain(chunk(300, 700)).chain([decode(400, 7)]).collect();
        let batches = plan_of_chunks(&rows, 10_000);
        let grains: Vec<_> = batches.iter().map(|b| (b.first_row, b.rows.len(), b.grain)).collect();
        assert_eq!(grains, [(0, 2, Grain::Section), (2, 640, Grain::Whole), (642, 1, Grain::Split)]);
        let tiles: Vec<_> = batches[1].tiles.iter().map(|t| (t.table, t.rows, t.split, t.splits)).collect();
        assert_eq!(tiles[..10], [(200, 32, 0, 1); 10]);
        assert_eq!(tiles[10..], [(300, 32, 0, 1); 10]);
        assert_eq!(batches[1].states, 640);
    }

    #[test]
    fn chunks_too_short_for_whole_rows_are_cut_at_sections() {
        let chunk = |rows: u32, len: u32| (0..rows).map(|row| decode(5, len + 1 - rows + row)).collect::<Vec<_>>();
        let of = |rows, len| plan_of_chunks(&chunk(rows, len), 10_000)[0].clone();
        assert_eq!((of(40, 9000).grain, of(40, 9000).tiles.len()), (Grain::Section, 2));
        // Neither fills the device: as if it were no chunk.
        assert_eq!((of(32, 700).grain, of(32, 700).tiles.len()), (Grain::Section, 16));
        assert_eq!(of(15, 9000).tiles[0].rows, 2);
    }

    #[test]
    fn batches_of_chunks_cover_every_row_once_whatever_the_states() {
        let rows: Vec<_> = (0..700).map(|i| decode(i / 140 * 1000, 1 + i % 140 * 50)).collect();
        for max in [1, 33, 400, 100_000] {
            let batches = plan_of_chunks(&rows, max);
            let mut next = 0;
            for batch in &batches {
                assert_eq!(batch.first_row, next);
                next += batch.rows.len();
                assert!(batch.states <= max || batch.rows.len() == 1, "{} states", batch.states);
            }
            assert_eq!(next, 700);
        }
    }
}
