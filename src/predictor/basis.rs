//! Which few directions are keys and queries looked at from? Matrices `[k_dim, rank]`, one for all or one a KV head.

use super::layout::check_rank;
use crate::{Error, Geometry, Result};
use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Where a basis comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BasisKind {
    /// Seeded Gaussian numbers ([`Basis::gaussian`]).
    Gaussian,
    /// Given matrices ([`Basis::from_matrices`]).
    Given,
}

impl BasisKind {
    /// Both kinds.
    pub const ALL: [BasisKind; 2] = [BasisKind::Gaussian, BasisKind::Given];

    /// Lower-case name, as files have it.
    pub const fn name(self) -> &'static str {
        match self {
            BasisKind::Gaussian => "gaussian",
            BasisKind::Given => "given",
        }
    }
}

/// Matrices P `[k_dim, rank]`, row-major, whose elements are bf16 numbers: one for each layer and KV head, or one for all.
///
/// ```
/// use kvtide::{Geometry, predictor::Basis};
/// let model = Geometry::new(32, 32, 8, 128);
/// let basis = Basis::gaussian(&model, 32, 7)?;
/// assert_eq!(basis.matrix(31, 7), basis.matrix(0, 0));
/// assert_eq!((basis.device_bytes(0).len(), basis.head_stride()), (128 * 32 * 2, 0));
/// # Ok::<(), kvtide::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Basis {
    pub(super) kind: BasisKind,
    pub(super) k_dim: u32,
    pub(super) rank: u32,
    /// Layers and KV heads that have a matrix of their own: (1, 1) when one serves all.
    pub(super) each: (u32, u32),
    /// `[layer, kv_head, k_dim, rank]`.
    pub(super) values: Vec<f32>,
}

impl Basis {
    /// One matrix for all layers and KV heads: independent normal numbers of variance 1 / k_dim, rounded to bf16.
    ///
    /// The numbers come from a ChaCha8 stream with this seed by Marsaglia's polar method in f64 (G. Marsaglia and
    /// T. Bray, *A convenient method for generating normal variables*, 1964), so they are the same everywhere.
    ///
    /// # Errors
    /// [`Error::Config`] for a rank that is not a multiple of 8 from 8 to 128; [`Error::Geometry`].
    pub fn gaussian(geometry: &Geometry, rank: u32, seed: u64) -> Result<Self> {
        let k_dim = geometry.validate()?.k_dim();
        check_rank(rank)?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut stream = ChaCha8Rng::from_seed(key);
        let scale = 1.0 / f64::from(k_dim).sqrt();
        let mut values = Vec::with_capacity((k_dim * rank) as usize);
        while values.len() < (k_dim * rank) as usize {
            values.extend(normal_pair(&mut stream).map(|x| round((x * scale) as f32)));
        }
        Ok(Basis { kind: BasisKind::Gaussian, k_dim, rank, each: (1, 1), values })
    }

    /// Matrices of the caller's, `[layer, kv_head, k_dim, rank]` or one `[k_dim, rank]` for all; rounded to bf16.
    ///
    /// # Errors
    /// [`Error::Config`] for a rank that is not a multiple of 8 from 8 to 128, or a value that is not finite in bf16;
    /// [`Error::Shape`] for another number of values; [`Error::Geometry`].
    pub fn from_matrices(geometry: &Geometry, rank: u32, values: &[f32]) -> Result<Self> {
        let geometry = geometry.validate()?;
        check_rank(rank)?;
        let one = u64::from(geometry.k_dim()) * u64::from(rank);
        let all = u64::from(geometry.layers()) * u64::from(geometry.kv_heads()) * one;
        let each = match values.len() as u64 {
            n if n == all => (geometry.layers(), geometry.kv_heads()),
            n if n == one => (1, 1),
            got => return Err(Error::Shape { what: "the number of values of a basis", got, expected: all }),
        };
        let values: Vec<f32> = values.iter().map(|&x| round(x)).collect();
        match values.iter().find(|x| !x.is_finite()) {
            Some(x) => {
                Err(Error::Config { field: "basis", value: x.to_string(), rule: "its values must be finite in bf16" })
            }
            None => Ok(Basis { kind: BasisKind::Given, k_dim: geometry.k_dim(), rank, each, values }),
        }
    }

    /// Where it comes from.
    pub fn kind(&self) -> BasisKind {
        self.kind
    }

    /// Dimensions of what it projects on.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Elements of the keys and queries that it projects.
    pub fn k_dim(&self) -> u32 {
        self.k_dim
    }

    /// Whether one matrix serves all layers and KV heads.
    pub fn is_shared(&self) -> bool {
        self.each == (1, 1)
    }

    /// Checks that the basis has a matrix for every layer and KV head of a geometry.
    ///
    /// # Errors
    /// [`Error::Shape`] with the first dimension that differs.
    pub fn fits(&self, geometry: &Geometry) -> Result<()> {
        let own = [
            ("layers of a basis", self.each.0, geometry.layers()),
            ("KV heads of a basis", self.each.1, geometry.kv_heads()),
        ];
        let own = own.into_iter().filter(|_| !self.is_shared());
        let mut dims = own.chain([("k_dim of a basis", self.k_dim, geometry.k_dim())]);
        match dims.find(|(_, got, expected)| got != expected) {
            Some((what, got, expected)) => Err(Error::Shape { what, got: got.into(), expected: expected.into() }),
            None => Ok(()),
        }
    }

