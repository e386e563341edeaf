//! `append` and `write_at`: brings in what is written to, makes room, and lets more tokens than the device holds pass
//! through it in pieces.

use super::fetch::Wanted;
use super::predict::Projected;
use super::residency::Origin;
use super::{HighSpeedSwap, WhenFull};
use crate::backend::Backend;
use crate::backend::ops::View;
use crate::store::{Append, Sequence};
use crate::{Error, Result};
use std::ops::Range;

impl<B: Backend> HighSpeedSwap<B> {
    /// Writes new tokens of one or many sequences into a layer, as [`PagedStore::append`](crate::PagedStore::append) does.
    ///
    /// Tokens for more pages than half of the frames (new ones, copies and those that come back) are written in pieces,
    /// whose pages leave the device as it goes.
    ///
    /// # Errors
    /// Those of `PagedStore::append`; [`Error::NothingEvictable`], [`Error::TierFull`] and [`Error::Page`] when no frame
    /// can be freed, when a split of 256 tokens would no longer fit beside the pages that cannot leave, or when a page that
    /// is written to does not come back. Nothing has changed then, except that a write in pieces over tokens that existed
    /// may have overwritten some of them.
    pub fn append(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        self.pump()?;
        self.store.check_appends(layer, appends)?;
        if self.config.when_full == WhenFull::Refuse {
            self.check_tier(layer, appends)?;
        }
        let frames = self.resident().limit;
        let lens: Vec<(u64, u64)> =
            appends.iter().map(|append| (append.seq.id(), self.store.sequences[&append.seq.id()][layer].len)).collect();
        let result = if self.fresh(layer, appends) + self.returning(layer, appends) <= (frames / 2).max(1) {
            self.append_piece(layer, appends)
        } else {
            self.append_pieces(layer, appends, (frames / 4).max(1))
        };
        if result.is_err() {
            for (id, len) in lens {
                self.store.truncate_layer(id, layer, len);
            }
            self.reap();
        }
        result
    }

    /// [`append`](Self::append) of one sequence from token `offset` on.
    ///
    /// # Errors
    /// Those of `append`.
    pub fn write_at(
        &mut self,
        layer: usize,
        seq: &Sequence,
        offset: u64,
        tokens: u32,
        k: View<B::Buffer>,
        v: View<B::Buffer>,
    ) -> Result<()> {
        self.append(layer, &[Append::new(seq, tokens, k, v).at(offset)])
    }

