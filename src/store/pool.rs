//! The device side of a store: slabs, page tables, scratch and the stream that orders all work on them.

use super::StoreConfig;
use super::calibration::DeviceChannels;
use super::projector::Projector;
use crate::attention::state_words;
use crate::backend::ops::{Arena, Channels};
use crate::backend::{Backend, DeviceBuffer};
use crate::pages::frames::Frames;
use crate::pages::growth::{self, SlabLimits};
use crate::pages::layer::LayerPages;
use crate::pages::tables::TableSpace;
use crate::record::Record;
use crate::swap::Residency;
use crate::{Error, KeyCalibration, Result};

/// Words of the smallest tables buffer.
const SMALLEST_TABLES: u64 = 1024;

#[derive(Debug)]
pub(crate) struct Pool<B: Backend> {
    pub(crate) backend: B,
    pub(crate) stream: B::Stream,
    pub(crate) slabs: Vec<B::Buffer>,
    /// Page numbers and their owners. Without a residency a page's number is its frame.
    pub(crate) book: Frames,
    /// Where pages are, when they may leave the device.
    pub(crate) residency: Option<Residency>,
    pub(crate) page_limit: u64,
    pub(crate) record: Record,
    limits: SlabLimits,
    step: u64,
    table_space: TableSpace,
    tables: Option<B::Buffer>,
    states: Option<B::Buffer>,
    counter: Option<B::Buffer>,
    /// What keys are centred and scaled by, and the same on the device.
    pub(crate) calibration: Option<KeyCalibration>,
    pub(crate) channels: Option<DeviceChannels<B::Buffer>>,
    /// Where keys are projected to as they are written.
    pub(crate) projector: Option<Projector<B>>,
}

