//! `PagedStore`: the KV cache of many sequences and all layers in one arena of pages, all resident on the device.

mod attend;
mod calibration;
mod check;
mod config;
mod context;
mod fork;
mod launch;
pub(crate) mod pool;
pub(crate) mod projector;
mod sequence;
mod step;
mod write;

pub use attend::{Query, Rows};
pub(crate) use calibration::channels_of;
pub use config::{NonFinite, StoreConfig};
pub use context::{AttentionContext, ContextView, SequenceContext};
pub use sequence::Sequence;
pub use step::{Capture, Step};
pub use write::{Append, StepPlan};

use crate::backend::Backend;
use crate::pages::layer::LayerPages;
use crate::record::Record;
use crate::{Error, Geometry, Result};
use pool::Pool;
use sequence::{Graveyard, StoreId};
use std::collections::{HashMap, HashSet};

/// A paged KV cache on one device.
///
/// Nothing is allocated before the first write. Every call enqueues work on the store's stream and returns at once;
/// a call that is refused changes nothing.
///
/// ```
/// use kvtide::backend::cpu::CpuBackend;
/// use kvtide::{Append, Backend, Dtype, Geometry, PagedStore, Query, Rows, View};
///
/// let device = CpuBackend::new();
/// let model = Geometry::new(1, 4, 2, 16); // 1 layer, 4 query heads over 2 KV heads of 16 elements
/// let mut kv = PagedStore::new(device.clone(), model)?;
///
/// let tokens = |n: usize, heads: usize| device.buffer_from(bytemuck::cast_slice(&vec![1.0f32; n * heads * 16]));
/// let (k, v, q, out) = (tokens(3, 2)?, tokens(3, 2)?, tokens(1, 4)?, tokens(1, 4)?);
/// let dense = |buffer: &_, heads| View::dense(Clone::clone(buffer), Dtype::F32, heads, 16);
///
/// let seq = kv.begin();
/// kv.append(0, &[Append::new(&seq, 3, dense(&k, 2), dense(&v, 2))])?;
/// let branch = kv.fork_at(&seq, 2)?; // shares the page until one of the two writes
/// kv.attend(0, &Query::new(&[Rows::decode(&seq)], dense(&q, 4), dense(&out, 4)))?;
///
/// let mut answer = [0.0f32; 64];
/// kv.download(&out, 0, bytemuck::cast_slice_mut(&mut answer))?;
/// assert!(answer.iter().all(|x| *x == 1.0));
/// assert_eq!((kv.len(&branch, 0)?, kv.stats().held_pages), (2, 1));
/// # Ok::<(), kvtide::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedStore<B: Backend> {
    id: StoreId,
    pub(crate) record: Record,
    config: StoreConfig,
    pub(crate) pool: Pool<B>,
    pub(crate) sequences: HashMap<u64, Vec<LayerPages>>,
    graveyard: Graveyard,
    pub(crate) next_sequence: u64,
    pub(crate) counters: Counters,
    /// Layers whose keys were warned of.
    warned: HashSet<usize>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counters {
    copied_pages: u64,
    appended_tokens: u64,
    pub(crate) attended_rows: u64,
}

/// A snapshot of a store's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Frames of the pool, free and held.
    pub capacity_pages: u64,
    /// Frames that hold no page.
    pub free_pages: u64,
    /// Pages held by sequences and reservations, wherever they are; a shared page counts once.
    pub held_pages: u64,
    /// Held pages that more than one sequence owns.
    pub shared_pages: u64,
    /// Held pages that are reserved and not yet part of a sequence.
    pub reserved_pages: u64,
    /// The most pages that the pool may have.
    pub page_limit: u64,
    /// Slabs that the pool consists of.
    pub slabs: u64,
    /// Device bytes of all slabs.
    pub arena_bytes: u64,
    /// Bytes of the records of held pages.
    pub held_bytes: u64,
    /// Live sequences.
    pub sequences: u64,
    /// Pages copied because a sequence wrote to a shared one.
    pub copied_pages: u64,
    /// Tokens written, summed over layers.
    pub appended_tokens: u64,
    /// Query rows attended, summed over layers.
    pub attended_rows: u64,
}

impl<B: Backend> PagedStore<B> {
    /// A store with the default [`StoreConfig`].
    ///
    /// # Errors
    /// A geometry that is not valid, or that the device cannot hold a page of.
    pub fn new(backend: B, geometry: Geometry) -> Result<Self> {
        Self::with_config(backend, geometry, StoreConfig::default())
    }

    /// A store with its own growth steps, limits and rules.
    ///
    /// # Errors
    /// Also [`Error::Limit`] when the page limit is more than the device can address.
    pub fn with_config(backend: B, geometry: Geometry, config: StoreConfig) -> Result<Self> {
        let stream = backend.stream()?;
        Self::on_stream(backend, stream, geometry, config)
    }

    /// A store whose work runs on the caller's stream.
    pub fn on_stream(backend: B, stream: B::Stream, geometry: Geometry, config: StoreConfig) -> Result<Self> {
        let record = Record::new(geometry.validate()?);
        config.validate()?;
        let pool = Pool::new(backend, stream, record, &config)?;
        Ok(PagedStore {
            id: StoreId::unique(),
            record,
            config,
            pool,
            sequences: HashMap::new(),
            graveyard: Graveyard::default(),
            next_sequence: 0,
            counters: Counters::default(),
            warned: HashSet::new(),
        })
    }

