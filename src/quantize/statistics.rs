//! Which calibration suits a model's keys? Their mean and their reach, channel by channel, over a text.

use super::KeyCalibration;
use crate::{Error, Geometry, Result};

/// Collects the keys of a text, and fits a [`KeyCalibration`] to them: the mean of each channel, and as its scale the
/// square root of the farthest that a key is from that mean, √(max |x − mean|); 1 for a channel that never varies.
///
/// Keys of real models have a few channels that are far larger than the others in every token (KIVI, arXiv 2402.02750, and
/// KVQuant, arXiv 2401.18079, quantise keys by channel for that reason). Here rows stay rows, so that a token is written
/// once and never again: the mean takes away what is the same in every token, which attention does not see, and the scale
/// brings what varies half-way together, since a query gets the scales that keys lose.
///
/// Give it keys as they are appended (after RoPE), over all positions that will be used: a mean of the first few tokens
/// does not stay the mean. Some thousand tokens of any text do; it need not be like those that come later.
///
/// ```
/// use kvtide::{Geometry, KeyStatistics};
/// let model = Geometry::new(1, 2, 1, 16);
/// let mut statistics = KeyStatistics::new(&model)?;
/// let key = |x: f32| [vec![100.0 + x], vec![0.0; 15]].concat();
/// statistics.add(0, &[key(-4.0), key(4.0)].concat())?; // two tokens
/// let calibration = statistics.calibration()?;
/// assert_eq!((calibration.mean(0, 0)[0], calibration.scale(0, 0)[..2].to_vec()), (100.0, vec![2.0, 1.0]));
/// # Ok::<(), kvtide::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeyStatistics {
    geometry: Geometry,
    /// Tokens of each layer.
    tokens: Vec<u64>,
    /// `[layer, kv_head, k_dim]`.
    channels: Vec<Channel>,
}

#[derive(Debug, Clone, Copy)]
struct Channel {
    sum: f64,
    least: f32,
    most: f32,
}

impl KeyStatistics {
    /// Nothing collected yet.
    ///
    /// # Errors
    /// [`Error::Geometry`].
    pub fn new(geometry: &Geometry) -> Result<Self> {
        let geometry = geometry.validate()?;
        let layers = geometry.layers() as usize;
        let nothing = Channel { sum: 0.0, least: f32::INFINITY, most: f32::NEG_INFINITY };
        let channels = vec![nothing; layers * row(&geometry)];
        Ok(KeyStatistics { geometry, tokens: vec![0; layers], channels })
    }

    /// Adds keys `[token, kv_head, k_dim]` of a layer, any number of tokens.
    ///
    /// # Errors
    /// [`Error::UnknownLayer`]; [`Error::Shape`] for a part of a token; [`Error::NonFinite`] when an element is infinite or
    /// NaN. Nothing is added then.
    pub fn add(&mut self, layer: usize, keys: &[f32]) -> Result<()> {
        let (layers, row) = (self.tokens.len(), row(&self.geometry));
        if layer >= layers {
            return Err(Error::UnknownLayer { layer, layers });
        }
        let tokens = whole_tokens(&self.geometry, keys)?;
        let count = keys.iter().filter(|x| !x.is_finite()).count() as u64;
        if count > 0 {
            return Err(Error::NonFinite { count });
        }
        let channels = &mut self.channels[layer * row..][..row];
        for token in keys.chunks_exact(row) {
            for (channel, &x) in channels.iter_mut().zip(token) {
                channel.sum += f64::from(x);
                channel.least = channel.least.min(x);
                channel.most = channel.most.max(x);
            }
        }
        self.tokens[layer] += tokens as u64;
        Ok(())
    }

    /// Tokens collected of each layer.
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// The calibration that suits what was collected.
    ///
    /// # Errors
    /// [`Error::Config`] for a layer of which no token was collected, or whose keys are past ±10³⁰.
    pub fn calibration(&self) -> Result<KeyCalibration> {
        if let Some(layer) = self.tokens.iter().position(|&tokens| tokens == 0) {
            let rule = "a calibration needs keys of every layer";
            return Err(Error::Config { field: "statistics", value: format!("empty for layer {layer}"), rule });
        }
        let row = row(&self.geometry);
        let fits = self.channels.iter().enumerate().map(|(at, channel)| channel.fit(self.tokens[at / row]));
        let (mean, scale) = fits.unzip();
        KeyCalibration::new(&self.geometry, mean, scale)
    }
}

