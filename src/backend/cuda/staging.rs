//! How does host memory get to the device without a wait? Through a ring of pinned chunks.
//!
//! An upload is copied into the current chunk before the call returns, and from there by the device. A chunk that is full
//! is marked by an event; it is written again only after that event, so the device never reads what a later upload wrote.
//! Only a program that is whole chunks ahead of the device waits here.

use super::driver::{failed, waits};
use super::memory::Pinned;
use super::stream::has_passed;
use crate::Result;
use cudarc::driver::{CudaContext, CudaEvent, result, sys};
use std::sync::Arc;

const CHUNKS: usize = 4;
const CHUNK_BYTES: usize = 1 << 20;

/// The ring of one stream.
pub(super) struct Staging {
    memory: Pinned,
    /// For every chunk, the end of the copies that read it.
    read: Vec<CudaEvent>,
    chunk: usize,
    filled: usize,
}

impl Staging {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let event = |_| context.new_event(None).map_err(failed("cuEventCreate"));
        let read = (0..CHUNKS).map(event).collect::<Result<_>>()?;
        Ok(Staging {
            memory: Pinned::new(context, "uploads", (CHUNKS * CHUNK_BYTES) as u64)?,
            read,
            chunk: 0,
            filled: 0,
        })
    }

    /// Copies `data` to device address `to`, in stream order. The caller has checked the range.
    pub(super) fn upload(&mut self, stream: sys::CUstream, mut to: sys::CUdeviceptr, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            if self.filled == CHUNK_BYTES {
                self.next_chunk(stream)?;
            }
            let (piece, rest) = data.split_at(data.len().min(CHUNK_BYTES - self.filled));
            let start = self.chunk * CHUNK_BYTES + self.filled;
            let pinned = &mut self.memory.as_mut()[start..start + piece.len()];
            pinned.copy_from_slice(piece);
            self.filled += piece.len();
            // SAFETY: the destination is checked device memory; the pinned bytes live and keep their contents until the
            // chunk's event has passed (`next_chunk`) or the context is idle (`Pinned`'s drop).
            unsafe { result::memcpy_htod_async(to, pinned, stream) }.map_err(failed("cuMemcpyHtoDAsync"))?;
            to += piece.len() as u64;
            data = rest;
        }
        Ok(())
    }

    /// Goes on to the chunk that was filled longest ago, once the device has read it.
    fn next_chunk(&mut self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event and the stream are live and of the same context.
        unsafe { result::event::record(self.read[self.chunk].cu_event(), stream) }.map_err(failed("cuEventRecord"))?;
        let next = (self.chunk + 1) % CHUNKS;
        if !has_passed(&self.read[next])? {
            waits();
            self.read[next].synchronize().map_err(failed("cuEventSynchronize"))?;
        }
        (self.chunk, self.filled) = (next, 0);
        Ok(())
    }
}
