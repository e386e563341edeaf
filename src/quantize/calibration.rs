//! How are keys centred and scaled, channel by channel, before they become int8?

use crate::{Error, Geometry, Result};

/// Largest magnitude of a mean, and the range of a scale: what they do to keys stays far from the ends of f32.
const MOST: f32 = 1e30;

/// For every layer, KV head and channel of a key a mean and a scale: a key `x` is stored as int8 of `(x − mean) ÷ scale`.
///
/// Models with biased keys (a large mean that hardly varies) are unusable in plain int8: the mean sets the scale of every
/// row, and what varies is lost in its rounding. Attention over calibrated keys is exact: the query absorbs the scales, and
/// query · mean, the same for every token, is added to the log-sum-exp.
///
/// [`KeyStatistics`](super::KeyStatistics) fits one, [`KeyCheck`](super::KeyCheck) tells whether a model needs one.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyCalibration {
    pub(super) layers: u32,
    pub(super) kv_heads: u32,
    pub(super) k_dim: u32,
    /// `[layer, kv_head, k_dim]`.
    pub(super) mean: Vec<f32>,
    /// The same.
    pub(super) scale: Vec<f32>,
}

impl KeyCalibration {
    /// Means and scales `[layer, kv_head, k_dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of values than the geometry has channels; [`Error::Config`] for a mean that is not
    /// finite or past ±10³⁰, or a scale outside 10⁻³⁰ to 10³⁰.
    pub fn new(geometry: &Geometry, mean: Vec<f32>, scale: Vec<f32>) -> Result<Self> {
        let geometry = geometry.validate()?;
        let (layers, kv_heads, k_dim) = (geometry.layers(), geometry.kv_heads(), geometry.k_dim());
        let expected = u64::from(layers) * u64::from(kv_heads) * u64::from(k_dim);
        for (what, got) in [("the means of a calibration", mean.len()), ("the scales of a calibration", scale.len())] {
            if got as u64 != expected {
                return Err(Error::Shape { what, got: got as u64, expected });
            }
        }
        let refused = |field, value: f32, rule| Err(Error::Config { field, value: value.to_string(), rule });
        if let Some(&x) = mean.iter().find(|x| x.is_nan() || x.abs() > MOST) {
            return refused("calibration.mean", x, "it must be a number from -1e30 to 1e30");
        }
        if let Some(&x) = scale.iter().find(|x| !(1.0 / MOST..=MOST).contains(*x)) {
            return refused("calibration.scale", x, "it must be a number from 1e-30 to 1e30");
        }
        Ok(KeyCalibration { layers, kv_heads, k_dim, mean, scale })
    }

    /// The calibration that changes nothing: means 0, scales 1.
    pub fn identity(geometry: &Geometry) -> Result<Self> {
        let channels = geometry.layers() as usize * geometry.kv_heads() as usize * geometry.k_dim() as usize;
        Self::new(geometry, vec![0.0; channels], vec![1.0; channels])
    }

    /// Whether it changes nothing, as if there were none.
    pub fn is_identity(&self) -> bool {
        self.mean.iter().all(|&mean| mean == 0.0) && self.scale.iter().all(|&scale| scale == 1.0)
    }

    /// A number that tells calibrations apart: XXH3 of the means and the scales.
    pub fn checksum(&self) -> u64 {
        let bytes: Vec<u8> = self.mean.iter().chain(&self.scale).flat_map(|x| x.to_le_bytes()).collect();
        xxhash_rust::xxh3::xxh3_64(&bytes)
    }

    /// The bits of the means and of the scales, and back.
    pub(crate) fn to_bits(&self) -> (Vec<u32>, Vec<u32>) {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
        (bits(&self.mean), bits(&self.scale))
    }

    pub(crate) fn from_bits(geometry: &Geometry, (mean, scale): (Vec<u32>, Vec<u32>)) -> Result<Self> {
        let values = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect();
        Self::new(geometry, values(mean), values(scale))
    }

    /// Whether it was made for keys of this geometry.
    ///
    /// # Errors
    /// [`Error::Shape`] with the first number that differs.
    pub fn fits(&self, geometry: &Geometry) -> Result<()> {
        let pairs = [
            ("the layers of a calibration", self.layers, geometry.layers()),
            ("the KV heads of a calibration", self.kv_heads, geometry.kv_heads()),
            ("the key elements of a calibration", self.k_dim, geometry.k_dim()),
        ];
        match pairs.into_iter().find(|(_, got, expected)| got != expected) {
            Some((what, got, expected)) => Err(Error::Shape { what, got: got.into(), expected: expected.into() }),
            None => Ok(()),
        }
    }

    /// The means of a layer and KV head, one a channel.
    pub fn mean(&self, layer: u32, head: u32) -> &[f32] {
        &self.mean[self.channels(layer, head)]
    }

    /// The scales of a layer and KV head, one a channel.
    pub fn scale(&self, layer: u32, head: u32) -> &[f32] {
        &self.scale[self.channels(layer, head)]
    }

    fn channels(&self, layer: u32, head: u32) -> std::ops::Range<usize> {
        let first = (layer * self.kv_heads + head) as usize * self.k_dim as usize;
        first..first + self.k_dim as usize
    }

    /// A layer as [`Channels`](crate::backend::ops::Channels) lie on the device.
    pub(crate) fn device_words(&self, layer: u32) -> Vec<f32> {
        let mut words = Vec::with_capacity(3 * (self.kv_heads * self.k_dim) as usize);
        for head in 0..self.kv_heads {
            let scale = self.scale(layer, head);
            words.extend(self.mean(layer, head).iter().chain(scale).copied());
            words.extend(scale.iter().map(|scale| 1.0 / scale));
        }
        words
    }
}

/// What is quantised of a key's element: `(x − mean) × inverse`, each step rounded. An element that is not finite stays.
pub(crate) fn calibrate(x: f32, mean: f32, inverse: f32) -> f32 {
    if x.is_finite() { (x - mean) * inverse } else { x }
}
