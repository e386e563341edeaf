//! How long do a decode step's calls take, through `PagedStore`, on every device here?
//!
//! Calls are enqueued in batches. The time of a batch is the device's, between two events, where the backend has those, else
//! the clock's until the device has done it. This is the quick look: `kvtide bench` empties the cache before each call and
//! measures a read ceiling in the same run.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use kvtide::{Append, Backend, Device, Dtype, Geometry, PagedStore, Query, Rows, StoreConfig, View};
use std::time::{Duration, Instant};

/// Calls between two events.
const BATCH: u64 = 16;

/// A store with `sequences` sequences of `tokens` tokens of noise, and device memory for one step.
struct Scene {
    store: PagedStore<Device>,
    sequences: Vec<kvtide::Sequence>,
    step: View<kvtide::backend::DeviceMemory>,
    out: View<kvtide::backend::DeviceMemory>,
}

fn scene(device: &Device, geometry: Geometry, sequences: u32, tokens: u32) -> kvtide::Result<Scene> {
    let heads = geometry.q_heads();
    let config = StoreConfig { step_pages: 1024, ..StoreConfig::default() };
    let mut store = PagedStore::with_config(device.clone(), geometry, config)?;
    let mut noise = 1u32;
    let mut random = |count: u64| -> Vec<bf16> {
        let next = |_| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32((noise >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        (0..count).map(next).collect()
    };
    let mut tensor = |rows: u32, heads: u32, store: &mut PagedStore<Device>| -> kvtide::Result<View<_>> {
        let data = random(u64::from(rows) * u64::from(heads) * u64::from(geometry.k_dim()));
        let buffer = device.alloc("bench", data.len() as u64 * 2)?;
        store.upload(&buffer, 0, bytemuck::cast_slice(&data))?;
        Ok(View::dense(buffer, Dtype::Bf16, heads, geometry.k_dim()))
    };
    let step = tensor(sequences, heads, &mut store)?;
    let out = tensor(sequences, heads, &mut store)?;
    let chunk = tensor(256, geometry.kv_heads(), &mut store)?;
    let sequences: Vec<_> = (0..sequences).map(|_| store.begin()).collect();
    // In turn, so that the sequences' frames interleave.
    for at in (0..tokens).step_by(256) {
        for seq in &sequences {
            store.append(0, &[Append::new(seq, 256.min(tokens - at), chunk.clone(), chunk.clone())])?;
        }
    }
    Ok(Scene { store, sequences, step, out })
}

/// The time of so many calls, [`BATCH`] at a time.
fn timed(
    calls: u64,
    scene: &mut Scene,
    mut call: impl FnMut(&mut Scene) -> kvtide::Result<()>,
) -> kvtide::Result<Duration> {
    let device = scene.store.backend().clone();
    let mut total = Duration::ZERO;
    for first in (0..calls).step_by(BATCH as usize) {
        let (start, began) = (Instant::now(), device.record(scene.store.stream())?);
        for _ in first..calls.min(first + BATCH) {
            call(scene)?;
        }
        let ended = device.record(scene.store.stream())?;
        scene.store.synchronize()?;
        let wall = start.elapsed();
        total += device.elapsed(&began, &ended)?.unwrap_or(wall);
    }
    Ok(total)
}

fn decode(c: &mut Criterion) {
    let (devices, missing) = Device::all();
    missing.iter().for_each(|error| eprintln!("not run: {error}"));
    for device in devices {
        let caps = device.caps();
        let software =
            caps.backend == "cpu" || caps.adapter.contains("llvmpipe") || caps.adapter.contains("SwiftShader");
        let shapes: &[(u32, u32)] =
            if software { &[(1, 1024)] } else { &[(1, 8192), (16, 8192), (64, 4096), (1, 131_072)] };
        let geometry = if software { Geometry::new(1, 8, 2, 64) } else { Geometry::new(1, 32, 8, 128) };
        for &(sequences, tokens) in shapes {
            let name = format!("{} {}", caps.backend, caps.adapter);
            let mut scene = match scene(&device, geometry, sequences, tokens) {
                Ok(scene) => scene,
                Err(error) => {
                    eprintln!("{name}, {sequences} x {tokens}: not run: {error}");
                    continue;
                }
            };
            let mut group = c.benchmark_group(name);
            group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
            let shape = format!("{sequences} x {tokens}");
            let bytes =
                u64::from(sequences) * u64::from(tokens) * 4 * u64::from(geometry.kv_heads() * geometry.k_dim());
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function(BenchmarkId::new("attend", &shape), |b| {
                b.iter_custom(|calls| {
                    timed(calls, &mut scene, |scene| {
                        let rows: Vec<Rows<'_>> = scene.sequences.iter().map(Rows::decode).collect();
                        scene.store.attend(0, &Query::new(&rows, scene.step.clone(), scene.out.clone()))
                    })
                    .expect("the scene fits the device")
                });
            });
            group.throughput(Throughput::Elements(sequences.into()));
            group.bench_function(BenchmarkId::new("rewrite the last token of each", &shape), |b| {
                b.iter_custom(|calls| {
                    timed(calls, &mut scene, |scene| {
                        let last = u64::from(tokens) - 1;
                        let append = |(seq, row)| {
                            let view = scene.step.clone().from_row(row);
                            Append::new(seq, 1, view.clone(), view).at(last)
                        };
                        let appends: Vec<_> = scene.sequences.iter().zip(0..).map(append).collect();
                        scene.store.append(0, &appends)
                    })
                    .expect("the scene fits the device")
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
