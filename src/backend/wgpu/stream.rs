//! How does work reach the queue? A stream collects commands in one encoder and everything that they read from the host
//! in one buffer, and hands both over together.
//!
//! All host bytes of a batch (parameters, descriptors, uploads) go into the *ring*, written once before the batch is
//! submitted. The queue keeps order, so the next batch may overwrite the ring from its start.

use super::clock::Clock;
use super::dispatch::Dispatch;
use super::groups::Groups;
use super::health::{Submission, device_error, scoped};
use super::memory::{BUFFER_USAGES, create_buffer};
use super::{Shared, WgpuBuffer, WgpuEvent};
use crate::Result;
use ::wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferSize, BufferUsages,
    CommandEncoder, ComputePass, ComputePassDescriptor,
};
use bytemuck::Pod;
use std::fmt;
use std::sync::Arc;

/// Bytes of a new stream's ring.
pub(super) const RING_BYTES: u64 = 1 << 20;
/// Room for one parameter block, and the alignment of its offset.
const BLOCK: u64 = 256;

/// A stream of the wgpu backend; dropping it hands over what is still pending.
pub struct WgpuStream {
    pub(super) shared: Arc<Shared>,
    // Before the encoder, so that it is dropped first: an encoder is locked while a pass is open.
    pass: Option<ComputePass<'static>>,
    encoder: Option<CommandEncoder>,
    ring: Ring,
    /// What the ring will hold when the batch is submitted.
    pending: Vec<u8>,
    groups: Groups,
    /// Whether the queue holds writes that no submission carries yet.
    pub(super) written: bool,
    /// The last submission.
    pub(super) last: Option<Submission>,
    /// Where downloads land.
    pub(super) landing: Option<Buffer>,
    /// Device memory that swaps pass through.
    pub(super) staging: Option<WgpuBuffer>,
    /// Of a stream that is timed.
    clock: Option<Clock>,
}

struct Ring {
    buffer: Buffer,
    /// Group 0 of every kernel.
    group: BindGroup,
}

impl Ring {
    fn new(shared: &Shared, bytes: u64) -> Result<Self> {
        let buffer = create_buffer(&shared.device, "kvtide ring", bytes, BUFFER_USAGES | BufferUsages::UNIFORM)?;
        let block = BufferBinding { buffer: &buffer, offset: 0, size: BufferSize::new(BLOCK) };
        let entries = [
            BindGroupEntry { binding: 0, resource: BindingResource::Buffer(block) },
            BindGroupEntry { binding: 1, resource: buffer.as_entire_binding() },
        ];
        let layout = &shared.pipelines.call;
        let descriptor = BindGroupDescriptor { label: Some("kvtide call"), layout, entries: &entries };
        let group = scoped(&shared.device, || shared.device.create_bind_group(&descriptor)).map_err(device_error)?;
        Ok(Ring { buffer, group })
    }
}

impl fmt::Debug for WgpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuStream({} bytes pending)", self.pending.len())
    }
}

impl Drop for WgpuStream {
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::error!(%error, "a dropped stream could not hand over its work");
        }
    }
}

impl WgpuStream {
    pub(super) fn new(shared: &Arc<Shared>) -> Result<Self> {
        shared.health.check()?;
        Ok(WgpuStream {
            shared: shared.clone(),
            pass: None,
            encoder: None,
            ring: Ring::new(shared, RING_BYTES)?,
            pending: Vec::new(),
            groups: Groups::default(),
            written: false,
            last: None,
            landing: None,
            staging: None,
            clock: None,
        })
    }

    /// Gives events of this stream a time, where the device has one.
    pub(super) fn time(&mut self) -> Result<()> {
        if self.clock.is_none() {
            self.clock = Clock::new(&self.shared.device)?;
        }
        Ok(())
    }

    /// Hands everything recorded to the queue, and marks where it ends.
    pub(super) fn record(&mut self) -> Result<WgpuEvent> {
        if self.clock.is_some() {
            self.encoder();
        }
        let mark = match (&mut self.clock, &mut self.encoder) {
            (Some(clock), Some(encoder)) => Some(clock.mark(&self.shared.device, encoder)?),
            _ => None,
        };
        self.flush()?;
        if let (Some(clock), Some(mark)) = (&mut self.clock, &mark) {
            clock.reached(mark);
        }
        Ok(WgpuEvent { device: self.shared.caps.device, submission: self.last.clone(), mark })
    }

