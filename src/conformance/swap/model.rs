//! Random operations beside a store whose pages never leave. A model of what must fit says which refusals are right.

use super::super::check::{Check, Failure, Verdict};
use super::super::values::Rng;
use super::faulty::Fault;
use super::standing::{Pin, Standing};
use super::twin::{See, Twin, Write, is_full};
use super::{Setup, TierKind, bottom, over_tiers};
use crate::swap::{PolicyChoice, WhenFull, WriteOut};
use crate::{Backend, Error, PageFormat};
use std::ops::Range;

const LAYERS: usize = 2;
const SEQUENCES: usize = 5;

struct Driver<'a, B: Backend> {
    twin: Twin<'a, B>,
    setup: Setup,
    rng: Rng,
    check: Check,
    /// Pins of the driver's own.
    pins: Vec<Pin>,
    refused: u64,
    /// Faults that were said.
    faults: u64,
}

/// Sends random operations to swaps of several shapes.
pub(super) fn drive<B: Backend>(backend: &B, format: PageFormat, seeds: Range<u64>, steps: u32) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for seed in seeds.clone() {
            let setup = shape(kind, format, seed);
            let (twin, rng) = (Twin::new(backend, &setup)?, Rng::new(seed));
            let mut driver = Driver { twin, setup, rng, check, pins: Vec::new(), refused: 0, faults: 0 };
            for step in 0..steps {
                let what = driver.step().map_err(|fault| Failure(format!("seed {seed}, step {step}: {}", fault.0)))?;
                driver
                    .compare_books()
                    .map_err(|fault| Failure(format!("seed {seed}, step {step} ({what}): {fault}")))?;
                if driver.check.has_failed() {
                    let worst = driver.check.done()?;
                    return Err(Failure(format!("seed {seed}, step {step} ({what}): {}", worst.what)));
                }
            }
            check = driver.end(seed, steps)?;
        }
        check.done()
    })
}

/// A small device and a small tier; every setting takes its turns.
fn shape(kind: TierKind, format: PageFormat, seed: u64) -> Setup {
    let at = seed as usize;
    let (page_size, frames) = [(64, 14), (256, 12), (32, 22), (64, 24)][at % 4];
    Setup::new(kind, format, page_size, frames).layers(LAYERS as u32).slots([30, 60, 16][at % 3]).config(|c| {
        c.tile_pages = [1, 4, 100][at / 2 % 3];
        c.tiles_ahead = [None, Some(0), Some(1), Some(5)][at / 3 % 4];
        c.layer_ahead = !at.is_multiple_of(3);
        c.policy = [PolicyChoice::StableSubset, PolicyChoice::Lru, PolicyChoice::PredictedScore][at / 2 % 3];
        c.write_out = [WriteOut::Pressure, WriteOut::Eager][at / 4 % 2];
        c.when_full = [WhenFull::Hold, WhenFull::Hold, WhenFull::Refuse][at % 3];
        c.state_bytes = [1 << 20, 400][at / 5 % 2];
    })
}

