//! Where does the file's I/O find its bytes? In buffers that are used again, and that the device reaches by itself where
//! there is such memory.

use super::super::Lane;
use super::super::file::{AlignedBuffer, RunBuffer};
use super::Until;
use crate::Result;
use crate::backend::params::Move;
use crate::backend::{Backend, HostUse, Swap};
use std::collections::{BTreeMap, VecDeque};

/// Buffers of a few sizes, each a number of pages. More than the limit are on the heap, and not kept.
#[derive(Debug)]
pub(super) struct Buffers<B: Backend> {
    /// Bytes of a page in the file.
    stride: usize,
    /// Pages of the largest size.
    most: usize,
    /// Bytes that are kept.
    limit: usize,
    /// Bytes of all buffers, free or not.
    bytes: usize,
    /// Those that are free, by their bytes.
    free: BTreeMap<usize, Vec<RunBuffer>>,
    /// Those that the device still reads, oldest first.
    leaving: VecDeque<Until<B, RunBuffer>>,
    /// Whether host memory of the device makes a buffer.
    direct: bool,
}

impl<B: Backend> Buffers<B> {
    /// Buffers for runs of up to `most` pages of `stride` bytes; at most `limit` bytes of them are kept.
    pub(super) fn new(stride: usize, most: usize, limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (free, leaving) = (BTreeMap::new(), VecDeque::new());
        Buffers { stride, most, limit, bytes: 0, free, leaving, direct: true }
    }

    /// A buffer for a run of `pages` pages, whatever its memory.
    pub(super) fn take(&mut self, backend: &B, pages: usize) -> Result<RunBuffer> {
        let size = self.size(pages);
        if let Some(buffer) = self.kept(backend, size)? {
            return Ok(buffer);
        }
        self.bytes += size;
        Ok(AlignedBuffer::new(size).into())
    }

    /// A buffer that the device reaches by itself, if there is one.
    pub(super) fn take_direct(&mut self, backend: &B, pages: usize) -> Result<Option<RunBuffer>> {
        if !self.direct {
            return Ok(None);
        }
        let buffer = self.kept(backend, self.size(pages))?;
        let (direct, heap) = match buffer {
            Some(buffer) if buffer.host::<B::Host>().is_some() => (Some(buffer), None),
            other => (None, other),
        };
        heap.into_iter().for_each(|buffer| self.give(buffer));
        Ok(direct)
    }

    /// Powers of two, so that a buffer finds another run that it fits.
    fn size(&self, pages: usize) -> usize {
        pages.next_power_of_two().min(self.most.max(pages)) * self.stride
    }

    /// A buffer that is free, or a new one that is kept; `None` when the limit is reached.
    fn kept(&mut self, backend: &B, size: usize) -> Result<Option<RunBuffer>> {
        self.reap(backend)?;
        if let Some(buffer) = self.free.get_mut(&size).and_then(Vec::pop) {
            return Ok(Some(buffer));
        }
        if !self.has_room(size) {
            if let Some(larger) = self.free.range_mut(size..).find_map(|(_, buffers)| buffers.pop()) {
                return Ok(Some(larger));
            }
            self.shed(size);
        }
        if !self.has_room(size) {
            return Ok(None);
        }
        self.bytes += size;
        Ok(Some(self.allocate(backend, size)))
    }

    fn has_room(&self, size: usize) -> bool {
        self.bytes.checked_add(size).is_some_and(|bytes| bytes <= self.limit)
    }

    /// Frees smaller buffers if that makes room for one of `size` bytes: runs have become longer.
    fn shed(&mut self, size: usize) {
        let idle: usize = self.free.iter().map(|(size, buffers)| size * buffers.len()).sum();
        if self.bytes - idle + size > self.limit {
            return;
        }
        while !self.has_room(size)
            && let Some(buffer) = self.free.values_mut().rev().find_map(Vec::pop)
        {
            self.bytes -= buffer.len();
        }
    }

    fn allocate(&mut self, backend: &B, size: usize) -> RunBuffer {
        if self.direct {
            let host = backend.alloc_host("buffers of the file tier", size as u64, HostUse::Shared);
            match host.map(RunBuffer::of_host) {
                Ok(Ok(buffer)) => return buffer,
                Ok(Err(_)) => {
                    tracing::debug!("pages of the file tier are copied: the host has no memory of the device")
                }
                Err(error) => tracing::warn!(%error, "pages of the file tier are copied"),
            }
            self.direct = false;
        }
        AlignedBuffer::new(size).into()
    }

    /// Enqueues moves between frames and a buffer that the device reaches, out of the frames or into them.
    pub(super) fn swap(&self, lane: &mut Lane<'_, B>, buffer: &RunBuffer, moves: &[Move], out: bool) -> Result<()> {
        let Some(host) = buffer.host::<B::Host>().filter(|_| !moves.is_empty()) else { return Ok(()) };
        let (record, arena, stride) = (lane.record, lane.arena, self.stride as u64);
        let args = Swap { record, arena, host, offset: 0, stride, moves };
        if out { lane.backend.swap_out(lane.stream, &args) } else { lane.backend.swap_in(lane.stream, &args) }
    }

    /// Takes a buffer that neither the file nor the device uses. That of a run that was given up is empty: its bytes are lost,
    /// and count as in use.
    pub(super) fn give(&mut self, buffer: RunBuffer) {
        if self.bytes > self.limit && buffer.host::<B::Host>().is_none() {
            self.bytes -= buffer.len();
        } else if !buffer.is_empty() {
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }

    /// Takes buffers that the device reads until an event.
    pub(super) fn give_after(&mut self, event: B::Event, buffers: Vec<RunBuffer>) {
        if !buffers.is_empty() {
            self.leaving.push_back((event, buffers));
        }
    }

    fn reap(&mut self, backend: &B) -> Result<()> {
        while let Some((event, _)) = self.leaving.front() {
            if !backend.is_done(event)? {
                break;
            }
            let buffers = self.leaving.pop_front().map_or_else(Vec::new, |(_, buffers)| buffers);
            buffers.into_iter().for_each(|buffer| self.give(buffer));
        }
        Ok(())
    }
}
