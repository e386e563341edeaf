//! The pages of one sequence in one layer, and what a write to them needs.

use super::frames::Frames;
use super::tables::Span;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// The page table of one sequence and layer, as the host knows it.
#[derive(Debug, Default)]
pub(crate) struct LayerPages {
    /// The page table: the number of each page.
    pub(crate) table: Vec<u32>,
    /// Grows with every change of `table`.
    pub(crate) edition: u64,
    /// Tokens held.
    pub(crate) len: u64,
    /// Page numbers claimed, with their frames, for pages to come.
    pub(crate) reserved: VecDeque<u32>,
    /// The table's place on the device.
    pub(crate) span: Option<Span>,
    /// Entries that the device does not know yet.
    pub(crate) dirty: Range<usize>,
    /// The frames that the device's table names, where pages change frames; empty where a page's number is its frame.
    pub(crate) known: Vec<u32>,
}

impl LayerPages {
    /// Notes that the device must learn entry `page`.
    pub(crate) fn touch(&mut self, page: usize) {
        self.dirty = if self.dirty.is_empty() {
            page..page + 1
        } else {
            self.dirty.start.min(page)..self.dirty.end.max(page + 1)
        };
    }
}

/// One page of a write whose frame cannot be written in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// The page does not exist yet.
    New,
    /// The page is shared: its record is copied first.
    Copy,
    /// The page is shared, and every valid token of it is about to be overwritten: no copy.
    Replace,
}

/// Changes of owner counts that a plan assumes before they happen.
#[derive(Debug, Default)]
pub(crate) struct Owners(HashMap<u32, u32>);

impl Owners {
    /// Owners of a frame after the writes planned so far.
    fn of(&self, frames: &Frames, frame: u32) -> u32 {
        self.0.get(&frame).copied().unwrap_or_else(|| frames.owners(frame))
    }
}

/// The pages of `offset..offset + tokens` that need a frame, with the reason, in page order.
///
/// A shared page is copied by every writer but the last owner, so plans of one call share `owners`.
pub(crate) fn fresh_pages(
    pages: &LayerPages,
    write: Range<u64>,
    page_size: u64,
    frames: &Frames,
    owners: &mut Owners,
) -> Vec<(usize, Fresh)> {
    let mut fresh = Vec::new();
    if write.is_empty() {
        return fresh;
    }
    for page in write.start / page_size..write.end.div_ceil(page_size) {
        let Some(&frame) = pages.table.get(page as usize) else {
            fresh.push((page as usize, Fresh::New));
            continue;
        };
        let count = owners.of(frames, frame);
        if count > 1 {
            owners.0.insert(frame, count - 1);
            let valid = page * page_size..((page + 1) * page_size).min(pages.len);
            let overwritten = write.start <= valid.start && valid.end <= write.end;
            fresh.push((page as usize, if overwritten { Fresh::Replace } else { Fresh::Copy }));
        }
    }
    fresh
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(len: u64, owners: &[u32]) -> (LayerPages, Frames) {
        let mut frames = Frames::new(8);
        frames.add_slab(16);
        let pages = owners.iter().map(|&n| {
            let frame = frames.take(None).unwrap();
            (1..n).for_each(|_| frames.retain(frame));
            frame
        });
        let pages = pages.collect();
        (LayerPages { table: pages, len, ..LayerPages::default() }, frames)
    }

    fn plan(len: u64, owners: &[u32], write: Range<u64>) -> Vec<(usize, Fresh)> {
        let (pages, frames) = shared(len, owners);
        fresh_pages(&pages, write, 16, &frames, &mut Owners::default())
    }

    #[test]
    fn private_pages_are_written_in_place_and_missing_ones_are_new() {
        assert_eq!(plan(20, &[1, 1], 20..21), []);
        assert_eq!(plan(32, &[1, 1], 32..33), [(2, Fresh::New)]);
        assert_eq!(plan(0, &[], 0..40), [(0, Fresh::New), (1, Fresh::New), (2, Fresh::New)]);
        assert_eq!(plan(5, &[1], 5..5), []);
    }

    #[test]
    fn a_shared_page_is_copied_unless_all_its_valid_tokens_are_overwritten() {
        assert_eq!(plan(20, &[2, 2], 20..22), [(1, Fresh::Copy)]);
        assert_eq!(plan(20, &[2, 2], 16..22), [(1, Fresh::Replace)]);
        assert_eq!(plan(20, &[2, 2], 10..20), [(0, Fresh::Copy), (1, Fresh::Replace)]);
        assert_eq!(plan(48, &[2, 2, 2], 10..40), [(0, Fresh::Copy), (1, Fresh::Replace), (2, Fresh::Copy)]);
    }

    #[test]
    fn the_last_of_several_writers_in_one_plan_writes_in_place() {
        let (pages, frames) = shared(20, &[1, 3]);
        let mut owners = Owners::default();
        let mut next = || fresh_pages(&pages, 20..21, 16, &frames, &mut owners);
        assert_eq!((next(), next(), next()), (vec![(1, Fresh::Copy)], vec![(1, Fresh::Copy)], vec![]));
    }
}
