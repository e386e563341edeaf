//! Cells of host memory that hold one record each, in blocks allocated as they are needed.

use super::super::Lane;
use crate::Result;
use crate::backend::params::Move;
use crate::backend::{Backend, HostUse, Swap};
use crate::record::Record;

/// Bytes of a block.
const BLOCK_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(super) struct Cells<B: Backend> {
    label: &'static str,
    stride: u64,
    count: u32,
    per_block: u32,
    blocks: Vec<Option<B::Host>>,
    free: Vec<u32>,
    /// Cells that have never been taken.
    fresh: u32,
}

impl<B: Backend> Cells<B> {
    pub(super) fn new(backend: &B, label: &'static str, record: Record, count: u32) -> Self {
        let stride = record.frame_stride();
        let block = BLOCK_BYTES.min(backend.caps().max_slab_bytes);
        let per_block = u32::try_from(block / stride).unwrap_or(u32::MAX).max(1);
        let blocks = (0..count.div_ceil(per_block)).map(|_| None).collect();
        Cells { label, stride, count, per_block, blocks, free: Vec::new(), fresh: 0 }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes from one cell to the next.
    pub(super) fn stride(&self) -> u64 {
        self.stride
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32 + self.count - self.fresh
    }

    /// A free cell.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let cell = self.fresh;
            (cell < self.count).then(|| {
                self.fresh += 1;
                cell
            })
        })
    }

    pub(super) fn give(&mut self, cell: u32) {
        self.free.push(cell);
    }

    fn block(&mut self, backend: &B, block: u32) -> Result<B::Host> {
        if let Some(host) = &self.blocks[block as usize] {
            return Ok(host.clone());
        }
        let cells = (self.count - block * self.per_block).min(self.per_block);
        let host = backend.alloc_host(self.label, u64::from(cells) * self.stride, HostUse::Shared)?;
        Ok(self.blocks[block as usize].insert(host).clone())
    }

    /// The bytes of a record that the device has stopped writing.
    pub(super) fn read(&mut self, backend: &B, cell: u32, out: &mut [u8]) -> Result<()> {
        let host = self.block(backend, cell / self.per_block)?;
        backend.read_host(&host, u64::from(cell % self.per_block) * self.stride, out)
    }

    /// Puts a record where the device neither reads nor writes.
    pub(super) fn write(&mut self, backend: &B, cell: u32, record: &[u8]) -> Result<()> {
        let host = self.block(backend, cell / self.per_block)?;
        backend.write_host(&host, u64::from(cell % self.per_block) * self.stride, record)
    }

    /// Enqueues moves between frames and cells: (frame, cell), out of the frames or into them.
    pub(super) fn swap(&mut self, lane: &mut Lane<'_, B>, pairs: &[(u32, u32)], out: bool) -> Result<()> {
        let mut pairs = pairs.to_vec();
        pairs.sort_unstable_by_key(|(_, cell)| *cell);
        let per_block = self.per_block;
        for run in pairs.chunk_by(|a, b| a.1 / per_block == b.1 / per_block) {
            let moves: Vec<Move> = run
                .iter()
                .map(|&(frame, cell)| {
                    let index = cell % per_block;
                    if out { Move { from: frame, to: index } } else { Move { from: index, to: frame } }
                })
                .collect();
            let host = self.block(lane.backend, run[0].1 / per_block)?;
            let (record, arena, stride) = (lane.record, lane.arena, self.stride);
            let args = Swap { record, arena, host: &host, offset: 0, stride, moves: &moves };
            if out { lane.backend.swap_out(lane.stream, &args)? } else { lane.backend.swap_in(lane.stream, &args)? }
        }
        Ok(())
    }
}
