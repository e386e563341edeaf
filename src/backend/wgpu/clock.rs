//! What time is it on the device? Timestamps where the batches of a timed stream begin and end.
//!
//! Two belong to an event: one where it was recorded, and one where the stream's next batch begins, behind what the host
//! uploads for it. The time from one event to another runs from the second of the first to the first of the second, so the
//! host's pauses and its uploads between batches are no part of it.

use super::Shared;
use super::health::{device_error, scoped};
use super::host::download;
use super::memory::create_buffer;
use super::stream::WgpuStream;
use super::{WgpuBuffer, WgpuEvent};
use crate::Result;
use ::wgpu::{BufferUsages, CommandEncoder, Device, Features, QuerySet, QuerySetDescriptor, QueryType};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What a device must have to be timed.
pub(super) const FEATURES: Features = Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
/// Timestamps of one set: an even number.
const STAMPS: u32 = 512;

/// The clock of a timed stream.
#[derive(Debug)]
pub(super) struct Clock {
    /// Tells clocks apart.
    own: Arc<()>,
    stamps: Arc<Stamps>,
    /// The next event's first timestamp.
    next: u32,
    /// The event behind which the next batch begins.
    resumes: Option<Mark>,
    events: u64,
}

/// Timestamps, written in order.
#[derive(Debug)]
struct Stamps {
    queries: QuerySet,
    /// How many have been handed to the queue.
    submitted: AtomicU32,
    /// Those that were read.
    read: Mutex<Vec<u64>>,
}

/// Where an event of a timed stream stands.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    clock: Arc<()>,
    stamps: Arc<Stamps>,
    /// Its first timestamp; the second follows.
    at: u32,
    /// Events of the stream before it.
    number: u64,
}

impl Stamps {
    fn new(device: &Device) -> Result<Arc<Self>> {
        let descriptor = QuerySetDescriptor { label: Some("kvtide clock"), ty: QueryType::Timestamp, count: STAMPS };
        let queries = scoped(device, || device.create_query_set(&descriptor)).map_err(device_error)?;
        Ok(Arc::new(Stamps { queries, submitted: AtomicU32::new(0), read: Mutex::default() }))
    }

    /// A timestamp that has been handed to the queue.
    fn read(&self, shared: &Arc<Shared>, at: u32) -> Result<u64> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&stamp) = read.get(at as usize) {
            return Ok(stamp);
        }
        let submitted = self.submitted.load(Ordering::Acquire);
        let mut stamps = vec![0u64; submitted as usize];
        let usage = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
        let resolved = create_buffer(&shared.device, "kvtide clock", u64::from(STAMPS) * 8, usage)?;
        let mut stream = WgpuStream::new(shared)?;
        stream.encoder().resolve_query_set(&self.queries, 0..submitted, &resolved, 0);
        let resolved = WgpuBuffer::new(resolved, shared.caps.device);
        download(&mut stream, &resolved, 0, bytemuck::cast_slice_mut(&mut stamps))?;
        *read = stamps;
        read.get(at as usize).copied().ok_or_else(|| device_error("a timestamp was not submitted"))
    }
}

impl Clock {
    /// A clock, where the device has timestamps between passes.
    pub(super) fn new(device: &Device) -> Result<Option<Self>> {
        if !device.features().contains(FEATURES) {
            return Ok(None);
        }
        Ok(Some(Clock { own: Arc::default(), stamps: Stamps::new(device)?, next: 0, resumes: None, events: 0 }))
    }

    /// A batch begins with this encoder.
    pub(super) fn begin(&self, encoder: &mut CommandEncoder) {
        if let Some(mark) = &self.resumes {
            encoder.write_timestamp(&mark.stamps.queries, mark.at + 1);
        }
    }

    /// Marks an event behind what the encoder holds.
    pub(super) fn mark(&mut self, device: &Device, encoder: &mut CommandEncoder) -> Result<Mark> {
        if self.next == STAMPS {
            (self.stamps, self.next) = (Stamps::new(device)?, 0);
        }
        let (clock, stamps) = (self.own.clone(), self.stamps.clone());
        let mark = Mark { clock, stamps, at: self.next, number: self.events };
        encoder.write_timestamp(&mark.stamps.queries, mark.at);
        self.next += 2;
        self.events += 1;
        Ok(mark)
    }

    /// A batch was handed to the queue.
    pub(super) fn submitted(&mut self) {
        if let Some(mark) = self.resumes.take() {
            mark.stamps.submitted.fetch_max(mark.at + 2, Ordering::AcqRel);
        }
    }

    /// The batch that ended with a mark was handed to the queue.
    pub(super) fn reached(&mut self, mark: &Mark) {
        mark.stamps.submitted.fetch_max(mark.at + 1, Ordering::AcqRel);
        self.resumes = Some(mark.clone());
    }
}

/// The time from one event to another of the same timed stream.
pub(super) fn elapsed(shared: &Arc<Shared>, from: &WgpuEvent, to: &WgpuEvent) -> Result<Option<Duration>> {
    let (Some(first), Some(last)) = (&from.mark, &to.mark) else { return Ok(None) };
    if !Arc::ptr_eq(&first.clock, &last.clock) {
        return Ok(None);
    }
    if last.number <= first.number {
        return Ok(Some(Duration::ZERO));
    }
    let begin = first.stamps.read(shared, first.at + 1)?;
    let ticks = last.stamps.read(shared, last.at)?.saturating_sub(begin);
    Ok(Some(Duration::from_nanos((ticks as f64 * f64::from(shared.queue.get_timestamp_period())) as u64)))
}
