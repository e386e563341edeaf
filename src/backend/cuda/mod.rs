//! The CUDA backend: kernels of `kernels/*.cu`, compiled by nvcc with the crate, launched through [`cudarc`].
//!
//! The driver is found at run time; without one, or in a crate that was compiled without nvcc, opening says so. A program
//! that has a context, streams and buffers of its own brings them in: [`CudaBackend::from_context`],
//! [`CudaBackend::wrap_stream`], [`CudaBackend::import`].
//!
//! Every call makes the backend's context current on the calling thread and leaves it so.

mod append;
mod attend;
mod driver;
mod kernels;
mod memory;
mod merge;
mod predict;
mod staging;
mod stream;
mod swap;
mod transfer;

/// The version of cudarc that this crate is built on: its types are in this module's signatures.
pub use cudarc;
pub use driver::{DriverCalls, driver_calls};
pub use memory::CudaMemory;
pub use stream::{CudaEvent, CudaStream};
pub use swap::CudaHost;

use super::ops::{Append, Attend, Fold, Merge, Project, Score, StepMemory, Transfer, check_sum, copy_sides, range};
use super::{Backend, Caps, DeviceId, HostUse, Operation, Swap, host_range};
use crate::{Error, Result};
use cudarc::driver::{CudaContext, result, sys};
use driver::failed;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Query vectors (row × head) that a block of `attend` takes at most.
const QUERY_TILE: u32 = attend::QUERY_TILES[attend::QUERY_TILES.len() - 1];

/// One CUDA device, with its kernels loaded. Clones are the same device.
#[derive(Clone)]
pub struct CudaBackend {
    inner: Arc<Inner>,
}

struct Inner {
    caps: Caps,
    kernels: kernels::Kernels,
    context: Arc<CudaContext>,
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBackend({})", self.inner.caps.adapter)
    }
}

impl CudaBackend {
    /// Opens the device of this number, in its primary context (which PyTorch, candle and others use too).
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver, without that device, in a crate compiled without nvcc, or where none of
    /// the kernels' code runs on the device.
    pub fn open(ordinal: usize) -> Result<Self> {
        kernels::compiled()?;
        Self::from_context(driver::open(ordinal)?)
    }

    /// Every device that the driver shows; one error where it shows none.
    pub fn all() -> Vec<Result<Self>> {
        match kernels::compiled().and_then(|()| driver::count()) {
            Ok(0) => vec![Err(driver::unavailable("the driver shows no device"))],
            Ok(count) => (0..count).map(Self::open).collect(),
            Err(error) => vec![Err(error)],
        }
    }

    /// Uses a context that the caller has.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn from_context(context: Arc<CudaContext>) -> Result<Self> {
        let kernels = kernels::Kernels::load(&context)?;
        let caps = driver::caps(&context, QUERY_TILE, Operation::formats)?;
        Ok(CudaBackend { inner: Arc::new(Inner { caps, kernels, context }) })
    }

    /// The context that everything runs in.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Uses a stream that the caller has; work enqueued here and by the caller happens in the order of the calls. While
    /// the stream is being captured into a graph, calls on it are refused, but for those of a decode step
    /// ([`Step`](crate::Step)).
    ///
    /// # Safety
    /// - `raw` is a stream of this backend's [`context`](Self::context), or the default stream of it (null).
    /// - It exists until the last call that is given the returned stream has returned.
    /// - `CU_STREAM_PER_THREAD` names another stream on each thread: the returned stream then stays on this thread.
    pub unsafe fn wrap_stream(&self, raw: sys::CUstream) -> Result<CudaStream> {
        CudaStream::borrowed(&self.inner.context, self.id(), raw)
    }

    /// Uses device memory that the caller has; dropping the handle frees nothing.
    ///
    /// # Errors
    /// [`Error::Misaligned`] unless `address` and `bytes` are multiples of 4. (For 16-bit elements at an odd place, import
    /// from an earlier address on and use [`View::offset`](super::ops::View::offset).) Operations refuse slabs and state
    /// buffers that are not on 16-byte boundaries.
    ///
    /// # Safety
    /// - `bytes` bytes at `address` are device memory that kernels of this backend's [`context`](Self::context) can
    ///   access.
    /// - They stay so until all work that was given the handle or a clone of it has finished on the device.
    /// - Nothing else writes what such work reads, or reads or writes what it writes, except in stream order.
    pub unsafe fn import(&self, address: sys::CUdeviceptr, bytes: u64) -> Result<CudaMemory> {
        if let Some(value) = [address, bytes].into_iter().find(|n| !n.is_multiple_of(4)) {
            return Err(Error::Misaligned { what: "imported memory", value, multiple: 4 });
        }
        Ok(CudaMemory::borrowed(self.id(), address, bytes))
    }

    fn id(&self) -> DeviceId {
        self.inner.caps.device
    }

    /// Checks that an event is this device's.
    fn ours(&self, event: &CudaEvent) -> Result<()> {
        if event.device() == self.id() { Ok(()) } else { Err(Error::WrongDevice { what: "an event" }) }
    }

    /// Makes the context current for a call that works on this stream and may be captured with it.
    fn enter_step(&self, stream: &CudaStream) -> Result<()> {
        if stream.device() != self.id() {
            return Err(Error::WrongDevice { what: "a stream" });
        }
        self.inner.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))
    }

    /// Makes the context current for a call that works on this stream.
    fn enter(&self, stream: &CudaStream) -> Result<()> {
        self.enter_step(stream)?;
        if stream.is_captured()? {
            // A replay would read host memory that a later call has filled anew.
            let format = "a stream that is being captured".into();
            return Err(Error::Unsupported { backend: self.caps().backend, operation: "work", format });
        }
        Ok(())
    }
}

