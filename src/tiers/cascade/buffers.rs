//! Where does the file's I/O find its bytes? In buffers that are used again, and that the device reaches by itself where
//! there is such memory.

use super::super::Lane;
use super::super::file::{AlignedBuffer, RunBuffer};
use super::Until;
use crate::Result;
use crate::backend::params::Move;
use crate::backend::{Backend, HostUse, Swap};
use std::collections::{BTreeMap, VecDeque};

/// Buffers of a few sizes, each a number of pages: those that the device reaches, up to a limit, and those on the heap.
#[derive(Debug)]
pub(super) struct Buffers<B: Backend> {
    /// Bytes of a page in the file.
    stride: usize,
    /// Pages of the largest size.
    most: usize,
    /// Bytes of buffers that the device reaches, and of free ones on the heap.
    limit: usize,
    /// Whether host memory of the device can be had, and makes a buffer.
    direct: bool,
    /// Bytes of all buffers that the device reaches, free or not.
    direct_bytes: usize,
    /// Those of them that are free, by their bytes.
    direct_free: BTreeMap<usize, Vec<RunBuffer>>,
    /// Those of them that the device still reads, oldest first.
    leaving: VecDeque<Until<B, RunBuffer>>,
    heap_bytes: usize,
    /// Free buffers on the heap, by their bytes: fresh memory costs more than the copy into it.
    heap_free: BTreeMap<usize, Vec<RunBuffer>>,
}

impl<B: Backend> Buffers<B> {
    /// Buffers for runs of up to `most` pages of `stride` bytes.
    pub(super) fn new(stride: usize, most: usize, limit: u64) -> Self {
        Buffers {
            stride,
            most,
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            direct: true,
            direct_bytes: 0,
            direct_free: BTreeMap::new(),
            leaving: VecDeque::new(),
            heap_bytes: 0,
            heap_free: BTreeMap::new(),
        }
    }

    /// A buffer for a run of `pages` pages, whatever its memory.
    pub(super) fn take(&mut self, backend: &B, pages: usize) -> Result<RunBuffer> {
        if let Some(buffer) = self.take_direct(backend, pages)? {
            return Ok(buffer);
        }
        let size = self.size(pages);
        let used = self.heap_free.get_mut(&size).and_then(Vec::pop);
        self.heap_bytes -= used.as_ref().map_or(0, RunBuffer::len);
        Ok(used.unwrap_or_else(|| AlignedBuffer::new(size).into()))
    }

    /// A buffer that the device reaches by itself; `None` where there is no such memory, or no more of it.
    pub(super) fn take_direct(&mut self, backend: &B, pages: usize) -> Result<Option<RunBuffer>> {
        self.reap(backend)?;
        let size = self.size(pages);
        if let Some(buffer) = self.direct_free.get_mut(&size).and_then(Vec::pop) {
            return Ok(Some(buffer));
        }
        if self.direct && self.has_room(size) {
            return Ok(self.allocate(backend, size));
        }
        if let Some(larger) = self.direct_free.range_mut(size..).find_map(|(_, buffers)| buffers.pop()) {
            return Ok(Some(larger));
        }
        Ok(if self.direct && self.shed(size) { self.allocate(backend, size) } else { None })
    }

    /// Powers of two, so that a buffer finds another run that it fits.
    fn size(&self, pages: usize) -> usize {
        pages.next_power_of_two().min(self.most.max(pages)) * self.stride
    }

    fn has_room(&self, size: usize) -> bool {
        self.direct_bytes.checked_add(size).is_some_and(|bytes| bytes <= self.limit)
    }

    /// Frees smaller buffers if that makes room for one of `size` bytes: runs have become longer.
    fn shed(&mut self, size: usize) -> bool {
        let idle: usize = self.direct_free.iter().map(|(size, buffers)| size * buffers.len()).sum();
        if self.direct_bytes - idle + size > self.limit {
            return false;
        }
        while !self.has_room(size)
            && let Some(buffer) = self.direct_free.values_mut().rev().find_map(Vec::pop)
        {
            self.direct_bytes -= buffer.len();
        }
        true
    }

