//! The calibration of a layer's keys on the device, which quantised pages are written and read with.

use super::ops::range;
use super::{Caps, DeviceBuffer};
use crate::record::Record;
use crate::{Error, Geometry, Result};

/// Means and scales of the channels of one layer's keys (see [`KeyCalibration`](crate::KeyCalibration)): f32 words
/// `[kv_head][mean: k_dim][scale: k_dim][inverse: k_dim]`, inverse = 1 ÷ scale.
///
/// An element x of a key is quantised as (x − mean) × inverse, each step rounded, unless x is not finite; what is stored
/// stands for mean + code × row scale × scale.
#[derive(Debug)]
pub struct Channels<'a, Buf> {
    /// The memory they lie in.
    pub buffer: &'a Buf,
    /// Bytes before the first KV head's means, a multiple of 256.
    pub offset: u64,
}

impl<Buf> Clone for Channels<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for Channels<'_, Buf> {}

impl<Buf> Channels<'_, Buf> {
    /// Bytes of a layer's channels.
    pub const fn bytes(geometry: &Geometry) -> u64 {
        12 * geometry.kv_heads() as u64 * geometry.k_dim() as u64
    }
}

impl<Buf: DeviceBuffer> Channels<'_, Buf> {
    /// Checks that channels are there exactly where the pages need them, and where they lie.
    pub(super) fn validate(this: Option<Self>, operation: &'static str, record: &Record, caps: &Caps) -> Result<()> {
        match (this, record.format().is_quantized()) {
            (None, false) => Ok(()),
            (Some(channels), true) if !channels.offset.is_multiple_of(256) => {
                Err(Error::Misaligned { what: "the key calibration", value: channels.offset, multiple: 256 })
            }
            (Some(channels), true) => {
                let bytes = Self::bytes(record.geometry());
                range(channels.buffer, channels.offset, bytes, "the key calibration", caps)
            }
            (given, _) => {
                let with = if given.is_some() { "with" } else { "without" };
                let format = format!("{} pages {with} a key calibration", record.format().name());
                Err(Error::Unsupported { backend: caps.backend, operation, format })
            }
        }
    }
}