impl Backend for CudaBackend {
    type Buffer = CudaMemory;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Host = CudaHost;

    fn caps(&self) -> &Caps {
        &self.inner.caps
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<CudaMemory> {
        let caps = self.caps();
        if bytes > caps.max_slab_bytes {
            let (adapter, have) = (caps.adapter.clone(), caps.max_slab_bytes);
            return Err(Error::Limit { adapter, limit: "cuDeviceTotalMem", need: bytes, have, purpose: "one buffer" });
        }
        CudaMemory::allocate(&self.inner.context, self.id(), label, bytes)
    }

    fn stream(&self) -> Result<CudaStream> {
        CudaStream::new(&self.inner.context, self.id())
    }

    fn upload(&self, stream: &mut CudaStream, dst: &CudaMemory, offset: u64, data: &[u8]) -> Result<()> {
        range(dst, offset, data.len() as u64, "an upload", self.caps())?;
        self.enter(stream)?;
        stream.upload(dst.at(offset), data)
    }

    fn download(&self, stream: &mut CudaStream, src: &CudaMemory, offset: u64, out: &mut [u8]) -> Result<()> {
        range(src, offset, out.len() as u64, "a download", self.caps())?;
        self.enter(stream)?;
        if !out.is_empty() {
            // SAFETY: the source range was checked; `out` outlives the copy, which has ended when `synchronize` returns,
            // also where it fails: a copy into pageable memory has ended when the driver returns from it.
            unsafe { result::memcpy_dtoh_async(out, src.at(offset), stream.raw()) }
                .map_err(failed("cuMemcpyDtoHAsync"))?;
        }
        stream.synchronize()
    }

    fn copy(
        &self,
        stream: &mut CudaStream,
        src: (&CudaMemory, u64),
        dst: (&CudaMemory, u64),
        bytes: u64,
    ) -> Result<()> {
        copy_sides(src, dst, bytes, self.caps())?;
        self.enter(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges were checked; memory outlives the work that uses it (see `CudaMemory`).
        unsafe { result::memcpy_dtod_async(dst.0.at(dst.1), src.0.at(src.1), bytes as usize, stream.raw()) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }

    fn fill(&self, stream: &mut CudaStream, dst: &CudaMemory, offset: u64, bytes: u64, word: u32) -> Result<()> {
        range(dst, offset, bytes, "a fill", self.caps())?;
        self.enter(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range was checked, in whole words; memory outlives the work that uses it (see `CudaMemory`).
        unsafe { sys::cuMemsetD32Async(dst.at(offset), word, bytes as usize / 4, stream.raw()) }
            .result()
            .map_err(failed("cuMemsetD32Async"))
    }

    fn sum(&self, stream: &mut CudaStream, src: &CudaMemory, bytes: u64, total: &CudaMemory) -> Result<()> {
        check_sum(src, bytes, total, self.caps())?;
        self.enter(stream)?;
        transfer::sum(&self.inner.kernels, stream, src, bytes, total)
    }

    fn record(&self, stream: &mut CudaStream) -> Result<CudaEvent> {
        self.enter(stream)?;
        stream.record()
    }

    fn wait(&self, stream: &mut CudaStream, event: &CudaEvent) -> Result<()> {
        self.enter(stream)?;
        stream.wait(event)
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool> {
        self.ours(event)?;
        self.inner.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        event.is_done()
    }

    fn finish(&self, event: &CudaEvent) -> Result<()> {
        self.ours(event)?;
        event.finish()
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<Option<Duration>> {
        [from, to].into_iter().try_for_each(|event| self.ours(event))?;
        from.until(to).map(Some)
    }

    fn alloc_host(&self, label: &str, bytes: u64, _: HostUse) -> Result<CudaHost> {
        CudaHost::allocate(&self.inner.context, self.id(), label, bytes)
    }

    fn read_host(&self, host: &CudaHost, offset: u64, out: &mut [u8]) -> Result<()> {
        host_range(host, offset, out.len(), self.caps())?;
        host.read(offset, out);
        Ok(())
    }

    fn write_host(&self, host: &CudaHost, offset: u64, data: &[u8]) -> Result<()> {
        host_range(host, offset, data.len(), self.caps())?;
        host.write(offset, data);
        Ok(())
    }

    fn swap_out(&self, stream: &mut CudaStream, args: &Swap<'_, CudaMemory, CudaHost>) -> Result<()> {
        args.validate(true, self.caps())?;
        self.enter(stream)?;
        swap::swap(&self.inner.kernels, stream, args, true)
    }

    fn swap_in(&self, stream: &mut CudaStream, args: &Swap<'_, CudaMemory, CudaHost>) -> Result<()> {
        args.validate(false, self.caps())?;
        self.enter(stream)?;
        swap::swap(&self.inner.kernels, stream, args, false)
    }

    fn flush(&self, stream: &mut CudaStream) -> Result<()> {
        self.enter(stream)?;
        stream.flush()
    }

    fn synchronize(&self, stream: &mut CudaStream) -> Result<()> {
        self.enter(stream)?;
        stream.synchronize()
    }

    fn append(&self, stream: &mut CudaStream, args: &Append<'_, CudaMemory>) -> Result<()> {
        args.validate(self.caps())?;
        self.enter(stream)?;
        append::append(&self.inner.kernels, stream, args)
    }

    fn transfer(&self, stream: &mut CudaStream, args: &Transfer<'_, CudaMemory>) -> Result<()> {
        args.validate(self.caps())?;
        self.enter(stream)?;
        transfer::transfer(&self.inner.kernels, stream, args)
    }

    fn attend(&self, stream: &mut CudaStream, args: &Attend<'_, CudaMemory>) -> Result<()> {
        args.validate(self.caps())?;
        self.enter(stream)?;
        attend::attend(&self.inner.kernels, stream, args, None)
    }

    fn merge(&self, stream: &mut CudaStream, args: &Merge<'_, CudaMemory>) -> Result<()> {
        args.validate(self.caps())?;
        self.enter(stream)?;
        merge::merge(&self.inner.kernels, stream, args, None)
    }

    fn append_step(
        &self,
        stream: &mut CudaStream,
        args: &Append<'_, CudaMemory>,
        at: &StepMemory<'_, CudaMemory>,
    ) -> Result<()> {
        args.validate(self.caps())?;
        at.validate(self.caps())?;
        at.validate_append(args, self.caps())?;
        self.enter_step(stream)?;
        append::append_step(&self.inner.kernels, stream, args, at)
    }

    fn attend_step(
        &self,
        stream: &mut CudaStream,
        args: &Attend<'_, CudaMemory>,
        at: &StepMemory<'_, CudaMemory>,
    ) -> Result<()> {
        args.validate(self.caps())?;
        at.validate(self.caps())?;
        at.validate_rows(args.rows.len())?;
        self.enter_step(stream)?;
        attend::attend(&self.inner.kernels, stream, args, Some(at))
    }

    fn merge_step(
        &self,
        stream: &mut CudaStream,
        args: &Merge<'_, CudaMemory>,
        at: &StepMemory<'_, CudaMemory>,
    ) -> Result<()> {
        args.validate(self.caps())?;
        at.validate(self.caps())?;
        at.validate_rows(args.rows.len())?;
        self.enter_step(stream)?;
        merge::merge(&self.inner.kernels, stream, args, Some(at))
    }

    fn fold(&self, stream: &mut CudaStream, args: &Fold<'_, CudaMemory>) -> Result<()> {
        args.validate(self.caps())?;
        self.enter(stream)?;
        merge::fold(&self.inner.kernels, stream, args)
    }

    fn project(&self, stream: &mut CudaStream, args: &Project<'_, CudaMemory>) -> Result<()> {
        let layout = args.validate(self.caps())?;
        self.enter(stream)?;
        predict::project(&self.inner.kernels, stream, args, &layout)
    }

    fn score(&self, stream: &mut CudaStream, args: &Score<'_, CudaMemory>) -> Result<()> {
        let layout = args.validate(self.caps())?;
        self.enter(stream)?;
        predict::score(&self.inner.kernels, stream, args, &layout)
    }
}

/// A number of descriptors (of up to 8 words), as kernels take it: the words still count in 32 bits.
fn count(n: usize, what: &'static str) -> Result<u32> {
    let maximum = u32::MAX / 8;
    match u32::try_from(n) {
        Ok(n) if n <= maximum => Ok(n),
        _ => Err(Error::TooLarge { what, value: n as u64, maximum: maximum.into() }),
    }
}
