//! What a planned write enqueues: copies of shared pages, then one launch for each group of like views.

use super::calibration::channels_of;
use super::write::{Append, Planned};
use super::{NonFinite, PagedStore};
use crate::backend::ops::{self, Arena, Channels, Onto, Place, Transfer, View};
use crate::backend::params::{AppendRun, Move};
use crate::backend::{Backend, DeviceBuffer};
use crate::pages::layer::Fresh;
use crate::record::Record;
use crate::{Error, Geometry, Result};

/// Bytes that the views of one launch may span: the largest binding that every WebGPU device has, less its alignment.
const NEAR: u64 = (128 << 20) - 4096;

impl<B: Backend> PagedStore<B> {
    /// Enqueues the copies and the writes.
    pub(super) fn enqueue(
        &mut self,
        layer: usize,
        appends: &[Append<'_, B::Buffer>],
        planned: &[Planned],
    ) -> Result<()> {
        let counter = self.pool.counter()?;
        self.pool.ready_channels()?;
        self.pool.ready_projector()?;
        let groups = self.launches(layer, appends, planned);
        // A launch that will be refused is found before the first one has written anything.
        let (record, caps) = (self.record, self.pool.backend.caps());
        let target = Target {
            record,
            arena: self.pool.arena(),
            channels: channels_of(&self.pool.channels, layer),
            onto: self.pool.projector.as_ref().map(|projector| projector.onto(layer)),
            non_finite: &counter,
        };
        groups.iter().try_for_each(|launch| launch.args(target, true).validate(caps))?;
        if self.config.non_finite == NonFinite::Refuse {
            let before = self.pool.non_finite()? as u32;
            groups.iter().try_for_each(|launch| self.launch(layer, launch, &counter, false))?;
            let count = (self.pool.non_finite()? as u32).wrapping_sub(before);
            if count > 0 {
                return Err(Error::NonFinite { count: count.into() });
            }
        }
        let moves = planned.iter().flat_map(|plan| {
            let old = &self.sequences[&plan.id][layer].table;
            let copies = plan.fresh.iter().zip(&plan.pages).filter(|((_, why), _)| *why == Fresh::Copy);
            copies.map(|((page, _), &to)| Move { from: self.pool.frame(old[*page]), to: self.pool.frame(to) })
        });
        let moves: Vec<Move> = moves.collect();
        if !moves.is_empty() {
            let arena = Arena { slabs: &self.pool.slabs, slab_shift: self.pool.shift() };
            let (from, to) = (Place::Frames(arena), Place::Frames(arena));
            let copy = Transfer { record: self.record, from, to, moves: &moves };
            self.pool.backend.transfer(&mut self.pool.stream, &copy)?;
        }
        groups.iter().try_for_each(|launch| self.launch(layer, launch, &counter, true))
    }

    fn launch(&mut self, layer: usize, launch: &Launch<B::Buffer>, counter: &B::Buffer, write: bool) -> Result<()> {
        let (record, slab_shift, pool) = (self.record, self.pool.shift(), &mut self.pool);
        let target = Target {
            record,
            arena: Arena { slabs: &pool.slabs, slab_shift },
            channels: channels_of(&pool.channels, layer),
            onto: pool.projector.as_ref().map(|projector| projector.onto(layer)),
            non_finite: counter,
        };
        pool.backend.append(&mut pool.stream, &launch.args(target, write))
    }

    /// Groups appends whose views differ in nothing but the offset, and cuts their tokens into runs.
    fn launches(&self, layer: usize, appends: &[Append<'_, B::Buffer>], planned: &[Planned]) -> Vec<Launch<B::Buffer>> {
        let mut launches: Vec<Launch<B::Buffer>> = Vec::new();
        let mut sorted: Vec<_> = appends.iter().zip(planned).filter(|(append, _)| append.tokens > 0).collect();
        sorted.sort_by_key(|(append, _)| (append.k.offset, append.v.offset));
        for (append, plan) in sorted {
            let found = launches.iter().position(|launch| launch.takes(append, self.geometry()));
            let at = found.unwrap_or_else(|| {
                launches.push(Launch { k: append.k.clone(), v: append.v.clone(), runs: Vec::new() });
                launches.len() - 1
            });
            let runs = self.runs(layer, append, plan, &launches[at]);
            launches[at].runs.extend(runs);
        }
        launches
    }

    fn runs(
        &self,
        layer: usize,
        append: &Append<'_, B::Buffer>,
        plan: &Planned,
        launch: &Launch<B::Buffer>,
    ) -> Vec<AppendRun> {
        let page_size = u64::from(self.geometry().page_tokens());
        let old = &self.sequences[&plan.id][layer].table;
        let number = |page: u64| {
            let fresh = plan.fresh.binary_search_by_key(&(page as usize), |(page, _)| *page);
            fresh.map_or_else(|_| old[page as usize], |at| plan.pages[at])
        };
        let projector = self.pool.projector.as_ref();
        let offset = |view: &View<B::Buffer>, base: &View<B::Buffer>, token: u64| {
            ((view.offset - base.offset) / view.dtype.bytes() + token * view.strides[0]) as u32
        };
        let mut runs = Vec::new();
        let mut token = plan.start;
        while token < plan.end {
            let (page, slot) = (token / page_size, token % page_size);
            let tokens = (page_size - slot).min(plan.end - token);
            runs.push(AppendRun {
                k_offset: offset(&append.k, &launch.k, token - plan.start),
                v_offset: offset(&append.v, &launch.v, token - plan.start),
                frame: self.pool.frame(number(page)),
                slot: slot as u32,
                tokens: tokens as u32,
                page: projector.map_or(0, |projector| projector.record(number(page))),
                reserved: [0; 2],
            });
            token += tokens;
        }
        runs
    }
}

/// What the launches of one write share.
#[derive(Debug)]
struct Target<'a, Buf> {
    record: Record,
    arena: Arena<'a, Buf>,
    channels: Option<Channels<'a, Buf>>,
    onto: Option<Onto<'a, Buf>>,
    non_finite: &'a Buf,
}

impl<Buf> Clone for Target<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for Target<'_, Buf> {}

/// One launch of `append`: views at the lowest offset of their group.
struct Launch<Buf> {
    k: View<Buf>,
    v: View<Buf>,
    runs: Vec<AppendRun>,
}

impl<Buf: DeviceBuffer> Launch<Buf> {
    fn args<'a>(&'a self, target: Target<'a, Buf>, write: bool) -> ops::Append<'a, Buf> {
        let Target { record, arena, channels, onto, non_finite } = target;
        ops::Append { record, arena, k: &self.k, v: &self.v, channels, runs: &self.runs, onto, non_finite, write }
    }

    /// Whether an append's views are this launch's views further on, near enough for one binding.
    fn takes(&self, append: &Append<'_, Buf>, geometry: &Geometry) -> bool {
        let further = |base: &View<Buf>, view: &View<Buf>, dim: u32| {
            let span = view.span([append.tokens.into(), geometry.kv_heads().into(), dim.into()]);
            base.strides == view.strides
                && base.dtype == view.dtype
                && base.offset <= view.offset
                && (view.offset - base.offset).saturating_add(span.unwrap_or(u64::MAX).saturating_mul(4)) <= NEAR
                && base.buffer.same_memory(&view.buffer)
        };
        further(&self.k, &append.k, geometry.k_dim()) && further(&self.v, &append.v, geometry.v_dim())
    }
}
