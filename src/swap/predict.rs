//! What does the predictor think of a page? Keys are projected as they are appended, pages scored for the last queries.
//!
//! A record of projections belongs to a page number, wherever the page is: pages in the tier are scored too. Scores come
//! back to the host once a step, when those of the step before have long been computed.

use super::fetch::Wanted;
use super::{HighSpeedSwap, SwapConfig};
use crate::backend::ops::{Arena, Project, Score, View};
use crate::backend::params::{ProjectRun, ScoreEntry};
use crate::backend::{Backend, DeviceBuffer};
use crate::predictor::Basis;
use crate::store::pool::Pool;
use crate::store::projector::Projector;
use crate::store::{Query, Sequence, channels_of};
use crate::{Error, Geometry, Result};
use std::collections::VecDeque;
use std::ops::Range;

/// The predictor of one cache.
#[derive(Debug)]
pub(super) struct Predictor<B: Backend> {
    basis: Basis,
    queries: Option<B::Buffer>,
    /// Scores under way, oldest first, and buffers of earlier ones.
    pending: VecDeque<Pending<B>>,
    spare: Vec<B::Buffer>,
    /// Where scores are read on, so that nothing but them is waited for.
    reading: Option<B::Stream>,
}

/// A page whose keys are projected as far as slot `len`: those in the slots `written` were, as they were written.
#[derive(Debug, Clone)]
pub(super) struct Projected {
    pub(super) page: u32,
    pub(super) written: Range<u32>,
    pub(super) len: u32,
}

#[derive(Debug)]
struct Pending<B: Backend> {
    done: B::Event,
    out: B::Buffer,
    pages: Vec<u32>,
}

impl<B: Backend> Predictor<B> {
    /// The predictor of a store, whose keys are projected on `basis` from now on.
    ///
    /// # Errors
    /// Those of [`Projector::new`].
    pub(super) fn new(pool: &mut Pool<B>, geometry: &Geometry, basis: Basis) -> Result<Self> {
        let mut stream = pool.backend.stream()?;
        let projector = Projector::new(&pool.backend, &mut stream, geometry, &basis, pool.page_limit)?;
        pool.projector = Some(projector);
        let reading = pool.backend.caps().overlap.then_some(stream);
        Ok(Predictor { basis, queries: None, pending: VecDeque::new(), spare: Vec::new(), reading })
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

    /// Projects those keys of pages on the device that are not projected yet.
    pub(super) fn project(&mut self, layer: usize, pages: &[Projected]) -> Result<()> {
        let pool = &mut self.store.pool;
        if pool.projector.is_none() {
            return Ok(());
        }
        pool.ready_projector()?;
        pool.ready_channels()?;
        let residency = pool.residency.as_mut().expect("made by the builder");
        let Some(projector) = &pool.projector else { return Ok(()) };
        let mut runs = Vec::new();
        for Projected { page, written, len } in pages {
            let before = residency.project(*page, *len);
            residency.used(*page, self.marks.next(), self.step);
            for (slot, end) in [(before, written.start), (written.end.max(before), *len)] {
                if slot < end {
                    let (frame, page) = (residency.frame(*page), projector.record(*page));
                    runs.push(ProjectRun { frame, page, slot, tokens: end - slot });
                }
            }
        }
        if runs.is_empty() {
            return Ok(());
        }
        let project = Project {
            record: self.store.record,
            arena: Arena { slabs: &pool.slabs, slab_shift: residency.frames.shift() },
            channels: channels_of(&pool.channels, layer),
            rank: projector.rank(),
            basis: projector.basis_of(layer),
            projections: projector.arena(),
            runs: &runs,
        };
        let projected = pool.backend.project(&mut pool.stream, &project);
        if projected.is_err() {
            pages.iter().for_each(|projected| self.residency().forget_projection(projected.page));
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
        let bare = bare.map(|page| Projected { page: page.number, written: 0..0, len: page_size });
        let bare: Vec<Projected> = bare.collect();
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
        let Some(projector) = &pool.projector else { return Ok(None) };
        let (rank, rows) = (projector.rank(), entries.iter().map(|entry| entry.1).max().unwrap_or(0) + 1);
        let bytes = Score::<B::Buffer>::query_bytes(rows.into(), geometry.q_heads(), rank);
        let queries = room(&pool.backend, &mut predictor.queries, "kvtide projected queries", bytes)?;
        let bytes = entries.len() as u64 * 4;
        let fits = predictor.spare.iter().position(|buffer| buffer.bytes() >= bytes);
        let mut out = fits.map(|at| predictor.spare.swap_remove(at));
        let out = room(&pool.backend, &mut out, "kvtide scores", bytes)?;
        let entries: Vec<ScoreEntry> = entries
            .iter()
            .map(|&(page, row, tokens)| ScoreEntry { page: projector.record(page), row, tokens, reserved: 0 })
            .collect();
        let score = Score {
            geometry,
            rank,
            projections: projector.arena(),
            q,
            basis: projector.basis_of(layer),
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
