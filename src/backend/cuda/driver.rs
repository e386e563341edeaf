//! Is there a CUDA driver, and what does it say? The probe, devices, their limits, and the driver's errors as ours.

use crate::backend::{Caps, DeviceId, Operation};
use crate::{Error, PageFormat, Result};
use cudarc::driver::{CudaContext, DriverError, sys::CUdevice_attribute as Attribute};
use libloading::Library;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

/// The backend's name in errors and in [`Caps`].
pub(super) const NAME: &str = "cuda";

/// The driver's library, which comes with the driver and not with the toolkit.
const LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

pub(super) fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { backend: NAME, reason: reason.into() }
}

/// What the driver calls an error.
fn message(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| text.map(|t| t.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Ok(name), Ok(meaning)) => format!("{meaning} ({name})"),
        _ => format!("unknown error {}", error.0 as u32),
    }
}

/// The error of a driver call that failed.
pub(super) fn failed(call: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Device { backend: NAME, message: format!("{call}: {}", message(error)) }
}

/// Checks that the driver's library loads, because cudarc panics where it does not.
///
/// cudarc's own probe is no help: it is gone from builds in which some other crate makes cudarc link to the library.
fn probe() -> Result<()> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: loading the library runs its initialisers and nothing else; cudarc loads it in the same way.
    let load = || LIBRARIES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    match LIBRARY.get_or_init(load) {
        Some(_) => Ok(()),
        None => Err(unavailable(format!("the driver's library, {}, does not load", LIBRARIES[0]))),
    }
}

/// Runs a first call into the driver; a panic of cudarc (a driver that lacks a function) becomes an error.
fn guarded<T>(call: impl FnOnce() -> Result<T, DriverError>) -> Result<T> {
    probe()?;
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| unavailable(message(error))),
        Err(_) => Err(unavailable("the driver's library lacks a function that cudarc needs")),
    }
}

/// The number of devices.
pub(super) fn count() -> Result<usize> {
    guarded(CudaContext::device_count).map(|count| usize::try_from(count).unwrap_or(0))
}

/// The primary context of a device.
pub(super) fn open(ordinal: usize) -> Result<Arc<CudaContext>> {
    let number = i32::try_from(ordinal).map_err(|_| unavailable(format!("there is no device {ordinal}")))?;
    guarded(|| CudaContext::new(number as usize))
}

/// What the device of a context is.
pub(super) fn caps(
    context: &CudaContext,
    query_tile: u32,
    formats: fn(Operation) -> &'static [PageFormat],
) -> Result<Caps> {
    let limit = |attribute| {
        let value = context.attribute(attribute).map_err(failed("cuDeviceGetAttribute"))?;
        Ok::<_, Error>(u64::try_from(value).unwrap_or(0))
    };
    let memory = context.total_mem().map_err(failed("cuDeviceTotalMem"))? as u64;
    let major = limit(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = limit(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let shared = limit(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let processors = limit(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let limits = vec![
        ("cuDeviceTotalMem", memory),
        ("COMPUTE_CAPABILITY", major * 10 + minor),
        ("MULTIPROCESSOR_COUNT", processors),
        ("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", shared),
        ("L2_CACHE_SIZE", limit(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
    ];
    Ok(Caps {
        backend: NAME,
        adapter: context.name().map_err(failed("cuDeviceGetName"))?,
        device: DeviceId::unique(),
        max_slabs: super::kernels::MAX_SLABS as u32,
        max_slab_bytes: memory,
        max_channels: ("cuDeviceTotalMem", memory),
        memory_bytes: Some(memory),
        query_tile,
        // A section of a multiprocessor may have four warps.
        at_once: processors,
        prefill: super::attend::prefill_of(shared),
        overlap: true,
        formats,
        limits,
    })
}

/// Calls into the driver that take long or wait, made by this thread so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DriverCalls {
    /// Allocations of device memory and of pinned host memory.
    pub allocations: u64,
    /// Waits for a stream, an event or all work of a context.
    pub waits: u64,
}

thread_local! {
    static CALLS: Cell<DriverCalls> = Cell::default();
}

/// What this thread has asked of the driver, through any backend, that a steady decode step does without.
///
/// ```
/// let before = kvtide::backend::cuda::driver_calls();
/// // … a decode step …
/// assert_eq!(kvtide::backend::cuda::driver_calls(), before);
/// ```
pub fn driver_calls() -> DriverCalls {
    CALLS.get()
}

/// Notes an allocation.
pub(super) fn allocates() {
    CALLS.with(|calls| calls.update(|now| DriverCalls { allocations: now.allocations + 1, ..now }));
}

/// Notes a wait.
pub(super) fn waits() {
    CALLS.with(|calls| calls.update(|now| DriverCalls { waits: now.waits + 1, ..now }));
}
