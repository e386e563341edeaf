//! What makes room for a step's next token? Pages planned for all layers, then copies, tables and lengths in stream order.

use super::{Capture, Step, has_moved};
use crate::backend::Backend;
use crate::backend::ops::{Arena, Place, Transfer};
use crate::backend::params::Move;
use crate::pages::layer::{Fresh, Owners, fresh_pages};
use crate::store::PagedStore;
use crate::store::write::Planned;
use crate::{Error, Result};

/// A page table that gets a page.
struct Turn {
    row: usize,
    layer: usize,
    plan: Planned,
}

impl<B: Backend> PagedStore<B> {
    /// Adds a token to each of the step's sequences in every layer, to be written by the next
    /// [`append_step`](Self::append_step) or replay: takes pages, copies shared ones, and tells the device.
    ///
    /// Sequences that were appended to, truncated or forked since the last call are taken as they are now. Allocates nothing
    /// on the device unless the pool must grow; waits for nothing. (Until the token is written it is whatever its slot held;
    /// [`truncate`](Self::truncate) takes it back.)
    ///
    /// # Errors
    /// Nothing has changed when the call fails: [`Error::UnknownSequence`] where one was dropped, [`Error::TooLarge`] where one
    /// is full ([`max_tokens`](Step::max_tokens)), [`Error::PageLimit`], or a device error, after which the step is
    /// [`Error::Behind`] until it advances.
    pub fn advance(&mut self, step: &mut Step<B::Buffer>) -> Result<Capture> {
        self.reap();
        let (rows, layers) = (step.rows(), self.geometry().layers() as usize);
        let _span = tracing::trace_span!("kvtide.advance", rows).entered();
        self.check_room(step)?;
        let mut turns = self.plan_turns(step);
        let mut more = 0;
        for of_layer in turns.chunk_by(|a, b| a.layer == b.layer) {
            let needs = |turn: &Turn| turn.plan.fresh.len() as u64 - self.reserved_for(turn.layer, &turn.plan);
            more += of_layer.iter().map(needs).sum::<u64>();
            self.pool.require(more, of_layer[0].layer)?;
        }
        self.pool.grow_for(more, 0)?;
        self.pool.ready_channels()?;
        turns.iter_mut().for_each(|turn| self.claim(turn.layer, &mut turn.plan));
        if let Err(error) = self.enqueue_advance(step, &turns) {
            turns.into_iter().for_each(|turn| self.unclaim(turn.layer, turn.plan));
            // Some tables may have been told what has not happened.
            step.known.fill(None);
            return Err(error);
        }
        turns.into_iter().for_each(|turn| self.commit(turn.layer, turn.plan));
        for (row, id) in step.sequences.iter().enumerate() {
            for (layer, pages) in self.sequences.get_mut(id).into_iter().flatten().enumerate() {
                pages.len = step.descriptors.rows(layer, row..row + 1)[0].end.into();
                step.known[layer * rows + row] = Some(pages.edition);
            }
        }
        // Replays are not seen: what they will do counts here.
        self.counters.appended_tokens += (layers * rows) as u64;
        self.counters.attended_rows += (layers * rows) as u64;
        let now = (self.pool.slabs.len(), self.pool.channels.as_ref().map(|channels| channels.buffer().clone()));
        let stale = has_moved(&step.captured, &now);
        step.captured = Some(now);
        Ok(if stale { Capture::Stale } else { Capture::Valid })
    }

    /// Refuses a step with a sequence that is gone or full.
    fn check_room(&self, step: &Step<B::Buffer>) -> Result<()> {
        for &id in &step.sequences {
            let layers = self.sequences.get(&id).filter(|_| step.store == self.id);
            let layers = layers.ok_or(Error::UnknownSequence { id })?;
            if let Some(pages) = layers.iter().find(|pages| pages.len >= step.max_tokens) {
                let (value, maximum) = (pages.len + 1, step.max_tokens);
                return Err(Error::TooLarge { what: "the tokens of a step's sequence", value, maximum });
            }
        }
        Ok(())
    }

    /// The page tables that need a page for one more token, by layer.
    fn plan_turns(&self, step: &Step<B::Buffer>) -> Vec<Turn> {
        let page_size = self.geometry().page_tokens().into();
        let (mut owners, mut turns) = (Owners::default(), Vec::new());
        for (row, &id) in step.sequences.iter().enumerate() {
            for (layer, pages) in self.sequences[&id].iter().enumerate() {
                let fresh = fresh_pages(pages, pages.len..pages.len + 1, page_size, &self.pool.book, &mut owners);
                if !fresh.is_empty() {
                    turns.push(Turn { row, layer, plan: Planned::new(id, pages.len..pages.len + 1, fresh) });
                }
            }
        }
        turns.sort_by_key(|turn| turn.layer);
        turns
    }

    /// Enqueues copies of shared pages, tables that the device does not have, their new entries, and all lengths.
    fn enqueue_advance(&mut self, step: &mut Step<B::Buffer>, turns: &[Turn]) -> Result<()> {
        let table = |turn: &Turn| &self.sequences[&turn.plan.id][turn.layer].table;
        let copies = turns.iter().flat_map(|turn| {
            let copied = turn.plan.fresh.iter().zip(&turn.plan.pages).filter(|((_, why), _)| *why == Fresh::Copy);
            copied.map(move |((page, _), &to)| (table(turn)[*page], to))
        });
        let moves: Vec<Move> = copies.map(|(from, to)| Move { from, to }).collect();
        let pool = &mut self.pool;
        if !moves.is_empty() {
            let arena = Arena { slabs: &pool.slabs, slab_shift: pool.book.shift() };
            let (from, to) = (Place::Frames(arena), Place::Frames(arena));
            pool.backend.transfer(&mut pool.stream, &Transfer { record: self.record, from, to, moves: &moves })?;
        }
        for (row, id) in step.sequences.iter().enumerate() {
            for (layer, pages) in self.sequences[id].iter().enumerate() {
                step.descriptors.see(layer, row, pages.len as u32 + 1);
                if step.known[layer * step.sequences.len() + row] != Some(pages.edition) {
                    let (offset, entries) =
                        (step.descriptors.table(layer, row) * 4, bytemuck::cast_slice(&pages.table));
                    pool.backend.upload(&mut pool.stream, &step.memory, offset, entries)?;
                }
            }
        }
        for Turn { row, layer, plan } in turns {
            for ((page, _), entry) in plan.fresh.iter().zip(&plan.pages) {
                let offset = (step.descriptors.table(*layer, *row) + *page as u64) * 4;
                pool.backend.upload(&mut pool.stream, &step.memory, offset, bytemuck::bytes_of(entry))?;
            }
        }
        let (offset, bytes) = step.descriptors.moving();
        pool.backend.upload(&mut pool.stream, &step.memory, offset, bytes)
    }
}