    /// P `[k_dim, rank]` of a layer and KV head. Layers and heads past the last count from the first again.
    pub fn matrix(&self, layer: u32, kv_head: u32) -> &[f32] {
        let (layers, heads) = self.each;
        let one = (self.k_dim * self.rank) as usize;
        &self.values[((layer % layers) * heads + kv_head % heads) as usize * one..][..one]
    }

    /// A layer's matrices as device memory holds them: bf16 `[kv_head, k_dim, rank]`, or `[k_dim, rank]` when shared.
    pub fn device_bytes(&self, layer: u32) -> Vec<u8> {
        let heads = 0..self.each.1;
        heads.flat_map(|head| self.matrix(layer, head)).flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
    }

    /// Elements from one KV head's matrix to the next in [`device_bytes`](Self::device_bytes); 0 when shared.
    pub fn head_stride(&self) -> u32 {
        if self.is_shared() { 0 } else { self.k_dim * self.rank }
    }
}

/// The nearest bf16 number.
fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Two independent standard normal numbers.
fn normal_pair(stream: &mut ChaCha8Rng) -> [f64; 2] {
    // 53 random bits as a number in [-1, 1).
    let mut unit = || (stream.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    loop {
        let (x, y) = (unit(), unit());
        let square = x * x + y * y;
        if square > 0.0 && square < 1.0 {
            let factor = (-2.0 * square.ln() / square).sqrt();
            return [x * factor, y * factor];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_bits_everywhere() {
        let checksum = |seed| {
            let basis = Basis::gaussian(&Geometry::new(4, 8, 2, 128), 32, seed).unwrap();
            xxhash_rust::xxh3::xxh3_64(&basis.device_bytes(0))
        };
        let first = Basis::gaussian(&Geometry::new(1, 1, 1, 128), 32, 0).unwrap().device_bytes(0);
        // Of another implementation of the stream and the method.
        let known = [0x3dc0, 0x3d16, 0xbcda, 0xbd1c, 0xbcbd, 0xbd1b, 0xbdd4, 0x3dd1u16];
        assert!(first.iter().zip(known.into_iter().flat_map(u16::to_le_bytes)).all(|(got, want)| *got == want));
        assert_eq!([checksum(0), checksum(7)], [0x736f_d260_ce16_8453, 0x54df_0eba_a378_375c]);
    }

    #[test]
    fn gaussian_values_have_mean_0_and_variance_1_over_k_dim() {
        for (k_dim, rank) in [(16, 128), (128, 32), (256, 64)] {
            let basis = Basis::gaussian(&Geometry::new(1, 1, 1, k_dim), rank, 3).unwrap();
            let values: Vec<f64> = basis.values.iter().map(|&x| f64::from(x) * f64::from(k_dim).sqrt()).collect();
            let moment = |p| values.iter().map(|x| x.powi(p)).sum::<f64>() / values.len() as f64;
            let (mean, variance, fourth) = (moment(1), moment(2), moment(4));
            assert!(mean.abs() < 0.09 && (variance - 1.0).abs() < 0.1 && (fourth - 3.0).abs() < 0.7);
            assert!(basis.values.iter().all(|&x| round(x) == x));
        }
    }

    #[test]
    fn given_matrices_are_found_by_layer_and_head() {
        let geometry = Geometry::new(3, 4, 2, 16);
        let values: Vec<f32> = (0..3 * 2 * 16 * 8).map(|at| (at / 128) as f32).collect();
        let basis = Basis::from_matrices(&geometry, 8, &values).unwrap();
        for (layer, head) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
            assert!(basis.matrix(layer, head).iter().all(|&x| x == (2 * layer + head) as f32));
        }
        assert_eq!((basis.device_bytes(1).len(), basis.head_stride()), (2 * 16 * 8 * 2, 128));
        assert_eq!(basis.device_bytes(1)[256..258], bf16::from_f32(3.0).to_le_bytes());
        assert!(basis.fits(&geometry).is_ok());
        for other in [Geometry::new(2, 4, 2, 16), Geometry::new(3, 4, 4, 16), Geometry::new(3, 4, 2, 24)] {
            assert!(matches!(basis.fits(&other), Err(Error::Shape { .. })));
        }
        let shared = Basis::from_matrices(&geometry, 8, &values[..128]).unwrap();
        assert!(shared.is_shared() && shared.fits(&Geometry::new(9, 4, 4, 16)).is_ok());
    }

    #[test]
    fn wrong_ranks_counts_and_values_are_refused() {
        let geometry = Geometry::new(2, 2, 2, 16);
        for rank in [0, 7, 12, 136] {
            let got = [Basis::gaussian(&geometry, rank, 0), Basis::from_matrices(&geometry, rank, &[])];
            assert!(got.iter().all(|basis| matches!(basis, Err(Error::Config { field: "rank", .. }))));
        }
        for count in [0, 127, 129, 256, 513] {
            let got = Basis::from_matrices(&geometry, 8, &vec![0.0; count]);
            assert!(matches!(got, Err(Error::Shape { got, .. }) if got == count as u64));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
            let got = Basis::from_matrices(&geometry, 8, &[bad; 128]);
            assert!(matches!(got, Err(Error::Config { field: "basis", .. })));
        }
    }
}
