//! What a caller may ask and order of single pages: where they are, pins, writing out, giving up and fetching.

use super::HighSpeedSwap;
use super::fetch::Wanted;
use crate::backend::ops::{Arena, Place, Transfer};
use crate::backend::params::Move;
use crate::backend::{Backend, DeviceBuffer};
use crate::store::{AttentionContext, ContextView, Sequence};
use crate::{Error, KeyCheck, Result};
use std::ops::Range;

/// One page of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageState {
    /// Its number: the same for all sequences that share the page.
    pub number: u32,
    /// Sequences and moves under way that own it.
    pub owners: u32,
    /// Whether it is in a frame.
    pub resident: bool,
    /// The tier's slot that holds a copy.
    pub slot: Option<u32>,
    /// The generation of that copy.
    pub generation: Option<u64>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// The pages of a sequence in a layer, in order.
    ///
    /// # Errors
    /// Unknown sequences or layers.
    pub fn pages(&mut self, layer: usize, seq: &Sequence) -> Result<Vec<PageState>> {
        self.reap();
        let table = &self.store.pages(seq, layer)?.table;
        let (book, residency) = (&self.store.pool.book, self.resident());
        let state = |&number: &u32| PageState {
            number,
            owners: book.owners(number),
            resident: residency.is_resident(number),
            slot: residency.slot(number).map(|(slot, _)| slot),
            generation: residency.slot(number).map(|(_, generation)| generation),
        };
        Ok(table.iter().map(state).collect())
    }

    /// Writes all full pages of a sequence to the tier that are not there yet, and waits until the tier has acknowledged
    /// them. The pages stay in their frames too.
    ///
    /// # Errors
    /// Unknown sequences, [`Error::TierFull`], [`Error::Page`]; the pages stay valid on the device.
    pub fn offload(&mut self, seq: &Sequence) -> Result<()> {
        self.reap();
        let mut own = Vec::new();
        for layer in self.store.layers(seq)? {
            let before = std::iter::once(None).chain(layer.table.iter().copied().map(Some));
            own.extend(layer.table.iter().copied().zip(before));
        }
        let (first, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.queue).into_iter().partition(|(page, _)| own.iter().any(|(own, _)| own == page));
        drop(first);
        let wanted: Vec<_> = own.into_iter().filter(|(page, _)| self.resident().wants_out(*page)).collect();
        self.queue = wanted.iter().copied().chain(later).collect();
        self.fault = None;
        let most = self.config.tile_pages as usize;
        let is_left = |swap: &Self| wanted.iter().any(|(page, _)| swap.resident().wants_out(*page));
        while is_left(self) && self.fault.is_none() && self.depart(most)? > 0 {}
        self.settle(true)?;
        if let Some((_, fault)) = self.fault.take() {
            return Err(fault);
        }
        let required = wanted.iter().filter(|(page, _)| self.resident().wants_out(*page)).count() as u64;
        if required > 0 {
            let (tier, free, capacity) = (self.tier.name(), self.tier.free(), self.tier.capacity());
            return Err(Error::TierFull { tier, required, free, capacity });
        }
        Ok(())
    }

    /// Gives up the frames of all pages of a sequence that the tier holds; returns how many.
    ///
    /// # Errors
    /// Unknown sequences.
    pub fn evict(&mut self, seq: &Sequence) -> Result<u64> {
        self.settle(false)?;
        self.reap();
        let pages: Vec<u32> = self.store.layers(seq)?.iter().flat_map(|layer| layer.table.iter().copied()).collect();
        Ok(pages.into_iter().map(|page| u64::from(self.residency().evict_page(page))).sum())
    }

    /// Begins to fetch pages `pages` of a sequence in a layer; they are in use like those that never left.
    ///
    /// # Errors
    /// Unknown sequences or layers, [`Error::NothingEvictable`]. A page that does not come is fetched again, and said, by the
    /// attention that needs it.
    pub fn prefetch(&mut self, layer: usize, seq: &Sequence, pages: Range<u64>) -> Result<()> {
        self.pump()?;
        let pages = self.numbers(layer, seq, pages)?;
        self.ask(&pages)?;
        self.let_go(&pages);
        pages.iter().for_each(|page| self.residency().stay(page.number));
        Ok(())
    }

    /// Brings pages `pages` of a sequence in a layer to the device and keeps them there until [`unpin`](Self::unpin). Pins
    /// count.
    ///
    /// # Errors
    /// Unknown sequences or layers, [`Error::NothingEvictable`], [`Error::Page`]; nothing is pinned then.
    pub fn pin(&mut self, layer: usize, seq: &Sequence, pages: Range<u64>) -> Result<()> {
        self.pump()?;
        let pages = self.numbers(layer, seq, pages)?;
        self.ask(&pages)?;
        let landed = self.land(layer, &pages);
        match landed {
            Ok(()) => pages.iter().for_each(|page| self.residency().stay(page.number)),
            Err(_) => self.let_go(&pages),
        }
        landed
    }

    /// Takes one pin of each page away; pages that are not pinned are left alone.
    ///
    /// # Errors
    /// Unknown sequences or layers.
    pub fn unpin(&mut self, layer: usize, seq: &Sequence, pages: Range<u64>) -> Result<()> {
        let pages = self.numbers(layer, seq, pages)?;
        self.let_go(&pages);
        Ok(())
    }

    fn numbers(&self, layer: usize, seq: &Sequence, pages: Range<u64>) -> Result<Vec<Wanted>> {
        let table = &self.store.pages(seq, layer)?.table;
        let wanted = |page: u64| Wanted { number: table[page as usize], sequence: seq.id(), page };
        Ok(pages.take_while(|&page| page < table.len() as u64).map(wanted).collect())
    }

    /// Looks at the first keys of a sequence in a layer, of those pages that are in frames, and warns: see
    /// [`PagedStore::check_keys`](crate::PagedStore::check_keys). Waits for the device; no page moves.
    ///
    /// # Errors
    /// Unknown sequences or layers; what the device reports.
    pub fn check_keys(&mut self, layer: usize, seq: &Sequence) -> Result<KeyCheck> {
        self.pump()?;
        let mut pages = self.store.first_pages(layer, seq)?;
        pages.retain(|&(page, _)| self.resident().is_resident(page));
        self.store.check_pages(layer, &pages)
    }

    /// A contiguous copy of what a sequence holds in a layer, gathered as its pages come: it may be more than the device
    /// budget, but must fit one buffer.
    ///
    /// # Errors
    /// Unknown sequences or layers, no memory for the copy, [`Error::Page`].
    pub fn context(&mut self, layer: usize, seq: &Sequence) -> Result<ContextView<B::Buffer>> {
        self.pump()?;
        let (tokens, record) = (self.len(seq, layer)?, self.store.record);
        let (count, stride) = (self.geometry().pages_for(tokens), record.frame_stride());
        let buffer = self.store.backend().alloc("kvtide gathered context", (count * stride).max(stride))?;
        let mut most = (self.resident().limit / 2).clamp(1, 4096);
        let mut first = 0;
        while first < count {
            let pages = first..(first + most).min(count);
            match self.pin(layer, seq, pages.clone()) {
                // Fewer at a time may fit beside what cannot leave.
                Err(Error::NothingEvictable { .. } | Error::TierFull { .. }) if most > 1 => {
                    most /= 2;
                    continue;
                }
                pinned => pinned?,
            }
            let gathered = self.gather(layer, seq, pages.clone(), &buffer);
            self.unpin(layer, seq, pages.clone())?;
            gathered?;
            first = pages.end;
        }
        self.store.flush()?;
        Ok(ContextView { buffer, offset: 0, pages: count, tokens, record, gathered: true })
    }

    fn gather(&mut self, layer: usize, seq: &Sequence, pages: Range<u64>, buffer: &B::Buffer) -> Result<()> {
        let (mark, step) = (self.marks.next(), self.step);
        let mut moves = Vec::new();
        for Wanted { number, page, .. } in self.numbers(layer, seq, pages)? {
            self.residency().used(number, mark, step);
            moves.push(Move { from: self.resident().frame(number), to: page as u32 });
        }
        let (record, stride, shift) = (self.store.record, self.store.record.frame_stride(), self.store.pool.shift());
        let pool = &mut self.store.pool;
        let from = Place::Frames(Arena { slabs: &pool.slabs, slab_shift: shift });
        let to = Place::Records { buffer, offset: 0, stride };
        pool.backend.transfer(&mut pool.stream, &Transfer { record, from, to, moves: &moves })?;
        self.set_mark()
    }

    /// Page tables and lengths for a caller's own kernel, with all pages of the sequences on the device. They stay where they
    /// are until the next call; work enqueued on [`stream`](Self::stream) before that is in order.
    ///
    /// # Errors
    /// Unknown sequences or layers, [`Error::NothingEvictable`] when the pages do not fit the device budget together,
    /// [`Error::Page`].
    pub fn attention_context(&mut self, layer: usize, seqs: &[&Sequence]) -> Result<AttentionContext<B::Buffer>> {
        seqs.iter().try_for_each(|seq| self.store.pages(seq, layer).map(|_| ()))?;
        let mut held = Vec::new();
        let mut result = Ok(());
        for seq in seqs {
            let pages = self.store.pages(seq, layer)?.table.len() as u64;
            result = self.pin(layer, seq, 0..pages);
            if result.is_err() {
                break;
            }
            held.push((*seq, 0..pages));
        }
        let context = result.and_then(|()| {
            let (mark, step) = (self.marks.next(), self.step);
            for (seq, _) in &held {
                let layers = self.store.sequences.get_mut(&seq.id());
                let pages = &mut layers.expect("pinned above")[layer];
                let residency = self.store.pool.residency.as_mut().expect("made by the builder");
                pages.known = pages.table.iter().map(|&page| residency.frame(page)).collect();
                pages.table.iter().for_each(|&page| residency.used(page, mark, step));
                pages.dirty = 0..pages.table.len();
            }
            self.store.attention_context(layer, seqs)
        });
        for (seq, pages) in held {
            self.unpin(layer, seq, pages)?;
        }
        context
    }

    /// Checks that pages, frames, slots and owners agree about each other.
    #[cfg(any(test, feature = "conformance"))]
    #[doc(hidden)]
    pub fn is_consistent(&mut self) -> bool {
        self.reap();
        let travelling: u64 = (self.departures.len() + self.flights.len()) as u64;
        let pages = self.store.pool.book.capacity() - self.store.pool.book.free();
        let slots: std::collections::HashSet<u32> = (0..self.store.pool.book.capacity() as u32)
            .filter_map(|page| self.resident().slot(page).map(|(slot, _)| slot))
            .collect();
        let used = self.tier.capacity() - self.tier.free();
        let settled = travelling > 0 || (self.store.is_consistent() && used == slots.len() as u64);
        let queued = self.queue.len() <= self.queue_limit();
        settled && queued && self.resident().is_consistent() && pages >= slots.len() as u64
    }

    /// Bytes of the buffers that frames lie in, at most the device budget.
    #[doc(hidden)]
    pub fn arena_bytes(&self) -> u64 {
        self.store.pool.slabs.iter().map(DeviceBuffer::bytes).sum()
    }
}
