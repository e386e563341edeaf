//! Where a byte of a page lives: the one address formula, for frames, host memory and files alike.
//!
//! A page is one contiguous record, HND as FlashInfer reads it too:
//!
//! ```text
//! [ K: kv_head × slot × k_row ][ V: kv_head × slot × v_row ][ K scales: kv_head × slot × f32 ][ V scales: … ]
//! ```
//!
//! (scales in quantised formats only), so, in 32-bit words from the start of the record and with row = head × page_size +
//! slot and rows = kv_heads × page_size,
//!
//! ```text
//! key(head, slot)         =              row × k_row_words
//! value(head, slot)       = v_base     + row × v_row_words,   v_base     = rows × k_row_words
//! key_scale(head, slot)   = scale_base + row,                 scale_base = v_base + rows × v_row_words
//! value_scale(head, slot) = scale_base + rows + row
//! ```
//!
//! and a frame `f` starts `(f & (2^slab_shift - 1)) × frame_words` words into slab `f >> slab_shift` of the arena.
//! `shaders/record.wgsl` and `kernels/record.cuh` state the same formula over the same parameters
//! ([`RecordParams`]); nothing else computes an address inside a page.

use crate::backend::params::RecordParams;
use crate::{Geometry, PageFormat};

/// Frames start on multiples of this many bytes.
pub const FRAME_ALIGN: u64 = 256;
/// Records in a file start on multiples of this many bytes.
pub const FILE_ALIGN: u64 = 4096;

/// The layout of one page of a [`Geometry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    geometry: Geometry,
}

impl Record {
    /// The layout of this geometry's pages.
    pub const fn new(geometry: Geometry) -> Self {
        Record { geometry }
    }

    /// The geometry that it follows from.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The format of its elements.
    pub const fn format(&self) -> PageFormat {
        self.geometry.page_format()
    }

    /// Bytes of one key row.
    pub const fn k_row_bytes(&self) -> u64 {
        self.format().row_bytes(self.geometry.k_dim())
    }

    /// Bytes of one value row.
    pub const fn v_row_bytes(&self) -> u64 {
        self.format().row_bytes(self.geometry.v_dim())
    }

    const fn rows(&self) -> u64 {
        self.geometry.kv_heads() as u64 * self.geometry.page_tokens() as u64
    }

    const fn row(&self, head: u32, slot: u32) -> u64 {
        head as u64 * self.geometry.page_tokens() as u64 + slot as u64
    }

    /// Byte offset of the key of (`head`, `slot`) in the record.
    pub const fn key(&self, head: u32, slot: u32) -> u64 {
        self.row(head, slot) * self.k_row_bytes()
    }

    /// Byte offset of the value of (`head`, `slot`) in the record.
    pub const fn value(&self, head: u32, slot: u32) -> u64 {
        self.value_base() + self.row(head, slot) * self.v_row_bytes()
    }

    /// Byte offset of the first value row.
    pub const fn value_base(&self) -> u64 {
        self.rows() * self.k_row_bytes()
    }

    /// Byte offset of the scale of the key of (`head`, `slot`), in quantised formats.
    pub const fn key_scale(&self, head: u32, slot: u32) -> u64 {
        self.scale_base() + self.row(head, slot) * self.format().scale_bytes()
    }

    /// Byte offset of the scale of the value of (`head`, `slot`), in quantised formats.
    pub const fn value_scale(&self, head: u32, slot: u32) -> u64 {
        self.key_scale(head, slot) + self.rows() * self.format().scale_bytes()
    }

    /// Byte offset of the first key scale: the end of the values.
    pub const fn scale_base(&self) -> u64 {
        self.value_base() + self.rows() * self.v_row_bytes()
    }

    /// Bytes of the record.
    pub const fn bytes(&self) -> u64 {
        self.scale_base() + 2 * self.rows() * self.format().scale_bytes()
    }

    /// Bytes from one frame to the next in a slab: the record rounded up to [`FRAME_ALIGN`].
    pub const fn frame_stride(&self) -> u64 {
        self.bytes().next_multiple_of(FRAME_ALIGN)
    }

