//! In which order does attention meet the pages? Splits whose pages are all on the device first, then tiles of splits that
//! are read ahead.
//!
//! A split is the unit: its pages are on the device together when it is attended, so where they came from cannot change
//! its state (contract C1).

use crate::attention::{Batch, SPLIT};
use crate::backend::params::Tile;
use std::ops::Range;

/// A sequence in an attention: the splits that its rows see, and the pages that hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Need {
    /// Splits that some row sees.
    pub(super) splits: Range<u32>,
    /// Pages of the sequence.
    pub(super) pages: u32,
}

/// Consecutive splits of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    /// Index of the sequence.
    pub(super) sequence: usize,
    pub(super) splits: Range<u32>,
}

/// Splits that are attended together once their pages have come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) spans: Vec<Span>,
    /// Pages among them that must come.
    pub(super) missing: usize,
}

impl Piece {
    /// A piece for every `each` splits. (What is missing is asked anew when a piece is fetched.)
    pub(super) fn parts(&self, each: u32) -> Vec<Piece> {
        let spans = self.spans.iter().flat_map(|span| parts(&span.splits, each).map(|splits| (span.sequence, splits)));
        spans.map(|(sequence, splits)| Piece { spans: vec![Span { sequence, splits }], missing: 0 }).collect()
    }

    fn push(&mut self, sequence: usize, splits: Range<u32>) {
        match self.spans.last_mut() {
            Some(span) if span.sequence == sequence && span.splits.end == splits.start => span.splits.end = splits.end,
            _ => self.spans.push(Span { sequence, splits }),
        }
    }
}

/// Splits in runs of `each`, cut where its multiples are.
pub(super) fn parts(splits: &Range<u32>, each: u32) -> impl Iterator<Item = Range<u32>> + use<> {
    let Range { start, end } = *splits;
    (start / each..end.div_ceil(each)).map(move |part| start.max(part * each)..end.min((part + 1) * each))
}

/// How large a tile of more than one split may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileSize {
    /// Pages that must come.
    pub(super) missing: u32,
    /// Pages in all: those that are there stay with the others until the tile is attended.
    pub(super) pages: u32,
}

/// What can be attended at once, and the tiles after it, in whole runs of `each` splits.
pub(super) fn pieces(
    needs: &[Need],
    page_size: u32,
    each: u32,
    size: TileSize,
    is_missing: impl Fn(usize, u32) -> bool,
) -> (Piece, Vec<Piece>) {
    let (mut resident, mut tiles) = (Piece::default(), Vec::new());
    let (mut tile, mut tile_pages) = (Piece::default(), 0);
    for (sequence, need) in needs.iter().enumerate() {
        for splits in parts(&need.splits, each) {
            let pages = pages_of(&splits, page_size, need.pages);
            let count = pages.len();
            let missing = pages.filter(|&page| is_missing(sequence, page)).count();
            if missing == 0 {
                resident.push(sequence, splits);
                continue;
            }
            let large = tile.missing + missing > size.missing as usize;
            if tile.missing > 0 && (large || tile_pages + count > size.pages as usize) {
                tiles.push(std::mem::take(&mut tile));
                tile_pages = 0;
            }
            tile.push(sequence, splits);
            tile_pages += count;
            tile.missing += missing;
        }
    }
    if !tile.spans.is_empty() {
        tiles.push(tile);
    }
    (resident, tiles)
}

/// The pages of consecutive splits, of a sequence of `pages` pages.
pub(super) fn pages_of(splits: &Range<u32>, page_size: u32, pages: u32) -> Range<u32> {
    let at = |split: u32| split.saturating_mul(SPLIT / page_size).min(pages);
    at(splits.start)..at(splits.end)
}

/// The tiles of a batch, cut down to the splits of a piece (whole sections, where the batch's states are those) and numbered
/// anew. `sequence_of` names a tile's sequence.
pub(super) fn tiles(batch: &Batch, spans: &[Span], sequence_of: impl Fn(&Tile) -> usize) -> Vec<Tile> {
    let each = batch.grain.splits();
    let mut cut = Vec::new();
    let mut item = 0;
    for tile in &batch.tiles {
        let sequence = sequence_of(tile);
        for span in spans.iter().filter(|span| span.sequence == sequence) {
            let from = tile.split.max(span.splits.start / each);
            let to = (tile.split + tile.splits).min(span.splits.end.div_ceil(each));
            if from < to {
                cut.push(Tile { split: from, splits: to - from, item, ..*tile });
                item += to - from;
            }
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Grain, Visible, plan};

    #[test]
    fn resident_splits_come_first_and_tiles_hold_whole_splits() {
        // Pages of 64: four a split. Sequence 0 misses page 1 and pages 8 to 11; sequence 1 misses page 0.
        let needs = [Need { splits: 0..3, pages: 11 }, Need { splits: 0..1, pages: 2 }];
        let missing = |sequence: usize, page: u32| match sequence {
            0 => page == 1 || page >= 8,
            _ => page == 0,
        };
        let size = |missing, pages| TileSize { missing, pages };
        let (resident, tiles) = pieces(&needs, 64, 1, size(4, 100), missing);
        assert_eq!(resident.spans, [Span { sequence: 0, splits: 1..2 }]);
        assert_eq!(tiles.len(), 2);
        assert_eq!(tiles[0].spans, [Span { sequence: 0, splits: 0..1 }, Span { sequence: 0, splits: 2..3 }]);
        assert_eq!(tiles[0].missing, 4);
        assert_eq!(tiles[1].missing, 1);
        let (_, small) = pieces(&needs, 64, 1, size(1, 100), missing);
        let misses = |tiles: Vec<Piece>| tiles.iter().map(|tile| tile.missing).collect::<Vec<_>>();
        assert_eq!(misses(small), [1, 3, 1]);
        // Seven pages in all for sequence 0's two splits.
        assert_eq!(misses(pieces(&needs, 64, 1, size(100, 6), missing).1), [1, 4]);
    }

    #[test]
    fn pieces_cover_every_work_item_once() {
        let rows: Vec<Visible> = (0..5).map(|i| Visible { table: i / 3 * 100, start: 0, end: 300 * (i + 1) }).collect();
        for grain in Grain::ALL {
            cover(&plan(&rows, 2, 1000, grain)[0]);
        }
    }

    fn cover(batch: &Batch) {
        let each = batch.grain.splits();
        let needs = [(4, 57), (6, 94)]
            .map(|(splits, pages): (u32, u32)| Need { splits: 0..splits.next_multiple_of(each), pages });
        let size = TileSize { missing: 20, pages: 1000 };
        let (resident, streamed) = pieces(&needs, 16, each, size, |_, page| page % 40 > 20);
        let mut seen: Vec<(u32, u32)> = Vec::new();
        for piece in std::iter::once(&resident).chain(&streamed) {
            let cut = tiles(batch, &piece.spans, |tile| usize::from(tile.table == 100));
            let mut item = 0;
            for tile in cut {
                assert_eq!(tile.item, item);
                item += tile.splits;
                seen.extend((tile.split..tile.split + tile.splits).map(|split| (tile.row, split)));
            }
        }
        seen.sort_unstable();
        let mut all: Vec<(u32, u32)> = Vec::new();
        for tile in &batch.tiles {
            all.extend((tile.split..tile.split + tile.splits).map(|split| (tile.row, split)));
        }
        all.sort_unstable();
        assert_eq!(seen, all);
    }
}
