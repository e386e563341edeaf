//! The key calibration of a store whose pages are quantised: given before the first write, on the device with it.

use super::PagedStore;
use super::pool::Pool;
use crate::backend::Backend;
use crate::backend::ops::Channels;
use crate::{Error, KeyCalibration, Result};

/// The channels of every layer on the device; one layer for all where nothing is calibrated.
#[derive(Debug)]
pub(crate) struct DeviceChannels<Buf> {
    buffer: Buf,
    /// Bytes from one layer to the next.
    stride: u64,
}

impl<Buf> DeviceChannels<Buf> {
    pub(super) fn buffer(&self) -> &Buf {
        &self.buffer
    }
}

impl<B: Backend> PagedStore<B> {
    /// What keys are centred and scaled by before they are quantised, where that was given.
    pub fn key_calibration(&self) -> Option<&KeyCalibration> {
        self.pool.calibration.as_ref()
    }

    /// Centres and scales keys by `calibration` from now on.
    ///
    /// # Errors
    /// [`Error::Config`] when the pages are not quantised, or when some are held already: what they store depends on the
    /// calibration; [`Error::Shape`] for a calibration of another geometry.
    pub fn calibrate_keys(&mut self, calibration: KeyCalibration) -> Result<()> {
        self.reap();
        let refused = |value: &str, rule| Err(Error::Config { field: "key_calibration", value: value.into(), rule });
        calibration.fits(self.geometry())?;
        if !self.geometry().page_format().is_quantized() {
            return refused(self.geometry().page_format().name(), "only quantised pages have one");
        }
        if self.stats().held_pages > 0 {
            return refused("given late", "it must be given before anything is written");
        }
        self.pool.calibration = Some(calibration);
        self.pool.channels = None;
        Ok(())
    }
}

impl<B: Backend> Pool<B> {
    /// Puts the channels on the device, where the pages need them and they are not there yet.
    pub(crate) fn ready_channels(&mut self) -> Result<()> {
        let geometry = self.record.geometry();
        if !geometry.page_format().is_quantized() || self.channels.is_some() {
            return Ok(());
        }
        let bytes = Channels::<B::Buffer>::bytes(geometry).next_multiple_of(256);
        let (calibration, layers, stride) = match &self.calibration {
            Some(calibration) => (calibration.clone(), geometry.layers(), bytes),
            None => (KeyCalibration::identity(geometry)?, 1, 0),
        };
        let buffer = self.backend.alloc("kvtide key calibration", bytes * u64::from(layers))?;
        for layer in 0..layers {
            let words = calibration.device_words(layer);
            let offset = u64::from(layer) * bytes;
            self.backend.upload(&mut self.stream, &buffer, offset, bytemuck::cast_slice(&words))?;
        }
        self.channels = Some(DeviceChannels { buffer, stride });
        Ok(())
    }
}

/// The channels of a layer, where they are [ready](Pool::ready_channels).
pub(crate) fn channels_of<Buf>(channels: &Option<DeviceChannels<Buf>>, layer: usize) -> Option<Channels<'_, Buf>> {
    channels.as_ref().map(|DeviceChannels { buffer, stride }| Channels { buffer, offset: layer as u64 * stride })
}
