//! What do a step's launches read? Descriptors planned for the most tokens that its sequences may come to, of which one more
//! token changes a few words.

use crate::attention::{Batch, Grain, SECTION, SPLIT, Visible};
use crate::backend::params::{MergeRow, Row, Tile};
use std::ops::Range;

const TILE: usize = size_of::<Tile>() / 4;
const ROW: usize = size_of::<Row>() / 4;
const MERGE: usize = size_of::<MergeRow>() / 4;

/// What rows may see at most: as many states as any place of a window needs.
pub(super) fn most_visible(max_tokens: u32, window: Option<u32>, table: u32) -> Visible {
    let whole = Visible { table, start: 0, end: max_tokens };
    let Some(window) = window.filter(|&window| window < max_tokens) else { return whole };
    // The window's first token is the last of a section, and of a split.
    let start = SECTION * SPLIT - 1;
    let part = Visible { table, start, end: start.saturating_add(window) };
    let states = |visible: &Visible| Grain::Split.states(visible.start, visible.end);
    if states(&part) < states(&whole) { part } else { whole }
}

/// The plan of all layers with one window.
#[derive(Debug)]
pub(super) struct WindowPlan {
    pub(super) window: Option<u32>,
    /// Each row with the most that it may see; one tile a row.
    pub(super) batches: Vec<Batch>,
}

impl WindowPlan {
    /// The batch of a row, and the row's place in it.
    fn find(&self, row: usize) -> (&Batch, usize) {
        let after = self.batches.partition_point(|batch| batch.first_row <= row);
        let batch = &self.batches[after - 1];
        (batch, row - batch.first_row)
    }

    /// What a row reads that sees tokens up to `end`: nothing where that is 0.
    fn describe(&self, row: usize, end: u32, table: u32) -> (Tile, Row, MergeRow) {
        let (batch, at) = self.find(row);
        let (tile, most, grain) = (batch.tiles[at], batch.rows[at], batch.grain);
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let split = start / grain.tokens();
        let states = grain.states(start, end);
        let before = split % grain.states_of_a_section();
        let state = most.state;
        (Tile { table, split, ..tile }, Row { start, end, state, split }, MergeRow { state, states, before })
    }

    /// The most states that a row of a batch may come to, with those of its first section before them.
    pub(super) fn most_states(&self, batch: &Batch) -> u32 {
        let states = batch.merge.iter().map(|merge| merge.states).max().unwrap_or(0);
        if self.window.is_some() { states + batch.grain.states_of_a_section() - 1 } else { states }
    }
}

/// The descriptors of every layer, as they lie in device memory behind the page tables: tables `[layer, row, page]`; tiles,
/// rows and merge rows, each `[layer, row]`.
#[derive(Debug)]
pub(super) struct Descriptors {
    plans: Vec<WindowPlan>,
    /// The plan of each layer.
    layers: Vec<usize>,
    rows: usize,
    /// Entries of a table.
    pages: u64,
    /// Tiles, rows and merge rows.
    words: Vec<u32>,
}

impl Descriptors {
    /// Descriptors of rows that see nothing yet, over tables of `pages` entries.
    pub(super) fn new(plans: Vec<WindowPlan>, layers: Vec<usize>, rows: usize, pages: u64) -> Self {
        let words = vec![0; layers.len() * rows * (TILE + ROW + MERGE)];
        let mut all = Descriptors { plans, layers, rows, pages, words };
        for (layer, row) in (0..all.layers.len()).flat_map(|layer| (0..rows).map(move |row| (layer, row))) {
            all.see(layer, row, 0);
        }
        all
    }

    /// Words of all tables.
    pub(super) const fn table_words(layers: usize, rows: usize, pages: u64) -> u64 {
        (layers as u64 * rows as u64).saturating_mul(pages).saturating_add(7) / 8 * 8
    }

    /// Words of everything.
    pub(super) fn bytes(&self) -> u64 {
        (self.first() + self.words.len() as u64) * 4
    }

    /// Words before the first tile.
    fn first(&self) -> u64 {
        Self::table_words(self.layers.len(), self.rows, self.pages)
    }

    /// Descriptors of each kind.
    fn count(&self) -> usize {
        self.layers.len() * self.rows
    }

    /// The words from which on the tiles, rows and merge rows of a layer lie, from row `row` on.
    fn places(&self, layer: usize, row: usize) -> [usize; 3] {
        let (at, count) = (layer * self.rows + row, self.count());
        [at * TILE, count * TILE + at * ROW, count * (TILE + ROW) + at * MERGE]
    }

    pub(super) fn plan(&self, layer: usize) -> &WindowPlan {
        &self.plans[self.layers[layer]]
    }

    /// First word of a row's page table.
    pub(super) fn table(&self, layer: usize, row: usize) -> u64 {
        (layer * self.rows + row) as u64 * self.pages
    }

    /// Lets a row see the tokens up to `end`.
    pub(super) fn see(&mut self, layer: usize, row: usize, end: u32) {
        let table = self.table(layer, row) as u32;
        let (tile, seen, merge) = self.plan(layer).describe(row, end, table);
        let [tiles, rows, merges] = self.places(layer, row);
        self.words[tiles..][..TILE].copy_from_slice(bytemuck::cast_slice(&[tile]));
        self.words[rows..][..ROW].copy_from_slice(bytemuck::cast_slice(&[seen]));
        self.words[merges..][..MERGE].copy_from_slice(bytemuck::cast_slice(&[merge]));
    }