impl<B: Backend> Pool<B> {
    pub(crate) fn new(backend: B, stream: B::Stream, record: Record, config: &StoreConfig) -> Result<Self> {
        let caps = backend.caps();
        let (stride, slab_bytes) = (record.frame_stride(), caps.max_slab_bytes);
        let limit = |limit, need, have, purpose| {
            Err(Error::Limit { adapter: caps.adapter.clone(), limit, need, have, purpose })
        };
        if stride > slab_bytes {
            return limit("max_slab_bytes", stride, slab_bytes, "one page");
        }
        let (channels, (name, most)) = (Channels::<B::Buffer>::bytes(record.geometry()), caps.max_channels);
        if record.format().is_quantized() && channels > most {
            return limit(name, channels, most, "the key calibration of a layer");
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
        backend.prepare(&record, 1);
        Ok(Pool {
            backend,
            stream,
            slabs: Vec::new(),
            book: Frames::new(shift),
            residency: None,
            page_limit,
            record,
            limits,
            step: config.step_pages,
            table_space: TableSpace::default(),
            tables: None,
            states: None,
            counter: None,
            calibration: None,
            channels: None,
            projector: None,
        })
    }

    /// Lets pages leave the device: at most `frames` of them are on it at a time, of at most `pages` in all.
    pub(crate) fn swapped(&mut self, frames: u64, pages: u64) {
        let numbers = Frames::new(31);
        self.residency = Some(Residency::new(std::mem::replace(&mut self.book, numbers), frames));
        self.page_limit = pages.min(1 << 31);
    }

    /// Frames and the slabs that they lie in.
    fn frames(&mut self) -> &mut Frames {
        match &mut self.residency {
            Some(residency) => &mut residency.frames,
            None => &mut self.book,
        }
    }

    pub(crate) fn shift(&self) -> u32 {
        self.residency.as_ref().map_or(self.book.shift(), |residency| residency.frames.shift())
    }

    pub(crate) fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.shift() }
    }

    /// The frame of a page that is on the device.
    pub(crate) fn frame(&self, page: u32) -> u32 {
        self.residency.as_ref().map_or(page, |residency| residency.frame(page))
    }

    /// A new page with a frame, the one right after `after`'s if that is free.
    pub(crate) fn take(&mut self, after: Option<u32>) -> Option<u32> {
        let Some(residency) = &mut self.residency else { return self.book.take(after) };
        if residency.frames.free() == 0 {
            return None;
        }
        let page = self.book.take(after)?;
        residency.enter(page, after);
        Some(page)
    }

    /// `count` new pages in one run of frames, where there is such a run.
    pub(crate) fn take_run(&mut self, count: u32) -> Option<Vec<u32>> {
        if self.residency.is_some() { None } else { self.book.take_run(count) }
    }

    /// Takes an owner of a page away; with the last one the page is gone.
    pub(crate) fn give(&mut self, page: u32) {
        self.book.release(page);
        if let (0, Some(residency)) = (self.book.owners(page), &mut self.residency) {
            residency.forget(page);
        }
    }

    /// Pages that the pool would hold with `more` held pages; [`Error::PageLimit`] past the limit.
    pub(crate) fn require(&self, more: u64, layer: usize) -> Result<u64> {
        let required = self.book.capacity() - self.book.free() + more;
        let target = growth::target(self.book.capacity(), required, self.step, self.page_limit);
        target.ok_or(Error::PageLimit { layer, required, maximum: self.page_limit })
    }

    /// Adds slabs until `more` frames are free.
    pub(crate) fn grow_for(&mut self, more: u64, layer: usize) -> Result<()> {
        let target = self.require(more, layer)?;
        if self.residency.is_some() {
            if more > self.book.free() {
                self.book.extend((target - self.book.capacity()) as u32);
            }
            let enough = self.has_frames(more)?;
            let residency = self.residency.as_ref().filter(|_| !enough);
            return residency.map_or(Ok(()), |residency| Err(residency.shortage(more)));
        }
        match self.grow_to(target, self.page_limit) {
            Ok(()) => Ok(()),
            Err(_) if self.book.free() >= more => Ok(()),
            // There may be room for what is needed where there is none for twice as much.
            Err(error) => {
                let required = self.book.capacity() - self.book.free() + more;
                let least = required.next_multiple_of(self.step).min(self.page_limit);
                if least < target { self.grow_to(least, self.page_limit) } else { Err(error) }
            }
        }
    }

    /// Whether `more` frames are free, after adding slabs within the device budget.
    pub(crate) fn has_frames(&mut self, more: u64) -> Result<bool> {
        let Some(residency) = &self.residency else { return Ok(true) };
        let (frames, limit) = (&residency.frames, residency.limit);
        if more > frames.free() && frames.capacity() < limit {
            let required = frames.capacity() - frames.free() + more;
            let target = growth::target(frames.capacity(), required, self.step, limit).unwrap_or(limit);
            self.grow_to(target, limit)?;
        }
        Ok(self.frames().free() >= more)
    }

    fn grow_to(&mut self, target: u64, limit: u64) -> Result<()> {
        let capacity = self.frames().capacity();
        for frames in self.limits.add(self.slabs.len() as u64, capacity, target, limit) {
            let bytes = u64::from(frames) * self.record.frame_stride();
            self.slabs.push(self.backend.alloc("kvtide slab", bytes)?);
            self.frames().add_slab(frames);
            tracing::debug!(frames, bytes, slabs = self.slabs.len(), "the pool has grown");
            // Before the next slab is there.
            self.backend.prepare(&self.record, self.slabs.len() + 1);
        }
        Ok(())
    }

    /// Gives everything back that a sequence holds in a layer.
    pub(crate) fn release(&mut self, layer: LayerPages) {
        layer.table.iter().chain(&layer.reserved).for_each(|&page| self.give(page));
        if let Some(span) = layer.span {
            self.table_space.give(span);
        }
    }

    /// Gives the pages' table a place that holds them all.
    pub(crate) fn place_table(&mut self, pages: &mut LayerPages) -> Result<()> {
        let needed = pages.table.len() as u32;
        if pages.span.is_none_or(|span| span.capacity < needed) {
            let maximum = (self.backend.caps().max_slab_bytes / 4).min(u32::MAX.into());
            let too_large = Error::TooLarge { what: "the words of the page tables", value: needed.into(), maximum };
            let span = self.table_space.take(needed, maximum as u32).ok_or(too_large)?;
            if let Some(old) = pages.span.replace(span) {
                self.table_space.give(old);
            }
            pages.dirty = 0..pages.table.len();
        }
        Ok(())
    }

    /// Tells the device what it does not know yet of the pages' table.
    pub(crate) fn upload_table(&mut self, pages: &mut LayerPages) -> Result<()> {
        self.place_table(pages)?;
        let tables = self.tables()?;
        let dirty = pages.dirty.start..pages.dirty.end.min(pages.table.len());
        if let (Some(span), false) = (pages.span, dirty.is_empty()) {
            let offset = (u64::from(span.base) + dirty.start as u64) * 4;
            let frames = if self.residency.is_some() { &pages.known } else { &pages.table };
            let entries = bytemuck::cast_slice(&frames[dirty]);
            self.backend.upload(&mut self.stream, &tables, offset, entries)?;
        }
        pages.dirty = 0..0;
        Ok(())
    }

    /// The tables buffer, large enough for every span handed out.
    pub(crate) fn tables(&mut self) -> Result<B::Buffer> {
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
    pub(crate) fn states(&mut self, states: u32) -> Result<B::Buffer> {
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
    pub(crate) fn state_bytes(&self) -> u64 {
        let geometry = self.record.geometry();
        u64::from(geometry.q_heads()) * u64::from(state_words(geometry.v_dim())) * 4
    }

    /// The counter of non-finite elements.
    pub(crate) fn counter(&mut self) -> Result<B::Buffer> {
        if let Some(counter) = &self.counter {
            return Ok(counter.clone());
        }
        let counter = self.backend.alloc("kvtide non-finite count", 16)?;
        self.backend.fill(&mut self.stream, &counter, 0, 16, 0)?;
        Ok(self.counter.insert(counter).clone())
    }

    pub(crate) fn non_finite(&mut self) -> Result<u64> {
        let mut count = [0u8; 4];
        if let Some(counter) = &self.counter {
            self.backend.download(&mut self.stream, counter, 0, &mut count)?;
        }
        Ok(u32::from_le_bytes(count).into())
    }
}