    /// Ends the open pass and returns the encoder, for copies.
    pub(super) fn encoder(&mut self) -> &mut CommandEncoder {
        self.pass = None;
        let (device, clock) = (&self.shared.device, &self.clock);
        self.encoder.get_or_insert_with(|| {
            let mut encoder = device.create_command_encoder(&Default::default());
            if let Some(clock) = clock {
                clock.begin(&mut encoder);
            }
            encoder
        })
    }

    fn pass(&mut self) -> &mut ComputePass<'static> {
        if self.pass.is_none() {
            let descriptor = ComputePassDescriptor { label: Some("kvtide"), timestamp_writes: None };
            self.pass = Some(self.encoder().begin_compute_pass(&descriptor).forget_lifetime());
        }
        self.pass.as_mut().expect("just opened")
    }

    /// Makes room for `bytes` bytes of one batch, at worst by submitting what is there and by a larger ring.
    fn reserve(&mut self, bytes: u64) -> Result<()> {
        if self.pending.len() as u64 + bytes <= self.ring.buffer.size() {
            return Ok(());
        }
        self.flush()?;
        if bytes > self.ring.buffer.size() {
            let maximum = self.shared.max_binding;
            if bytes > maximum {
                let purpose = "the descriptors of one call";
                return Err(self.shared.limit("max_storage_buffer_binding_size", bytes, maximum, purpose));
            }
            self.ring = Ring::new(&self.shared, bytes.next_power_of_two().min(maximum))?;
        }
        Ok(())
    }

    /// Puts bytes on the ring, of whose batch there must be room, and returns their offset.
    fn push(&mut self, bytes: &[u8]) -> u64 {
        let at = self.pending.len() as u64;
        self.pending.extend_from_slice(bytes);
        at
    }

    /// Records a copy of host bytes to `dst`.
    pub(super) fn copy_from_host(&mut self, dst: &WgpuBuffer, offset: u64, data: &[u8]) -> Result<()> {
        self.reserve(data.len() as u64)?;
        let at = self.push(data);
        let ring = self.ring.buffer.clone();
        self.encoder().copy_buffer_to_buffer(&ring, at, dst.raw(), offset, data.len() as u64);
        Ok(())
    }

    /// Records a dispatch. `params` gets the word index of each list of descriptors.
    pub(super) fn dispatch<P: Pod, const N: usize>(
        &mut self,
        dispatch: &Dispatch<'_>,
        descriptors: [&[u8]; N],
        params: impl FnOnce([u32; N]) -> P,
    ) -> Result<()> {
        let [x, y, z] = dispatch.workgroups()?;
        let shared = self.shared.clone();
        let pipeline = shared.pipelines.get(&shared.device, dispatch.kernel, dispatch.slabs.len())?;
        let group = self.groups.get(dispatch, || dispatch.bind(&shared, &pipeline.buffers))?;
        let words: usize = descriptors.iter().map(|rows| rows.len()).sum();
        self.reserve(words as u64 + 2 * BLOCK)?;
        let at = descriptors.map(|rows| (self.push(rows) / 4) as u32);
        self.pending.resize(self.pending.len().next_multiple_of(BLOCK as usize), 0);
        let block = self.push(bytemuck::bytes_of(&params(at)));
        self.pending.resize(self.pending.len().next_multiple_of(BLOCK as usize), 0);
        let call = self.ring.group.clone();
        let pass = self.pass();
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &call, &[block as u32]);
        pass.set_bind_group(1, &group, &[]);
        pass.dispatch_workgroups(x, y, z);
        Ok(())
    }

    /// Hands everything recorded to the queue.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.pass = None;
        let encoder = self.encoder.take();
        let pending = std::mem::take(&mut self.pending);
        self.shared.health.check()?;
        if encoder.is_none() && !self.written {
            return Ok(());
        }
        let (device, queue, stamped) = (&self.shared.device, &self.shared.queue, encoder.is_some());
        let submission = scoped(device, || {
            let commands = encoder.map(CommandEncoder::finish);
            if !pending.is_empty() {
                queue.write_buffer(&self.ring.buffer, 0, &pending);
            }
            Submission::new(queue, commands)
        });
        // Work that was refused leaves buffers that later work counts on unwritten: nothing after it may pass as right.
        self.last = Some(submission.map_err(|error| self.shared.health.fail(error))?);
        self.written = false;
        self.groups.submitted();
        if let (Some(clock), true) = (&mut self.clock, stamped) {
            clock.submitted();
        }
        self.pending = pending;
        self.pending.clear();
        Ok(())
    }

    /// Waits until everything has finished.
    pub(super) fn synchronize(&mut self) -> Result<()> {
        self.flush()?;
        match &self.last {
            Some(last) => self.shared.health.wait(&self.shared.device, last, || true),
            None => Ok(()),
        }
    }
}
