//! Does a decode step do what appends and attends do? To the bit, while its sequences grow over every edge.

use super::Cases;
use super::cache::Bits;
use super::check::{Check, Failure, Verdict};
use super::store::{context_bits, upload, view};
use super::values::{Tensor, natural, poison};
use crate::backend::Backend;
use crate::store::{Append, Capture, NonFinite, PagedStore, Query, Rows, Sequence, Step, StoreConfig};
use crate::{Dtype, Error, Geometry, PageFormat, View};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name, run: fn(&B, PageFormat) -> Verdict| {
        list.store(format, weight, name, move |backend| run(backend, format));
    };
    add(4_000_000, "steps of ragged sequences", ragged);
    add(2_000_000, "steps with windows, in several batches", windowed);
    add(1_000_000, "steps of sequences that others change", changed);
    add(50_000, "steps that cannot be", refusals);
}

const LAYERS: usize = 2;
const DIM: u32 = 64;
const HEADS: [u32; 2] = [4, 2];

fn geometry(format: PageFormat) -> Geometry {
    Geometry::new(LAYERS as u32, HEADS[0], HEADS[1], DIM).page_size(8).format(format)
}

/// The same sequences twice: one store steps, the other appends and attends.
struct Twins<'a, B: Backend> {
    backend: &'a B,
    stepped: PagedStore<B>,
    plain: PagedStore<B>,
    /// Each in both stores.
    seqs: Vec<[Sequence; 2]>,
    windows: [Option<u64>; LAYERS],
    seed: u64,
}

impl<'a, B: Backend> Twins<'a, B> {
    fn new(backend: &'a B, format: PageFormat, config: StoreConfig, lens: &[u32]) -> Result<Self, Failure> {
        let store = || PagedStore::with_config(backend.clone(), geometry(format), config);
        let (stepped, plain) = (store()?, store()?);
        let mut twins = Twins { backend, stepped, plain, seqs: Vec::new(), windows: [None; LAYERS], seed: 0 };
        for (at, &len) in lens.iter().enumerate() {
            twins.seqs.push([twins.stepped.begin(), twins.plain.begin()]);
            twins.append(at, len)?;
        }
        Ok(twins)
    }

    fn format(&self) -> PageFormat {
        self.plain.geometry().page_format()
    }

    fn tensor(&mut self, rows: u32, heads: u32) -> Tensor {
        self.seed += 1;
        Tensor::normal(natural(self.format()), [rows, heads, DIM], self.seed)
    }

    /// Appends tokens to a sequence of both.
    fn append(&mut self, seq: usize, tokens: u32) -> Result<(), Failure> {
        for layer in 0..LAYERS {
            let (k, v) = (self.tensor(tokens, HEADS[1]), self.tensor(tokens, HEADS[1]));
            for (store, seq) in [&mut self.stepped, &mut self.plain].into_iter().zip(&self.seqs[seq]) {
                let (k, v) = (view(self.backend, store, &k)?, view(self.backend, store, &v)?);
                store.append(layer, &[Append::new(seq, tokens, k, v)])?;
            }
        }
        Ok(())
    }

    fn step(&mut self, max_tokens: u64) -> crate::Result<Step<B::Buffer>> {
        let seqs: Vec<_> = self.seqs.iter().map(|[seq, _]| seq).collect();
        self.stepped.step_windowed(&seqs, max_tokens, |layer| self.windows[layer])
    }

    /// One more token of every sequence, in both stores.
    fn compare(&mut self, check: &mut Check, step: &mut Step<B::Buffer>) -> Result<Capture, Failure> {
        let rows = self.seqs.len() as u32;
        let capture = self.stepped.advance(step)?;
        for layer in 0..LAYERS {
            let [k, v] = [0; 2].map(|_| self.tensor(rows, HEADS[1]));
            let q = self.tensor(rows, HEADS[0]);
            let got = self.stepped(step, layer, [&k, &v, &q])?;
            let want = self.plain(layer, [&k, &v, &q])?;
            check.bits("outputs of a step", &got.0, &want.0);
            check.bits("log-sum-exps of a step", &got.1, &want.1);
        }
        Ok(capture)
    }

    fn stepped(&mut self, step: &Step<B::Buffer>, layer: usize, [k, v, q]: [&Tensor; 3]) -> Result<Bits, Failure> {
        let (backend, store) = (self.backend, &mut self.stepped);
        let [k, v, q] = [k, v, q].map(|t| view(backend, store, t));
        store.append_step(step, layer, &k?, &v?)?;
        let [out, lse] = outputs(backend, store, step.rows() as u32)?;
        store.attend_step(step, layer, &Query::of_step(q?, out.clone()).lse(lse.clone()))?;
        Ok((read(store, &out)?, read(store, &lse)?))
    }

