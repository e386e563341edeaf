//! Does a process stay as large as it is, however often its kernels run?
//!
//! lavapipe compiles a kernel anew at every dispatch, and keeps them all, where it believes that the call's parameters say how
//! often a loop runs and unrolling it makes the kernel longer.
#![cfg(all(feature = "wgpu", target_os = "linux"))]

use kvtide::backend::wgpu::WgpuBackend;
use kvtide::{Append, Backend, Dtype, Geometry, PageFormat, PagedStore, Query, Rows, View};
use std::sync::{Mutex, PoisonError};
use wgpu::DeviceType;

/// Held by each test: they measure one process.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes of memory that this process has.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// A token more of each of one to three sequences, and attention over them, so many times.
fn decode(device: &WgpuBackend, format: PageFormat, steps: usize) {
    let model = Geometry::new(1, 8, 2, 64).page_size(16).format(format);
    let mut kv = PagedStore::new(device.clone(), model).unwrap();
    let tensor = |heads: u64| {
        let buffer = device.alloc("tensor", 3 * heads * 64 * 4).unwrap();
        device.fill(&mut device.stream().unwrap(), &buffer, 0, 3 * heads * 64 * 4, 0.5f32.to_bits()).unwrap();
        buffer
    };
    let (k, v, q, out) = (tensor(2), tensor(2), tensor(8), tensor(8));
    let view = |buffer: &_, heads| View::dense(Clone::clone(buffer), Dtype::F32, heads, 64);
    let sequences: Vec<_> = (0..3).map(|_| kv.begin()).collect();
    for step in 0..steps {
        let some = &sequences[..1 + step % 3];
        let appends: Vec<_> = some.iter().map(|seq| Append::new(seq, 1, view(&k, 2), view(&v, 2))).collect();
        kv.append(0, &appends).unwrap();
        let rows: Vec<_> = some.iter().map(Rows::decode).collect();
        kv.attend(0, &Query::new(&rows, view(&q, 8), view(&out, 8))).unwrap();
    }
    kv.synchronize().unwrap();
}

#[test]
fn attention_does_not_grow_with_calls() {
    const GROWTH: u64 = 64 << 20;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let adapters = WgpuBackend::adapters();
    if adapters.is_empty() {
        eprintln!("not run: no adapter for wgpu");
    }
    for adapter in &adapters {
        for format in [PageFormat::Bf16, PageFormat::Int8] {
            let device = WgpuBackend::open_adapter(adapter).unwrap();
            decode(&device, format, 6);
            let before = resident();
            decode(&device, format, 48);
            let grown = resident().saturating_sub(before);
            eprintln!("{} {format:?}: {} KiB more", adapter.get_info().name, grown >> 10);
            assert!(grown < GROWTH, "{}: {} MiB more after 48 calls", adapter.get_info().name, grown >> 20);
        }
    }
}

/// Bind groups that are kept for later calls keep what they bind, but not for long.
#[test]
fn memory_that_is_given_up_comes_back() {
    const BYTES: u64 = 64 << 20;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Only theirs is memory of this process.
    let mut adapters = WgpuBackend::adapters();
    adapters.retain(|adapter| adapter.get_info().device_type == DeviceType::Cpu);
    if adapters.is_empty() {
        eprintln!("not run: no software adapter for wgpu");
    }
    for adapter in &adapters {
        let device = WgpuBackend::open_adapter(adapter).unwrap();
        let mut stream = device.stream().unwrap();
        let small = device.alloc("small", 4096).unwrap();
        let fill = |stream: &mut _, buffer: &_, bytes: u64| {
            device.fill(stream, buffer, 0, bytes, 1).unwrap();
            device.synchronize(stream).unwrap();
        };
        fill(&mut stream, &small, 4096);
        let before = resident();
        let large = device.alloc("large", BYTES).unwrap();
        fill(&mut stream, &large, BYTES);
        let held = resident().saturating_sub(before);
        drop(large);
        for _ in 0..20 {
            fill(&mut stream, &small, 4096);
        }
        let left = resident().saturating_sub(before);
        eprintln!("{}: {} KiB, then {} KiB more", adapter.get_info().name, held >> 10, left >> 10);
        assert!(held > BYTES / 2, "the buffer is not in the process's memory");
        assert!(left < BYTES / 2, "{}: {} MiB stay", adapter.get_info().name, left >> 20);
    }
}
