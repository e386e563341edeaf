//! Does a key calibration stay with its pages? Restarts, refusals, warnings, and the bytes that int8 pages take.

use anyhow::Result;
use kvtide::backend::cpu::{CpuBackend, CpuBuffer};
use kvtide::record::Record;
use kvtide::swap::{HighSpeedSwap, SwapBuilder};
use kvtide::tiers::{FileTier, HostTier};
use kvtide::{
    Append, Backend, Dtype, Error, Geometry, KeyCalibration, KeyCheck, PageFormat, PagedStore, Query, Rows, Sequence,
    View,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tracing::span::{Attributes, Id, Record as Fields};

fn model() -> Geometry {
    Geometry::new(1, 4, 2, 16).format(PageFormat::Int8)
}

/// Keys or values with a constant in one channel.
fn tensor(device: &CpuBackend, tokens: u32, heads: u32, constant: f32) -> Result<View<CpuBuffer>> {
    let noise = |at: u32| ((at * 7919) % 2003) as f32 / 1001.0 - 1.0 + if at % 16 == 3 { constant } else { 0.0 };
    let values: Vec<f32> = (0..tokens * heads * 16).map(noise).collect();
    Ok(View::dense(device.buffer_from(bytemuck::cast_slice(&values))?, Dtype::F32, heads, 16))
}

fn builder(device: &CpuBackend) -> SwapBuilder<CpuBackend> {
    let budget = 20 * Record::new(model()).frame_stride();
    HighSpeedSwap::builder(device.clone(), model()).device_budget(budget)
}

fn calibration(mean: f32) -> KeyCalibration {
    let means = (0..32).map(|at| if at % 16 == 3 { mean } else { 0.0 }).collect();
    KeyCalibration::new(&model(), means, (0..32).map(|at| 0.5 + at as f32 / 16.0).collect()).expect("it fits")
}

/// The bits of what the last token attends to.
fn attend(kv: &mut HighSpeedSwap<CpuBackend>, seq: &Sequence) -> Result<Vec<u32>> {
    let device = kv.backend().clone();
    let (q, out) = (tensor(&device, 1, 4, 0.0)?, tensor(&device, 1, 4, 0.0)?);
    kv.attend(0, &Query::new(&[Rows::decode(seq)], q, out.clone()))?;
    let mut bits = vec![0u32; 64];
    kv.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
    Ok(bits)
}

/// Closes a file of 1,000 tokens and gives what they attended to.
fn closed(device: &CpuBackend, path: &Path, calibration: Option<KeyCalibration>) -> Result<Vec<u32>> {
    let mut builder = builder(device).tier(FileTier::create(path, 1 << 20));
    if let Some(calibration) = calibration {
        builder = builder.key_calibration(calibration);
    }
    let mut kv = builder.build()?;
    let seq = kv.begin();
    let (k, v) = (tensor(device, 1000, 2, 50.0)?, tensor(device, 1000, 2, 0.0)?);
    kv.append(0, &[Append::new(&seq, 1000, k, v)])?;
    let bits = attend(&mut kv, &seq)?;
    kv.close()?;
    Ok(bits)
}

/// Opens the file with a calibration or none; what it attends to, and by which calibration.
fn open(device: &CpuBackend, path: &Path, given: Option<KeyCalibration>) -> Result<(Vec<u32>, Option<KeyCalibration>)> {
    let mut builder = builder(device).tier(FileTier::open(path));
    if let Some(calibration) = given {
        builder = builder.key_calibration(calibration);
    }
    let mut kv = builder.build()?;
    let seq = kv.take_restored().remove(0);
    let (bits, calibration) = (attend(&mut kv, &seq)?, kv.key_calibration().cloned());
    kv.close()?;
    Ok((bits, calibration))
}

fn refused(result: Result<(Vec<u32>, Option<KeyCalibration>)>) -> (String, String) {
    match result.map_err(|error| error.downcast::<Error>()) {
        Err(Ok(Error::WrongFile { what: "key calibration", found, expected, .. })) => (found, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_keeps_the_calibration_that_its_keys_were_written_with() -> Result<()> {
    let (device, folder) = (CpuBackend::new(), tempfile::tempdir()?);
    let path = folder.path().join("calibrated");
    let bits = closed(&device, &path, Some(calibration(50.0)))?;
    let name = format!("{:#018x}", calibration(50.0).checksum());
    assert_eq!(open(&device, &path, Some(calibration(50.0)))?, (bits.clone(), Some(calibration(50.0))));
    // Without one the file's is taken over. Those that are refused leave the file as it was.
    for _ in 0..2 {
        let other = format!("{:#018x}", calibration(49.0).checksum());
        assert_eq!(refused(open(&device, &path, Some(calibration(49.0)))), (name.clone(), other));
        let identity = KeyCalibration::identity(&model())?;
        assert_eq!(refused(open(&device, &path, Some(identity))), (name.clone(), "none".into()));
        assert_eq!(open(&device, &path, None)?, (bits.clone(), Some(calibration(50.0))));
    }
    Ok(())
}

#[test]
fn a_file_without_a_calibration_takes_none_but_the_one_that_changes_nothing() -> Result<()> {
    let (device, folder) = (CpuBackend::new(), tempfile::tempdir()?);
    let identity = KeyCalibration::identity(&model())?;
    for given in [None, Some(identity.clone())] {
        let path = folder.path().join("plain");
        let bits = closed(&device, &path, given)?;
        let (found, _) = refused(open(&device, &path, Some(calibration(50.0))));
        assert_eq!(found, "none");
        assert_eq!(open(&device, &path, None)?, (bits.clone(), None));
        assert_eq!(open(&device, &path, Some(identity.clone()))?, (bits, Some(identity.clone())));
    }
    // Pages of another format have none.
    let bf16 = HighSpeedSwap::builder(device, model().format(PageFormat::Bf16)).device_budget(1 << 20);
    let built = bf16.tier(HostTier::new(1 << 20)).key_calibration(identity).build();
    assert!(matches!(built, Err(Error::Config { field: "key_calibration", .. })));
    Ok(())
}

/// Counts warnings.
struct Warnings(Arc<AtomicU32>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Relaxed);
    }
    fn record(&self, _: &Id, _: &Fields<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_store_warns_once_of_keys_that_should_be_calibrated() -> Result<()> {
    let warnings = Arc::new(AtomicU32::new(0));
    let _guard = tracing::subscriber::set_default(Warnings(warnings.clone()));
    let device = CpuBackend::new();
    for (format, constant, calibrated, hurts, warned) in [
        (PageFormat::Int8, 50.0, false, true, 1),
        (PageFormat::Int8, 50.0, true, false, 0),
        (PageFormat::Int8, 0.0, false, false, 0),
        (PageFormat::Bf16, 50.0, false, true, 0),
        (PageFormat::F16, 50.0, false, true, 0),
        (PageFormat::F32, 0.0, false, false, 0),
    ] {
        let mut store = PagedStore::new(device.clone(), model().format(format))?;
        if calibrated {
            store.calibrate_keys(calibration(50.0))?;
        }
        let seq = store.begin();
        assert_eq!(store.check_keys(0, &seq)?.tokens(), 0);
        let k = tensor(&device, 100, 2, constant)?;
        store.append(0, &[Append::new(&seq, 41, k.clone(), k.clone())])?;
        let few = store.check_keys(0, &seq)?;
        let rest = k.clone().from_row(41);
        store.append(0, &[Append::new(&seq, 59, rest.clone(), rest)])?;
        let check = store.check_keys(0, &seq)?;
        assert_eq!((few.tokens(), check.tokens()), (41, KeyCheck::TOKENS as usize));
        assert_eq!((few.hurts(), check.hurts()), (hurts, hurts), "{format:?} {constant} {check:?}");
        assert_eq!(warnings.swap(0, Relaxed), warned, "{format:?} {constant}");
        assert!(matches!(store.check_keys(1, &seq), Err(Error::UnknownLayer { .. })));
    }
    // What was written is what is looked at: f32 pages hold the keys themselves.
    let mut store = PagedStore::new(device.clone(), model().format(PageFormat::F32))?;
    let seq = store.begin();
    let k = tensor(&device, 64, 2, 9.0)?;
    store.append(0, &[Append::new(&seq, 64, k.clone(), k.clone())])?;
    let mut keys = vec![0.0f32; 64 * 32];
    store.download(&k.buffer, 0, bytemuck::cast_slice_mut(&mut keys))?;
    assert_eq!(store.check_keys(0, &seq)?, KeyCheck::new(&model(), &keys)?);
    Ok(())
}

#[test]
fn a_cache_that_swaps_looks_at_the_first_pages_that_are_in_frames() -> Result<()> {
    let device = CpuBackend::new();
    let mut kv = builder(&device).tier(HostTier::new(1 << 20)).build()?;
    let seq = kv.begin();
    let k = tensor(&device, 64, 2, 50.0)?;
    kv.append(0, &[Append::new(&seq, 64, k.clone(), k)])?;
    let check = kv.check_keys(0, &seq)?;
    assert!(check.tokens() == 64 && check.hurts());
    kv.offload(&seq)?;
    assert_eq!(kv.evict(&seq)?, 4);
    assert_eq!(kv.check_keys(0, &seq)?.tokens(), 0);
    kv.pin(0, &seq, 1..3)?;
    let check = kv.check_keys(0, &seq)?;
    assert!(check.tokens() == 32 && check.hurts());
    Ok(())
}

#[test]
fn bytes_of_int8_pages_are_the_same_in_stores_budgets_and_tiers() -> Result<()> {
    let (device, folder) = (CpuBackend::new(), tempfile::tempdir()?);
    let model = Geometry::new(1, 8, 8, 128).format(PageFormat::Int8);
    let record = Record::new(model);
    let (page, padded) = (33_792, 36_864);
    assert_eq!((record.bytes(), record.frame_stride(), record.file_stride()), (page, page, padded));
    let tensor = device.alloc("zeros", 320 * 1024 * 4)?;
    let view = View::dense(tensor, Dtype::F32, 8, 128);
    for file in [false, true] {
        // One byte less than another page, of the budget and of the tier.
        let (budget, each) = (18 * page - 1, if file { padded } else { page });
        let builder = HighSpeedSwap::builder(device.clone(), model).device_budget(budget);
        let bytes = 41 * each - 1;
        let mut kv = match file {
            true => builder.tier(FileTier::create(folder.path().join("pages"), bytes).host_cache(3 * page)).build()?,
            false => builder.tier(HostTier::new(bytes)).build()?,
        };
        let seq = kv.begin();
        kv.append(0, &[Append::new(&seq, 320, view.clone(), view.clone())])?;
        kv.offload(&seq)?;
        kv.synchronize()?;
        let stats = kv.stats();
        assert_eq!((stats.frames, stats.store.held_pages, stats.store.held_bytes), (17, 20, 20 * page));
        assert_eq!(stats.store.arena_bytes, stats.store.capacity_pages * page);
        assert!(stats.store.arena_bytes <= budget && kv.arena_bytes() == stats.store.arena_bytes);
        let tier = stats.tiers.last().expect("a level");
        assert_eq!((tier.page_bytes, tier.capacity_pages, tier.used_pages), (each, 40, 20));
        assert_eq!(tier.bytes_in, tier.pages_in * each);
        if file {
            let cache = &stats.tiers[0];
            assert_eq!((cache.page_bytes, cache.capacity_pages, cache.bytes_in), (page, 3, cache.pages_in * page));
            kv.close()?;
            // A header block, the slots, and the index behind them.
            let size = std::fs::metadata(folder.path().join("pages"))?.len();
            assert!(size >= 4096 + 40 * padded && size < 4096 + 41 * padded, "{size}");
        }
    }
    let snug = Record::new(model.page_size(model.snug_page_size().expect("64 tokens")));
    assert_eq!((snug.geometry().page_tokens(), snug.file_padding()), (64, 0));
    Ok(())
}
