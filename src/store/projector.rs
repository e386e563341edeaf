//! The projections of a store's keys on the device: the matrices of every layer, and a record for each page number.

use super::pool::Pool;
use crate::backend::Backend;
use crate::backend::ops::{Arena, Matrices, Onto};
use crate::pages::frames::Frames;
use crate::pages::growth::{self, SlabLimits};
use crate::predictor::{Basis, Projections};
use crate::{Error, Geometry, Result};

/// Records that the first slab holds.
const STEP: u64 = 256;

/// Where the keys of a store are projected to.
#[derive(Debug)]
pub(crate) struct Projector<B: Backend> {
    layout: Projections,
    /// The matrices of all layers, one after the other.
    matrices: B::Buffer,
    layer_bytes: u64,
    head_stride: u32,
    slabs: Vec<B::Buffer>,
    /// Numbers of records, in slabs; all are used, by page number.
    records: Frames,
    limits: SlabLimits,
    /// The most records there may be.
    most: u64,
}

impl<B: Backend> Projector<B> {
    /// Puts a basis on the device, over `stream`.
    ///
    /// # Errors
    /// A basis of another geometry; [`Error::Limit`] when the projections of `pages` pages are more than the device can
    /// address or hold.
    pub(crate) fn new(
        backend: &B,
        stream: &mut B::Stream,
        geometry: &Geometry,
        basis: &Basis,
        pages: u64,
    ) -> Result<Self> {
        basis.fits(geometry)?;
        let (caps, layout) = (backend.caps(), Projections::new(geometry, basis.rank())?);
        let slab_bits = u64::from(caps.max_slabs).next_power_of_two().trailing_zeros();
        let frames = (caps.max_slab_bytes / layout.stride()).min(1 << (31 - slab_bits));
        let limits = SlabLimits { frames, slabs: caps.max_slabs.into() };
        let limit = |limit, need, have| {
            let purpose = "projections of all pages: lower the rank, or use a smaller tier";
            Err(Error::Limit { adapter: caps.adapter.clone(), limit, need, have, purpose })
        };
        if pages > limits.addressable() {
            return limit("max_slabs × max_slab_bytes / projections", pages, limits.addressable());
        }
        if let Some(memory) = caps.memory_bytes.filter(|memory| pages * layout.stride() > memory / 20 * 19) {
            return limit("memory", pages * layout.stride(), memory);
        }
        let layers: Vec<Vec<u8>> = (0..geometry.layers()).map(|layer| basis.device_bytes(layer)).collect();
        let layer_bytes = (layers[0].len() as u64).next_multiple_of(256);
        let matrices = backend.alloc("kvtide basis", layer_bytes * layers.len() as u64)?;
        for (layer, bytes) in layers.iter().enumerate() {
            backend.upload(stream, &matrices, layer as u64 * layer_bytes, bytes)?;
        }
        backend.synchronize(stream)?;
        let (head_stride, most) = (basis.head_stride(), pages);
        let records = Frames::new(frames.next_power_of_two().trailing_zeros());
        Ok(Projector { layout, matrices, layer_bytes, head_stride, slabs: Vec::new(), records, limits, most })
    }

    /// Room for the projections of pages below `pages`.
    pub(crate) fn grow(&mut self, backend: &B, pages: u64) -> Result<()> {
        let (capacity, most) = (self.records.capacity(), self.most);
        let target = growth::target(capacity, pages, STEP, most).unwrap_or(most);
        for records in self.limits.add(self.slabs.len() as u64, capacity, target, most) {
            self.slabs.push(backend.alloc("kvtide projections", u64::from(records) * self.layout.stride())?);
            self.records.add_slab(records);
        }
        Ok(())
    }

    /// Dimensions of a projected key.
    pub(crate) fn rank(&self) -> u32 {
        self.layout.rank()
    }

    /// The record of a page.
    pub(crate) fn record(&self, page: u32) -> u32 {
        self.records.number(page)
    }

    /// All records.
    pub(crate) fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.records.shift() }
    }

    /// The matrices of a layer.
    pub(crate) fn basis_of(&self, layer: usize) -> Matrices<'_, B::Buffer> {
        let offset = layer as u64 * self.layer_bytes;
        Matrices { buffer: &self.matrices, offset, head_stride: self.head_stride }
    }

    /// What the keys of a layer are projected on.
    pub(crate) fn onto(&self, layer: usize) -> Onto<'_, B::Buffer> {
        Onto { rank: self.rank(), basis: self.basis_of(layer), projections: self.arena() }
    }
}

impl<B: Backend> Pool<B> {
    /// Makes room for the projections of every page there is, where keys are projected.
    pub(crate) fn ready_projector(&mut self) -> Result<()> {
        match &mut self.projector {
            Some(projector) => projector.grow(&self.backend, self.book.capacity()),
            None => Ok(()),
        }
    }
}