impl Channel {
    /// Mean and scale.
    fn fit(&self, tokens: u64) -> (f32, f32) {
        if self.least == self.most {
            return (self.least, 1.0);
        }
        let mean = (self.sum / tokens as f64) as f32;
        (mean, (self.most - mean).max(mean - self.least).sqrt())
    }
}

/// Elements of a token's keys.
fn row(geometry: &Geometry) -> usize {
    geometry.kv_heads() as usize * geometry.k_dim() as usize
}

/// Tokens of keys `[token, kv_head, k_dim]`; [`Error::Shape`] where the last one is not whole.
pub(super) fn whole_tokens(geometry: &Geometry, keys: &[f32]) -> Result<usize> {
    let (row, got) = (row(geometry), keys.len() as u64);
    match keys.len().checked_rem(row) {
        Some(0) => Ok(keys.len() / row),
        _ => Err(Error::Shape { what: "elements of keys", got, expected: got.next_multiple_of(row.max(1) as u64) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Geometry {
        Geometry::new(2, 4, 2, 16)
    }

    #[test]
    fn means_and_scales_are_those_of_all_parts_together() {
        let key = |token: usize, at: usize| (at as f32 - 9.0) * 3.0 + ((token * 31 + at * 17) % 13) as f32 - 6.0;
        let keys: Vec<f32> = (0..65).flat_map(|token| (0..32).map(move |at| key(token, at))).collect();
        let mut statistics = KeyStatistics::new(&model()).unwrap();
        statistics.add(0, &keys).unwrap();
        for part in [&keys[..32], &[], &keys[32..96], &keys[96..]] {
            statistics.add(1, part).unwrap();
        }
        assert_eq!(statistics.tokens(), [65, 65]);
        let calibration = statistics.calibration().unwrap();
        for (head, channel) in [(0, 0), (0, 15), (1, 3)] {
            let at = head as usize * 16 + channel;
            let all: Vec<f64> = (0..65).map(|token| f64::from(key(token, at))).collect();
            let mean = all.iter().sum::<f64>() / 65.0;
            let reach = all.iter().map(|x| (x - mean).abs()).fold(0.0, f64::max);
            for layer in 0..2 {
                assert!((f64::from(calibration.mean(layer, head)[channel]) - mean).abs() < 1e-5);
                assert!((f64::from(calibration.scale(layer, head)[channel]) - reach.sqrt()).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn channels_that_never_vary_keep_their_scale_and_almost_nothing_is_something() {
        let mut statistics = KeyStatistics::new(&model()).unwrap();
        let mut tokens = [vec![-7.5; 32], vec![-7.5; 32]].concat();
        (tokens[1], tokens[33]) = (0.0, f32::from_bits(2));
        statistics.add(0, &tokens).unwrap();
        statistics.add(1, &[0.1; 32 * 3]).unwrap();
        let calibration = statistics.calibration().unwrap();
        assert_eq!((calibration.mean(0, 0)[0], calibration.scale(0, 0)[0]), (-7.5, 1.0));
        assert!(calibration.scale(0, 0)[1] > 0.0 && calibration.scale(0, 0)[1] < 1e-20);
        assert!(calibration.mean(1, 1).iter().zip(calibration.scale(1, 1)).all(|pair| pair == (&0.1, &1.0)));
    }

    #[test]
    fn what_is_refused_is_not_added() {
        let mut statistics = KeyStatistics::new(&model()).unwrap();
        assert!(matches!(statistics.add(2, &[0.0; 32]), Err(Error::UnknownLayer { layer: 2, layers: 2 })));
        assert!(matches!(statistics.add(0, &[0.0; 33]), Err(Error::Shape { got: 33, expected: 64, .. })));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let keys = [[1.0; 32], [bad; 32]].concat();
            assert!(matches!(statistics.add(0, &keys), Err(Error::NonFinite { count: 32 })));
        }
        statistics.add(0, &[3.0; 32]).unwrap();
        assert_eq!(statistics.tokens(), [1, 0]);
        assert!(matches!(statistics.calibration(), Err(Error::Config { field: "statistics", .. })));
        statistics.add(1, &[f32::MAX; 32]).unwrap();
        assert!(matches!(statistics.calibration(), Err(Error::Config { field: "calibration.mean", .. })));
        assert!(matches!(KeyStatistics::new(&Geometry::new(0, 1, 1, 16)), Err(Error::Geometry { .. })));
    }
}
