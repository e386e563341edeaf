//! Does `HighSpeedSwap` give the answers of a store that never leaves the device, over every tier, and errors where it can't?

mod bits;
mod faults;
mod faulty;
mod full;
mod long;
mod model;
mod order;
mod pins;
mod refusals;
mod standing;
mod stress;
mod twin;

use super::Cases;
use super::check::{Failure, Verdict};
use super::store::stored;
use super::values::Tensor;
use crate::backend::Backend;
use crate::predictor::Basis;
use crate::record::{FRAME_ALIGN, Record};
use crate::swap::{HighSpeedSwap, PolicyChoice, SwapConfig, SwapStats};
use crate::tiers::{FileTier, HostTier, Tier, TierStats};
use crate::{Dtype, Geometry, PageFormat};
use faulty::{Faults, FaultyTier};
use tempfile::TempDir;

/// Adds the cases over a swap with pages of this format.
pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name, run: fn(&B, PageFormat) -> Verdict| {
        list.swap(format, weight, name, move |backend| run(backend, format));
    };
    add(5_000, "settings that make no sense", refusals::settings);
    add(5_000, "bad input", refusals::bad_input);
    add(20_000, "the second of three pages comes back as itself", order::one_of_three);
    add(100_000, "the smallest budget", bits::smallest_budget);
    add(4_000_000, "C1 whatever the budget, tiles and policy", bits::any_configuration);
    add(500_000, "C1 in many batches of states", bits::many_batches);
    add(4_000_000, "splits that are half there", bits::half_resident_splits);
    add(200_000, "writes of no tokens", bits::empty_writes);
    add(4_000_000, "a prefill longer than the device", long::prefill);
    add(200_000, "writes into pages that left", long::write_into_swapped);
    add(500_000, "each full page goes out once", long::written_once);
    add(50_000, "a long life on a device that holds all", long::long_life);
    add(500_000, "150 rounds of write, offload, evict, attend", order::marker_rounds);
    add(500_000, "300 attends over sequences that push each other out", order::alternating);
    add(50_000, "what is dropped while it travels", order::dropped_under_way);
    add(50_000, "every frame pinned", pins::all_pinned);
    add(50_000, "no pin outlives a call", pins::given_back);
    add(50_000, "a full tier", full::full_tier);
    add(50_000, "tails that do not fit the device", full::too_many_tails);
    add(200_000, "reads that fail", faults::reads);
    add(200_000, "writes that fail", faults::writes);
    add(200_000, "writes acknowledged late", faults::late);
    add(500_000, "random operations beside a store", |backend, format| model::drive(backend, format, 1..3, 300));
    add(20_000_000, "thousands of random operations beside a store", |backend, format| {
        model::drive(backend, format, 3..9, 1000)
    });
    add(3_500_000, "10,000 steps over 8 frames and 16 slots", stress::shadow);
    add(2_000_000, "eight threads", stress::threads);
}

/// Where pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TierKind {
    Host,
    File,
    Cascade,
}

/// The kinds of tier that cases run over: another one for each format, all of them when there is time.
fn tiers(format: PageFormat) -> Vec<TierKind> {
    match std::env::var_os("KVTIDE_LONG") {
        Some(_) => vec![TierKind::Host, TierKind::File, TierKind::Cascade],
        None => vec![[TierKind::Host, TierKind::File, TierKind::Cascade, TierKind::File][format.code() as usize]],
    }
}

/// A tier, and the folder that its file lives in.
type Made<B> = (Box<dyn Tier<B>>, Option<TempDir>);

