//! `HighSpeedSwap`: a KV cache larger than the device. Full pages go out to a tier; attention streams them back in tiles.
//!
//! The answer is the one of a cache that never left the device, bit for bit: attention works in splits of 256 tokens
//! whose states merge in token order, and a split is attended when all its pages are in frames, wherever they came from.
//!
//! ```text
//! append → frames ──(full pages)──→ write out → tier
//! attend:  splits in frames ─────────────────┐
//!          splits elsewhere → fetch a tile ──┴→ states → merge → output
//! ```

mod append;
mod attend;
mod builder;
mod config;
mod fetch;
mod headroom;
mod inspect;
mod marks;
mod order;
mod plan;
mod policy;
mod predict;
mod residency;
mod restart;
mod spill;
mod stats;

pub use builder::SwapBuilder;
pub use config::{PolicyChoice, SwapConfig, WhenFull, WriteOut};
pub use inspect::PageState;
pub use policy::{EvictionPolicy, Lru, PredictedScore, Resident, StableSubset};
pub(crate) use residency::Residency;
pub use stats::{AttendStats, SwapStats};

use crate::backend::Backend;
use crate::store::{PagedStore, Sequence, StepPlan};
use crate::tiers::{Lane, Tier};
use crate::{Error, Geometry, PageFault, Result};
use fetch::Flight;
use marks::Marks;
use spill::Departure;
use stats::Meter;
use std::collections::{HashMap, VecDeque};

/// A paged KV cache whose pages may leave the device, for as many tokens as the tier holds.
///
/// It takes the same calls as [`PagedStore`]. Pages that are full are written to the tier once; partial pages, and as many
/// recent ones as the budget allows, stay in frames.
///
/// ```
/// use kvtide::backend::cpu::CpuBackend;
/// use kvtide::swap::HighSpeedSwap;
/// use kvtide::tiers::HostTier;
/// use kvtide::{Append, Backend, Dtype, Geometry, Query, Rows, View};
///
/// let device = CpuBackend::new();
/// let model = Geometry::new(1, 2, 1, 16).page_size(8); // pages of 512 bytes
/// let mut kv = HighSpeedSwap::builder(device.clone(), model)
///     .device_budget(64 * 512) // 512 tokens on the device
///     .tier(HostTier::new(1 << 20))
///     .build()?;
///
/// let tokens = |n: usize, heads: usize| device.buffer_from(bytemuck::cast_slice(&vec![1.0f32; n * heads * 16]));
/// let dense = |buffer: &_, heads| View::dense(Clone::clone(buffer), Dtype::F32, heads, 16);
/// let (k, q, out) = (tokens(2048, 1)?, tokens(1, 2)?, tokens(1, 2)?);
///
/// let seq = kv.begin();
/// kv.append(0, &[Append::new(&seq, 2048, dense(&k, 1), dense(&k, 1))])?; // four times the budget
/// kv.attend(0, &Query::new(&[Rows::decode(&seq)], dense(&q, 2), dense(&out, 2)))?;
///
/// let mut answer = [0.0f32; 32];
/// kv.download(&out, 0, bytemuck::cast_slice_mut(&mut answer))?;
/// assert!(answer.iter().all(|x| (x - 1.0).abs() < 1e-6));
/// assert!(kv.stats().streamed_pages > 0);
/// # Ok::<(), kvtide::Error>(())
/// ```
#[derive(Debug)]
pub struct HighSpeedSwap<B: Backend> {
    store: PagedStore<B>,
    config: SwapConfig,
    tier: Box<dyn Tier<B>>,
    policy: Box<dyn EvictionPolicy>,
    lanes: Lanes<B>,
    marks: Marks<B>,
    /// Reads under way, oldest first.
    flights: VecDeque<Flight>,
    /// Pages that did not come, until they are fetched again or an error has named them.
    failed: HashMap<u32, PageFault>,
    /// Writes under way, oldest first.
    departures: VecDeque<Departure>,
    /// Full pages to write out, each with the page before it in its sequence.
    queue: VecDeque<(u32, Option<u32>)>,
    /// The generation of the last page written.
    generation: u64,
    /// Counts the sweeps over the layers.
    step: u64,
    last_layer: Option<usize>,
    meter: Meter<B>,
    predictor: Option<predict::Predictor<B>>,
    /// The first page that could not be written out, until a call reports it or a later try succeeds.
    fault: Option<(u32, Error)>,
    /// Sequences of an earlier store, until they are taken.
    restored: Vec<Sequence>,
}

