//! What does the predictor think of a page? Keys are projected as they are appended, pages scored for the last queries.
//!
//! A record of projections belongs to a page number, wherever the page is: pages in the tier are scored too. Scores come
//! back to the host once a step, when those of the step before have long been computed.

use super::fetch::Wanted;
use super::{HighSpeedSwap, SwapConfig};
use crate::backend::ops::{Arena, View};
use crate::backend::ops::{Matrices, Project, Score};
use crate::backend::params::{ProjectRun, ScoreEntry};
use crate::backend::{Backend, DeviceBuffer};
use crate::pages::frames::Frames;
use crate::pages::growth::{self, SlabLimits};
use crate::predictor::{Basis, Projections};
use crate::store::{Query, Sequence, channels_of};
use crate::{Error, Geometry, Result};
use std::collections::VecDeque;

/// Records that the first slab of projections holds.
const STEP: u64 = 256;

/// The predictor of one cache.
#[derive(Debug)]
pub(super) struct Predictor<B: Backend> {
    basis: Basis,
    layout: Projections,
    /// The matrices of all layers, one after the other.
    matrices: B::Buffer,
    layer_bytes: u64,
    slabs: Vec<B::Buffer>,
    /// Numbers of records, in slabs; all are used, by page number.
    records: Frames,
    limits: SlabLimits,
    /// The most records there may be.
    most: u64,
    queries: Option<B::Buffer>,
    /// Scores under way, oldest first, and buffers of earlier ones.
    pending: VecDeque<Pending<B>>,
    spare: Vec<B::Buffer>,
    /// Where scores are read on, so that nothing but them is waited for.
    reading: Option<B::Stream>,
}

#[derive(Debug)]
struct Pending<B: Backend> {
    done: B::Event,
    out: B::Buffer,
    pages: Vec<u32>,
}

impl<B: Backend> Predictor<B> {
    /// Puts a basis on the device.
    ///
    /// # Errors
    /// A basis of another geometry; [`Error::Limit`] when the projections of all pages are more than the device can
    /// address or hold.
    pub(super) fn new(backend: &B, geometry: &Geometry, basis: Basis, pages: u64) -> Result<Self> {
        basis.fits(geometry)?;
        let (caps, layout) = (backend.caps(), Projections::new(geometry, basis.rank())?);
        let slab_bits = u64::from(caps.max_slabs).next_power_of_two().trailing_zeros();
        let frames = (caps.max_slab_bytes / layout.stride()).min(1 << (31 - slab_bits));
        let limits = SlabLimits { frames, slabs: caps.max_slabs.into() };
        let limit = |limit, need, have| {
            let purpose = "projections of all pages: lower the rank, or use a smaller tier";
            Err(Error::Limit { adapter: caps.adapter.clone(), limit, need, have, purpose })
        };
        if pages > limits.addressable() {
            return limit("max_slabs × max_slab_bytes / projections", pages, limits.addressable());
        }
        if let Some(memory) = caps.memory_bytes.filter(|memory| pages * layout.stride() > memory / 20 * 19) {
            return limit("memory", pages * layout.stride(), memory);
        }
        let mut stream = backend.stream()?;
        let layers: Vec<Vec<u8>> = (0..geometry.layers()).map(|layer| basis.device_bytes(layer)).collect();
        let layer_bytes = (layers[0].len() as u64).next_multiple_of(256);
        let matrices = backend.alloc("kvtide basis", layer_bytes * layers.len() as u64)?;
        for (layer, bytes) in layers.iter().enumerate() {
            backend.upload(&mut stream, &matrices, layer as u64 * layer_bytes, bytes)?;
        }
        backend.synchronize(&mut stream)?;
        Ok(Predictor {
            basis,
            layout,
            matrices,
            layer_bytes,
            slabs: Vec::new(),
            records: Frames::new(frames.next_power_of_two().trailing_zeros()),
            limits,
            most: pages,
            queries: None,
            pending: VecDeque::new(),
            spare: Vec::new(),
            reading: if caps.overlap { Some(stream) } else { None },
        })
    }

    /// Room for the projections of pages below `pages`.
    fn grow(&mut self, backend: &B, pages: u64) -> Result<()> {
        let (capacity, most) = (self.records.capacity(), self.most);
        let target = growth::target(capacity, pages, STEP, most).unwrap_or(most);
        for records in self.limits.add(self.slabs.len() as u64, capacity, target, most) {
            self.slabs.push(backend.alloc("kvtide projections", u64::from(records) * self.layout.stride())?);
            self.records.add_slab(records);
        }
        Ok(())
    }

    fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.records.shift() }
    }

    fn basis_of(&self, layer: usize) -> Matrices<'_, B::Buffer> {
        let offset = layer as u64 * self.layer_bytes;
        Matrices { buffer: &self.matrices, offset, head_stride: self.basis.head_stride() }
    }
}

/// A buffer of at least `bytes` bytes in `place`.
fn room<B: Backend>(backend: &B, place: &mut Option<B::Buffer>, label: &str, bytes: u64) -> Result<B::Buffer> {
    if place.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
        *place = Some(backend.alloc(label, bytes.next_power_of_two().max(256))?);
    }
    Ok(place.clone().expect("just made"))
}

impl<B: Backend> HighSpeedSwap<B> {
    /// The basis of the predictor, where there is one.
    pub fn basis(&self) -> Option<&Basis> {
        self.predictor.as_ref().map(|predictor| &predictor.basis)
    }

    /// Projects the keys of pages on the device, from the first slot that has not been projected to slot `end` (exclusive)
    /// of each: (page number, first slot written, end).
    pub(super) fn project(&mut self, layer: usize, pages: &[(u32, u32, u32)]) -> Result<()> {
        let Some(predictor) = &mut self.predictor else { return Ok(()) };
        let pool = &mut self.store.pool;
        predictor.grow(&pool.backend, pool.book.capacity())?;
        pool.ready_channels()?;
        let residency = pool.residency.as_mut().expect("made by the builder");
        let mut runs = Vec::with_capacity(pages.len());
        for &(page, start, end) in pages {
            let slot = residency.project(page, start, end);
            residency.used(page, self.marks.next(), self.step);
            let record = predictor.records.number(page);
            runs.push(ProjectRun { frame: residency.frame(page), page: record, slot, tokens: end - slot });
        }
        let project = Project {
            record: self.store.record,
            arena: Arena { slabs: &pool.slabs, slab_shift: residency.frames.shift() },
            channels: channels_of(&pool.channels, layer),
            rank: predictor.layout.rank(),
            basis: predictor.basis_of(layer),
            projections: predictor.arena(),
            runs: &runs,
        };
        let projected = pool.backend.project(&mut pool.stream, &project);
        if projected.is_err() {
            pages.iter().for_each(|&(page, ..)| self.residency().forget_projection(page));
        }
        projected
    }

    /// Projects pages that came from an earlier store, whose projections are gone.
    pub(super) fn project_landed(&mut self, layer: usize, pages: &[Wanted]) -> Result<()> {
        if self.predictor.is_none() {
            return Ok(());
        }
        let page_size = self.geometry().page_tokens();
        let bare = pages.iter().filter(|page| self.resident().projected(page.number) == 0);
        let bare: Vec<(u32, u32, u32)> = bare.map(|page| (page.number, 0, page_size)).collect();
        if bare.is_empty() { Ok(()) } else { self.project(layer, &bare) }
    }

    /// The pages of a sequence whose keys are projected: page number and tokens.
    fn scored(&self, layer: usize, sequence: u64) -> Vec<(u32, u32)> {
        let pages = &self.store.sequences[&sequence][layer];
        let page_size = u64::from(self.geometry().page_tokens());
        let tokens = |at: usize| (pages.len - at as u64 * page_size).min(page_size) as u32;
        let all = pages.table.iter().enumerate().map(|(at, &page)| (page, tokens(at)));
        all.filter(|&(page, tokens)| self.resident().projected(page) >= tokens).collect()
    }

