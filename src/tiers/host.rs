//! The host tier: pages in host memory that the device reaches by itself, in blocks taken as they are needed.

use super::extents::{Extents, extent};
use super::{Landing, Lane, Outcome, PageMove, Ticket, Tier, TierStats};
use crate::backend::params::Move;
use crate::backend::{Backend, HostUse, Swap};
use crate::record::{FRAME_ALIGN, Record};
use crate::{Error, Result};
use std::collections::HashMap;
use std::time::Duration;

/// Bytes of a block: one allocation of host memory. Large single allocations meet limits of drivers and of the system.
const BLOCK_BYTES: u64 = 1 << 30;

/// Pages in host memory, moved by the device: pinned memory on CUDA, buffers in host memory on wgpu where the adapter
/// can, plain memory and uploads elsewhere.
#[derive(Debug)]
pub struct HostTier<B: Backend> {
    bytes: u64,
    attached: Option<Attached<B>>,
}

#[derive(Debug)]
struct Attached<B: Backend> {
    slots: Extents,
    stride: u64,
    /// Slots a block.
    per_block: u32,
    blocks: Vec<Option<B::Host>>,
    writes: HashMap<Ticket, (B::Event, usize)>,
    reads: HashMap<Ticket, (B::Event, B::Event, usize)>,
    next: u64,
    stats: TierStats,
}

impl<B: Backend> HostTier<B> {
    /// At most `bytes` bytes of host memory, allocated in blocks when pages come.
    pub fn new(bytes: u64) -> Self {
        HostTier { bytes, attached: None }
    }

    fn attached(&mut self) -> Result<&mut Attached<B>> {
        self.attached.as_mut().ok_or_else(|| Error::Unavailable { backend: "host", reason: "not attached".into() })
    }
}

impl<B: Backend> Attached<B> {
    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    /// Enqueues moves between frames and slots, one swap for each block that they touch.
    fn swap(&mut self, lane: &mut Lane<'_, B>, pages: &[PageMove], out: bool) -> Result<()> {
        let mut by_block: HashMap<u32, Vec<Move>> = HashMap::new();
        for page in pages {
            let (block, index) = (page.slot / self.per_block, page.slot % self.per_block);
            let (from, to) = if out { (page.frame, index) } else { (index, page.frame) };
            by_block.entry(block).or_default().push(Move { from, to });
        }
        let mut blocks: Vec<_> = by_block.into_iter().collect();
        blocks.sort_unstable_by_key(|(block, _)| *block);
        for (block, moves) in blocks {
            let host = self.block(lane.backend, block)?;
            let (record, arena, stride) = (lane.record, lane.arena, self.stride);
            let args = Swap { record, arena, host: &host, offset: 0, stride, moves: &moves };
            if out { lane.backend.swap_out(lane.stream, &args)? } else { lane.backend.swap_in(lane.stream, &args)? }
        }
        Ok(())
    }

    fn block(&mut self, backend: &B, block: u32) -> Result<B::Host> {
        if let Some(host) = &self.blocks[block as usize] {
            return Ok(host.clone());
        }
        let first = u64::from(block) * u64::from(self.per_block);
        let slots = (u64::from(self.slots.capacity()) - first).min(self.per_block.into());
        let host = backend.alloc_host("host tier", slots * self.stride, HostUse::Device)?;
        Ok(self.blocks[block as usize].insert(host).clone())
    }
}

impl<B: Backend> Tier<B> for HostTier<B> {
    fn attach(&mut self, backend: &B, record: Record) -> Result<()> {
        let stride = record.bytes().next_multiple_of(FRAME_ALIGN);
        let slots = (self.bytes / stride).min(u64::from(u32::MAX) / 2) as u32;
        if slots == 0 {
            let value = self.bytes.to_string();
            return Err(Error::Config { field: "tier.bytes", value, rule: "it must hold at least one page" });
        }
        let block = BLOCK_BYTES.min(backend.caps().max_slab_bytes);
        let per_block = u32::try_from(block / stride).unwrap_or(u32::MAX).max(1);
        let blocks = slots.div_ceil(per_block) as usize;
        let (tier, mode) = ("host", "memory that the device reaches".into());
        let stats = TierStats { tier, mode, page_bytes: stride, ..TierStats::default() };
        self.attached = Some(Attached {
            slots: Extents::new(slots, extent(slots)),
            stride,
            per_block,
            blocks: (0..blocks).map(|_| None).collect(),
            writes: HashMap::new(),
            reads: HashMap::new(),
            next: 0,
            stats,
        });
        Ok(())
    }

    fn name(&self) -> String {
        "the host tier".into()
    }

    fn capacity(&self) -> u64 {
        self.attached.as_ref().map_or(0, |tier| tier.slots.capacity().into())
    }

    fn free(&self) -> u64 {
        self.attached.as_ref().map_or(0, |tier| tier.slots.free().into())
    }

    fn take(&mut self, after: Option<u32>) -> Option<u32> {
        self.attached.as_mut()?.slots.take(after)
    }

    fn give(&mut self, slot: u32) {
        if let Some(tier) = &mut self.attached {
            tier.slots.give(slot);
        }
    }

    fn write(&mut self, mut lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        let tier = self.attached()?;
        tier.swap(&mut lane, pages, true)?;
        let (event, ticket) = (lane.backend.record(lane.stream)?, tier.ticket());
        tier.writes.insert(ticket, (event, pages.len()));
        tier.stats.pages_in += pages.len() as u64;
        tier.stats.bytes_in += pages.len() as u64 * lane.record.bytes();
        Ok(ticket)
    }

    fn poll_write(&mut self, backend: &B, ticket: Ticket, wait: bool) -> Result<Option<Outcome>> {
        let tier = self.attached()?;
        let Some((event, pages)) = tier.writes.get(&ticket) else { return Ok(Some(Vec::new())) };
        let pages = *pages;
        if wait {
            backend.finish(event)?;
        } else if !backend.is_done(event)? {
            return Ok(None);
        }
        tier.writes.remove(&ticket);
        Ok(Some(vec![Ok(()); pages]))
    }

    fn read(&mut self, mut lane: Lane<'_, B>, pages: &[PageMove]) -> Result<Ticket> {
        let tier = self.attached()?;
        let began = lane.backend.record(lane.stream)?;
        tier.swap(&mut lane, pages, false)?;
        let (ended, ticket) = (lane.backend.record(lane.stream)?, tier.ticket());
        tier.reads.insert(ticket, (began, ended, pages.len()));
        tier.stats.pages_out += pages.len() as u64;
        tier.stats.hits += pages.len() as u64;
        tier.stats.bytes_out += pages.len() as u64 * lane.record.bytes();
        Ok(ticket)
    }

    fn land(&mut self, _: Lane<'_, B>, ticket: Ticket) -> Result<Landing<B>> {
        let found = self.attached()?.reads.remove(&ticket);
        let (outcome, moved) = match found {
            Some((began, ended, pages)) => (vec![Ok(()); pages], Some((began, ended))),
            None => (Vec::new(), None),
        };
        Ok(Landing { outcome, moved, waited: Duration::ZERO })
    }

    fn stats(&self) -> Vec<TierStats> {
        let Some(tier) = &self.attached else { return Vec::new() };
        let (capacity_pages, used_pages) = (tier.slots.capacity().into(), tier.slots.used().into());
        vec![TierStats { capacity_pages, used_pages, ..tier.stats.clone() }]
    }
}