    fn plain(&mut self, layer: usize, [k, v, q]: [&Tensor; 3]) -> Result<Bits, Failure> {
        let (backend, store) = (self.backend, &mut self.plain);
        let [k, v, q] = [k, v, q].map(|t| view(backend, store, t));
        let (k, v) = (k?, v?);
        let row = |view: &View<B::Buffer>, at| view.clone().from_row(at);
        let appends = (0..).zip(&self.seqs).map(|(at, [_, seq])| Append::new(seq, 1, row(&k, at), row(&v, at)));
        store.append(layer, &appends.collect::<Vec<_>>())?;
        let [out, lse] = outputs(backend, store, self.seqs.len() as u32)?;
        let rows = self
            .seqs
            .iter()
            .map(|[_, seq]| self.windows[layer].map_or(Rows::decode(seq), |window| Rows::decode(seq).window(window)));
        let rows: Vec<_> = rows.collect();
        store.attend(layer, &Query::new(&rows, q?, out.clone()).lse(lse.clone()))?;
        Ok((read(store, &out)?, read(store, &lse)?))
    }

    /// Everything that both stores hold.
    fn compare_pages(&mut self, check: &mut Check) -> Result<(), Failure> {
        for (seq, layer) in self.seqs.iter().flat_map(|seq| (0..LAYERS).map(move |layer| (seq, layer))) {
            let got = context_bits(&mut self.stepped, layer, &seq[0])?;
            let want = context_bits(&mut self.plain, layer, &seq[1])?;
            check.bits("keys after steps", &got.0, &want.0);
            check.bits("values after steps", &got.1, &want.1);
        }
        let same = self.stepped.stats().held_pages == self.plain.stats().held_pages;
        check.holds("as many pages are held", same);
        check.holds("the stepped store is consistent", self.stepped.is_consistent());
        Ok(())
    }
}

/// Poisoned outputs and log-sum-exps.
fn outputs<B: Backend>(backend: &B, store: &mut PagedStore<B>, rows: u32) -> Result<[View<B::Buffer>; 2], Failure> {
    let mut poisoned = |dim: u32| {
        let words = (rows * HEADS[0] * dim) as usize;
        let tensor = Tensor::raw(Dtype::F32, [rows, HEADS[0], dim], vec![poison(Dtype::F32); words]);
        Ok::<_, Failure>(View::dense(upload(backend, store, &tensor)?, Dtype::F32, HEADS[0], dim))
    };
    Ok([poisoned(DIM)?, poisoned(1)?])
}

fn read<B: Backend>(store: &mut PagedStore<B>, view: &View<B::Buffer>) -> Result<Vec<u32>, Failure> {
    let mut bits = vec![0u32; crate::DeviceBuffer::bytes(&view.buffer) as usize / 4];
    store.download(&view.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
    Ok(bits)
}

/// Empty, short and longer sequences, two of which share their last page, grow over the edges of pages and of a split.
fn ragged<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut check = Check::default();
    let mut twins = Twins::new(backend, format, StoreConfig::default(), &[251, 0, 14])?;
    let forks = [twins.stepped.fork(&twins.seqs[2][0])?, twins.plain.fork(&twins.seqs[2][1])?];
    twins.seqs.push(forks);
    let mut step = twins.step(300)?;
    // Before the first token a step does nothing.
    let nothing = [0; 3].map(|_| twins.tensor(4, HEADS[0]));
    let before = twins.stepped(&step, 0, nothing.each_ref())?;
    check.holds("a step that sees nothing gives zeros", before.0.iter().all(|&bits| bits == 0));
    check.holds("and a log-sum-exp of nothing", before.1.iter().all(|&bits| bits == f32::NEG_INFINITY.to_bits()));
    for token in 0..9 {
        let capture = twins.compare(&mut check, &mut step)?;
        check.holds("the first token asks for a capture", token > 0 || capture == Capture::Stale);
    }
    twins.compare_pages(&mut check)?;
    check.done()
}

/// A window in one layer, and states for a row or two at a time.
fn windowed<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut check = Check::default();
    let state = u64::from(HEADS[0] * (DIM + 4) * 4);
    let config = StoreConfig { state_bytes: 3 * state, ..StoreConfig::default() };
    let mut twins = Twins::new(backend, format, config, &[277, 30, 254])?;
    twins.windows = [None, Some(25)];
    let mut step = twins.step(400)?;
    for _ in 0..6 {
        let _ = twins.compare(&mut check, &mut step)?;
    }
    twins.compare_pages(&mut check)?;
    check.done()
}