    /// A new, empty sequence. Dropping the handle gives its pages back at the store's next call.
    pub fn begin(&mut self) -> Sequence {
        let layers = self.geometry().layers() as usize;
        self.insert((0..layers).map(|_| LayerPages::default()).collect())
    }

    /// Gives a sequence's pages back now; the same as dropping the handle. (So another store's sequence is refused here,
    /// but its own store takes it back all the same.)
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for another store's sequence.
    pub fn release(&mut self, seq: Sequence) -> Result<()> {
        self.layers(&seq)?;
        drop(seq);
        self.reap();
        Ok(())
    }

    /// Tokens that a sequence holds in a layer.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::UnknownLayer`].
    pub fn len(&self, seq: &Sequence, layer: usize) -> Result<u64> {
        Ok(self.pages(seq, layer)?.len)
    }

    /// Whether a sequence holds no token in any layer.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn is_empty(&self, seq: &Sequence) -> Result<bool> {
        Ok(self.layers(seq)?.iter().all(|layer| layer.len == 0))
    }

    /// The geometry that the store was made for.
    pub fn geometry(&self) -> &Geometry {
        self.record.geometry()
    }

    /// The layout of its pages.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The configuration that it was made with.
    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.pool.backend
    }

    /// The stream that the store works on, to order the caller's own work with.
    pub fn stream(&mut self) -> &mut B::Stream {
        &mut self.pool.stream
    }

    /// Counters, as of now. Pages of dropped handles count as given back.
    pub fn stats(&mut self) -> Stats {
        self.reap();
        let book = &self.pool.book;
        let held = book.capacity() - book.free();
        let frames = self.pool.residency.as_ref().map_or(book, |residency| &residency.frames);
        let reserved = self.sequences.values().flatten().map(|layer| layer.reserved.len() as u64).sum();
        Stats {
            capacity_pages: frames.capacity(),
            free_pages: frames.free(),
            held_pages: held,
            shared_pages: book.shared(),
            reserved_pages: reserved,
            page_limit: self.pool.page_limit,
            slabs: self.pool.slabs.len() as u64,
            arena_bytes: frames.capacity() * self.record.frame_stride(),
            held_bytes: held * self.record.bytes(),
            sequences: self.sequences.len() as u64,
            copied_pages: self.counters.copied_pages,
            appended_tokens: self.counters.appended_tokens,
            attended_rows: self.counters.attended_rows,
        }
    }

    /// Infinite and NaN elements of K and V that appends have met so far, refused ones included; counts modulo 2³². Waits
    /// for the device.
    pub fn non_finite(&mut self) -> Result<u64> {
        self.pool.non_finite()
    }

    /// Copies host bytes into device memory, in order with everything that the store enqueues.
    pub fn upload(&mut self, dst: &B::Buffer, offset: u64, data: &[u8]) -> Result<()> {
        self.pool.backend.upload(&mut self.pool.stream, dst, offset, data)
    }

    /// Copies device memory to the host after everything that the store has enqueued, and waits for it.
    pub fn download(&mut self, src: &B::Buffer, offset: u64, out: &mut [u8]) -> Result<()> {
        self.pool.backend.download(&mut self.pool.stream, src, offset, out)
    }

    /// Hands enqueued work to the device without waiting.
    pub fn flush(&mut self) -> Result<()> {
        self.pool.backend.flush(&mut self.pool.stream)
    }

    /// Waits for everything enqueued, and reports what failed.
    pub fn synchronize(&mut self) -> Result<()> {
        self.pool.backend.synchronize(&mut self.pool.stream)
    }

    pub(crate) fn insert(&mut self, layers: Vec<LayerPages>) -> Sequence {
        let id = self.next_sequence;
        self.next_sequence += 1;
        self.insert_as(id, layers)
    }

    /// A sequence with a number that no live one has.
    pub(crate) fn insert_as(&mut self, id: u64, layers: Vec<LayerPages>) -> Sequence {
        self.sequences.insert(id, layers);
        Sequence::new(id, self.id, self.graveyard.clone())
    }

    /// Takes back what dropped handles held.
    pub(crate) fn reap(&mut self) {
        for id in self.graveyard.take() {
            for layer in self.sequences.remove(&id).into_iter().flatten() {
                self.pool.release(layer);
            }
        }
    }

    pub(crate) fn layers(&self, seq: &Sequence) -> Result<&Vec<LayerPages>> {
        let known = if seq.store() == self.id { self.sequences.get(&seq.id()) } else { None };
        known.ok_or(Error::UnknownSequence { id: seq.id() })
    }

    pub(crate) fn check_layer(&self, layer: usize) -> Result<()> {
        let layers = self.geometry().layers() as usize;
        if layer < layers { Ok(()) } else { Err(Error::UnknownLayer { layer, layers }) }
    }

    pub(crate) fn pages(&self, seq: &Sequence, layer: usize) -> Result<&LayerPages> {
        self.check_layer(layer)?;
        Ok(&self.layers(seq)?[layer])
    }

    /// Checks that every frame is either free and listed once, or held by exactly the tables that name it.
    #[cfg(any(test, feature = "conformance"))]
    #[doc(hidden)]
    pub fn is_consistent(&mut self) -> bool {
        self.reap();
        let mut owners: HashMap<u32, u32> = HashMap::new();
        for layer in self.sequences.values().flatten() {
            layer.table.iter().chain(&layer.reserved).for_each(|&page| *owners.entry(page).or_default() += 1);
        }
        let book = &self.pool.book;
        owners.iter().all(|(&page, &count)| book.owners(page) == count)
            && book.capacity() - book.free() == owners.len() as u64
            && book.is_consistent()
    }
}
