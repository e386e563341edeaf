//! Do sequences survive the file tier? Every tier against a resident store, faults of the disk, restarts.
#![cfg(feature = "conformance")]

use anyhow::{Context, Result};
use kvtide::backend::cpu::{CpuBackend, CpuBuffer};
use kvtide::swap::{HighSpeedSwap, SwapConfig};
use kvtide::tiers::{FileTier, HostTier, Tier};
use kvtide::{Append, Backend, Dtype, Geometry, PageFormat, PagedStore, Query, Rows, Sequence, View};

const LAYERS: u32 = 2;
const PAGE: u32 = 16;

fn model() -> Geometry {
    Geometry::new(LAYERS, 4, 2, 16).page_size(PAGE).format(PageFormat::F32)
}

/// Frames of one split and a little: everything else must travel.
fn config(frames: u64) -> SwapConfig {
    let device_budget = frames * kvtide::record::Record::new(model()).frame_stride();
    SwapConfig { device_budget, tile_pages: 16, ..SwapConfig::default() }
}

/// Values that depend on sequence, layer, token and element.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn tensor(device: &CpuBackend, seed: u64, rows: u32, heads: u32) -> Result<View<CpuBuffer>> {
    let data = values(seed, (rows * heads * 16) as usize);
    Ok(View::dense(device.buffer_from(bytemuck::cast_slice(&data))?, Dtype::F32, heads, 16))
}

/// The same calls to a resident store and to one that swaps.
struct Twins {
    device: CpuBackend,
    resident: PagedStore<CpuBackend>,
    swapped: HighSpeedSwap<CpuBackend>,
}

impl Twins {
    fn new(frames: u64, tier: impl Tier<CpuBackend> + 'static) -> Result<Self> {
        let device = CpuBackend::new();
        let resident = PagedStore::new(device.clone(), model())?;
        let swapped = HighSpeedSwap::builder(device.clone(), model()).config(config(frames)).tier(tier).build()?;
        Ok(Twins { device, resident, swapped })
    }

    fn begin(&mut self) -> (Sequence, Sequence) {
        (self.resident.begin(), self.swapped.begin())
    }

    fn append(&mut self, pair: &(Sequence, Sequence), tokens: u32, seed: u64) -> Result<()> {
        for layer in 0..LAYERS as usize {
            let seed = seed * 1000 + layer as u64 * 10;
            let (k, v) = (tensor(&self.device, seed + 1, tokens, 2)?, tensor(&self.device, seed + 2, tokens, 2)?);
            self.resident.append(layer, &[Append::new(&pair.0, tokens, k.clone(), v.clone())])?;
            self.swapped.append(layer, &[Append::new(&pair.1, tokens, k, v)])?;
        }
        Ok(())
    }

    fn attend_swapped(&mut self, seq: &Sequence, layer: usize, rows: u32, seed: u64) -> kvtide::Result<Vec<u32>> {
        let q = tensor(&self.device, seed, rows, 4).expect("a query");
        let out = View::dense(self.device.alloc("out", u64::from(rows) * 256)?, Dtype::F32, 4, 16);
        self.swapped.attend(layer, &Query::new(&[Rows::tail(seq, rows)], q, out.clone()))?;
        let mut bits = vec![0u32; rows as usize * 64];
        self.swapped.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
        Ok(bits)
    }

    fn attend_resident(&mut self, seq: &Sequence, layer: usize, rows: u32, seed: u64) -> Result<Vec<u32>> {
        let q = tensor(&self.device, seed, rows, 4)?;
        let out = View::dense(self.device.alloc("out", u64::from(rows) * 256)?, Dtype::F32, 4, 16);
        self.resident.attend(layer, &Query::new(&[Rows::tail(seq, rows)], q, out.clone()))?;
        let mut bits = vec![0u32; rows as usize * 64];
        self.resident.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
        Ok(bits)
    }

    fn compare(&mut self, pair: &(Sequence, Sequence), rows: u32, seed: u64) -> Result<()> {
        for layer in 0..LAYERS as usize {
            let want = self.attend_resident(&pair.0, layer, rows, seed)?;
            let got = self.attend_swapped(&pair.1, layer, rows, seed).context("swapped")?;
            anyhow::ensure!(got == want, "layer {layer}, {rows} rows: the bits differ");
        }
        Ok(())
    }
}

fn folder() -> Result<tempfile::TempDir> {
    Ok(tempfile::tempdir()?)
}

