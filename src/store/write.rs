//! `append` and `write_at`: plan the frames, copy what is shared, write, and only then change the tables.

use super::{PagedStore, Sequence};
use crate::backend::Backend;
use crate::backend::ops::View;
use crate::pages::layer::{Fresh, Owners, fresh_pages};
use crate::{Error, Result};
use std::collections::HashSet;
use std::ops::Range;

/// Tokens of one sequence at most: positions are 32 bits, and a split may end one split past the last token.
pub(super) const MAX_TOKENS: u64 = (u32::MAX - 2 * crate::attention::SPLIT) as u64;

/// New tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Append<'a, Buf> {
    pub(crate) seq: &'a Sequence,
    pub(crate) at: Option<u64>,
    pub(crate) tokens: u32,
    pub(crate) k: View<Buf>,
    pub(crate) v: View<Buf>,
}

impl<'a, Buf> Append<'a, Buf> {
    /// `tokens` tokens at the end of `seq`: K `[token, kv_head, k_dim]` and V `[token, kv_head, v_dim]`, in any of the
    /// three element types and with any strides. Elements are rounded to the page's format, to nearest even.
    pub fn new(seq: &'a Sequence, tokens: u32, k: View<Buf>, v: View<Buf>) -> Self {
        Append { seq, tokens, k, v, at: None }
    }

    /// Write from token `offset` on instead of at the end; tokens past the end are appended.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.at = Some(offset);
        self
    }
}

/// What one step would take from the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepPlan {
    /// Pages that would be added to sequences.
    pub new_pages: u64,
    /// Shared pages that would get a private copy.
    pub copied_pages: u64,
    /// Pages of the pool afterwards.
    pub capacity_pages: u64,
}

/// One sequence's share of a write, planned.
pub(crate) struct Planned {
    pub(crate) id: u64,
    /// Tokens written: `start..end`.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Pages that need a frame.
    pub(crate) fresh: Vec<(usize, Fresh)>,
    /// Page numbers for `fresh`, in its order.
    pub(crate) pages: Vec<u32>,
    /// How many of them come from the reservation.
    from_reserved: usize,
}

impl Planned {
    pub(super) fn new(id: u64, write: Range<u64>, fresh: Vec<(usize, Fresh)>) -> Self {
        Planned { id, start: write.start, end: write.end, fresh, pages: Vec::new(), from_reserved: 0 }
    }
}

impl<B: Backend> PagedStore<B> {
    /// Writes new tokens of one or many sequences into a layer.
    ///
    /// Views over the same buffers with the same strides are written by one launch. Shared pages in the write range
    /// are copied first, unless every valid token of theirs is overwritten.
    ///
    /// # Errors
    /// Nothing has changed when the call fails: an unknown or twice-named sequence, an offset past the end, views that
    /// do not fit, [`Error::PageLimit`], [`Error::NonFinite`] where the store refuses such values, or a device error.
    pub fn append(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        self.reap();
        self.check_appends(layer, appends)?;
        let mut planned = self.plan_appends(layer, appends);
        let needed = planned.iter().map(|p| p.fresh.len() as u64).sum::<u64>();
        let reserved = planned.iter().map(|p| self.reserved_for(layer, p)).sum::<u64>();
        self.pool.grow_for(needed - reserved, layer)?;
        planned.iter_mut().for_each(|plan| self.claim(layer, plan));
        let tokens: u64 = appends.iter().map(|a| u64::from(a.tokens)).sum();
        let _span = tracing::trace_span!("kvtide.append", layer, tokens).entered();
        match self.enqueue(layer, appends, &planned) {
            Ok(()) => {
                self.counters.appended_tokens += tokens;
                planned.into_iter().for_each(|plan| self.commit(layer, plan));
                Ok(())
            }
            Err(error) => {
                planned.into_iter().for_each(|plan| self.unclaim(layer, plan));
                Err(error)
            }
        }
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

    /// Whether a whole step fits: `tokens` more tokens of each sequence in every layer.
    ///
    /// A page that several sequences of the step share counts one copy for each but the last.
    ///
    /// # Errors
    /// [`Error::PageLimit`] with the first layer that does not fit, unknown or twice-named sequences.
    pub fn preflight(&mut self, step: &[(&Sequence, u64)]) -> Result<StepPlan> {
        self.reap();
        self.check_distinct(step.iter().map(|(seq, _)| *seq))?;
        let mut plan = StepPlan { capacity_pages: self.pool.book.capacity(), ..StepPlan::default() };
        let mut more = 0;
        for layer in 0..self.geometry().layers() as usize {
            let mut owners = Owners::default();
            for &(seq, tokens) in step {
                let pages = self.pages(seq, layer)?;
                let end = self.check_end(layer, pages.len, tokens)?;
                let page_size = self.geometry().page_tokens().into();
                let fresh = fresh_pages(pages, pages.len..end, page_size, &self.pool.book, &mut owners);
                let new = fresh.iter().filter(|(_, why)| *why == Fresh::New).count() as u64;
                plan.new_pages += new;
                plan.copied_pages += fresh.len() as u64 - new;
                more += fresh.len() as u64 - new.min(pages.reserved.len() as u64);
            }
            plan.capacity_pages = self.pool.require(more, layer)?;
        }
        Ok(plan)
    }

    pub(crate) fn check_distinct<'s>(&self, sequences: impl Iterator<Item = &'s Sequence>) -> Result<()> {
        let mut seen = HashSet::new();
        for seq in sequences {
            self.layers(seq)?;
            if !seen.insert(seq.id()) {
                return Err(Error::DuplicateSequence { id: seq.id() });
            }
        }
        Ok(())
    }

