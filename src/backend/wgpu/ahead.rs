//! What is compiled before a call needs it? What a store over such pages decodes with, on a thread of its own: drivers take up to
//! seconds to compile a kernel. A call that comes earlier waits for its kernel alone.

use super::Shared;
use super::kernels::{Kernel, Source};
use super::pipelines::Pipelines;
use super::shapes::AttendShape;
use crate::record::Record;
use ::wgpu::Device;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Compilations under way; dropped, they end with the kernel that each is at.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A thread that panicked has nothing to tell: the call that needs the kernel compiles it itself.
        threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Compiles what decode over these pages needs. Software adapters, whose calls take as long, compile what is called for only.
pub(super) fn prepare(shared: &Shared, record: &Record, slabs: usize) {
    if !shared.processor.own_kernels {
        return;
    }
    let wanted = [
        Kernel::append(record, Source::Quads),
        Kernel::Attend(AttendShape::new(record, shared.processor)),
        Kernel::Merge,
        Kernel::MergeLong,
    ];
    // An arena that has all the slabs it can will not have more.
    let could = |kernel: &Kernel| kernel.fits(slabs, &shared.limits);
    let missing: Vec<_> =
        wanted.into_iter().filter(could).filter(|&kernel| shared.pipelines.claim(kernel, slabs)).collect();
    if missing.is_empty() {
        return;
    }
    let (device, pipelines, stop) = (shared.device.clone(), shared.pipelines.clone(), shared.ahead.stop.clone());
    let work = move || compile(&device, &pipelines, &missing, slabs, &stop);
    match std::thread::Builder::new().name("kvtide-compile".into()).spawn(work) {
        Ok(thread) => {
            let mut threads = shared.ahead.threads.lock().unwrap_or_else(PoisonError::into_inner);
            threads.retain(|thread| !thread.is_finished());
            threads.push(thread);
        }
        Err(error) => tracing::debug!(%error, "no thread to compile kernels ahead"),
    }
}

fn compile(device: &Device, pipelines: &Pipelines, kernels: &[Kernel], slabs: usize, stop: &AtomicBool) {
    for &kernel in kernels {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = pipelines.find(device, kernel, slabs) {
            tracing::debug!(%error, ?kernel, "a kernel could not be compiled ahead");
        }
    }
}
