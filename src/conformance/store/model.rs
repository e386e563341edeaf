//! A naive model of `PagedStore`, and a driver that sends random operations to both and compares them.
//!
//! The model keeps each token as a plain vector and each page as a number in a list. It knows nothing of frames, slabs
//! or plans: from the lists alone it says how many pages must be held and which calls must be refused.

use super::super::check::{Failure, Verdict};
use super::super::values::{Rng, Tensor};
use super::{attend_bits, context_bits, measure_zero, shown, stored, upload};
use crate::attention::reference;
use crate::store::{Append, PagedStore, Rows, Sequence, StoreConfig};
use crate::{Backend, Dtype, Error, Geometry, PageFormat, View};
use std::collections::HashSet;

const PAGE: usize = 8;
const LAYERS: usize = 2;

/// One layer of a sequence: the bits of each token's K and V, and which page is which.
#[derive(Debug, Clone, Default)]
struct Layer {
    k: Vec<Vec<u32>>,
    v: Vec<Vec<u32>>,
    pages: Vec<u64>,
    reserved: usize,
}

/// A sequence in both worlds.
struct Twin {
    handle: Sequence,
    layers: Vec<Layer>,
}

struct Driver<'a, B: Backend> {
    backend: &'a B,
    store: PagedStore<B>,
    twins: Vec<Twin>,
    rng: Rng,
    limit: usize,
    next_page: u64,
    refused: usize,
}

/// Sends `steps` random operations to a small store and to the model; any difference ends the run.
pub(super) fn drive<B: Backend>(backend: &B, format: PageFormat, seed: u64, steps: usize) -> Verdict {
    let limit = 24;
    let geometry = Geometry::new(LAYERS as u32, 4, 2, 16).value_dim(24).page_size(PAGE as u32).format(format);
    let config = StoreConfig { step_pages: 3, page_limit: Some(limit), ..StoreConfig::default() };
    let store = PagedStore::with_config(backend.clone(), geometry, config)?;
    let rng = Rng::new(seed);
    let mut driver = Driver { backend, store, twins: Vec::new(), rng, limit: limit as usize, next_page: 0, refused: 0 };
    for step in 0..steps {
        let what = driver.step()?;
        driver.compare_counts().map_err(|fault| Failure(format!("seed {seed}, step {step} ({what}): {fault}")))?;
        if !driver.twins.is_empty() && driver.rng.below(8) == 0 {
            let fault = driver.compare_values()?;
            if let Some(fault) = fault {
                return Err(Failure(format!("seed {seed}, step {step} ({what}): {fault}")));
            }
        }
    }
    driver.twins.clear();
    let stats = driver.store.stats();
    if (stats.held_pages, stats.free_pages) != (0, stats.capacity_pages) {
        return Err(Failure(format!("seed {seed}: {} pages are held by nobody", stats.held_pages)));
    }
    if steps >= 500 && driver.refused == 0 {
        return Err(Failure(format!("seed {seed}: the pool was never full, so the limit was not tried")));
    }
    Ok(measure_zero(format!("{steps} random operations")))
}