/// The streams that pages travel on; where copies and kernels do not overlap, the store's own stream serves.
#[derive(Debug)]
struct Lanes<B: Backend> {
    fetch: Option<B::Stream>,
    spill: Option<B::Stream>,
    /// The end of the last fetch, which a write into a slot used anew must not overtake.
    fetched: Option<B::Event>,
    /// Slots have been given back since the last write.
    slots_freed: bool,
}

/// Which lane a page travels on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Begins to build a cache for this geometry on this device.
    pub fn builder(backend: B, geometry: Geometry) -> SwapBuilder<B> {
        SwapBuilder::new(backend, geometry)
    }

    /// A new, empty sequence. Dropping the handle gives its pages back, on the device and in the tier.
    pub fn begin(&mut self) -> Sequence {
        self.store.begin()
    }

    /// Gives a sequence's pages back now; the same as dropping the handle.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for another store's sequence.
    pub fn release(&mut self, seq: Sequence) -> Result<()> {
        self.store.release(seq)?;
        self.reap();
        Ok(())
    }

    /// A new sequence with the same tokens. All pages are shared, those in the tier too; no page moves.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, seq: &Sequence) -> Result<Sequence> {
        self.reap();
        self.store.fork(seq)
    }

    /// A new sequence with the first `tokens` tokens of every layer, sharing the pages that hold them.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], or [`Error::OffsetPastEnd`] when a layer holds fewer tokens.
    pub fn fork_at(&mut self, seq: &Sequence, tokens: u64) -> Result<Sequence> {
        self.reap();
        self.store.fork_at(seq, tokens)
    }

    /// Keeps the first `tokens` tokens of every layer. A partial page that is in the tier comes back when it is written to.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], or [`Error::OffsetPastEnd`] when a layer holds fewer tokens.
    pub fn truncate(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.store.truncate(seq, tokens)?;
        self.reap();
        Ok(())
    }

    /// Claims frames, so that every layer can hold `tokens` tokens in all. They stay on the device until they are used or
    /// [released](Self::release_reservation).
    ///
    /// # Errors
    /// Also [`Error::NothingEvictable`] when the device budget does not hold them, or not beside a split of 256 tokens.
    pub fn reserve(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.reap();
        let pages = self.geometry().pages_for(tokens);
        let missing = self
            .store
            .layers(seq)?
            .iter()
            .map(|layer| pages.saturating_sub((layer.table.len() + layer.reserved.len()) as u64));
        let missing = missing.sum();
        self.keep_headroom_beside(missing)?;
        self.make_room(missing)?;
        self.store.reserve(seq, tokens)
    }

    /// Gives back the reserved frames that no token has used, beyond what `tokens` tokens in all need.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn release_reservation(&mut self, seq: &Sequence, tokens: u64) -> Result<()> {
        self.store.release_reservation(seq, tokens)
    }

    /// Tokens that a sequence holds in a layer.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::UnknownLayer`].
    pub fn len(&self, seq: &Sequence, layer: usize) -> Result<u64> {
        self.store.len(seq, layer)
    }

    /// Whether a sequence holds no token in any layer.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn is_empty(&self, seq: &Sequence) -> Result<bool> {
        self.store.is_empty(seq)
    }

    /// Whether a whole step fits: `tokens` more tokens of each sequence in every layer, on the device and in the tier
    /// together.
    ///
    /// # Errors
    /// [`Error::PageLimit`] with the first layer that does not fit; [`Error::NothingEvictable`] when the pages that may not
    /// leave the device (partial and reserved ones) would be more than its frames.
    pub fn preflight(&mut self, step: &[(&Sequence, u64)]) -> Result<StepPlan> {
        self.reap();
        let plan = self.store.preflight(step)?;
        let partial = self.store.sequences.values().flatten().map(|layer| {
            let page_size = u64::from(self.store.geometry().page_tokens());
            layer.reserved.len() as u64 + u64::from(!layer.len.is_multiple_of(page_size))
        });
        let required = partial.sum::<u64>().max(step.len() as u64);
        let Some(residency) = &self.store.pool.residency else { return Ok(plan) };
        if required > residency.limit {
            let (evictable, frames, pinned) = (residency.limit, residency.limit, residency.pinned());
            return Err(Error::NothingEvictable { required, evictable, frames, pinned });
        }
        Ok(plan)
    }

    /// The geometry that the cache was made for.
    pub fn geometry(&self) -> &Geometry {
        self.store.geometry()
    }

    /// The layout of its pages.
    pub fn record(&self) -> &crate::record::Record {
        self.store.record()
    }

    /// The configuration that it was made with.
    pub fn config(&self) -> &SwapConfig {
        &self.config
    }

    /// The tier.
    pub fn tier(&self) -> &dyn Tier<B> {
        &*self.tier
    }

    /// The device.
    pub fn backend(&self) -> &B {
        self.store.backend()
    }

    /// The stream that appends and attention run on, to order the caller's own work with.
    pub fn stream(&mut self) -> &mut B::Stream {
        self.store.stream()
    }

    /// Infinite and NaN elements of K and V that appends have met so far. Waits for the device.
    pub fn non_finite(&mut self) -> Result<u64> {
        self.store.non_finite()
    }

    /// Copies host bytes into device memory, in order with appends and attention.
    pub fn upload(&mut self, dst: &B::Buffer, offset: u64, data: &[u8]) -> Result<()> {
        self.store.upload(dst, offset, data)
    }

    /// Copies device memory to the host after all appends and attention so far, and waits for it.
    pub fn download(&mut self, src: &B::Buffer, offset: u64, out: &mut [u8]) -> Result<()> {
        self.store.download(src, offset, out)
    }

    /// Hands enqueued work to the device without waiting.
    pub fn flush(&mut self) -> Result<()> {
        self.store.flush()
    }

    /// Waits for everything enqueued and for every page under way, and reports what failed.
    pub fn synchronize(&mut self) -> Result<()> {
        self.settle(true)?;
        while !self.flights.is_empty() {
            self.land_front()?;
        }
        self.store.synchronize()?;
        self.fault.take().map_or(Ok(()), |(_, fault)| Err(fault))
    }

    /// Takes back what dropped handles held, here and in the tier.
    fn reap(&mut self) {
        self.store.reap();
        let Some(residency) = &mut self.store.pool.residency else { return };
        for slot in residency.freed() {
            self.tier.give(slot);
            self.lanes.slots_freed = true;
        }
    }

    fn residency(&mut self) -> &mut Residency {
        self.store.pool.residency.as_mut().expect("the builder made the store with a residency")
    }

    fn resident(&self) -> &Residency {
        self.store.pool.residency.as_ref().expect("the builder made the store with a residency")
    }

    /// The page numbers of a sequence in a layer.
    fn table(&self, id: u64, layer: usize) -> &[u32] {
        &self.store.sequences[&id][layer].table
    }

    /// The tier, and what it works with.
    fn lane(&mut self, way: Way) -> (&mut dyn Tier<B>, Lane<'_, B>) {
        let pool = &mut self.store.pool;
        let slab_shift = pool.residency.as_ref().map_or(0, |residency| residency.frames.shift());
        let own = match way {
            Way::In => &mut self.lanes.fetch,
            Way::Out => &mut self.lanes.spill,
        };
        let stream = own.as_mut().unwrap_or(&mut pool.stream);
        let arena = crate::backend::ops::Arena { slabs: &pool.slabs, slab_shift };
        (&mut *self.tier, Lane { backend: &pool.backend, stream, arena, record: self.store.record })
    }
}