/// A tier of a kind for so many pages, and the folder that it lives in.
fn make<B: Backend>(kind: TierKind, pages: u64, record: &Record) -> Result<Made<B>, Failure> {
    if kind == TierKind::Host {
        return Ok((Box::new(HostTier::new(pages * record.bytes().next_multiple_of(FRAME_ALIGN))), None));
    }
    let folder = tempfile::tempdir().map_err(|error| Failure(format!("a folder for the file tier: {error}")))?;
    let file = FileTier::create(folder.path().join("store"), pages * record.file_stride());
    // Fewer cells than some batches have pages.
    let file = file.staging(20 * record.frame_stride());
    let cells = if kind == TierKind::Cascade { (pages / 3).clamp(1, 40) } else { 0 };
    Ok((Box::new(file.host_cache(cells * record.frame_stride())), Some(folder)))
}

/// The same as one tier, without faults.
fn boxed<B: Backend>(kind: TierKind, pages: u64, record: &Record) -> Box<dyn Tier<B>> {
    let (tier, folder) = make(kind, pages, record).expect("a folder for the file tier");
    Box::new(FaultyTier::new(tier, folder).0)
}

/// Runs a case over every kind of tier; the first that fails is the answer.
fn over_tiers(format: PageFormat, case: impl Fn(TierKind) -> Verdict) -> Verdict {
    let mut last = Err(Failure("no tier".into()));
    for kind in tiers(format) {
        last = case(kind).map_err(|failure| Failure(format!("{kind:?}: {}", failure.0)));
        if !last.as_ref().is_ok_and(super::check::Measure::passes) {
            return last;
        }
    }
    last
}

/// What a swap is built from.
#[derive(Debug, Clone, Copy)]
struct Setup {
    geometry: Geometry,
    config: SwapConfig,
    frames: u64,
    slots: u64,
    kind: TierKind,
}

impl Setup {
    /// One layer, 2 query heads over 1 KV head of 16 elements, tiles of one page, and room in the tier.
    fn new(kind: TierKind, format: PageFormat, page_size: u32, frames: u64) -> Self {
        let geometry = Geometry::new(1, 2, 1, 16).page_size(page_size).format(format);
        let config = SwapConfig { tile_pages: 1, ..SwapConfig::default() };
        Setup { geometry, config, frames, slots: 4096, kind }
    }

    fn layers(self, layers: u32) -> Self {
        let geometry = Geometry::new(layers, 2, 1, 16);
        let geometry = geometry.page_size(self.geometry.page_tokens()).format(self.geometry.page_format());
        Setup { geometry, ..self }
    }

    fn slots(self, slots: u64) -> Self {
        Setup { slots, ..self }
    }

    fn config(mut self, change: impl FnOnce(&mut SwapConfig)) -> Self {
        change(&mut self.config);
        self
    }

    fn build<B: Backend>(&self, backend: &B) -> Result<(HighSpeedSwap<B>, Faults), Failure> {
        let record = Record::new(self.geometry);
        let (tier, folder) = make(self.kind, self.slots, &record)?;
        let (tier, faults) = FaultyTier::new(tier, folder);
        let mut builder = HighSpeedSwap::builder(backend.clone(), self.geometry)
            .config(self.config)
            .device_budget(self.frames * record.frame_stride())
            .boxed_tier(Box::new(tier));
        if self.config.policy == PolicyChoice::PredictedScore {
            builder = builder.predictor(Basis::gaussian(&self.geometry, 8, 1)?);
        }
        Ok((builder.build()?, faults))
    }
}

/// The counters of the level that has a place for every page.
fn bottom(stats: &SwapStats) -> &TierStats {
    stats.tiers.last().expect("a tier has a level")
}

/// Pages written out, to whichever level.
fn written(stats: &SwapStats) -> u64 {
    stats.tiers.iter().map(|level| level.pages_in).sum()
}

/// Pages of a split of 256 tokens.
fn split_pages(page_size: u32) -> u64 {
    u64::from((crate::attention::SPLIT / page_size).max(1))
}

/// The bits that a context shows of a row whose elements are all `x`.
fn constant(x: f32, format: PageFormat) -> u32 {
    stored(&Tensor::of(Dtype::F32, [1, 1, 8], |_, _, _| x), format)[0]
}