/// Between its tokens others append, truncate, fork and write to the sequences of a step.
fn changed<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut check = Check::default();
    let mut twins = Twins::new(backend, format, StoreConfig { step_pages: 1, ..StoreConfig::default() }, &[20, 31])?;
    let mut step = twins.step(64)?;
    let _ = twins.compare(&mut check, &mut step)?;
    twins.append(0, 10)?;
    let (k, v) = (twins.tensor(2, HEADS[1]), twins.tensor(2, HEADS[1]));
    let [k, v] = [&k, &v].map(|t| view(backend, &mut twins.stepped, t));
    let behind = twins.stepped.append_step(&step, 0, &k?, &v?);
    check.refused("a step that is behind", behind, |error| matches!(error, Error::Behind { layer: 0, .. }));
    let _ = twins.compare(&mut check, &mut step)?;
    let forks = [twins.stepped.fork(&twins.seqs[1][0])?, twins.plain.fork(&twins.seqs[1][1])?];
    let _ = twins.compare(&mut check, &mut step)?;
    for (store, at) in [&mut twins.stepped, &mut twins.plain].into_iter().zip(0..) {
        store.truncate(&twins.seqs[0][at], 17)?;
    }
    twins.append(0, 7)?;
    twins.append(1, 1)?;
    let _ = twins.compare(&mut check, &mut step)?;
    twins.seqs.push(forks);
    twins.append(2, 3)?;
    twins.compare_pages(&mut check)?;
    // Another step over the same sequences, in another order, and the first one again.
    twins.seqs.swap(0, 2);
    let mut other = twins.step(64)?;
    for _ in 0..2 {
        let _ = twins.compare(&mut check, &mut other)?;
    }
    twins.seqs.swap(0, 2);
    let last = twins.seqs.pop();
    let _ = twins.compare(&mut check, &mut step)?;
    twins.seqs.extend(last);
    twins.compare_pages(&mut check)?;
    check.done()
}

/// What cannot be is refused, and nothing has changed.
fn refusals<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut check = Check::default();
    let config = StoreConfig { step_pages: 1, page_limit: Some(8), ..StoreConfig::default() };
    let mut twins = Twins::new(backend, format, config, &[15, 7])?;
    let stranger = PagedStore::new(backend.clone(), geometry(format))?.begin();
    let store = &mut twins.stepped;
    let seq = &twins.seqs[0][0];
    check.refused("no sequence", store.step(&[], 20), |e| matches!(e, Error::Shape { expected: 1, .. }));
    check.refused("twice", store.step(&[seq, seq], 20), |e| matches!(e, Error::DuplicateSequence { .. }));
    check.refused("a stranger", store.step(&[&stranger], 20), |e| matches!(e, Error::UnknownSequence { .. }));
    let short = |e: &Error| matches!(e, Error::TooLarge { value: 15, maximum: 14, .. });
    check.refused("longer already", store.step(&[seq], 14), short);
    check.refused("no such pool", store.step(&[seq], 65), |e| matches!(e, Error::PageLimit { required: 9, .. }));
    check.refused("a vast step", store.step(&[seq], u64::MAX), |e| matches!(e, Error::TooLarge { .. }));
    let no_window = store.step_windowed(&[seq], 20, |_| Some(0));
    check.refused("no window", no_window, |e| matches!(e, Error::Shape { .. }));
    let refusing = StoreConfig { non_finite: NonFinite::Refuse, ..config };
    let mut waits = PagedStore::with_config(backend.clone(), geometry(format), refusing)?;
    let waiting = waits.begin();
    check.refused("a store that waits", waits.step(&[&waiting], 20), |e| matches!(e, Error::Unsupported { .. }));

    // Three pages more would do for a token of both; the pool may have two.
    let mut step = twins.step(16)?;
    let _ = twins.compare(&mut check, &mut step)?;
    let full = twins.stepped.advance(&mut step);
    check.refused("a full sequence", full, |e| matches!(e, Error::TooLarge { value: 17, maximum: 16, .. }));
    let mut step = twins.step(32)?;
    let beyond = twins.stepped.advance(&mut step);
    let limit = |e: &Error| matches!(e, Error::PageLimit { layer: 1, required: 10, maximum: 8 });
    check.refused("more pages than there may be", beyond, limit);
    twins.compare_pages(&mut check)?;

    let Twins { stepped: store, seqs, .. } = &mut twins;
    let tensor = |heads| Tensor::normal(Dtype::F32, [2, heads, DIM], 9);
    let (k, q) = (view(backend, store, &tensor(HEADS[1]))?, view(backend, store, &tensor(HEADS[0]))?);
    let [out, _] = outputs(backend, store, 2)?;
    let far = k.clone().from_row(1);
    check.refused("too few keys", store.append_step(&step, 0, &far, &k), |e| matches!(e, Error::OutOfBounds { .. }));
    check.refused("no such layer", store.append_step(&step, 2, &k, &k), |e| matches!(e, Error::UnknownLayer { .. }));
    let rows = [Rows::decode(&seqs[0][0])];
    let named = store.attend_step(&step, 0, &Query::new(&rows, q.clone(), out.clone()));
    check.refused("rows beside the step's", named, |e| matches!(e, Error::Shape { got: 1, expected: 0, .. }));
    let query = Query::of_step(q, out);
    let scaled = store.attend_step(&step, 0, &query.clone().scale(0.0));
    check.refused("a scale of nothing", scaled, |e| matches!(e, Error::Scale { .. }));
    let id = seqs.remove(0)[0].id();
    let gone = |e: &Error| matches!(e, Error::UnknownSequence { .. });
    let dropped = store.advance(&mut step);
    check.holds("the error names the sequence", dropped == Err(Error::UnknownSequence { id }));
    check.refused("an append to a dropped sequence", store.append_step(&step, 0, &k, &k), gone);
    check.refused("attention over a dropped sequence", store.attend_step(&step, 0, &query), gone);
    check.holds("the store is consistent", store.is_consistent());
    check.done()
}
