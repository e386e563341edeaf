//! The WGSL backend: Vulkan, Metal and DX12 through wgpu.
//!
//! One queue a device, so streams are batches of commands (see [`WgpuStream`]) and events are submissions; a copy and a
//! kernel do not overlap. Kernels need WebGPU's default limits and no optional feature; what a device has more of buys
//! larger and more slabs. One operation may not read a buffer and write it too, except that `transfer` copies within an
//! arena. Host memory is a mappable buffer where the device may have such, else bytes that pages land in: then a swap in
//! waits for earlier swaps out through the same memory. Errors of the device come back from the call that meets them, and
//! from every call after it.

mod adapter;
mod ahead;
mod append;
mod attend;
mod clock;
mod dispatch;
mod groups;
mod health;
mod host;
mod kernels;
mod memory;
mod merge;
mod pipelines;
mod predict;
mod shapes;
mod stream;
mod swap;
mod text;
mod tier;
mod transfer;
mod variants;

/// The version of wgpu that this crate is built on: its types are in this module's signatures.
pub use ::wgpu;
pub use memory::{BUFFER_USAGES, WgpuBuffer};
#[doc(hidden)]
pub use shapes::WORKGROUP_BYTES;
pub use stream::WgpuStream;
pub use tier::WgpuHost;
#[doc(hidden)]
pub use variants::{ShaderVariant, shader_variants};

use super::ops::{Append, Attend, Fold, Merge, Project, Score, Transfer, also_project};
use super::{Backend, Caps, DeviceId, HostUse, Swap};
use crate::record::Record;
use crate::{Error, Result};
use ::wgpu::{Device, Limits, Queue};
use ahead::Ahead;
use clock::Mark;
use health::{Health, Submission};
use pipelines::Pipelines;
use shapes::Processor;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The backend's name.
const NAME: &str = "wgpu";

/// A device reached through wgpu; clones are the same device.
#[derive(Clone)]
pub struct WgpuBackend {
    shared: Arc<Shared>,
}

/// What all clones and streams of a device use.
struct Shared {
    device: Device,
    queue: Queue,
    health: Health,
    limits: Limits,
    caps: Caps,
    pipelines: Arc<Pipelines>,
    ahead: Ahead,
    /// Stands in for buffers that a kernel binds and does not use.
    spare: WgpuBuffer,
    /// Bytes of the largest binding.
    max_binding: u64,
    /// What binding offsets are multiples of, at most 256.
    align: u64,
    processor: Processor,
}

impl Shared {
    fn limit(&self, limit: &'static str, need: u64, have: u64, purpose: &'static str) -> Error {
        Error::Limit { adapter: self.caps.adapter.clone(), limit, need, have, purpose }
    }
}

/// An event of the wgpu backend: a submission.
#[derive(Debug, Clone)]
pub struct WgpuEvent {
    device: DeviceId,
    /// `None` when the stream had never submitted anything.
    submission: Option<Submission>,
    /// Of a timed stream.
    mark: Option<Mark>,
}

impl fmt::Debug for WgpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuBackend({})", self.shared.caps.adapter)
    }
}

impl WgpuBackend {
    /// Checks that a call may go on: the stream is this device's, and the device has not failed.
    fn ready(&self, stream: &WgpuStream) -> Result<()> {
        if !Arc::ptr_eq(&stream.shared, &self.shared) {
            return Err(Error::WrongDevice { what: "the stream" });
        }
        self.shared.health.check()
    }

    fn ours(&self, event: &WgpuEvent) -> Result<()> {
        if event.device == self.shared.caps.device { Ok(()) } else { Err(Error::WrongDevice { what: "the event" }) }
    }
}

impl Backend for WgpuBackend {
    type Buffer = WgpuBuffer;
    type Stream = WgpuStream;
    type Event = WgpuEvent;
    type Host = WgpuHost;

    fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<WgpuBuffer> {
        memory::alloc(&self.shared, label, bytes)
    }

    fn stream(&self) -> Result<WgpuStream> {
        WgpuStream::new(&self.shared)
    }

    fn prepare(&self, record: &Record, slabs: usize) {
        ahead::prepare(&self.shared, record, slabs);
    }

    fn upload(&self, stream: &mut WgpuStream, dst: &WgpuBuffer, offset: u64, data: &[u8]) -> Result<()> {
        self.ready(stream)?;
        host::upload(stream, dst, offset, data)
    }

    fn download(&self, stream: &mut WgpuStream, src: &WgpuBuffer, offset: u64, out: &mut [u8]) -> Result<()> {
        self.ready(stream)?;
        host::download(stream, src, offset, out)
    }