    fn allocate(&mut self, backend: &B, size: usize) -> Option<RunBuffer> {
        let host = backend.alloc_host("buffers of the file tier", size as u64, HostUse::Shared);
        match host.map(RunBuffer::of_host) {
            Ok(Ok(buffer)) => {
                self.direct_bytes += size;
                return Some(buffer);
            }
            Ok(Err(_)) => tracing::debug!("pages of the file tier are copied: the device has no memory of the host"),
            Err(error) => tracing::warn!(%error, "pages of the file tier are copied"),
        }
        self.direct = false;
        None
    }

    /// Enqueues moves between frames and a buffer that the device reaches, out of the frames or into them.
    pub(super) fn swap(&self, lane: &mut Lane<'_, B>, buffer: &RunBuffer, moves: &[Move], out: bool) -> Result<()> {
        let Some(host) = buffer.host::<B::Host>().filter(|_| !moves.is_empty()) else { return Ok(()) };
        let (record, arena, stride) = (lane.record, lane.arena, self.stride as u64);
        let args = Swap { record, arena, host, offset: 0, stride, moves };
        if out { lane.backend.swap_out(lane.stream, &args) } else { lane.backend.swap_in(lane.stream, &args) }
    }

    /// Takes a buffer that neither the file nor the device uses. That of a run that was given up is empty: its memory is lost,
    /// and counts as in use.
    pub(super) fn give(&mut self, buffer: RunBuffer) {
        if buffer.is_empty() {
            return;
        }
        if buffer.host::<B::Host>().is_some() {
            self.direct_free.entry(buffer.len()).or_default().push(buffer);
        } else if self.heap_bytes + buffer.len() <= self.limit {
            self.heap_bytes += buffer.len();
            self.heap_free.entry(buffer.len()).or_default().push(buffer);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuHost};

    /// Pages of 4096 bytes that it holds, and whether the device reaches them.
    fn kind(buffer: &RunBuffer) -> (usize, bool) {
        (buffer.len() / 4096, buffer.host::<CpuHost>().is_some())
    }

    #[test]
    fn buffers_are_used_again_and_kept_up_to_the_limit() {
        let device = CpuBackend::new();
        let mut buffers = Buffers::<CpuBackend>::new(4096, 16, 32 * 4096);
        // Powers of two up to the longest run, as many as the limit allows; the others are on the heap.
        let taken = [1, 3, 11, 16, 8, 2].map(|pages| buffers.take(&device, pages).unwrap());
        let kinds = [(1, true), (4, true), (16, true), (16, false), (8, true), (2, true)];
        assert_eq!(taken.each_ref().map(kind), kinds);
        assert!(buffers.take_direct(&device, 2).unwrap().is_none());
        // All of them come back.
        taken.into_iter().for_each(|buffer| buffers.give(buffer));
        assert_eq!((buffers.direct_bytes, buffers.heap_bytes), (31 * 4096, 16 * 4096));
        let taken = [3, 5, 6].map(|pages| buffers.take(&device, pages).unwrap());
        assert_eq!(taken.each_ref().map(kind), [(4, true), (8, true), (16, true)]);
        // A run that was given up: its bytes never come back.
        buffers.give(RunBuffer::default());
        assert_eq!((buffers.direct_bytes, kind(&buffers.take(&device, 16).unwrap())), (31 * 4096, (16, false)));
    }

    #[test]
    fn runs_that_become_longer_get_the_room_of_shorter_ones() {
        let device = CpuBackend::new();
        let mut buffers = Buffers::<CpuBackend>::new(4096, 16, 32 * 4096);
        let short: Vec<RunBuffer> = (0..32).map(|_| buffers.take(&device, 1).unwrap()).collect();
        assert!(buffers.take_direct(&device, 1).unwrap().is_none());
        buffers.give_after(device.record(&mut device.stream().unwrap()).unwrap(), short);
        let long = [16, 16, 16].map(|pages| buffers.take(&device, pages).unwrap());
        assert_eq!(long.each_ref().map(kind), [(16, true), (16, true), (16, false)]);
    }
}