    /// The bytes of everything but the tables, and where they go.
    pub(super) fn all(&self) -> (u64, &[u8]) {
        (self.first() * 4, bytemuck::cast_slice(&self.words))
    }

    /// The bytes that one more token may change, and where they go. Tiles move with windows alone.
    pub(super) fn moving(&self) -> (u64, &[u8]) {
        let from = if self.plans.iter().any(|plan| plan.window.is_some()) { 0 } else { self.count() * TILE };
        ((self.first() + from as u64) * 4, bytemuck::cast_slice(&self.words[from..]))
    }

    /// The bytes before tiles, rows and merge rows of a layer in device memory, from row `row` on.
    pub(super) fn offsets(&self, layer: usize, row: usize) -> [u64; 3] {
        self.places(layer, row).map(|at| (self.first() + at as u64) * 4)
    }

    /// Tiles of some rows of a layer.
    pub(super) fn tiles(&self, layer: usize, rows: Range<usize>) -> &[Tile] {
        bytemuck::cast_slice(&self.words[self.places(layer, rows.start)[0]..][..rows.len() * TILE])
    }

    /// What some rows of a layer see.
    pub(super) fn rows(&self, layer: usize, rows: Range<usize>) -> &[Row] {
        bytemuck::cast_slice(&self.words[self.places(layer, rows.start)[1]..][..rows.len() * ROW])
    }

    /// What is merged for some rows of a layer.
    pub(super) fn merges(&self, layer: usize, rows: Range<usize>) -> &[MergeRow] {
        bytemuck::cast_slice(&self.words[self.places(layer, rows.start)[2]..][..rows.len() * MERGE])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plan;

    /// What rows of a step read is what a plan of their lengths says, and all of it has room.
    #[test]
    fn every_length_fits_the_plan_for_the_longest() {
        for (most, window) in [(3000, None), (3000, Some(1)), (3000, Some(700)), (9000, Some(1100)), (500, Some(700))] {
            for (grain, max_states) in [(Grain::Split, 20), (Grain::Section, 4), (Grain::Split, 1000)] {
                let visible: Vec<_> = (0..3).map(|row| most_visible(most, window, row)).collect();
                let batches = plan(&visible, 4, max_states, grain);
                let plans = vec![WindowPlan { window, batches: batches.clone() }];
                let mut all = Descriptors::new(plans, vec![0, 0], 3, u64::from(most).div_ceil(16));
                for end in (0..=most).filter(|end| [0, 1, 2, 255].contains(&(end % 256))) {
                    (0..3).for_each(|row| all.see(1, row, end.saturating_sub(row as u32)));
                    for batch in &batches {
                        let rows = batch.first_row..batch.first_row + batch.rows.len();
                        let (tiles, seen) = (all.tiles(1, rows.clone()), all.rows(1, rows.clone()));
                        let mut item = 0;
                        for ((tile, row), merge) in tiles.iter().zip(seen).zip(all.merges(1, rows)) {
                            let start = window.map_or(0, |window| row.end.saturating_sub(window));
                            let see = Visible { table: tile.table, start, end: row.end };
                            let [alone] = &plan(&[see], 4, u32::MAX, grain)[..] else { panic!("one batch") };
                            assert_eq!((row.start, row.end, row.split), (start, row.end, alone.rows[0].split));
                            assert_eq!((merge.states, merge.before), (alone.merge[0].states, alone.merge[0].before));
                            assert!(merge.states <= tile.splits, "{end} of {most}, window {window:?}");
                            assert!(merge.state == row.state && tile.split == row.split && tile.item == item);
                            item += tile.splits;
                            assert_eq!(row.state + tile.splits, item, "a tile's items have a state each");
                            assert!(merge.before + merge.states <= all.plan(1).most_states(batch));
                        }
                        assert!(item <= batch.states);
                    }
                }
            }
        }
    }

    #[test]
    fn descriptors_of_layers_lie_apart_and_behind_the_tables() {
        let batches = plan(&[most_visible(40, None, 0), most_visible(40, None, 3)], 4, 100, Grain::Split);
        let mut all = Descriptors::new(vec![WindowPlan { window: None, batches }], vec![0; 3], 2, 3);
        assert_eq!((all.table(0, 1), all.table(2, 1), Descriptors::table_words(3, 2, 3)), (3, 15, 24));
        assert_eq!(all.offsets(0, 0), [96, 96 + 6 * 32, 96 + 6 * 48]);
        assert_eq!(all.offsets(2, 1), [96 + 5 * 32, 96 + 6 * 32 + 5 * 16, 96 + 6 * 48 + 5 * 12]);
        all.see(2, 1, 17);
        let ends: Vec<u32> = (0..3).flat_map(|layer| all.rows(layer, 0..2).iter().map(|row| row.end)).collect();
        assert_eq!(ends, [0, 0, 0, 0, 0, 17]);
        assert_eq!((all.moving().0, all.moving().1.len()), (96 + 6 * 32, 6 * 28));
        assert_eq!(all.bytes(), 96 + 6 * 60);
    }
}