    fn copy(
        &self,
        stream: &mut WgpuStream,
        src: (&WgpuBuffer, u64),
        dst: (&WgpuBuffer, u64),
        bytes: u64,
    ) -> Result<()> {
        self.ready(stream)?;
        host::copy(stream, src, dst, bytes)
    }

    fn fill(&self, stream: &mut WgpuStream, dst: &WgpuBuffer, offset: u64, bytes: u64, word: u32) -> Result<()> {
        self.ready(stream)?;
        host::fill(stream, dst, offset, bytes, word)
    }

    fn sum(&self, stream: &mut WgpuStream, src: &WgpuBuffer, bytes: u64, total: &WgpuBuffer) -> Result<()> {
        self.ready(stream)?;
        host::sum(stream, src, bytes, total)
    }

    fn record(&self, stream: &mut WgpuStream) -> Result<WgpuEvent> {
        self.ready(stream)?;
        stream.record()
    }

    /// Nothing to wait for: the event's work was submitted before, and the one queue keeps order.
    fn wait(&self, stream: &mut WgpuStream, event: &WgpuEvent) -> Result<()> {
        self.ready(stream)?;
        self.ours(event)
    }

    fn is_done(&self, event: &WgpuEvent) -> Result<bool> {
        self.ours(event)?;
        match &event.submission {
            Some(submission) => self.shared.health.is_done(&self.shared.device, submission),
            None => Ok(true),
        }
    }

    fn finish(&self, event: &WgpuEvent) -> Result<()> {
        self.ours(event)?;
        match &event.submission {
            Some(submission) => self.shared.health.wait(&self.shared.device, submission, || true),
            None => self.shared.health.check(),
        }
    }

    /// Needs [`Features`](::wgpu::Features) `TIMESTAMP_QUERY` and `TIMESTAMP_QUERY_INSIDE_ENCODERS`.
    fn time(&self, stream: &mut WgpuStream) -> Result<()> {
        self.ready(stream)?;
        stream.time()
    }

    /// Between events of one [timed](Backend::time) stream: from where the next batch begins on the device.
    fn elapsed(&self, from: &WgpuEvent, to: &WgpuEvent) -> Result<Option<Duration>> {
        [from, to].into_iter().try_for_each(|event| self.ours(event))?;
        clock::elapsed(&self.shared, from, to)
    }

    fn alloc_host(&self, label: &str, bytes: u64, usage: HostUse) -> Result<WgpuHost> {
        WgpuHost::new(&self.shared, label, bytes, usage)
    }

    fn read_host(&self, host: &WgpuHost, offset: u64, out: &mut [u8]) -> Result<()> {
        host.read(&self.shared, offset, out)
    }

    fn write_host(&self, host: &WgpuHost, offset: u64, data: &[u8]) -> Result<()> {
        host.write(&self.shared, offset, data)
    }

    fn swap_out(&self, stream: &mut WgpuStream, args: &Swap<'_, WgpuBuffer, WgpuHost>) -> Result<()> {
        self.ready(stream)?;
        swap::swap_out(stream, args)
    }

    fn swap_in(&self, stream: &mut WgpuStream, args: &Swap<'_, WgpuBuffer, WgpuHost>) -> Result<()> {
        self.ready(stream)?;
        swap::swap_in(stream, args)
    }

    fn flush(&self, stream: &mut WgpuStream) -> Result<()> {
        self.ready(stream)?;
        stream.flush()
    }

    fn synchronize(&self, stream: &mut WgpuStream) -> Result<()> {
        self.ready(stream)?;
        stream.synchronize()
    }

    fn append(&self, stream: &mut WgpuStream, args: &Append<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        if append::append(stream, args)? { Ok(()) } else { also_project(self, stream, args) }
    }

    fn transfer(&self, stream: &mut WgpuStream, args: &Transfer<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        transfer::transfer(stream, args)
    }

    fn attend(&self, stream: &mut WgpuStream, args: &Attend<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        attend::attend(stream, args)
    }

    fn merge(&self, stream: &mut WgpuStream, args: &Merge<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        merge::merge(stream, args)
    }

    fn project(&self, stream: &mut WgpuStream, args: &Project<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        predict::project(stream, args)
    }

    fn score(&self, stream: &mut WgpuStream, args: &Score<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        predict::score(stream, args)
    }

    fn fold(&self, stream: &mut WgpuStream, args: &Fold<'_, WgpuBuffer>) -> Result<()> {
        self.ready(stream)?;
        merge::fold(stream, args)
    }
}
