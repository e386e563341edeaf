//! Which pages does the cascade keep in host memory, and which of them has the file not seen yet?

use super::super::TierStats;
use super::cells::Cells;
use crate::backend::Backend;
use std::collections::HashMap;

/// Cells looked at for one that has been passed by.
const LOOKED_AT: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Kept {
    cell: u32,
    generation: u64,
    /// The file has no copy.
    dirty: bool,
    /// Moves under way that use the cell.
    users: u32,
    /// Pages read from the tier when this one was last used.
    used: u64,
}

/// Cells that keep pages, by slot.
#[derive(Debug)]
pub(super) struct Cache<B: Backend> {
    pub(super) cells: Cells<B>,
    kept: HashMap<u32, Kept>,
    /// Pages that are gone while their cells are in use.
    ghosts: Vec<(u32, Kept)>,
    /// Slots in the order in which cells are looked at.
    clock: Vec<u32>,
    hand: usize,
    reads: u64,
    stats: TierStats,
}

impl<B: Backend> Cache<B> {
    pub(super) fn new(cells: Cells<B>) -> Self {
        let (tier, mode, page_bytes) = ("host", "cache over the file".into(), cells.stride());
        let stats = TierStats { tier, mode, page_bytes, ..TierStats::default() };
        Cache { cells, kept: HashMap::new(), ghosts: Vec::new(), clock: Vec::new(), hand: 0, reads: 0, stats }
    }

    pub(super) fn capacity(&self) -> u32 {
        self.cells.count()
    }

    /// The cell of a page that is kept, for a move that uses it until [`done`](Self::done).
    pub(super) fn hit(&mut self, slot: u32, generation: u64, bytes: usize) -> Option<u32> {
        let kept = self.kept.get_mut(&slot).filter(|kept| kept.generation == generation)?;
        kept.users += 1;
        self.stats.hits += 1;
        self.stats.pages_out += 1;
        self.stats.bytes_out += bytes as u64;
        Some(kept.cell)
    }

    /// Counts a page that was read, from whichever level.
    pub(super) fn count_read(&mut self, slot: u32) {
        self.reads += 1;
        if let Some(kept) = self.kept.get_mut(&slot) {
            kept.used = self.reads;
        }
    }

    /// A cell for a page that is to be kept, in use until [`done`](Self::done); `None` when none is free and none has
    /// been passed by for two sweeps over `pages` pages.
    pub(super) fn keep(&mut self, slot: u32, generation: u64, dirty: bool, pages: u64, bytes: usize) -> Option<u32> {
        self.forget(slot);
        let cell = self.cells.take().or_else(|| self.evict(pages))?;
        let kept = Kept { cell, generation, dirty, users: 1, used: self.reads };
        self.kept.insert(slot, kept);
        self.clock.push(slot);
        if self.clock.len() > 2 * self.kept.len() + LOOKED_AT {
            let kept = &self.kept;
            self.clock.retain(|slot| kept.contains_key(slot));
            self.clock.sort_unstable();
            self.clock.dedup();
        }
        self.stats.pages_in += 1;
        self.stats.bytes_in += bytes as u64;
        Some(cell)
    }

    fn evict(&mut self, pages: u64) -> Option<u32> {
        for _ in 0..LOOKED_AT.min(self.clock.len()) {
            self.hand = if self.hand >= self.clock.len() { 0 } else { self.hand };
            let slot = *self.clock.get(self.hand)?;
            let stale = match self.kept.get(&slot) {
                None => {
                    self.clock.swap_remove(self.hand);
                    continue;
                }
                Some(kept) => !kept.dirty && kept.users == 0 && self.reads - kept.used > 2 * pages,
            };
            if stale {
                self.clock.swap_remove(self.hand);
                return self.kept.remove(&slot).map(|kept| kept.cell);
            }
            self.hand += 1;
        }
        None
    }

    /// A move that used the page's cell has finished.
    pub(super) fn done(&mut self, slot: u32, generation: u64) {
        if let Some(kept) = self.kept.get_mut(&slot).filter(|kept| kept.generation == generation) {
            kept.users = kept.users.saturating_sub(1);
            return;
        }
        let ghost = self.ghosts.iter().position(|(ghost, kept)| *ghost == slot && kept.generation == generation);
        if let Some(at) = ghost {
            let kept = &mut self.ghosts[at].1;
            kept.users = kept.users.saturating_sub(1);
            if kept.users == 0 {
                let cell = kept.cell;
                self.ghosts.swap_remove(at);
                self.cells.give(cell);
            }
        }
    }

    /// The page is gone.
    pub(super) fn forget(&mut self, slot: u32) {
        let Some(kept) = self.kept.remove(&slot) else { return };
        if kept.users == 0 {
            self.cells.give(kept.cell);
        } else {
            self.ghosts.push((slot, kept));
        }
    }

    /// Pages that the file has not seen, up to `most`: slot, generation and cell. They are in use until `done`.
    pub(super) fn dirty(&mut self, most: usize) -> Vec<(u32, u64, u32)> {
        let mut dirty: Vec<(u32, u64, u32)> = Vec::new();
        for (&slot, kept) in self.kept.iter_mut().filter(|(_, kept)| kept.dirty && kept.users == 0).take(most) {
            kept.users += 1;
            dirty.push((slot, kept.generation, kept.cell));
        }
        dirty.sort_unstable();
        dirty
    }

    /// Whether there is a page that the file has not seen.
    pub(super) fn is_dirty(&self) -> bool {
        self.kept.values().any(|kept| kept.dirty)
    }

    /// The file has the page now.
    pub(super) fn cleaned(&mut self, slot: u32, generation: u64) {
        if let Some(kept) = self.kept.get_mut(&slot).filter(|kept| kept.generation == generation) {
            kept.dirty = false;
        }
    }

    /// Whether the cache is more than half full of pages that the file has not seen.
    pub(super) fn wants_cleaning(&self) -> bool {
        let dirty = self.kept.values().filter(|kept| kept.dirty && kept.users == 0).count() as u32;
        self.cells.free() == 0 && dirty * 2 > self.capacity()
    }

    pub(super) fn stats(&self) -> TierStats {
        let (capacity_pages, used_pages) = (self.capacity().into(), self.kept.len() as u64);
        TierStats { capacity_pages, used_pages, ..self.stats.clone() }
    }
}
