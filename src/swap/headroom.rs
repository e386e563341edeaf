//! May a write take these frames, and attention still bring in a split? What the device can never give up must leave room
//! for one.

use super::HighSpeedSwap;
use crate::attention::SPLIT;
use crate::backend::Backend;
use crate::store::Append;
use crate::{Error, Result};

/// Pages on the device that no slot holds a copy of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dirty {
    /// Partial and reserved ones, which stay.
    pub(crate) partial: u64,
    /// Full ones, which leave as long as the tier has room.
    pub(crate) full: u64,
}

impl Dirty {
    fn of(&mut self, full: bool) -> &mut u64 {
        if full { &mut self.full } else { &mut self.partial }
    }
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Refuses a write after which some split could no longer be attended.
    pub(super) fn keep_headroom(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        let planned = self.store.plan_appends(layer, appends);
        let fresh = planned.iter().map(|plan| plan.fresh.len() as u64).sum::<u64>();
        if self.has_headroom(fresh + self.returning(layer, appends), fresh) {
            return Ok(());
        }
        let (mut dirty, mut slots) = (self.resident().dirty(), self.tier.free());
        let page_size = u64::from(self.geometry().page_tokens());
        for (append, plan) in appends.iter().zip(&planned) {
            let pages = &self.store.sequences[&plan.id][layer];
            dirty.partial -= self.store.reserved_for(layer, plan);
            for index in self.page_range(append, plan.start) {
                let is_fresh = plan.fresh.binary_search_by_key(&(index as usize), |(page, _)| *page).is_ok();
                if let Some(&page) = pages.table.get(index as usize).filter(|_| !is_fresh) {
                    if let Some(full) = self.resident().dirty_page(page) {
                        *dirty.of(full) -= 1;
                    }
                    // Written in place, it gives its slot back.
                    slots += u64::from(self.resident().is_clean(page));
                }
                *dirty.of(pages.len.max(plan.end) >= (index + 1) * page_size) += 1;
            }
        }
        self.check_headroom(dirty, slots, fresh)
    }

    /// The same for frames that a reservation claims.
    pub(super) fn keep_headroom_beside(&self, frames: u64) -> Result<()> {
        if self.has_headroom(frames, frames) {
            return Ok(());
        }
        let dirty = self.resident().dirty();
        self.check_headroom(Dirty { partial: dirty.partial + frames, ..dirty }, self.tier.free(), frames)
    }

    /// Whether there is no doubt: all pages fit the device, or even with `more` dirty pages, none of which leaves, a split
    /// does.
    fn has_headroom(&self, more: u64, fresh: u64) -> bool {
        let (residency, book) = (self.resident(), &self.store.pool.book);
        let held = residency.frames.capacity() - residency.frames.free();
        book.capacity() - book.free() + fresh <= residency.limit
            || held - residency.clean() + more + self.split_pages() <= residency.limit
    }

    fn split_pages(&self) -> u64 {
        u64::from((SPLIT / self.geometry().page_tokens()).max(1))
    }

    fn check_headroom(&self, after: Dirty, free: u64, required: u64) -> Result<()> {
        let capacity = self.tier.capacity();
        let most = self.resident().limit - self.split_pages();
        if after.partial + after.full.saturating_sub(free) <= most {
            return Ok(());
        }
        if after.full > free {
            return Err(Error::TierFull { tier: self.tier.name(), required: after.full, free, capacity });
        }
        let (now, frames, pinned) = (self.resident().dirty().partial, self.resident().limit, self.resident().pinned());
        Err(Error::NothingEvictable { required, evictable: most.saturating_sub(now), frames, pinned })
    }
}
