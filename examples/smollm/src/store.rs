//! Where are the model's pages? All on the device, or on it and in a tier, behind the same calls.

use anyhow::{Result, ensure};
use kvtide::backend::DeviceMemory;
use kvtide::swap::HighSpeedSwap;
use kvtide::{Append, Device, Geometry, KeyCalibration, PagedStore, Query, Sequence, StoreConfig};

use crate::counters::Counters;
use crate::room::Temporary;

/// A store of pages on a device that was chosen at run time.
#[expect(clippy::large_enum_variant, reason = "there are one or two of them")]
pub(crate) enum Store {
    Resident(PagedStore<Device>),
    Swapped {
        store: HighSpeedSwap<Device>,
        /// Pages that it was made for.
        whole: u64,
        /// Removed after the store is dropped.
        _file: Option<Temporary>,
    },
}

/// The same call to whichever store it is.
macro_rules! on {
    ($self:ident, $store:ident => $call:expr) => {
        match $self {
            Self::Resident($store) => $call,
            Self::Swapped { store: $store, .. } => $call,
        }
    };
}

impl Store {
    /// A store that keeps every page on the device.
    pub(crate) fn resident(device: Device, geometry: Geometry, calibration: Option<KeyCalibration>) -> Result<Self> {
        let config = StoreConfig { step_pages: u64::from(geometry.layers()) * 8, ..StoreConfig::default() };
        let mut store = PagedStore::with_config(device, geometry, config)?;
        if let Some(calibration) = calibration {
            store.calibrate_keys(calibration)?;
        }
        Ok(Self::Resident(store))
    }

    /// A store that was made for `whole` pages, and the file of its tier if nobody keeps that.
    pub(crate) fn swapped(store: HighSpeedSwap<Device>, whole: u64, file: Option<Temporary>) -> Self {
        Self::Swapped { store, whole, _file: file }
    }

    pub(crate) fn device(&self) -> &Device {
        on!(self, store => store.backend())
    }

    pub(crate) fn begin(&mut self) -> Sequence {
        on!(self, store => store.begin())
    }

    pub(crate) fn len(&self, seq: &Sequence, layer: usize) -> Result<u64> {
        Ok(on!(self, store => store.len(seq, layer))?)
    }

    pub(crate) fn upload(&mut self, memory: &DeviceMemory, data: &[u8]) -> Result<()> {
        Ok(on!(self, store => store.upload(memory, 0, data))?)
    }

    pub(crate) fn download(&mut self, memory: &DeviceMemory, out: &mut [u8]) -> Result<()> {
        Ok(on!(self, store => store.download(memory, 0, out))?)
    }

    pub(crate) fn append(&mut self, layer: usize, append: Append<'_, DeviceMemory>) -> Result<()> {
        Ok(on!(self, store => store.append(layer, &[append]))?)
    }

    pub(crate) fn attend(&mut self, layer: usize, query: &Query<'_, DeviceMemory>) -> Result<()> {
        Ok(on!(self, store => store.attend(layer, query))?)
    }

    /// Pages that sequences hold, wherever they are, and their bytes.
    pub(crate) fn held(&mut self) -> (u64, u64) {
        let stats = match self {
            Self::Resident(store) => store.stats(),
            Self::Swapped { store, .. } => store.stats().store,
        };
        (stats.held_pages, stats.held_bytes)
    }

    /// What swapping did, once everything has finished. Frames for fewer pages than there are, and none streamed: then
    /// the run shows nothing, which is an error.
    pub(crate) fn counters(&mut self) -> Result<Option<Counters>> {
        let Self::Swapped { store, whole, .. } = self else { return Ok(None) };
        store.synchronize()?;
        let (stats, whole) = (store.stats(), *whole);
        ensure!(
            stats.streamed_pages > 0 || stats.frames >= whole,
            "no page was streamed: {} pages were used, and {} of {whole} have frames; let it run over more tokens",
            stats.store.held_pages,
            stats.frames
        );
        Ok(Some(Counters { whole, stats }))
    }
}
