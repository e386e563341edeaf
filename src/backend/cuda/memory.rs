//! Who frees memory, and when? Handles to device memory of our own and of the caller's, and pinned host memory.

use super::driver::{self, NAME, failed};
use crate::backend::{DeviceBuffer, DeviceId};
use crate::{Error, Result};
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A handle to device memory.
///
/// Memory that the backend allocated is freed with the last handle: that waits until everything enqueued in the context
/// has finished, whatever the stream, so work that uses the memory never loses it. (Buffers are few and long-lived;
/// nothing is dropped in the steady state.) Imported memory is the caller's to keep.
#[derive(Clone)]
pub struct CudaMemory {
    allocation: Arc<Allocation>,
    device: DeviceId,
}

struct Allocation {
    address: sys::CUdeviceptr,
    bytes: u64,
    /// The context to free it in; `None` for imported memory.
    owner: Option<Arc<CudaContext>>,
}

impl CudaMemory {
    /// New memory, rounded up to whole words.
    pub(super) fn allocate(context: &Arc<CudaContext>, device: DeviceId, label: &str, bytes: u64) -> Result<Self> {
        context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        let bytes = bytes.next_multiple_of(4);
        driver::allocates();
        // SAFETY: the memory is only ever reached by kernels and copies, for which no contents are invalid.
        let address = unsafe { result::malloc_sync(bytes.max(4) as usize) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => out_of_memory(bytes, label),
            _ => failed("cuMemAlloc")(error),
        })?;
        let allocation = Arc::new(Allocation { address, bytes, owner: Some(Arc::clone(context)) });
        Ok(CudaMemory { allocation, device })
    }

    pub(super) fn borrowed(device: DeviceId, address: sys::CUdeviceptr, bytes: u64) -> Self {
        CudaMemory { allocation: Arc::new(Allocation { address, bytes, owner: None }), device }
    }

    /// The device address of its first byte.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.allocation.address
    }

    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: u64) -> sys::CUdeviceptr {
        self.allocation.address + offset
    }

    /// Its address, where kernels access it 16 bytes at a time.
    pub(super) fn aligned(&self, what: &'static str) -> Result<sys::CUdeviceptr> {
        match self.address() {
            address if address.is_multiple_of(16) => Ok(address),
            value => Err(Error::Misaligned { what, value, multiple: 16 }),
        }
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaMemory({} bytes at {:#x})", self.bytes(), self.address())
    }
}

impl DeviceBuffer for CudaMemory {
    fn bytes(&self) -> u64 {
        self.allocation.bytes
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn same_memory(&self, other: &Self) -> bool {
        (self.device, self.address(), self.bytes()) == (other.device, other.address(), other.bytes())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(context) = &self.owner {
            // SAFETY: the address came from cuMemAlloc in this context and is freed here only.
            free_when_idle(context, self.bytes, || unsafe { result::free_sync(self.address) });
        }
    }
}

/// Pinned host memory, cached (not write-combined), which kernels and copies reach at its own address in every context.
pub(super) struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to this value alone and may be used on any thread; `&self` gives its address away, and only
// `&mut self` reaches its bytes.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// New memory of at least one byte, with unspecified contents.
    pub(super) fn new(context: &Arc<CudaContext>, label: &str, bytes: u64) -> Result<Self> {
        context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        let full = || out_of_memory(bytes, &format!("pinned host memory: {label}"));
        let size = usize::try_from(bytes).map_err(|_| full())?;
        driver::allocates();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory comes from the system, which has filled it: no contents are invalid for bytes.
        let start = unsafe { result::malloc_host(size, flags) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_INVALID_VALUE => full(),
            _ => failed("cuMemHostAlloc")(error),
        })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(full)?;
        Ok(Pinned { start, bytes: size, context: Arc::clone(context) })
    }

    /// The address of its first byte, on the host and on the device.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its bytes. The caller touches none that queued work writes, and writes none that it reads.
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is this long, filled (see `new`), and borrowed through `self`; the device, by
        // the rule above, does not write what the caller has.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the memory came from cuMemHostAlloc and is freed here only.
        free_when_idle(&self.context, self.bytes as u64, || unsafe { result::free_host(self.start.as_ptr().cast()) });
    }
}

/// Frees memory once the context has nothing left to do; where it cannot be waited for, the memory is lost instead.
fn free_when_idle(context: &CudaContext, bytes: u64, free: impl FnOnce() -> Result<(), DriverError>) {
    driver::waits();
    if let Err(error) = context.synchronize().and_then(|()| free()) {
        tracing::warn!(%error, bytes, "memory was not freed");
    }
}

fn out_of_memory(bytes: u64, purpose: &str) -> Error {
    Error::OutOfMemory { backend: NAME, bytes, purpose: purpose.to_owned() }
}
