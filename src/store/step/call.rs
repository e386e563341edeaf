//! The launches of a step: as its descriptors in device memory say, now or when they are replayed.

use super::Step;
use crate::attention::Batch;
use crate::backend::Backend;
use crate::backend::ops::{self, Arena, StepMemory, View};
use crate::backend::params::AppendRun;
use crate::store::attend::{Query, check_query, scale_of};
use crate::store::{PagedStore, channels_of};
use crate::{Error, Result};

impl<Buf> Step<Buf> {
    fn at(&self, layer: usize, first: usize, count: usize, states: u32) -> StepMemory<'_, Buf> {
        let [tiles, rows, merge] = self.descriptors.offsets(layer, first);
        StepMemory { buffer: &self.memory, tiles, rows, merge, count: count as u32, states }
    }
}

impl<B: Backend> PagedStore<B> {
    /// Writes the step's token of each sequence in a layer: K `[row, kv_head, k_dim]` and V `[row, kv_head, v_dim]`, a row for
    /// each sequence, as [`append`](Self::append) would write them. May be captured on CUDA.
    ///
    /// Before the first [`advance`](Self::advance) there is no token, and nothing is written.
    ///
    /// # Errors
    /// Unknown layers, views that do not fit, [`Error::Behind`] where a sequence was changed since the last `advance`, or a
    /// device error.
    pub fn append_step(
        &mut self,
        step: &Step<B::Buffer>,
        layer: usize,
        k: &View<B::Buffer>,
        v: &View<B::Buffer>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        let (geometry, rows) = (*self.geometry(), step.rows());
        let shape = |dim: u32| [rows as u64, geometry.kv_heads().into(), dim.into()];
        k.validate("K", shape(geometry.k_dim()), self.pool.backend.caps())?;
        v.validate("V", shape(geometry.v_dim()), self.pool.backend.caps())?;
        let runs = self.step_runs(step, layer, [k.strides[0], v.strides[0]])?;
        let _span = tracing::trace_span!("kvtide.append_step", layer, rows).entered();
        let non_finite = &self.pool.counter()?;
        let pool = &mut self.pool;
        let append = ops::Append {
            record: self.record,
            arena: Arena { slabs: &pool.slabs, slab_shift: pool.book.shift() },
            k,
            v,
            channels: channels_of(&pool.channels, layer),
            runs: &runs,
            onto: None,
            non_finite,
            write: true,
        };
        pool.backend.append_step(&mut pool.stream, &append, &step.at(layer, 0, rows, 0))
    }

    /// Attends the step's rows over a layer's pages, as [`attend`](Self::attend) would: each sees its sequence, with the
    /// step's token, within the layer's window. `query` is one [of a step](Query::of_step). May be captured on CUDA.
    ///
    /// Before the first [`advance`](Self::advance) rows see nothing.
    ///
    /// # Errors
    /// Unknown layers, views that do not fit, a scale that is not finite and positive, [`Error::Behind`] where a sequence was
    /// changed since the last `advance`, or a device error.
    pub fn attend_step(&mut self, step: &Step<B::Buffer>, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()> {
        self.check_layer(layer)?;
        if let got @ 1.. = query.rows.len() as u64 {
            return Err(Error::Shape { what: "the rows named by the query of a step", got, expected: 0 });
        }
        let rows = step.rows();
        check_query(query, rows as u64, self.geometry(), self.pool.backend.caps())?;
        self.check_current(step, layer)?;
        let _span = tracing::trace_span!("kvtide.attend_step", layer, rows).entered();
        let plan = step.descriptors.plan(layer);
        plan.batches.iter().try_for_each(|batch| self.attend_batch(step, layer, query, batch, plan.most_states(batch)))
    }

    fn attend_batch(
        &mut self,
        step: &Step<B::Buffer>,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        batch: &Batch,
        most_states: u32,
    ) -> Result<()> {
        let (pool, descriptors, geometry) = (&mut self.pool, &step.descriptors, self.record.geometry());
        let rows = batch.first_row..batch.first_row + batch.rows.len();
        let at = step.at(layer, rows.start, rows.len(), most_states);
        let from = |view: &View<B::Buffer>| view.clone().from_row(rows.start as u64);
        let attend = ops::Attend {
            record: self.record,
            arena: Arena { slabs: &pool.slabs, slab_shift: pool.book.shift() },
            channels: channels_of(&pool.channels, layer),
            tables: &step.memory,
            q: &from(query.q()),
            scale: scale_of(query, geometry),
            grain: batch.grain,
            rows: descriptors.rows(layer, rows.clone()),
            tiles: descriptors.tiles(layer, rows.clone()),
            states: &step.states,
        };
        pool.backend.attend_step(&mut pool.stream, &attend, &at)?;
        let (out, lse) = query.outputs();
        let lse = lse.map(from);
        let merge = ops::Merge {
            states: &step.states,
            grain: batch.grain,
            rows: descriptors.merges(layer, rows.clone()),
            q_heads: geometry.q_heads(),
            v_dim: geometry.v_dim(),
            out: &from(out),
            lse: lse.as_ref(),
        };
        pool.backend.merge_step(&mut pool.stream, &merge, &at)
    }

    /// Refuses a step whose descriptors are no longer what the sequences are.
    fn check_current(&self, step: &Step<B::Buffer>, layer: usize) -> Result<()> {
        for (row, &id) in step.sequences.iter().enumerate() {
            let layers = self.sequences.get(&id).filter(|_| step.store == self.id);
            let pages = &layers.ok_or(Error::UnknownSequence { id })?[layer];
            let end = u64::from(step.descriptors.rows(layer, row..row + 1)[0].end);
            let known = step.known[layer * step.rows() + row];
            if end > 0 && (pages.len != end || known != Some(pages.edition)) {
                return Err(Error::Behind { sequence: id, layer });
            }
        }
        Ok(())
    }

    /// Where each row's token goes; `strides` are the elements from one row of K and of V to the next.
    fn step_runs(&self, step: &Step<B::Buffer>, layer: usize, strides: [u64; 2]) -> Result<Vec<AppendRun>> {
        self.check_current(step, layer)?;
        let page = self.geometry().page_tokens();
        let run = |(at, &id): (usize, &u64)| {
            let token = step.descriptors.rows(layer, at..at + 1)[0].end.checked_sub(1)?;
            let [k_offset, v_offset] = strides.map(|stride| (at as u64 * stride) as u32);
            let frame = self.sequences[&id][layer].table[(token / page) as usize];
            Some(AppendRun { k_offset, v_offset, frame, slot: token % page, tokens: 1, page: 0, reserved: [0; 2] })
        };
        Ok(step.sequences.iter().enumerate().filter_map(run).collect())
    }
}
