//! The device side of a store: slabs, page tables, scratch and the stream that orders all work on them.

use super::StoreConfig;
use crate::attention::state_words;
use crate::backend::ops::Arena;
use crate::backend::{Backend, DeviceBuffer};
use crate::pages::frames::Frames;
use crate::pages::growth::{self, SlabLimits};
use crate::pages::layer::LayerPages;
use crate::pages::tables::TableSpace;
use crate::record::Record;
use crate::{Error, Result};

/// Words of the smallest tables buffer.
const SMALLEST_TABLES: u64 = 1024;

#[derive(Debug)]
pub(super) struct Pool<B: Backend> {
    pub(super) backend: B,
    pub(super) stream: B::Stream,
    pub(super) slabs: Vec<B::Buffer>,
    pub(super) frames: Frames,
    pub(super) page_limit: u64,
    record: Record,
    limits: SlabLimits,
    step: u64,
    table_space: TableSpace,
    tables: Option<B::Buffer>,
    states: Option<B::Buffer>,
    counter: Option<B::Buffer>,
}

impl<B: Backend> Pool<B> {
    pub(super) fn new(backend: B, stream: B::Stream, record: Record, config: &StoreConfig) -> Result<Self> {
        let caps = backend.caps();
        let (stride, slab_bytes) = (record.frame_stride(), caps.max_slab_bytes);
        let limit = |limit, need, have, purpose| {
            Err(Error::Limit { adapter: caps.adapter.clone(), limit, need, have, purpose })
        };
        if stride > slab_bytes {
            return limit("max_slab_bytes", stride, slab_bytes, "one page");
        }
        // Frame numbers are 32 bits: the slab above, the index below.
        let slabs = u64::from(caps.max_slabs);
        let slab_bits = slabs.next_power_of_two().trailing_zeros();
        let frames = (slab_bytes / stride).min(1 << (31 - slab_bits));
        let limits = SlabLimits { frames, slabs };
        let half = frames * (slabs / 2).max(1);
        let memory = caps.memory_bytes.map_or(half, |bytes| half.min((bytes / stride).max(1)));
        let page_limit = config.page_limit.unwrap_or(memory);
        if page_limit > limits.addressable() {
            return limit("max_slabs × max_slab_bytes / page", page_limit, limits.addressable(), "the page limit");
        }
        let shift = frames.next_power_of_two().trailing_zeros();
        Ok(Pool {
            backend,
            stream,
            slabs: Vec::new(),
            frames: Frames::new(shift),
            page_limit,
            record,
            limits,
            step: config.step_pages,
            table_space: TableSpace::default(),
            tables: None,
            states: None,
            counter: None,
        })
    }