    /// Bytes from one record to the next in a file: the record rounded up to [`FILE_ALIGN`].
    pub const fn file_stride(&self) -> u64 {
        self.bytes().next_multiple_of(FILE_ALIGN)
    }

    /// Bytes of a file that each record leaves unused: none where the record is a multiple of [`FILE_ALIGN`]. Int8 records
    /// often are not; [`Geometry::snug_page_size`] says for which page size they are.
    pub const fn file_padding(&self) -> u64 {
        self.file_stride() - self.bytes()
    }

    /// What kernels need to evaluate the formula, for frames numbered with `slab_shift` index bits.
    pub fn params(&self, slab_shift: u32) -> RecordParams {
        let words = |bytes: u64| u32::try_from(bytes / 4).expect("a validated record is far below 2^32 words");
        RecordParams {
            page_shift: self.geometry.page_tokens().trailing_zeros(),
            kv_heads: self.geometry.kv_heads(),
            k_dim: self.geometry.k_dim(),
            v_dim: self.geometry.v_dim(),
            k_row_words: words(self.k_row_bytes()),
            v_row_words: words(self.v_row_bytes()),
            v_base_words: words(self.value_base()),
            record_words: words(self.bytes()),
            frame_words: words(self.frame_stride()),
            slab_shift,
            format: self.format().code(),
            scale_base_words: words(self.scale_base()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_tile_the_record_without_gap_or_overlap() {
        for (heads, k_dim, v_dim, page, format) in [
            (1, 16, 16, 8, PageFormat::F32),
            (8, 128, 128, 16, PageFormat::Bf16),
            (3, 80, 96, 64, PageFormat::F16),
            (8, 128, 128, 16, PageFormat::Int8),
            (3, 24, 40, 8, PageFormat::Int8),
        ] {
            let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(v_dim).page_size(page).format(format);
            let record = Record::new(geometry.validate().unwrap());
            let mut next = 0;
            for head in 0..heads {
                for slot in 0..page {
                    assert_eq!(record.key(head, slot), next);
                    next += record.k_row_bytes();
                }
            }
            for head in 0..heads {
                for slot in 0..page {
                    assert_eq!(record.value(head, slot), next);
                    next += record.v_row_bytes();
                }
            }
            for scale in [Record::key_scale, Record::value_scale] {
                for (head, slot) in (0..heads).flat_map(|head| (0..page).map(move |slot| (head, slot))) {
                    assert_eq!(scale(&record, head, slot), next);
                    next += if format == PageFormat::Int8 { 4 } else { 0 };
                }
            }
            assert_eq!(record.bytes(), next);
            assert!(record.frame_stride() >= next && record.frame_stride().is_multiple_of(FRAME_ALIGN));
            assert!(record.file_stride() >= next && record.file_stride().is_multiple_of(FILE_ALIGN));
        }
    }

    #[test]
    fn the_issue_example_is_64_kib_a_page() {
        let record = Record::new(Geometry::new(32, 32, 8, 128).validate().unwrap());
        assert_eq!(record.bytes(), 65_536);
        assert_eq!((record.key(0, 1), record.key(1, 0), record.value(0, 0)), (256, 4096, 32_768));
    }

    #[test]
    fn int8_records_say_what_a_file_wastes_and_which_page_size_does_not() {
        let geometry = Geometry::new(32, 32, 8, 128).format(PageFormat::Int8);
        let record = Record::new(geometry.validate().unwrap());
        assert_eq!((record.bytes(), record.frame_stride(), record.file_stride()), (33_792, 33_792, 36_864));
        assert_eq!((record.file_padding(), geometry.snug_page_size()), (3_072, Some(64)));
        let snug = Record::new(geometry.page_size(64));
        assert_eq!((snug.bytes(), snug.file_padding()), (135_168, 0));
        assert_eq!(Geometry::new(32, 32, 8, 128).snug_page_size(), Some(16));
        assert_eq!(Geometry::new(1, 1, 1, 24).format(PageFormat::Int8).snug_page_size(), None);
    }
}