    pub(crate) fn check_appends(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
        self.check_layer(layer)?;
        self.check_distinct(appends.iter().map(|a| a.seq))?;
        let (geometry, caps) = (self.geometry(), self.pool.backend.caps());
        for append in appends {
            let len = self.pages(append.seq, layer)?.len;
            let offset = append.at.unwrap_or(len);
            if offset > len {
                return Err(Error::OffsetPastEnd { layer, offset, len });
            }
            self.check_end(layer, offset, append.tokens.into())?;
            let shape = |dim: u32| [append.tokens.into(), geometry.kv_heads().into(), dim.into()];
            append.k.validate("K", shape(geometry.k_dim()), caps)?;
            append.v.validate("V", shape(geometry.v_dim()), caps)?;
            if append.k.dtype != append.v.dtype {
                let [got, expected] = [append.v.dtype, append.k.dtype].map(|d| d.code().into());
                return Err(Error::Shape { what: "the dtype code of V", got, expected });
            }
        }
        Ok(())
    }

    pub(crate) fn plan_appends(&self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Vec<Planned> {
        let mut owners = Owners::default();
        let page_size = self.geometry().page_tokens().into();
        let plan = |append: &Append<'_, B::Buffer>| {
            let pages = &self.sequences[&append.seq.id()][layer];
            let start = append.at.unwrap_or(pages.len);
            let end = start + u64::from(append.tokens);
            let fresh = fresh_pages(pages, start..end, page_size, &self.pool.book, &mut owners);
            Planned::new(append.seq.id(), start..end, fresh)
        };
        appends.iter().map(plan).collect()
    }

    /// Reserved frames that a plan's new pages will use.
    pub(crate) fn reserved_for(&self, layer: usize, plan: &Planned) -> u64 {
        let new = plan.fresh.iter().filter(|(_, why)| *why == Fresh::New).count();
        self.sequences[&plan.id][layer].reserved.len().min(new) as u64
    }

    /// Takes the plan's frames: new pages from the reservation first, each after its predecessor where that is free.
    pub(super) fn claim(&mut self, layer: usize, plan: &mut Planned) {
        let pages = &mut self.sequences.get_mut(&plan.id).expect("planned")[layer];
        let mut last = pages.table.last().copied();
        for (_, why) in &plan.fresh {
            let reserved = if *why == Fresh::New { pages.reserved.pop_front() } else { None };
            plan.from_reserved += usize::from(reserved.is_some());
            let frame = reserved.or_else(|| self.pool.take(last)).expect("the pool has grown for the plan");
            last = Some(frame);
            plan.pages.push(frame);
        }
    }

    /// Takes a claim back: reserved frames return to the reservation, the others to the pool.
    pub(super) fn unclaim(&mut self, layer: usize, plan: Planned) {
        let pages = &mut self.sequences.get_mut(&plan.id).expect("planned")[layer];
        let mut reserved = plan.from_reserved;
        let mut returned = Vec::new();
        for ((_, why), frame) in plan.fresh.iter().zip(plan.pages) {
            if *why == Fresh::New && reserved > 0 {
                reserved -= 1;
                returned.push(frame);
            } else {
                self.pool.give(frame);
            }
        }
        returned.into_iter().rev().for_each(|frame| pages.reserved.push_front(frame));
    }

    pub(super) fn commit(&mut self, layer: usize, plan: Planned) {
        let pages = &mut self.sequences.get_mut(&plan.id).expect("planned")[layer];
        pages.edition += u64::from(!plan.fresh.is_empty());
        for ((page, why), frame) in plan.fresh.into_iter().zip(plan.pages) {
            match why {
                Fresh::New => pages.table.push(frame),
                Fresh::Copy | Fresh::Replace => {
                    self.pool.give(std::mem::replace(&mut pages.table[page], frame));
                }
            }
            self.counters.copied_pages += u64::from(why == Fresh::Copy);
            pages.touch(page);
        }
        pages.len = pages.len.max(plan.end);
    }

    /// The end of a write, if one sequence may hold so many tokens and so many pages.
    fn check_end(&self, layer: usize, offset: u64, tokens: u64) -> Result<u64> {
        let end = offset.saturating_add(tokens);
        if end > MAX_TOKENS {
            return Err(Error::TooLarge { what: "the sequence's length", value: end, maximum: MAX_TOKENS });
        }
        let (required, maximum) = (self.geometry().pages_for(end), self.pool.page_limit);
        if required > maximum { Err(Error::PageLimit { layer, required, maximum }) } else { Ok(end) }
    }
}
