//! Do sequences survive the file tier? Every tier against a resident store, faults of the disk, restarts.
#![cfg(feature = "conformance")]

mod twins;

use anyhow::Result;
use kvtide::backend::cpu::CpuBackend;
use kvtide::swap::{HighSpeedSwap, SwapConfig};
use kvtide::tiers::{FileTier, HostTier, Tier};
use kvtide::{Geometry, PageFormat, Sequence};
use twins::{LAYERS, PAGE, Twins, config, model};

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
    for cache in [0, 50 * 4096, 4 << 20] {
        let path = folder.path().join(format!("store-{cache}"));
        let tier = FileTier::create(&path, 4 << 20).fingerprint(7).host_cache(cache);
        let mut twins = Twins::new(40, tier)?;
        let (a, b) = (twins.begin(), twins.begin());
        twins.append(&a, 1000, 1)?;
        twins.append(&b, 37, 2)?;
        let fork = (twins.resident.fork_at(&a.0, 500)?, twins.swapped.fork_at(&a.1, 500)?);
        twins.append(&fork, 20, 3)?;
        let ids = [a.1.id(), b.1.id(), fork.1.id()];
        // Pages that were read last are in use by the device for a while; they reach the file too.
        twins.compare(&a, 2, 1)?;
        twins.swapped.close()?;

        let opened = || FileTier::open(&path).fingerprint(7).host_cache(cache);
        let device = twins.device.clone();
        let builder = || HighSpeedSwap::builder(device.clone(), model()).config(config(40));
        // A mistake in the configuration does not cost the sequences.
        let wrong = SwapConfig { policy: kvtide::swap::PolicyChoice::PredictedScore, ..config(40) };
        assert!(matches!(builder().config(wrong).tier(opened()).build(), Err(kvtide::Error::Config { .. })));
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

#[test]
fn a_chunk_whose_states_do_not_fit_streams_each_page_once() -> Result<()> {
    for (rows, state_bytes) in [(300, 64 << 10), (40, 16 << 10), (17, 1)] {
        let mut twins = Twins::new(40, HostTier::new(4 << 20))?;
        let tier = HostTier::new(4 << 20);
        let config = SwapConfig { state_bytes, layer_ahead: false, ..config(40) };
        twins.swapped = HighSpeedSwap::builder(twins.device.clone(), model()).config(config).tier(tier).build()?;
        let pair = twins.begin();
        twins.append(&pair, 2000, 1)?;
        twins.append(&pair, rows, 2)?;
        let before = twins.swapped.stats().streamed_pages;
        twins.compare(&pair, rows, 3)?;
        let streamed = twins.swapped.stats().streamed_pages - before;
        let pages = u64::from((2000 + rows).div_ceil(PAGE) * LAYERS);
        println!("{rows} rows, {state_bytes} bytes of states: {streamed} of {pages} pages streamed");
        if rows == 300 {
            assert!(streamed <= 8 * pages, "{streamed} pages streamed for {pages}");
        }
    }
    Ok(())
}