    /// Frames that a write would take.
    fn fresh(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> u64 {
        let planned = self.store.plan_appends(layer, appends);
        planned.iter().map(|plan| plan.fresh.len() as u64 - self.store.reserved_for(layer, plan)).sum()
    }

    /// Pages that a write touches and that the tier holds too: they may have to come first.
    pub(super) fn returning(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> u64 {
        let touched = self.touched(layer, appends);
        touched.iter().filter(|page| self.resident().is_clean(page.number)).count() as u64
    }

    /// The pages that a write of one sequence touches and that exist.
    fn existing(&self, layer: usize, append: &Append<'_, B::Buffer>) -> Vec<Wanted> {
        let sequence = append.seq.id();
        let pages = &self.store.sequences[&sequence][layer];
        let range = self.page_range(append, append.at.unwrap_or(pages.len));
        let existing = range.take_while(|&page| page < pages.table.len() as u64);
        existing.map(|page| Wanted { number: pages.table[page as usize], sequence, page }).collect()
    }

    /// The places of the pages that a write from token `start` on touches; none for a write of no tokens.
    pub(super) fn page_range(&self, append: &Append<'_, B::Buffer>, start: u64) -> Range<u64> {
        let page_size = u64::from(self.geometry().page_tokens());
        let end = start + u64::from(append.tokens);
        let first = start / page_size;
        first..if append.tokens == 0 { first } else { end.div_ceil(page_size) }
    }

    /// Refuses a write that completes more pages than the tier has room for. A page that is in the tier and written anew
    /// needs no more than the slot that it has.
    fn check_tier(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        let page_size = u64::from(self.geometry().page_tokens());
        let waiting = self.waiting();
        let mut required = waiting;
        for (append, plan) in appends.iter().zip(self.store.plan_appends(layer, appends)) {
            let pages = &self.store.sequences[&plan.id][layer];
            let end = pages.len.max(plan.end);
            let full = self.page_range(append, plan.start).filter(|index| end >= (index + 1) * page_size);
            let more = full.filter(|&index| {
                let is_fresh = plan.fresh.binary_search_by_key(&(index as usize), |(page, _)| *page).is_ok();
                let page = pages.table.get(index as usize).filter(|_| !is_fresh);
                page.is_none_or(|&page| !self.resident().is_clean(page) && !self.resident().wants_out(page))
            });
            required += more.count() as u64;
        }
        let (free, capacity) = (self.tier.free(), self.tier.capacity());
        if required > free && required > waiting {
            return Err(Error::TierFull { tier: self.tier.name(), required, free, capacity });
        }
        Ok(())
    }

    /// Cuts a write at page boundaries, so that each piece needs few frames.
    fn append_pieces(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>], pages: u64) -> Result<()> {
        let page_size = u64::from(self.geometry().page_tokens());
        for append in appends {
            let len = self.store.sequences[&append.seq.id()][layer].len;
            let mut at = append.at.unwrap_or(len);
            let (first, end) = (at, at + u64::from(append.tokens));
            while at < end {
                let next = ((at / page_size + pages) * page_size).min(end);
                let from = |view: &View<B::Buffer>| view.clone().from_row(at - first);
                let (k, v) = (from(&append.k), from(&append.v));
                let piece = Append::new(append.seq, (next - at) as u32, k, v).at(at);
                self.append_piece(layer, &[piece])?;
                self.pump()?;
                at = next;
            }
        }
        Ok(())
    }

    fn append_piece(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        let touched = self.touched(layer, appends);
        self.ask(&touched)?;
        let result = self.land(layer, &touched).and_then(|()| {
            let (mark, step) = (self.marks.next(), self.step);
            touched.iter().for_each(|page| self.residency().used(page.number, mark, step));
            self.keep_headroom(layer, appends)?;
            self.make_room(self.fresh(layer, appends))?;
            self.write(layer, appends)
        });
        self.let_go(&touched);
        result
    }

    /// The pages that exist and will be written to or copied.
    fn touched(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Vec<Wanted> {
        appends.iter().flat_map(|append| self.existing(layer, append)).collect()
    }

    /// The write itself: everything that it touches is on the device, and there is room.
    fn write(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        let page_size = u64::from(self.geometry().page_tokens());
        let starts: Vec<u64> = appends
            .iter()
            .map(|append| append.at.unwrap_or(self.store.sequences[&append.seq.id()][layer].len))
            .collect();
        if let Err(error) = self.store.append(layer, appends) {
            // Kernels that were enqueued all the same are over before their frames are used anew.
            self.store.synchronize()?;
            return Err(error);
        }
        let (mark, step) = (self.marks.next(), self.step);
        let mut projected = Vec::new();
        for (append, start) in appends.iter().zip(starts) {
            let sequence = append.seq.id();
            for index in self.page_range(append, start) {
                let pages = &self.store.sequences[&sequence][layer];
                let (page, len) = (pages.table[index as usize], pages.len);
                let full = len >= (index + 1) * page_size;
                let before = (index > 0).then(|| pages.table[index as usize - 1]);
                let origin = Origin { sequence, layer: layer as u32, index: index as u32 };
                self.residency().written(page, full, origin);
                self.residency().used(page, mark, step);
                if full {
                    self.queue.push_back((page, before));
                }
                // To the last valid token: a copy has no projections of what was not written now.
                let slot = |token: u64| (token.max(index * page_size) - index * page_size).min(page_size) as u32;
                let written = slot(start)..slot(start + u64::from(append.tokens));
                projected.push(Projected { page, written, len: slot(len) });
            }
        }
        self.reap();
        self.tidy_queue();
        self.project(layer, &projected)
    }
}