    /// Enqueues scores of the pages of each sequence in a call, for its last row.
    pub(super) fn score(&mut self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()> {
        if self.predictor.is_none() || !self.policy.wants_scores() {
            return Ok(());
        }
        let (mut entries, mut pages) = (Vec::new(), Vec::new());
        let mut row = 0;
        for rows in query.rows {
            row += rows.count;
            for (page, tokens) in self.scored(layer, rows.seq.id()).into_iter().filter(|_| rows.count > 0) {
                entries.push((page, row - 1, tokens));
                pages.push(page);
            }
        }
        let Some((done, out)) = self.enqueue_score(layer, &entries, query.q())? else { return Ok(()) };
        if let Some(predictor) = &mut self.predictor {
            predictor.pending.push_back(Pending { done, out, pages });
        }
        Ok(())
    }

    fn enqueue_score(
        &mut self,
        layer: usize,
        entries: &[(u32, u32, u32)],
        q: &View<B::Buffer>,
    ) -> Result<Option<(B::Event, B::Buffer)>> {
        let (geometry, pool) = (*self.store.geometry(), &mut self.store.pool);
        let Some(predictor) = self.predictor.as_mut().filter(|_| !entries.is_empty()) else { return Ok(None) };
        let (rank, rows) = (predictor.layout.rank(), entries.iter().map(|entry| entry.1).max().unwrap_or(0) + 1);
        let bytes = Score::<B::Buffer>::query_bytes(rows.into(), geometry.q_heads(), rank);
        let queries = room(&pool.backend, &mut predictor.queries, "kvtide projected queries", bytes)?;
        let bytes = entries.len() as u64 * 4;
        let fits = predictor.spare.iter().position(|buffer| buffer.bytes() >= bytes);
        let mut out = fits.map(|at| predictor.spare.swap_remove(at));
        let out = room(&pool.backend, &mut out, "kvtide scores", bytes)?;
        let entries: Vec<ScoreEntry> = entries
            .iter()
            .map(|&(page, row, tokens)| ScoreEntry { page: predictor.records.number(page), row, tokens, reserved: 0 })
            .collect();
        let score = Score {
            geometry,
            rank,
            projections: predictor.arena(),
            q,
            basis: predictor.basis_of(layer),
            queries: &queries,
            entries: &entries,
            out: &out,
        };
        pool.backend.score(&mut pool.stream, &score)?;
        Ok(Some((pool.backend.record(&mut pool.stream)?, out)))
    }

    /// Takes the scores that have been computed, at the beginning of a step.
    pub(super) fn take_scores(&mut self) -> Result<()> {
        loop {
            let pool = &mut self.store.pool;
            let Some(predictor) = &mut self.predictor else { return Ok(()) };
            match predictor.pending.front() {
                Some(front) if pool.backend.is_done(&front.done)? => {}
                _ => return Ok(()),
            }
            let Some(Pending { out, pages, .. }) = predictor.pending.pop_front() else { return Ok(()) };
            let mut scores = vec![0.0f32; pages.len()];
            let stream = predictor.reading.as_mut().unwrap_or(&mut pool.stream);
            pool.backend.download(stream, &out, 0, bytemuck::cast_slice_mut(&mut scores))?;
            predictor.spare.push(out);
            for (page, score) in pages.into_iter().zip(scores) {
                self.residency().rate(page, score);
            }
        }
    }

    /// Scores every page of a sequence in a layer for one query row `[1, q_head, k_dim]`: the largest product of a projected
    /// query head with a projected key of the page, in page order. Pages that were never projected (of a store that was
    /// reopened, until they have been on the device) get −∞. Waits for the device.
    ///
    /// # Errors
    /// Unknown sequences or layers, a query that does not fit, [`Error::Unavailable`] without a predictor.
    pub fn scores(&mut self, layer: usize, seq: &Sequence, q: &View<B::Buffer>) -> Result<Vec<f32>> {
        self.pump()?;
        let count = self.store.pages(seq, layer)?.table.len();
        if self.predictor.is_none() {
            return Err(Error::Unavailable { backend: "predictor", reason: "none was given to the builder".into() });
        }
        let geometry = self.geometry();
        q.validate("Q", [1, geometry.q_heads().into(), geometry.k_dim().into()], self.backend().caps())?;
        let scored = self.scored(layer, seq.id());
        let entries: Vec<(u32, u32, u32)> = scored.iter().map(|&(page, tokens)| (page, 0, tokens)).collect();
        let mut scores = vec![f32::NEG_INFINITY; count];
        let Some((_, out)) = self.enqueue_score(layer, &entries, q)? else { return Ok(scores) };
        let mut found = vec![0.0f32; entries.len()];
        self.store.download(&out, 0, bytemuck::cast_slice_mut(&mut found))?;
        if let Some(predictor) = &mut self.predictor {
            predictor.spare.push(out);
        }
        let table = self.table(seq.id(), layer);
        let mut found = scored.iter().map(|(page, _)| *page).zip(found).peekable();
        for (score, page) in scores.iter_mut().zip(table) {
            if let Some((_, one)) = found.next_if(|(number, _)| number == page) {
                *score = one;
            }
        }
        Ok(scores)
    }
}

/// Refuses a policy that needs scores where nothing gives any.
pub(super) fn check_policy(config: &SwapConfig, predictor: bool, wants: bool) -> Result<()> {
    if wants && !predictor {
        let value = format!("{:?}", config.policy);
        return Err(Error::Config { field: "policy", value, rule: "a predictor must be given to the builder for it" });
    }
    Ok(())
}