fn exercise(name: &str, tier: impl Tier<CpuBackend> + 'static) -> Result<()> {
    let mut twins = Twins::new(40, tier)?;
    let (a, b) = (twins.begin(), twins.begin());
    twins.append(&a, 1500, 1)?;
    twins.append(&b, 700, 2)?;
    for step in 0..40 {
        twins.append(&a, 1, 100 + step)?;
        twins.append(&b, 3, 200 + step)?;
        twins.compare(&a, 1 + (step as u32 % 3), step)?;
        twins.compare(&b, 2, step)?;
    }
    assert!(twins.swapped.is_consistent(), "{name}");
    let stats = twins.swapped.stats();
    assert!(stats.streamed_pages > 1000, "{name}: {} pages streamed", stats.streamed_pages);
    println!("{name}: {:?}", stats.tiers);
    Ok(())
}

#[test]
fn every_tier_gives_the_bits_of_a_resident_store() -> Result<()> {
    let folder = folder()?;
    let path = |name: &str| folder.path().join(name);
    exercise("host", HostTier::new(4 << 20))?;
    exercise("file", FileTier::create(path("file"), 4 << 20))?;
    exercise("file with four cells", FileTier::create(path("small"), 4 << 20).staging(4 * 4096))?;
    exercise("cascade", FileTier::create(path("cascade"), 4 << 20).host_cache(100 * 4096))?;
    exercise("small cascade", FileTier::create(path("cells"), 4 << 20).host_cache(5 * 4096).staging(3 * 4096))?;
    exercise("cascade that holds all", FileTier::create(path("all"), 4 << 20).host_cache(4 << 20))
}

#[test]
fn a_closed_store_opens_again_and_attends_as_before() -> Result<()> {
    let folder = folder()?;
    for cache in [0, 50 * 4096] {
        let path = folder.path().join(format!("store-{cache}"));
        let tier = FileTier::create(&path, 4 << 20).fingerprint(7).host_cache(cache);
        let mut twins = Twins::new(40, tier)?;
        let (a, b) = (twins.begin(), twins.begin());
        twins.append(&a, 1000, 1)?;
        twins.append(&b, 37, 2)?;
        let fork = (twins.resident.fork_at(&a.0, 500)?, twins.swapped.fork_at(&a.1, 500)?);
        twins.append(&fork, 20, 3)?;
        let ids = [a.1.id(), b.1.id(), fork.1.id()];
        twins.swapped.close()?;

        let opened = || FileTier::open(&path).fingerprint(7).host_cache(cache);
        let device = twins.device.clone();
        let builder = || HighSpeedSwap::builder(device.clone(), model()).config(config(40));
        twins.swapped = builder().tier(opened()).build()?;
        let restored = twins.swapped.take_restored();
        assert_eq!(restored.iter().map(Sequence::id).collect::<Vec<_>>(), ids);
        let resident = [a.0, b.0, fork.0];
        let pairs: Vec<(Sequence, Sequence)> = resident.into_iter().zip(restored).collect();
        for (at, pair) in pairs.iter().enumerate() {
            assert_eq!(twins.swapped.len(&pair.1, 0)?, twins.resident.len(&pair.0, 0)?);
            twins.compare(pair, 2, at as u64)?;
            twins.append(pair, 40, 50 + at as u64)?;
            twins.compare(pair, 3, at as u64)?;
        }
        assert!(twins.swapped.is_consistent());
        let begun = twins.swapped.begin();
        assert!(!ids.contains(&begun.id()));
        // While it is open nobody else may open it.
        let second = builder().tier(opened()).build();
        assert!(matches!(second, Err(kvtide::Error::Locked { .. })), "{second:?}");
    }
    Ok(())
}

#[test]
fn a_file_of_another_model_is_refused() -> Result<()> {
    let folder = folder()?;
    let path = folder.path().join("store");
    let device = CpuBackend::new();
    let build = |geometry: Geometry, tier: FileTier<CpuBackend>| {
        HighSpeedSwap::builder(device.clone(), geometry).config(config(40)).tier(tier).build()
    };
    build(model(), FileTier::create(&path, 1 << 20).fingerprint(7))?.close()?;
    let what = |result: kvtide::Result<HighSpeedSwap<CpuBackend>>| match result {
        Err(kvtide::Error::WrongFile { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(what(build(model(), FileTier::open(&path).fingerprint(8))), "fingerprint");
    for other in [
        model().page_size(32),
        model().format(PageFormat::F16),
        model().value_dim(24),
        Geometry::new(3, 4, 2, 16).page_size(PAGE).format(PageFormat::F32),
    ] {
        what(build(other, FileTier::open(&path).fingerprint(7)));
    }
    // Not closed: the sequences cannot be trusted.
    drop(build(model(), FileTier::open(&path).fingerprint(7))?);
    assert_eq!(what(build(model(), FileTier::open(&path).fingerprint(7))), "state");
    Ok(())
}
