//! Are kernels compiled before they are called for, and kept for the next process?
#![cfg(feature = "wgpu")]

use kvtide::backend::wgpu::WgpuBackend;
use kvtide::{Append, Backend, Dtype, Geometry, PageFormat, PagedStore, Query, Rows, View};
use std::time::{Duration, Instant};
use wgpu::{Adapter, Features};

/// Software adapters take their time.
const PATIENCE: Duration = Duration::from_secs(300);

fn adapters() -> Vec<Adapter> {
    let adapters = WgpuBackend::adapters();
    if adapters.is_empty() {
        eprintln!("not run: no adapter for wgpu");
    }
    adapters
}

fn store(device: &WgpuBackend) -> PagedStore<WgpuBackend> {
    let model = Geometry::new(1, 8, 2, 64).page_size(16).format(PageFormat::Bf16);
    PagedStore::new(device.clone(), model).unwrap()
}

/// A decode step of the store's pages.
fn decode(device: &WgpuBackend, kv: &mut PagedStore<WgpuBackend>) {
    let tensor = |heads: u64| device.alloc("tensor", heads * 64 * 2).unwrap();
    let view = |buffer: &_, heads| View::dense(Clone::clone(buffer), Dtype::Bf16, heads, 64);
    let (k, v, q, out) = (tensor(2), tensor(2), tensor(8), tensor(8));
    let seq = kv.begin();
    kv.append(0, &[Append::new(&seq, 1, view(&k, 2), view(&v, 2))]).unwrap();
    kv.attend(0, &Query::new(&[Rows::decode(&seq)], view(&q, 8), view(&out, 8))).unwrap();
    kv.synchronize().unwrap();
}

#[test]
fn decode_finds_its_kernels_compiled() {
    for adapter in &adapters() {
        let device = WgpuBackend::open_adapter(adapter).unwrap().with_own_kernels();
        let mut kv = store(&device);
        let begin = Instant::now();
        while device.compiled()[0] < 4 {
            assert!(begin.elapsed() < PATIENCE, "{:?} after {PATIENCE:?}", device.compiled());
            std::thread::sleep(Duration::from_millis(10));
        }
        decode(&device, &mut kv);
        assert_eq!(device.compiled()[1], 0, "{}: decode waited for kernels", adapter.get_info().name);
    }
}

/// What is dropped while kernels compile waits for one of them at most, and harms nothing.
#[test]
fn a_device_may_go_while_kernels_compile() {
    for adapter in &adapters() {
        let device = WgpuBackend::open_adapter(adapter).unwrap().with_own_kernels();
        drop(store(&device));
        drop(device);
    }
}

#[test]
fn what_was_compiled_is_kept_for_the_next_process() {
    for adapter in &adapters() {
        // SAFETY: there is no data.
        let device = unsafe { WgpuBackend::open_adapter(adapter).unwrap().with_pipeline_cache(None) };
        decode(&device, &mut store(&device));
        let kept = device.pipeline_cache();
        let (name, has) = (adapter.get_info().name, adapter.features().contains(Features::PIPELINE_CACHE));
        eprintln!("{name}: {:?} bytes", kept.as_ref().map(Vec::len));
        assert_eq!(kept.is_some(), has, "{name}");
        // SAFETY: the data is what this adapter's cache has just given.
        let next = unsafe { WgpuBackend::open_adapter(adapter).unwrap().with_pipeline_cache(kept.as_deref()) };
        decode(&next, &mut store(&next));
        assert_eq!(next.pipeline_cache().is_some(), has, "{name}");
    }
}
