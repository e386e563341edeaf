//! What is a queue of work? A stream of our own or of the caller's, its staging ring and its descriptor buffer.

use super::driver::{failed, waits};
use super::kernels::Descriptors;
use super::memory::CudaMemory;
use super::staging::Staging;
use crate::backend::{DeviceBuffer, DeviceId};
use crate::{Error, Result};
use cudarc::driver::{self, CudaContext, result, sys};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Descriptor bytes that a stream starts with; larger calls make it grow.
const DESCRIPTOR_BYTES: u64 = 1 << 20;

/// A stream of the CUDA backend.
pub struct CudaStream {
    raw: sys::CUstream,
    /// Whether the stream is ours to destroy.
    owned: bool,
    context: Arc<CudaContext>,
    device: DeviceId,
    staging: Staging,
    /// What the next kernel reads. One region is enough: stream order keeps a copy behind the kernels before it.
    descriptors: CudaMemory,
}

// SAFETY: the driver's streams may be used on any thread; the only exception, the per-thread default stream, is the
// caller's to keep on its thread (`CudaBackend::wrap_stream`).
unsafe impl Send for CudaStream {}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({:?}{})", self.raw, if self.owned { "" } else { ", borrowed" })
    }
}

impl CudaStream {
    /// A stream of its own, which does not wait for the default stream.
    pub(super) fn new(context: &Arc<CudaContext>, device: DeviceId) -> Result<Self> {
        context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
        let stream = Self::borrowed(context, device, raw);
        match stream {
            Ok(mut stream) => {
                stream.owned = true;
                Ok(stream)
            }
            Err(error) => {
                destroy(raw);
                Err(error)
            }
        }
    }

    pub(super) fn borrowed(context: &Arc<CudaContext>, device: DeviceId, raw: sys::CUstream) -> Result<Self> {
        let staging = Staging::new(context)?;
        let descriptors = CudaMemory::allocate(context, device, "descriptors", DESCRIPTOR_BYTES)?;
        Ok(CudaStream { raw, owned: false, context: Arc::clone(context), device, staging, descriptors })
    }

    /// Whether the caller is capturing the stream into a graph. Streams of our own are never captured.
    pub(super) fn is_captured(&self) -> Result<bool> {
        if self.owned {
            return Ok(false);
        }
        // SAFETY: the stream exists: `wrap_stream` demands it.
        let status = unsafe { result::stream::is_capturing(self.raw) }.map_err(failed("cuStreamIsCapturing"))?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The driver's handle, for work of the caller's own.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    /// Copies host bytes to checked device memory.
    pub(super) fn upload(&mut self, to: sys::CUdeviceptr, data: &[u8]) -> Result<()> {
        self.staging.upload(self.raw, to, data)
    }

    /// The next kernel's descriptors, one after the other: few travel with its launch.
    pub(super) fn descriptors(&mut self, parts: &[&[u32]]) -> Result<Descriptors> {
        self.descriptors_of(parts)
    }

    /// The same for a kernel that takes another number of words than most.
    pub(super) fn descriptors_of<const WORDS: usize>(&mut self, parts: &[&[u32]]) -> Result<Descriptors<WORDS>> {
        Descriptors::new(parts, |parts| self.upload_descriptors(parts))
    }

    /// Puts the next kernel's descriptors, one after the other, where the returned address says.
    fn upload_descriptors(&mut self, parts: &[&[u32]]) -> Result<sys::CUdeviceptr> {
        let bytes = parts.iter().map(|part| part.len() as u64 * 4).sum::<u64>();
        if bytes > self.descriptors.bytes() {
            let bytes = bytes.next_power_of_two();
            self.descriptors = CudaMemory::allocate(&self.context, self.device, "descriptors", bytes)?;
        }
        let mut to = self.descriptors.address();
        for part in parts {
            self.staging.upload(self.raw, to, bytemuck::cast_slice(part))?;
            to += part.len() as u64 * 4;
        }
        Ok(self.descriptors.address())
    }

    pub(super) fn record(&mut self) -> Result<CudaEvent> {
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.context.new_event(Some(timed)).map_err(failed("cuEventCreate"))?;
        // SAFETY: the event and the stream are live and of the same context.
        unsafe { result::event::record(event.cu_event(), self.raw) }.map_err(failed("cuEventRecord"))?;
        Ok(CudaEvent { event: Arc::new(event), device: self.device })
    }

    pub(super) fn wait(&mut self, event: &CudaEvent) -> Result<()> {
        if event.device != self.device {
            return Err(Error::WrongDevice { what: "an event" });
        }
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and the stream are live and of the same context.
        unsafe { result::stream::wait_event(self.raw, event.event.cu_event(), flags) }
            .map_err(failed("cuStreamWaitEvent"))
    }

    /// Linux drivers submit at once; the display driver of Windows holds work back until it is asked.
    pub(super) fn flush(&mut self) -> Result<()> {
        if !cfg!(windows) {
            return Ok(());
        }
        // SAFETY: the stream is live.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => other.result().map_err(failed("cuStreamQuery")),
        }
    }

    pub(super) fn synchronize(&mut self) -> Result<()> {
        waits();
        // SAFETY: the stream is live.
        unsafe { result::stream::synchronize(self.raw) }.map_err(failed("cuStreamSynchronize"))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // What it has queued still runs: staging ring and descriptors wait for that before they are freed.
        if self.owned && self.context.bind_to_thread().is_ok() {
            destroy(self.raw);
        }
    }
}

fn destroy(stream: sys::CUstream) {
    // SAFETY: both callers own the stream and do not use it again; the driver finishes its work first.
    if let Err(error) = unsafe { result::stream::destroy(stream) } {
        tracing::warn!(%error, "a stream was not destroyed");
    }
}

/// A point in a stream.
#[derive(Debug, Clone)]
pub struct CudaEvent {
    event: Arc<driver::CudaEvent>,
    device: DeviceId,
}

impl CudaEvent {
    /// cudarc's event, for work of the caller's own.
    pub fn event(&self) -> &Arc<driver::CudaEvent> {
        &self.event
    }

    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn finish(&self) -> Result<()> {
        waits();
        self.event.synchronize().map_err(failed("cuEventSynchronize"))
    }

    /// Device time from this event to another of the same device, to half a microsecond or so.
    pub(super) fn until(&self, to: &CudaEvent) -> Result<Duration> {
        let milliseconds = self.event.elapsed_ms(&to.event).map_err(failed("cuEventElapsedTime"))?;
        // Negative where `to` came first.
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        has_passed(&self.event)
    }
}

/// Whether the work before an event has finished; one that was never recorded counts as passed.
pub(super) fn has_passed(event: &driver::CudaEvent) -> Result<bool> {
    // SAFETY: the event is live.
    match unsafe { sys::cuEventQuery(event.cu_event()) } {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => other.result().map(|()| true).map_err(failed("cuEventQuery")),
    }
}
