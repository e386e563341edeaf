//! What can leave the device and what cannot, and what fits beside it: the model behind the random operations.

use super::super::check::Failure;
use super::twin::Twin;
use super::{Setup, bottom, split_pages};
use crate::Backend;
use std::collections::HashSet;
use std::ops::Range;

/// A caller's pin: sequence, layer, pages.
pub(super) type Pin = (usize, usize, Range<u64>);

/// What the device holds, as far as it matters for what fits.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Pages on the device that cannot leave it: partial or pinned.
    stuck: HashSet<u32>,
    /// Pages that leave it once the tier has taken them.
    full: HashSet<u32>,
    partial: u64,
    reserved: u64,
    pub(super) free_slots: u64,
    pub(super) frames: u64,
    /// Pages of a split.
    split: u64,
}

impl Standing {
    pub(super) fn of<B: Backend>(twin: &mut Twin<'_, B>, setup: &Setup, pins: &[Pin]) -> Result<Self, Failure> {
        let page_size = setup.geometry.page_tokens();
        let mut standing = Standing { frames: setup.frames, split: split_pages(page_size), ..Standing::default() };
        let mut partial = HashSet::new();
        for seq in 0..twin.seqs.len() {
            for layer in 0..setup.geometry.layers() as usize {
                let whole = twin.len(layer, seq) / u64::from(page_size);
                let pages = twin.swap.pages(layer, &twin.seqs[seq].swap)?;
                for (page, at) in pages.into_iter().zip(0..).filter(|(page, _)| page.resident && page.slot.is_none()) {
                    let kind = if at < whole { &mut standing.full } else { &mut partial };
                    kind.insert(page.number);
                }
            }
        }
        let partial: Vec<u32> = partial.difference(&standing.full).copied().collect();
        standing.partial = partial.len() as u64;
        standing.stuck.extend(partial);
        for (seq, layer, pages) in pins {
            let table = twin.swap.pages(*layer, &twin.seqs[*seq].swap)?;
            standing.stuck.extend(table[pages.start as usize..pages.end as usize].iter().map(|page| page.number));
        }
        let stats = twin.swap.stats();
        standing.reserved = stats.store.reserved_pages;
        standing.free_slots = bottom(&stats).capacity_pages - bottom(&stats).used_pages;
        Ok(standing)
    }

    /// Pages that may want a slot: full ones, and those that were full before their sequence was cut short.
    pub(super) fn leaving(&self) -> u64 {
        self.full.len() as u64 + self.partial
    }

    /// Whether these pages and so many new ones fit beside what cannot leave.
    pub(super) fn fits(&self, pages: impl IntoIterator<Item = u32>, new: u64) -> bool {
        let mut here = self.stuck.clone();
        here.extend(pages);
        let blocked = self.full.difference(&here).count() as u64;
        here.len() as u64 + self.reserved + new + blocked.saturating_sub(self.free_slots) <= self.frames
    }

    /// Whether a split still fits once so many more pages are full and so many more partial.
    pub(super) fn leaves_a_split(&self, full: u64, partial: u64) -> bool {
        let blocked = (self.full.len() as u64 + full).saturating_sub(self.free_slots);
        self.partial + partial + self.reserved + blocked + self.split <= self.frames
    }
}
