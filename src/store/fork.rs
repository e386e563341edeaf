//! Sharing, shortening and reserving: `fork`, `fork_at`, `truncate`, `reserve`.

use super::{PagedStore, Sequence};
use crate::backend::Backend;
use crate::pages::layer::LayerPages;
use crate::{Error, Result};

impl<B: Backend> PagedStore<B> {
    /// A new sequence with the same tokens. All pages are shared; whoever writes to one first gets a copy.
    ///
    /// Reservations are not inherited.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, seq: &Sequence) -> Result<Sequence> {
        self.reap();
        let lens: Vec<u64> = self.layers(seq)?.iter().map(|layer| layer.len).collect();
        self.fork_lens(seq, &lens)
    }

    /// A new sequence with the first `tokens` tokens of every layer, sharing just the pages that hold them.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], or [`Error::OffsetPastEnd`] when a layer holds fewer tokens.
    pub fn fork_at(&mut self, seq: &Sequence, tokens: u64) -> Result<Sequence> {
        self.reap();
        self.check_len(seq, tokens)?;
        let lens = vec![tokens; self.geometry().layers() as usize];
        self.fork_lens(seq, &lens)
    }

    fn fork_lens(&mut self, seq: &Sequence, lens: &[u64]) -> Result<Sequence> {
        let geometry = *self.geometry();
        let mut forked = Vec::with_capacity(lens.len());
        for (layer, &len) in self.sequences[&seq.id()].iter().zip(lens) {
            let table = layer.table[..geometry.pages_for(len) as usize].to_vec();
            table.iter().for_each(|&page| self.pool.book.retain(page));
            let dirty = 0..table.len();
            forked.push(LayerPages { table, len, dirty, ..LayerPages::default() });
        }
        Ok(self.insert(forked))
    }

    /// Keeps the first `tokens` tokens of every layer (rejected draft tokens go). The partial page stays.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], or [`Error::OffsetPastEnd`] when a layer holds fewer tokens.
    pub fn truncate(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.reap();
        self.check_len(seq, tokens)?;
        (0..self.geometry().layers() as usize).for_each(|layer| self.truncate_layer(seq.id(), layer, tokens));
        Ok(())
    }

    /// Shortens one layer of a sequence that holds at least `tokens` tokens there.
    pub(crate) fn truncate_layer(&mut self, id: u64, layer: usize, tokens: u64) {
        let keep = self.geometry().pages_for(tokens) as usize;
        let Some(layer) = self.sequences.get_mut(&id).map(|layers| &mut layers[layer]) else { return };
        layer.table.drain(keep..).for_each(|page| self.pool.give(page));
        layer.dirty.end = layer.dirty.end.min(keep);
        layer.len = tokens;
        layer.edition += 1;
    }

    /// Claims frames, in contiguous runs where there are such, so that every layer can hold `tokens` tokens in all.
    ///
    /// They are for pages to come: the private copy of a page that is shared now still comes from the pool.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::PageLimit`], and then nothing is reserved.
    pub fn reserve(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.reap();
        let pages = self.geometry().pages_for(tokens);
        let missing = |layer: &LayerPages| pages.saturating_sub((layer.table.len() + layer.reserved.len()) as u64);
        let missing: Vec<u64> = self.layers(seq)?.iter().map(missing).collect();
        let mut more = 0;
        for (layer, missing) in missing.iter().enumerate() {
            more += missing;
            self.pool.require(more, layer)?;
        }
        self.pool.grow_for(more, 0)?;
        let layers = self.sequences.get_mut(&seq.id()).into_iter().flatten();
        for (layer, missing) in layers.zip(missing) {
            let run = self.pool.take_run(missing as u32).unwrap_or_else(|| {
                let mut last = layer.reserved.back().or(layer.table.last()).copied();
                let take = |_| {
                    last = self.pool.take(last);
                    last.expect("the pool has grown for the reservation")
                };
                (0..missing).map(take).collect()
            });
            layer.reserved.extend(run);
        }
        Ok(())
    }

    /// Gives back the reserved frames that no token has used, beyond what `tokens` tokens in all need.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn release_reservation(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.layers(seq)?;
        let pages = self.geometry().pages_for(tokens) as usize;
        for layer in self.sequences.get_mut(&seq.id()).into_iter().flatten() {
            let keep = pages.saturating_sub(layer.table.len()).min(layer.reserved.len());
            layer.reserved.drain(keep..).for_each(|page| self.pool.give(page));
        }
        Ok(())
    }

    fn check_len(&self, seq: &Sequence, offset: u64) -> Result<()> {
        let short = self.layers(seq)?.iter().enumerate().find(|(_, pages)| pages.len < offset);
        match short {
            Some((layer, pages)) => Err(Error::OffsetPastEnd { layer, offset, len: pages.len }),
            None => Ok(()),
        }
    }
}
