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
    /// A piece for each split. (What is missing is asked anew when a piece is fetched.)
    pub(super) fn splits(&self) -> Vec<Piece> {
        let one = |sequence, split| Span { sequence, splits: split..split + 1 };
        let spans = self.spans.iter().flat_map(|span| span.splits.clone().map(|split| one(span.sequence, split)));
        spans.map(|span| Piece { spans: vec![span], missing: 0 }).collect()
    }

    fn push(&mut self, sequence: usize, split: u32) {
        match self.spans.last_mut() {
            Some(span) if span.sequence == sequence && span.splits.end == split => span.splits.end += 1,
            _ => self.spans.push(Span { sequence, splits: split..split + 1 }),
        }
    }
}

/// How large a tile of more than one split may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileSize {
    /// Pages that must come.
    pub(super) missing: u32,
    /// Pages in all: those that are there stay with the others until the tile is attended.
    pub(super) pages: u32,
}

/// What can be attended at once, and the tiles after it.
pub(super) fn pieces(
    needs: &[Need],
    page_size: u32,
    size: TileSize,
    is_missing: impl Fn(usize, u32) -> bool,
) -> (Piece, Vec<Piece>) {
    let (mut resident, mut tiles) = (Piece::default(), Vec::new());
    let (mut tile, mut tile_pages) = (Piece::default(), 0);
    for (sequence, need) in needs.iter().enumerate() {
        for split in need.splits.clone() {
            let pages = pages_of(split, page_size, need.pages);
            let count = pages.len();
            let missing = pages.filter(|&page| is_missing(sequence, page)).count();
            if missing == 0 {
                resident.push(sequence, split);
                continue;
            }
            let large = tile.missing + missing > size.missing as usize;
            if tile.missing > 0 && (large || tile_pages + count > size.pages as usize) {
                tiles.push(std::mem::take(&mut tile));
                tile_pages = 0;
            }
            tile.push(sequence, split);
            tile_pages += count;
            tile.missing += missing;
        }
    }
    if !tile.spans.is_empty() {
        tiles.push(tile);
    }
    (resident, tiles)
}

/// The pages of a split, of a sequence of `pages` pages.
pub(super) fn pages_of(split: u32, page_size: u32, pages: u32) -> Range<u32> {
    let per_split = SPLIT / page_size;
    let first = split.saturating_mul(per_split).min(pages);
    first..first.saturating_add(per_split).min(pages)
}

/// The tiles of a batch, cut down to the splits of a piece and numbered anew. `sequence_of` names a tile's sequence.
pub(super) fn tiles(batch: &Batch, spans: &[Span], sequence_of: impl Fn(&Tile) -> usize) -> Vec<Tile> {
    let mut cut = Vec::new();
    let mut item = 0;
    for tile in &batch.tiles {
        let sequence = sequence_of(tile);
        for span in spans.iter().filter(|span| span.sequence == sequence) {
            let from = tile.split.max(span.splits.start);
            let to = (tile.split + tile.splits).min(span.splits.end);
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
    use crate::attention::{Visible, plan};

    #[test]
    fn resident_splits_come_first_and_tiles_hold_whole_splits() {
        // Pages of 64: four a split. Sequence 0 misses page 1 and pages 8 to 11; sequence 1 misses page 0.
        let needs = [Need { splits: 0..3, pages: 11 }, Need { splits: 0..1, pages: 2 }];
        let missing = |sequence: usize, page: u32| match sequence {
            0 => page == 1 || page >= 8,
            _ => page == 0,
        };
        let size = |missing, pages| TileSize { missing, pages };
        let (resident, tiles) = pieces(&needs, 64, size(4, 100), missing);
        assert_eq!(resident.spans, [Span { sequence: 0, splits: 1..2 }]);
        assert_eq!(tiles.len(), 2);
        assert_eq!(tiles[0].spans, [Span { sequence: 0, splits: 0..1 }, Span { sequence: 0, splits: 2..3 }]);
        assert_eq!(tiles[0].missing, 4);
        assert_eq!(tiles[1].missing, 1);
        let (_, small) = pieces(&needs, 64, size(1, 100), missing);
        let misses = |tiles: Vec<Piece>| tiles.iter().map(|tile| tile.missing).collect::<Vec<_>>();
        assert_eq!(misses(small), [1, 3, 1]);
        // Seven pages in all for sequence 0's two splits.
        assert_eq!(misses(pieces(&needs, 64, size(100, 6), missing).1), [1, 4]);
    }

    #[test]
    fn pieces_cover_every_work_item_once() {
        let rows: Vec<Visible> = (0..5).map(|i| Visible { table: i / 3 * 100, start: 0, end: 300 * (i + 1) }).collect();
        let batch = &plan(&rows, 2, 1000)[0];
        let needs = [Need { splits: 0..4, pages: 57 }, Need { splits: 0..6, pages: 94 }];
        let (resident, streamed) = pieces(&needs, 16, TileSize { missing: 20, pages: 1000 }, |_, page| page % 40 > 20);
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
