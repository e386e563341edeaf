//! The calibration of one KV head's keys, read from memory.

use super::memory::CpuBuffer;
use crate::backend::ops::Channels;
use crate::{Dtype, Geometry};

/// One value a channel.
pub(super) struct HeadChannels {
    pub(super) mean: Vec<f32>,
    pub(super) scale: Vec<f32>,
    pub(super) inverse: Vec<f32>,
}

impl HeadChannels {
    pub(super) fn read(channels: &Channels<'_, CpuBuffer>, geometry: &Geometry, head: u32) -> Self {
        let dim = geometry.k_dim() as usize;
        let part = |number: u64| {
            let mut values = vec![0.0; dim];
            let at = channels.offset + (u64::from(head) * 3 + number) * dim as u64 * 4;
            channels.buffer.read_row(at, Dtype::F32, &mut values);
            values
        };
        HeadChannels { mean: part(0), scale: part(1), inverse: part(2) }
    }

    /// The key that a row of codes stands for, in place.
    pub(super) fn restore(&self, codes: &mut [f32], row_scale: f32) {
        let channels = self.mean.iter().zip(&self.scale);
        codes.iter_mut().zip(channels).for_each(|(x, (mean, scale))| *x = mean + *x * row_scale * scale);
    }
}