impl<B: Backend> Driver<'_, B> {
    fn step(&mut self) -> Result<&'static str, Failure> {
        if self.twins.is_empty() || (self.twins.len() < 6 && self.rng.below(12) == 0) {
            let handle = self.store.begin();
            self.twins.push(Twin { handle, layers: vec![Layer::default(); LAYERS] });
            return Ok("begin");
        }
        match self.rng.below(16) {
            0..=6 => self.append(),
            7 | 8 => self.write_at(),
            9 => self.fork(),
            10 => self.fork_at(),
            11 | 12 => self.truncate(),
            13 => self.release(),
            14 => self.reserve(),
            _ => self.release_reservation(),
        }
    }

    fn pick(&mut self) -> usize {
        self.rng.below(self.twins.len() as u32) as usize
    }

    /// Distinct pages that sequences name, and reserved ones.
    fn held(&self) -> usize {
        let layers = || self.twins.iter().flat_map(|twin| &twin.layers);
        let pages: HashSet<u64> = layers().flat_map(|layer| layer.pages.iter().copied()).collect();
        pages.len() + layers().map(|layer| layer.reserved).sum::<usize>()
    }

    fn append(&mut self) -> Result<&'static str, Failure> {
        let mut who: Vec<usize> = (0..self.twins.len()).collect();
        self.rng.shuffle(&mut who);
        who.truncate(1 + self.rng.below(3) as usize);
        let layer = self.rng.below(LAYERS as u32) as usize;
        let writes = who.into_iter().map(|twin| {
            let tokens = if self.rng.below(4) == 0 { self.rng.below(40) } else { self.rng.below(4) };
            (twin, self.twins[twin].layers[layer].k.len(), tokens)
        });
        let writes = writes.collect();
        self.write(layer, writes).map(|()| "append")
    }

    fn write_at(&mut self) -> Result<&'static str, Failure> {
        let (twin, layer) = (self.pick(), self.rng.below(LAYERS as u32) as usize);
        let at = self.rng.below(self.twins[twin].layers[layer].k.len() as u32 + 1) as usize;
        let tokens = self.rng.below(20);
        self.write(layer, vec![(twin, at, tokens)]).map(|()| "write_at")
    }

    /// Writes (twin, offset, tokens) in one call, in the store and in the model.
    fn write(&mut self, layer: usize, writes: Vec<(usize, usize, u32)>) -> Result<(), Failure> {
        let dtype = Dtype::ALL[self.rng.below(3) as usize];
        let total: u32 = writes.iter().map(|w| w.2).sum();
        let k = Tensor::normal(dtype, [total.max(1), 2, 16], self.rng.bits());
        let v = Tensor::normal(dtype, [total.max(1), 2, 24], self.rng.bits());
        let (k_memory, v_memory) =
            (upload(self.backend, &mut self.store, &k)?, upload(self.backend, &mut self.store, &v)?);
        let (k_view, v_view) = (View::dense(k_memory, dtype, 2, 16), View::dense(v_memory, dtype, 2, 24));
        let mut row = 0;
        let mut appends = Vec::new();
        for &(twin, at, tokens) in &writes {
            let (k, v) = (k_view.clone().from_row(row), v_view.clone().from_row(row));
            appends.push(Append::new(&self.twins[twin].handle, tokens, k, v).at(at as u64));
            row += u64::from(tokens);
        }
        let answer = self.store.append(layer, &appends);
        let before: Vec<Layer> = self.twins.iter().map(|twin| twin.layers[layer].clone()).collect();
        let format = self.store.geometry().page_format();
        let stored = |t: &Tensor, row: usize| stored(&t.slice(row, 1), format);
        let mut row = 0;
        for &(twin, at, tokens) in &writes {
            self.give_pages(twin, layer, at, tokens as usize);
            let target = &mut self.twins[twin].layers[layer];
            for token in at..at + tokens as usize {
                let (k, v): (Vec<u32>, Vec<u32>) = (stored(&k, row), stored(&v, row));
                if token < target.k.len() {
                    (target.k[token], target.v[token]) = (k, v);
                } else {
                    target.k.push(k);
                    target.v.push(v);
                }
                row += 1;
            }
        }
        let fits = self.held() <= self.limit;
        if !fits {
            self.twins.iter_mut().zip(before).for_each(|(twin, before)| twin.layers[layer] = before);
        }
        self.settle(fits, answer)
    }

    /// The model's pages for tokens `at..at + tokens`: shared ones are replaced, missing ones are new.
    fn give_pages(&mut self, twin: usize, layer: usize, at: usize, tokens: usize) {
        if tokens == 0 {
            return;
        }
        for page in at / PAGE..(at + tokens).div_ceil(PAGE) {
            let owners = |id: u64| self.twins.iter().filter(|t| t.layers[layer].pages.contains(&id)).count();
            let known = self.twins[twin].layers[layer].pages.get(page).copied();
            let target = match known {
                Some(id) if owners(id) == 1 => continue,
                Some(_) => {
                    let pages = &mut self.twins[twin].layers[layer].pages;
                    &mut pages[page]
                }
                None => {
                    let target = &mut self.twins[twin].layers[layer];
                    target.reserved = target.reserved.saturating_sub(1);
                    target.pages.push(0);
                    target.pages.last_mut().expect("pushed")
                }
            };
            self.next_page += 1;
            *target = self.next_page;
        }
    }

    /// Compares the store's answer with whether the model says that the pages fit.
    fn settle(&mut self, fits: bool, answer: crate::Result<()>) -> Result<(), Failure> {
        match (fits, answer) {
            (true, Ok(())) => Ok(()),
            (false, Err(Error::PageLimit { .. })) => {
                self.refused += 1;
                Ok(())
            }
            (fits, answer) => Err(Failure(format!("the model says fits = {fits}, the store {answer:?}"))),
        }
    }

    fn fork(&mut self) -> Result<&'static str, Failure> {
        if self.twins.len() < 6 {
            let twin = self.pick();
            let handle = self.store.fork(&self.twins[twin].handle)?;
            let layers = self.twins[twin].layers.iter().map(|layer| Layer { reserved: 0, ..layer.clone() }).collect();
            self.twins.push(Twin { handle, layers });
        }
        Ok("fork")
    }

    fn fork_at(&mut self) -> Result<&'static str, Failure> {
        let twin = self.pick();
        let shortest = self.shortest(twin);
        let at = self.rng.below(shortest as u32 + 3) as usize;
        let forked = self.store.fork_at(&self.twins[twin].handle, at as u64);
        match forked {
            Ok(handle) if at <= shortest => {
                let mut layers = self.twins[twin].layers.clone();
                layers.iter_mut().for_each(|layer| layer.cut(at));
                layers.iter_mut().for_each(|layer| layer.reserved = 0);
                if self.twins.len() < 6 {
                    self.twins.push(Twin { handle, layers });
                }
                Ok("fork_at")
            }
            Err(Error::OffsetPastEnd { .. }) if at > shortest => Ok("fork_at"),
            other => Err(Failure(format!("fork_at({at}) of {shortest} tokens: {other:?}"))),
        }
    }

    fn truncate(&mut self) -> Result<&'static str, Failure> {
        let twin = self.pick();
        let shortest = self.shortest(twin);
        let at = self.rng.below(shortest as u32 + 3) as usize;
        match self.store.truncate(&self.twins[twin].handle, at as u64) {
            Ok(()) if at <= shortest => self.twins[twin].layers.iter_mut().for_each(|layer| layer.cut(at)),
            Err(Error::OffsetPastEnd { .. }) if at > shortest => {}
            other => return Err(Failure(format!("truncate({at}) of {shortest} tokens: {other:?}"))),
        }
        Ok("truncate")
    }

    fn release(&mut self) -> Result<&'static str, Failure> {
        let twin = self.pick();
        let Twin { handle, .. } = self.twins.swap_remove(twin);
        if self.rng.below(2) == 0 {
            self.store.release(handle)?;
        }
        Ok("release")
    }

    fn reserve(&mut self) -> Result<&'static str, Failure> {
        let (twin, tokens) = (self.pick(), self.rng.below(64) as usize);
        let answer = self.store.reserve(&self.twins[twin].handle, tokens as u64);
        let before = self.twins[twin].layers.clone();
        for layer in &mut self.twins[twin].layers {
            layer.reserved = layer.reserved.max(tokens.div_ceil(PAGE).saturating_sub(layer.pages.len()));
        }
        let fits = self.held() <= self.limit;
        if !fits {
            self.twins[twin].layers = before;
        }
        self.settle(fits, answer).map(|()| "reserve")
    }

    fn release_reservation(&mut self) -> Result<&'static str, Failure> {
        let (twin, tokens) = (self.pick(), self.rng.below(64) as usize);
        self.store.release_reservation(&self.twins[twin].handle, tokens as u64)?;
        for layer in &mut self.twins[twin].layers {
            layer.reserved = layer.reserved.min(tokens.div_ceil(PAGE).saturating_sub(layer.pages.len()));
        }
        Ok("release_reservation")
    }

    fn shortest(&self, twin: usize) -> usize {
        self.twins[twin].layers.iter().map(|layer| layer.k.len()).min().unwrap_or(0)
    }

    /// Page counts, lengths and the store's own books.
    fn compare_counts(&mut self) -> Result<(), String> {
        let (held, stats) = (self.held() as u64, self.store.stats());
        if stats.held_pages != held || stats.free_pages + stats.held_pages != stats.capacity_pages {
            return Err(format!("{held} pages are held, the store says {stats:?}"));
        }
        if stats.capacity_pages > self.limit as u64 {
            return Err(format!("{} pages are over the limit of {}", stats.capacity_pages, self.limit));
        }
        for twin in &self.twins {
            for (at, layer) in twin.layers.iter().enumerate() {
                let len = self.store.len(&twin.handle, at).map_err(|error| error.to_string())?;
                if len != layer.k.len() as u64 {
                    return Err(format!("layer {at} holds {} tokens, the store says {len}", layer.k.len()));
                }
            }
        }
        if self.store.is_consistent() { Ok(()) } else { Err("owner counts and the free list disagree".into()) }
    }

    /// Every token of one sequence and layer as bits, and attention over it.
    fn compare_values(&mut self) -> Result<Option<String>, Failure> {
        let (twin, layer) = (self.pick(), self.rng.below(LAYERS as u32) as usize);
        let Twin { handle, layers } = &self.twins[twin];
        let expected = &layers[layer];
        let (k, v) = context_bits(&mut self.store, layer, handle)?;
        if k != expected.k.concat() || v != expected.v.concat() {
            return Ok(Some(format!("layer {layer} of sequence {} holds other values", handle.id())));
        }
        let q = Tensor::normal(Dtype::F32, [2, 4, 16], self.rng.bits());
        let (out, _) = attend_bits(self.backend, &mut self.store, layer, &[Rows::tail(handle, 2)], &q)?;
        let format = self.store.geometry().page_format();
        let context = reference::Context { k: decode(&k, format), v: decode(&v, format) };
        let heads = reference::Heads::from(self.store.geometry());
        for row in 0..2 {
            let end = (expected.k.len() + row).saturating_sub(1);
            let want = reference::attend(&q.slice(row, 1).values(), &context, heads, 0..end, 0.25).0;
            let got = out[row * 96..][..96].iter().map(|&bits| f64::from(f32::from_bits(bits)));
            let (mut difference, mut size) = (0.0, 1e-30);
            got.zip(&want).for_each(|(got, want)| {
                difference += (got - want).powi(2);
                size += want.powi(2);
            });
            if !((difference / size).sqrt() <= 1e-5 || difference == 0.0) {
                let error = (difference / size).sqrt();
                return Ok(Some(format!("attention over layer {layer} of sequence {} is {error:e} off", handle.id())));
            }
        }
        Ok(None)
    }
}

impl Layer {
    fn cut(&mut self, tokens: usize) {
        self.k.truncate(tokens);
        self.v.truncate(tokens);
        self.pages.truncate(tokens.div_ceil(PAGE));
    }
}

fn decode(bits: &[u32], format: PageFormat) -> Vec<f32> {
    bits.iter().map(|&bits| super::super::values::decode(bits, shown(format))).collect()
}
