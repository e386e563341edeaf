//! Where does a projected key live? The record of one page's projections, and the one address formula over it.
//!
//! ```text
//! [ keys: kv_head × slot × rank bf16 ][ residual norms: kv_head × slot × f32 ]
//! ```
//!
//! so, in 32-bit words from the start of the record,
//!
//! ```text
//! key(head, slot)  =             (head × page_size + slot) × rank / 2
//! norm(head, slot) = norm_base + (head × page_size + slot),       norm_base = kv_heads × page_size × rank / 2
//! ```
//!
//! Records are numbered and kept in slabs as frames are: record `r` starts `(r & (2^slab_shift - 1)) × record_words` words
//! into slab `r >> slab_shift`. `shaders/projections.wgsl` and `kernels/projections.cuh` state the same formula.
//!
//! The norm of a token is that of what its key has outside the basis. `project` writes zero there: no operation computes or
//! reads it yet.

use crate::backend::params::ProjectionParams;
use crate::record::FRAME_ALIGN;
use crate::{Error, Geometry, Result};

/// The layout of one page's projected keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projections {
    kv_heads: u32,
    page_tokens: u32,
    rank: u32,
}

impl Projections {
    /// The layout for pages of this geometry in `rank` dimensions.
    ///
    /// # Errors
    /// [`Error::Config`] for a rank that is not a multiple of 8 from 8 to 128; [`Error::Geometry`].
    pub fn new(geometry: &Geometry, rank: u32) -> Result<Self> {
        let geometry = geometry.validate()?;
        check_rank(rank)?;
        Ok(Projections { kv_heads: geometry.kv_heads(), page_tokens: geometry.page_tokens(), rank })
    }

    /// Dimensions of a projected key.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Bytes of one projected key.
    pub const fn key_bytes(&self) -> u64 {
        self.rank as u64 * 2
    }

    const fn rows(&self) -> u64 {
        self.kv_heads as u64 * self.page_tokens as u64
    }

    const fn row(&self, head: u32, slot: u32) -> u64 {
        head as u64 * self.page_tokens as u64 + slot as u64
    }

    /// Byte offset of the projected key of (`head`, `slot`) in the record: `rank` bf16 elements.
    pub const fn key(&self, head: u32, slot: u32) -> u64 {
        self.row(head, slot) * self.key_bytes()
    }

    /// Byte offset of the residual norm of (`head`, `slot`) in the record: one f32.
    pub const fn norm(&self, head: u32, slot: u32) -> u64 {
        self.norm_base() + self.row(head, slot) * 4
    }

    /// Byte offset of the first residual norm.
    pub const fn norm_base(&self) -> u64 {
        self.rows() * self.key_bytes()
    }

    /// Bytes of the record.
    pub const fn bytes(&self) -> u64 {
        self.norm_base() + self.rows() * 4
    }

    /// Bytes from one record to the next in a slab: the record rounded up to a multiple of 256.
    pub const fn stride(&self) -> u64 {
        self.bytes().next_multiple_of(FRAME_ALIGN)
    }

    /// What kernels need to evaluate the formula, for records numbered with `slab_shift` index bits.
    pub fn params(&self, slab_shift: u32) -> ProjectionParams {
        let words = |bytes: u64| u32::try_from(bytes / 4).expect("a validated record is far below 2^32 words");
        ProjectionParams {
            page_shift: self.page_tokens.trailing_zeros(),
            kv_heads: self.kv_heads,
            rank: self.rank,
            key_words: words(self.key_bytes()),
            norm_base_words: words(self.norm_base()),
            record_words: words(self.stride()),
            slab_shift,
            reserved: 0,
        }
    }
}

/// Checks a rank, whoever asks for it.
pub(super) fn check_rank(rank: u32) -> Result<()> {
    if (8..=128).contains(&rank) && rank.is_multiple_of(8) {
        return Ok(());
    }
    Err(Error::Config { field: "rank", value: rank.to_string(), rule: "it must be a multiple of 8 from 8 to 128" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_norms_tile_the_record_without_gap_or_overlap() {
        for (heads, page, rank) in [(1, 8, 8), (8, 16, 32), (3, 64, 24), (2, 256, 128)] {
            let layout = Projections::new(&Geometry::new(1, heads, heads, 64).page_size(page), rank).unwrap();
            let places = |at: fn(&Projections, u32, u32) -> u64| {
                (0..heads).flat_map(move |head| (0..page).map(move |slot| at(&layout, head, slot)))
            };
            let mut next = 0;
            for at in places(Projections::key) {
                assert_eq!((at, at % 16), (next, 0));
                next += layout.key_bytes();
            }
            for at in places(Projections::norm) {
                assert_eq!(at, next);
                next += 4;
            }
            assert_eq!(layout.bytes(), next);
            assert!(layout.stride() >= next && layout.stride().is_multiple_of(256));
        }
    }

    #[test]
    fn ranks_that_no_kernel_has_are_refused() {
        let geometry = Geometry::new(1, 1, 1, 128);
        for rank in [0, 1, 4, 12, 33, 136, 256, u32::MAX] {
            let error = Projections::new(&geometry, rank).unwrap_err();
            assert!(matches!(&error, Error::Config { field: "rank", value, .. } if *value == rank.to_string()));
        }
        assert!(matches!(Projections::new(&Geometry::new(1, 1, 1, 12), 8), Err(Error::Geometry { .. })));
    }
}
