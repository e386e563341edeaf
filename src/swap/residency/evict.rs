//! Which page gives up its frame next, and how many frames can be had?

use super::{NONE, Origin, Page, Residency, Travel};
use crate::Error;
use crate::swap::policy::{EvictionPolicy, Resident};

impl Residency {
    /// The page came for one attention, which is enqueued: it goes before others.
    pub(crate) fn streamed(&mut self, page: u32) {
        let entry = self.page_mut(page);
        if entry.streamed && !std::mem::replace(&mut entry.listed, true) {
            self.streamed.push_back(page);
        }
    }

    /// The page is to stay like those that never left.
    pub(crate) fn stay(&mut self, page: u32) {
        self.page_mut(page).streamed = false;
    }

    fn is_evictable(&self, page: u32) -> bool {
        let page = self.page(page);
        page.frame != NONE && page.slot != NONE && page.travel == Travel::No && page.pins == 0
    }

    /// Gives up the frame of one page; `false` when no page can go.
    pub(crate) fn evict(&mut self, step: u64, policy: &mut dyn EvictionPolicy) -> bool {
        let Some(page) = self.victim(step, policy) else { return false };
        self.vacate(page);
        true
    }

    /// The next page that came for one attention.
    fn passing(&mut self) -> Option<u32> {
        while let Some(page) = self.streamed.pop_front() {
            self.page_mut(page).listed = false;
            if self.page(page).streamed && self.is_evictable(page) {
                return Some(page);
            }
        }
        None
    }

    /// Makes `frames` frames free side by side, so that pages land there in one long move: those of pages that came for one
    /// attention, or else the first run whose pages may go, whatever their rank. It is the run that later tiles use too.
    pub(crate) fn clear_run(&mut self, frames: u32) {
        while self.frames.free() < frames.into() {
            let Some(page) = self.passing() else { break };
            self.vacate(page);
        }
        let run = |is_usable: &dyn Fn(u32) -> bool| self.frames.find_run(frames, |_, dense| is_usable(dense));
        let is_free = |dense: u32| self.frames.is_free(dense);
        if self.frames.free() >= 2 * u64::from(frames) || run(&is_free).is_some() {
            return;
        }
        let may_go = |dense: u32| match self.holders.get(dense as usize) {
            Some(&page) if page != NONE => self.is_evictable(page),
            _ => is_free(dense),
        };
        let Some(first) = run(&may_go) else { return };
        for dense in first..first + frames {
            match self.holders.get(dense as usize) {
                Some(&page) if page != NONE => self.vacate(page),
                _ => {}
            }
        }
    }

    fn victim(&mut self, step: u64, policy: &mut dyn EvictionPolicy) -> Option<u32> {
        loop {
            if let Some(page) = self.passing() {
                return Some(page);
            }
            while let Some(page) = self.ranking.pop() {
                if self.is_evictable(page) {
                    return Some(page);
                }
            }
            // One ranking a step, and another only for pages that could not be in it.
            if self.ranked == Some(step) && !self.changed {
                return None;
            }
            (self.ranked, self.changed) = (Some(step), false);
            let evictable = self.holders.iter().filter(|&&page| page != NONE && self.is_evictable(page));
            let resident = |&page: &u32| {
                let Page { origin, used, score, streamed, .. } = *self.page(page);
                let Origin { sequence, layer, index } = origin;
                Resident { page, sequence, layer, index, used, step, score, streamed }
            };
            let mut candidates: Vec<Resident> = evictable.map(resident).collect();
            policy.rank(&mut candidates);
            self.ranking = candidates.iter().rev().map(|resident| resident.page).collect();
            if self.ranking.is_empty() {
                return None;
            }
        }
    }

    /// Gives up the frame of this page, if it may.
    pub(crate) fn evict_page(&mut self, page: u32) -> bool {
        let may = self.is_evictable(page);
        if may {
            self.vacate(page);
        }
        may
    }

    /// Frames that are free or hold pages which gave way to others before: what can be had without disturbing anybody.
    pub(crate) fn free_soon(&self) -> u64 {
        let passing = self.streamed.iter().filter(|&&page| self.page(page).streamed && self.is_evictable(page));
        self.limit - self.frames.capacity() + self.frames.free() + passing.count() as u64
    }

    /// Frames that are free or could be freed now.
    pub(crate) fn evictable(&self) -> u64 {
        let held = self.holders.iter().filter(|&&page| page != NONE && self.is_evictable(page));
        self.frames.free() + held.count() as u64
    }

    /// The error of a call that needs more frames at once than can be freed.
    pub(crate) fn shortage(&self, required: u64) -> Error {
        let (evictable, pinned) = (self.evictable() + self.limit - self.frames.capacity(), self.pinned);
        Error::NothingEvictable { required, evictable, frames: self.limit, pinned }
    }
}