    pub(super) fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.frames.shift() }
    }

    /// Pages that the pool would hold with `more` held frames; [`Error::PageLimit`] past the limit.
    pub(super) fn require(&self, more: u64, layer: usize) -> Result<u64> {
        let required = self.frames.capacity() - self.frames.free() + more;
        let target = growth::target(self.frames.capacity(), required, self.step, self.page_limit);
        target.ok_or(Error::PageLimit { layer, required, maximum: self.page_limit })
    }

    /// Adds slabs until `more` frames are free.
    pub(super) fn grow_for(&mut self, more: u64, layer: usize) -> Result<()> {
        let target = self.require(more, layer)?;
        match self.grow_to(target) {
            Ok(()) => Ok(()),
            Err(_) if self.frames.free() >= more => Ok(()),
            // There may be room for what is needed where there is none for twice as much.
            Err(error) => {
                let required = self.frames.capacity() - self.frames.free() + more;
                let least = required.next_multiple_of(self.step).min(self.page_limit);
                if least < target { self.grow_to(least) } else { Err(error) }
            }
        }
    }

    fn grow_to(&mut self, target: u64) -> Result<()> {
        let capacity = self.frames.capacity();
        for frames in self.limits.add(self.slabs.len() as u64, capacity, target, self.page_limit) {
            let bytes = u64::from(frames) * self.record.frame_stride();
            self.slabs.push(self.backend.alloc("kvtide slab", bytes)?);
            self.frames.add_slab(frames);
            tracing::debug!(frames, bytes, slabs = self.slabs.len(), "the pool has grown");
        }
        Ok(())
    }

    /// Gives everything back that a sequence holds in a layer.
    pub(super) fn release(&mut self, layer: LayerPages) {
        layer.frames.iter().chain(&layer.reserved).for_each(|&frame| self.frames.release(frame));
        if let Some(span) = layer.span {
            self.table_space.give(span);
        }
    }

    /// Gives the pages' table a place that holds them all, and tells the device what it does not know yet.
    pub(super) fn upload_table(&mut self, pages: &mut LayerPages) -> Result<()> {
        let needed = pages.frames.len() as u32;
        if pages.span.is_none_or(|span| span.capacity < needed) {
            let maximum = (self.backend.caps().max_slab_bytes / 4).min(u32::MAX.into());
            let too_large = Error::TooLarge { what: "the words of the page tables", value: needed.into(), maximum };
            let span = self.table_space.take(needed, maximum as u32).ok_or(too_large)?;
            if let Some(old) = pages.span.replace(span) {
                self.table_space.give(old);
            }
            pages.dirty = 0..pages.frames.len();
        }
        let tables = self.tables()?;
        let dirty = pages.dirty.start..pages.dirty.end.min(pages.frames.len());
        if let (Some(span), false) = (pages.span, dirty.is_empty()) {
            let offset = (u64::from(span.base) + dirty.start as u64) * 4;
            let entries = bytemuck::cast_slice(&pages.frames[dirty]);
            self.backend.upload(&mut self.stream, &tables, offset, entries)?;
        }
        pages.dirty = 0..0;
        Ok(())
    }

    /// The tables buffer, large enough for every span handed out.
    pub(super) fn tables(&mut self) -> Result<B::Buffer> {
        let words = u64::from(self.table_space.words());
        let largest = self.backend.caps().max_slab_bytes / 4;
        let bytes = words.max(SMALLEST_TABLES).next_power_of_two().min(largest.max(words)) * 4;
        match &self.tables {
            Some(tables) if tables.bytes() >= bytes => Ok(tables.clone()),
            old => {
                let new = self.backend.alloc("kvtide page tables", bytes)?;
                if let Some(old) = old {
                    self.backend.copy(&mut self.stream, (old, 0), (&new, 0), old.bytes())?;
                }
                Ok(self.tables.insert(new).clone())
            }
        }
    }

    /// The states buffer, large enough for `states` states of every query head.
    pub(super) fn states(&mut self, states: u32) -> Result<B::Buffer> {
        let bytes = (u64::from(states) * self.state_bytes()).max(256);
        match &self.states {
            Some(buffer) if buffer.bytes() >= bytes => Ok(buffer.clone()),
            _ => {
                let bytes = bytes.next_power_of_two().min(self.backend.caps().max_slab_bytes).max(bytes);
                let new = self.backend.alloc("kvtide attention states", bytes)?;
                Ok(self.states.insert(new).clone())
            }
        }
    }

    /// Bytes of one state of every query head.
    pub(super) fn state_bytes(&self) -> u64 {
        let geometry = self.record.geometry();
        u64::from(geometry.q_heads()) * u64::from(state_words(geometry.v_dim())) * 4
    }

    /// The counter of non-finite elements.
    pub(super) fn counter(&mut self) -> Result<B::Buffer> {
        if let Some(counter) = &self.counter {
            return Ok(counter.clone());
        }
        let counter = self.backend.alloc("kvtide non-finite count", 16)?;
        self.backend.fill(&mut self.stream, &counter, 0, 16, 0)?;
        Ok(self.counter.insert(counter).clone())
    }

    pub(super) fn non_finite(&mut self) -> Result<u64> {
        let mut count = [0u8; 4];
        if let Some(counter) = &self.counter {
            self.backend.download(&mut self.stream, counter, 0, &mut count)?;
        }
        Ok(u32::from_le_bytes(count).into())
    }
}