impl<B: Backend> Driver<'_, B> {
    fn step(&mut self) -> Result<String, Failure> {
        if self.twin.seqs.is_empty() {
            self.twin.begin();
        }
        // Writes are acknowledged at once or after a while; now and then a page does not travel.
        self.twin.faults.plan().delay = self.rng.below(4) * self.rng.below(3);
        let (read, write) = (self.rng.below(25) == 0, self.rng.below(25) == 0);
        let nth = Fault::Nth(self.rng.below(4).into());
        let kinds = [nth, nth, Fault::Short, Fault::Batch];
        let (for_read, for_write) = (kinds[self.rng.below(4) as usize], kinds[self.rng.below(4) as usize]);
        if read {
            self.twin.faults.plan().read = Some(for_read);
        }
        if write {
            self.twin.faults.plan().write = Some(for_write);
        }
        match self.rng.below(24) {
            0..=5 => self.append(),
            6 | 7 => self.write_at(),
            8..=13 => self.attend(),
            14 => self.context(),
            15 => self.fork(),
            16 => self.truncate(),
            17 => self.reserve(),
            18 => self.offload(),
            19 => self.evict(),
            20 => self.prefetch(),
            21 => self.pin(),
            22 => self.unpin(),
            _ => self.begin_or_drop(),
        }
    }

    fn pick(&mut self) -> (usize, usize) {
        (self.rng.below(self.twin.seqs.len() as u32) as usize, self.rng.below(LAYERS as u32) as usize)
    }

    fn page_size(&self) -> u64 {
        self.setup.geometry.page_tokens().into()
    }

    fn table(&mut self, seq: usize, layer: usize) -> Result<Vec<u32>, Failure> {
        let pages = self.twin.swap.pages(layer, &self.twin.seqs[seq].swap)?;
        Ok(pages.into_iter().map(|page| page.number).collect())
    }

    /// Holds a refusal against what the model says: whether it had to fit.
    fn judge(&mut self, what: &str, fits: bool, answer: crate::Result<()>) -> Result<bool, Failure> {
        match answer {
            Ok(()) => return Ok(true),
            Err(Error::Page { .. } | Error::Device { .. }) if self.twin.faults.plan().happened > self.faults => {
                self.faults += 1;
            }
            // A fault may also leave a page on the device that had to leave.
            Err(ref error) if is_full(error) && !fits => self.refused += 1,
            Err(error) => return Err(Failure(format!("{what} had to succeed (fits: {fits}): {error}"))),
        }
        Ok(false)
    }

    fn append(&mut self) -> Result<String, Failure> {
        let mut who: Vec<usize> = (0..self.twin.seqs.len()).collect();
        self.rng.shuffle(&mut who);
        who.truncate(1 + self.rng.below(3) as usize);
        let (_, layer) = self.pick();
        let most = if self.rng.below(4) == 0 { 700 } else { 40 };
        let writes: Vec<Write> = who.into_iter().map(|seq| (seq, None, self.rng.below(most))).collect();
        self.write(layer, &writes)
    }

    fn write_at(&mut self) -> Result<String, Failure> {
        let (seq, layer) = self.pick();
        let at = self.rng.below(self.twin.len(layer, seq) as u32 + 1);
        let most = if self.rng.below(5) == 0 { 900 } else { 100 };
        let tokens = self.rng.below(most);
        self.write(layer, &[(seq, Some(at.into()), tokens)])
    }

    fn write(&mut self, layer: usize, writes: &[Write]) -> Result<String, Failure> {
        self.unpin_all()?;
        let (standing, page_size) = (Standing::of(&mut self.twin, &self.setup, &self.pins)?, self.page_size());
        let (mut touched, mut new, mut overwrites) = (Vec::new(), 0, false);
        for &(seq, at, tokens) in writes.iter().filter(|write| write.2 > 0) {
            let start = at.unwrap_or(self.twin.len(layer, seq));
            let pages = start / page_size..(start + u64::from(tokens)).div_ceil(page_size);
            overwrites |= start < self.twin.len(layer, seq);
            new += pages.end - pages.start;
            let table = self.table(seq, layer)?;
            touched.extend(table.into_iter().take(pages.end as usize).skip(pages.start as usize));
        }
        let stats = self.twin.swap.stats();
        let half = self.setup.frames / 2;
        // Small writes at once; larger ones in pieces of a quarter, whose full pages need slots.
        let touched_pages = touched.len() as u64;
        let fits = if touched_pages + new <= half {
            standing.fits(touched, new)
        } else {
            let slots = standing.leaving() + new <= standing.free_slots;
            slots && standing.fits([], half.max(2) + 2 * writes.len() as u64)
        };
        let refuses = self.setup.config.when_full == WhenFull::Refuse && standing.leaving() + new > standing.free_slots;
        let held = stats.store.held_pages + new;
        let numbers = held <= stats.store.page_limit
            && (held <= standing.frames || standing.leaves_a_split(touched_pages + new, writes.len() as u64));
        let seed = self.rng.bits();
        let answer = self.twin.try_write(layer, writes, seed)?;
        let failed = answer.is_err();
        let what = format!("write {writes:?} in layer {layer}");
        self.judge(&what, fits && !refuses && numbers, answer)?;
        if failed && overwrites && new > half / 2 {
            // A write in pieces may have overwritten some tokens: this sequence is not compared any more.
            self.remove(writes[0].0)?;
        }
        Ok(what)
    }

    fn attend(&mut self) -> Result<String, Failure> {
        let (_, layer) = self.pick();
        let standing = Standing::of(&mut self.twin, &self.setup, &self.pins)?;
        let per_split = super::split_pages(self.page_size() as u32) as usize;
        let (mut fits, mut looks) = (true, Vec::new());
        for _ in 0..1 + self.rng.below(4) {
            let (seq, _) = self.pick();
            let (len, count) = (self.twin.len(layer, seq) as u32, 1 + self.rng.below(6));
            let see = match self.rng.below(5) {
                0 if len > count => See::At(self.rng.below(len - count).into(), count),
                1 => See::Window(count, 1 + u64::from(self.rng.below(400))),
                2 => See::Full(count),
                _ => See::Tail(count),
            };
            looks.push((seq, see));
            let table = self.table(seq, layer)?;
            fits &= table.chunks(per_split).all(|split| standing.fits(split.to_vec(), 0));
        }
        let seed = self.rng.bits();
        let mut check = std::mem::take(&mut self.check);
        let answer = self.twin.try_attend(layer, &looks, seed, &mut check)?;
        self.check = check;
        let what = format!("attend {looks:?} in layer {layer}");
        self.judge(&what, fits, answer)?;
        Ok(what)
    }

    fn context(&mut self) -> Result<String, Failure> {
        let (seq, layer) = self.pick();
        let (standing, table) = (Standing::of(&mut self.twin, &self.setup, &self.pins)?, self.table(seq, layer)?);
        let fits = table.iter().all(|&page| standing.fits([page], 0));
        let mut check = std::mem::take(&mut self.check);
        let answer = self.twin.try_context(layer, seq, &mut check)?;
        self.check = check;
        self.judge("context", fits, answer).map(|_| "context".into())
    }

    fn fork(&mut self) -> Result<String, Failure> {
        if self.twin.seqs.len() < SEQUENCES {
            let (seq, _) = self.pick();
            let shortest = (0..LAYERS).map(|layer| self.twin.len(layer, seq)).min().unwrap_or(0) as u32;
            match self.rng.below(2) {
                0 => self.twin.fork(seq)?,
                _ => self.twin.fork_at(seq, self.rng.below(shortest + 1).into())?,
            };
        }
        Ok("fork".into())
    }

    fn truncate(&mut self) -> Result<String, Failure> {
        self.unpin_all()?;
        let (seq, _) = self.pick();
        let shortest = (0..LAYERS).map(|layer| self.twin.len(layer, seq)).min().unwrap_or(0) as u32;
        let to = self.rng.below(shortest + 1);
        self.twin.truncate(seq, to.into())?;
        Ok(format!("truncate {seq} to {to}"))
    }

    fn reserve(&mut self) -> Result<String, Failure> {
        let (seq, _) = self.pick();
        let tokens = u64::from(self.rng.below(600));
        if self.rng.below(3) > 0 {
            self.twin.swap.release_reservation(&self.twin.seqs[seq].swap, tokens)?;
            return Ok("release a reservation".into());
        }
        let (standing, pages) =
            (Standing::of(&mut self.twin, &self.setup, &self.pins)?, tokens.div_ceil(self.page_size()) * LAYERS as u64);
        let stats = self.twin.swap.stats().store;
        let held = stats.held_pages + pages;
        let fits = standing.fits([], pages)
            && held <= stats.page_limit
            && (held <= standing.frames || standing.leaves_a_split(0, pages));
        let answer = self.twin.swap.reserve(&self.twin.seqs[seq].swap, tokens);
        if self.judge("reserve", fits, answer)? && self.rng.below(2) == 0 {
            self.twin.swap.release_reservation(&self.twin.seqs[seq].swap, 0)?;
        }
        Ok("reserve".into())
    }

    fn offload(&mut self) -> Result<String, Failure> {
        let (seq, _) = self.pick();
        let standing = Standing::of(&mut self.twin, &self.setup, &self.pins)?;
        let fits = standing.leaving() <= standing.free_slots;
        let answer = self.twin.swap.offload(&self.twin.seqs[seq].swap);
        if self.judge("offload", fits, answer)? {
            for layer in 0..LAYERS {
                let whole = self.twin.len(layer, seq) / self.page_size();
                let pages = self.twin.swap.pages(layer, &self.twin.seqs[seq].swap)?;
                let there = pages.iter().take(whole as usize).all(|page| page.slot.is_some());
                self.check.holds("offloaded pages are in the tier", there);
            }
        }
        Ok("offload".into())
    }

    fn evict(&mut self) -> Result<String, Failure> {
        let (seq, _) = self.pick();
        self.twin.swap.evict(&self.twin.seqs[seq].swap)?;
        Ok("evict".into())
    }

    fn some_pages(&mut self) -> Result<(usize, usize, Range<u64>), Failure> {
        let (seq, layer) = self.pick();
        let pages = self.table(seq, layer)?.len() as u32;
        let first = self.rng.below(pages + 1);
        let end = pages.min(first + self.rng.below(4));
        Ok((seq, layer, first.into()..end.into()))
    }

    fn prefetch(&mut self) -> Result<String, Failure> {
        let (seq, layer, pages) = self.some_pages()?;
        let (standing, table) = (Standing::of(&mut self.twin, &self.setup, &self.pins)?, self.table(seq, layer)?);
        let fits = standing.fits(table[pages.start as usize..pages.end as usize].to_vec(), 0);
        let answer = self.twin.swap.prefetch(layer, &self.twin.seqs[seq].swap, pages);
        self.judge("prefetch", fits, answer).map(|_| "prefetch".into())
    }

    fn pin(&mut self) -> Result<String, Failure> {
        let (seq, layer, pages) = self.some_pages()?;
        let (standing, table) = (Standing::of(&mut self.twin, &self.setup, &self.pins)?, self.table(seq, layer)?);
        let fits = standing.fits(table[pages.start as usize..pages.end as usize].to_vec(), 0);
        let answer = self.twin.swap.pin(layer, &self.twin.seqs[seq].swap, pages.clone());
        if self.judge("pin", fits, answer)? {
            self.pins.push((seq, layer, pages));
        }
        Ok("pin".into())
    }

    fn unpin(&mut self) -> Result<String, Failure> {
        self.unpin_all().map(|()| "unpin".into())
    }

    /// Pins stay with pages, so the driver takes them away before a sequence changes its pages.
    fn unpin_all(&mut self) -> Result<(), Failure> {
        for (seq, layer, pages) in std::mem::take(&mut self.pins) {
            self.twin.swap.unpin(layer, &self.twin.seqs[seq].swap, pages)?;
        }
        self.check.holds("pins are back to none", self.twin.swap.stats().pinned_pages == 0);
        Ok(())
    }

    fn remove(&mut self, seq: usize) -> Result<(), Failure> {
        self.unpin_all()?;
        let pair = self.twin.seqs.swap_remove(seq);
        if self.rng.below(2) == 0 {
            self.twin.swap.release(pair.swap)?;
        }
        Ok(())
    }

    fn begin_or_drop(&mut self) -> Result<String, Failure> {
        if self.twin.seqs.len() < SEQUENCES && self.rng.below(2) == 0 {
            self.twin.begin();
            return Ok("begin".into());
        }
        let (seq, _) = self.pick();
        self.remove(seq).map(|()| format!("drop {seq}"))
    }

    /// Lengths, frames, slots and owners.
    fn compare_books(&mut self) -> Result<(), String> {
        if !self.twin.swap.is_consistent() {
            return Err("the books disagree".into());
        }
        let stats = self.twin.swap.stats();
        let (frames, tier) = (stats.frames, bottom(&stats));
        let free = self.twin.swap.tier().free();
        if stats.resident_pages + stats.store.free_pages != stats.store.capacity_pages
            || stats.store.capacity_pages > frames
            || tier.used_pages + free != tier.capacity_pages
            || tier.capacity_pages != self.setup.slots
            || stats.clean_pages > stats.resident_pages
            || (self.pins.is_empty() && stats.pinned_pages > 0)
            || self.twin.swap.arena_bytes() > self.setup.frames * self.twin.swap.record().frame_stride()
        {
            return Err(format!("{stats:?}, {free} slots are free"));
        }
        for seq in 0..self.twin.seqs.len() {
            for layer in 0..LAYERS {
                let (want, got) = (self.twin.len(layer, seq), self.twin.swap.len(&self.twin.seqs[seq].swap, layer));
                if got != Ok(want) {
                    return Err(format!("layer {layer} of {seq} holds {got:?} tokens, not {want}"));
                }
            }
        }
        Ok(())
    }

    fn end(mut self, seed: u64, steps: u32) -> Result<Check, Failure> {
        self.unpin_all()?;
        (self.twin.faults.plan().read, self.twin.faults.plan().write) = (None, None);
        let stats = self.twin.swap.stats();
        let counts = (stats.streamed_pages, stats.store.copied_pages, self.refused, self.twin.faults.plan().happened);
        let tried = counts.0 > 20 && counts.1 > 0 && (counts.2 > 0 || steps < 500) && counts.3 > 0;
        self.check.holds(&format!("seed {seed} streamed, copied, refused, failed: {counts:?}"), tried);
        let mut check = self.check;
        self.twin.finish(&mut check)?;
        Ok(check)
    }
}
