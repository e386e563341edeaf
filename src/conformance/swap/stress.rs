//! Does every page keep its contents over thousands of moves, and with many threads? (B40, B47)

use super::super::check::{Check, Failure, Measure, Verdict};
use super::super::store::context_bits;
use super::super::values::{Rng, Tensor};
use super::constant;
use super::twin::{append, is_full};
use super::{Setup, bottom, over_tiers, tiers};
use crate::store::Sequence;
use crate::swap::HighSpeedSwap;
use crate::{Backend, Dtype, Error, PageFormat};
use std::sync::{Arc, Mutex, PoisonError};

/// Blocks whose every element says which one it is.
struct Blocks<B: Backend> {
    swap: HighSpeedSwap<B>,
    live: Vec<(Sequence, f32)>,
    moved: u64,
}

impl<B: Backend> Blocks<B> {
    /// One random step: write, rewrite, send away, bring back, read or drop.
    fn step(&mut self, backend: &B, rng: &mut Rng, name: f32, check: &mut Check) -> Result<(), Failure> {
        let page = self.swap.geometry().page_tokens();
        let block = |x: f32| [x, -x].map(|x| Tensor::of(Dtype::F32, [page, 1, 16], move |_, _, _| x));
        let at = rng.below(self.live.len().max(1) as u32) as usize;
        let full = |error: Error| if is_full(&error) { Ok(()) } else { Err(Failure::from(error)) };
        match (self.live.len(), rng.below(6)) {
            (0, _) | (1..23, 0) => {
                let seq = self.swap.begin();
                match append(backend, &mut self.swap, 0, &[(&seq, None, page)], &block(name))? {
                    Ok(()) => self.live.push((seq, name)),
                    Err(error) => full(error)?,
                }
            }
            (_, 0) => drop(self.live.swap_remove(at)),
            (_, 1) => match append(backend, &mut self.swap, 0, &[(&self.live[at].0, Some(0), page)], &block(name))? {
                Ok(()) => self.live[at].1 = name,
                Err(error) => full(error)?,
            },
            (_, 2) => match self.swap.offload(&self.live[at].0) {
                Ok(()) => self.moved += self.swap.evict(&self.live[at].0)?,
                Err(error) => full(error)?,
            },
            (_, 3) => match self.swap.prefetch(0, &self.live[at].0, 0..1) {
                Ok(()) => {}
                Err(error) => full(error)?,
            },
            _ => {
                let (k, v) = context_bits(&mut self.swap, 0, &self.live[at].0)?;
                let format = self.swap.geometry().page_format();
                let [want_k, want_v] = [1.0, -1.0].map(|sign| constant(sign * self.live[at].1, format));
                let right = k.iter().all(|&bits| bits == want_k) && v.iter().all(|&bits| bits == want_v);
                check.holds("a block holds what was written to it", right);
            }
        }
        Ok(())
    }

    fn balance(&mut self, check: &mut Check) {
        let stats = self.swap.stats();
        let (tier, free) = (bottom(&stats), self.swap.tier().free());
        let frames = stats.resident_pages + stats.store.free_pages == stats.store.capacity_pages;
        check.holds("free and used slots are all slots", tier.used_pages + free == tier.capacity_pages);
        check.holds("free and used frames are all frames", frames && stats.store.capacity_pages <= stats.frames);
    }
}

/// A name that every format holds exactly.
fn name(step: u32) -> f32 {
    (1 + step % 255) as f32
}

/// B40: 10,000 random steps over a few frames and 16 slots.
pub(super) fn shadow<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let (swap, _) = Setup::new(kind, format, 64, 8).slots(16).build(backend)?;
        let (mut blocks, mut rng) = (Blocks { swap, live: Vec::new(), moved: 0 }, Rng::new(40));
        for step in 0..10_000 {
            blocks.step(backend, &mut rng, name(step), &mut check)?;
            blocks.balance(&mut check);
        }
        check.holds("the books agree", blocks.swap.is_consistent());
        let moved = (blocks.moved, blocks.swap.stats().streamed_pages);
        check.holds(&format!("pages went both ways: {moved:?}"), moved.0 > 100 && moved.1 > 500);
        blocks.live.clear();
        blocks.swap.synchronize()?;
        let stats = blocks.swap.stats();
        check.holds("nothing is left", (stats.store.held_pages, bottom(&stats).used_pages) == (0, 0));
        check.done()
    })
}

/// B47: eight threads over one cache, then over one each on the same device.
pub(super) fn threads<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut last = Err(Failure("no tier".into()));
    for (kind, shared) in tiers(format).into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let open = || -> Result<_, Failure> {
            let (swap, _) = Setup::new(kind, format, 64, 8).slots(24).build(backend)?;
            Ok(Arc::new(Mutex::new(Blocks { swap, live: Vec::new(), moved: 0 })))
        };
        let one = open()?;
        let run = |thread: u32| -> Verdict {
            let cache = if shared { one.clone() } else { open()? };
            let (mut rng, mut check) = (Rng::new(thread.into()), Check::default());
            for step in 0..300 {
                let mut blocks = cache.lock().unwrap_or_else(PoisonError::into_inner);
                blocks.step(backend, &mut rng, name(thread * 300 + step), &mut check)?;
                blocks.balance(&mut check);
            }
            let mut blocks = cache.lock().unwrap_or_else(PoisonError::into_inner);
            check.holds("the books agree", blocks.swap.is_consistent());
            check.done()
        };
        let verdicts: Vec<Verdict> = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || run(thread))).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(Failure("a thread panicked".into())))).collect()
        });
        for verdict in verdicts {
            last = verdict;
            if !last.as_ref().is_ok_and(Measure::passes) {
                return last;
            }
        }
    }
    last
}
