//! What stands where in a store file: the header block, the slots, the index. Pure.
//!
//! ```text
//! 0      header block: magic, version, length and checksum of the description, the description as JSON, zeros
//! 4096   slot 0, slot 1, … each one record, zeros up to its stride
//! end    index (of a closed file only): generation and checksum of every slot, then the caller's bytes
//! ```

use crate::record::{FILE_ALIGN, Record};
use crate::{Error, Geometry, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the header block; slot 0 stands right behind it.
pub(super) const HEADER: u64 = FILE_ALIGN;
const MAGIC: [u8; 8] = *b"kvtidepg";
const VERSION: u32 = 1;
/// Where the description starts: after magic (8), version (4), length (4) and checksum (8).
const DESCRIPTION: usize = 24;

/// Whose pages a store file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// What the pages look like.
    pub geometry: Geometry,
    /// The caller's number for the model and whatever else decides what K and V are.
    pub fingerprint: u64,
}

/// Where the slots are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes of a record.
    pub(super) record: usize,
    /// Bytes from one record to the next.
    pub(super) stride: usize,
    /// Slots of the file.
    pub(super) slots: u32,
}

impl Layout {
    /// The layout of `slots` pages. A page is at most 2 GiB, so that every offset stays below 2^63.
    pub(super) fn new(geometry: Geometry, slots: u32) -> Result<Layout> {
        let record = Record::new(geometry.validate()?);
        let size = |bytes: u64| {
            usize::try_from(bytes).map_err(|_| Error::TooLarge {
                what: "bytes of a page",
                value: bytes,
                maximum: usize::MAX as u64,
            })
        };
        Ok(Layout { record: size(record.bytes())?, stride: size(record.file_stride())?, slots })
    }

    /// Where a slot starts.
    pub(super) fn offset(&self, slot: u32) -> u64 {
        HEADER + u64::from(slot) * self.stride as u64
    }

    /// Where the slots end.
    pub(super) fn end(&self) -> u64 {
        self.offset(self.slots)
    }
}

/// The index of a closed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) checksum: u64,
}

/// The description in a header block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) identity: Identity,
    pub(super) record_bytes: u64,
    pub(super) stride: u64,
    pub(super) slots: u32,
    /// Where the index is; none while the file is in use.
    pub(super) index: Option<Index>,
}

impl Header {
    /// The header of a file in use.
    pub(super) fn new(identity: Identity, layout: &Layout) -> Header {
        let Layout { record, stride, slots } = *layout;
        Header { identity, record_bytes: record as u64, stride: stride as u64, slots, index: None }
    }

    /// The header block.
    pub(super) fn encode(&self) -> [u8; HEADER as usize] {
        let description = serde_json::to_vec(self).expect("plain numbers have a JSON form");
        let mut block = [0; HEADER as usize];
        block[..8].copy_from_slice(&MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_le_bytes());
        block[12..16].copy_from_slice(&(description.len() as u32).to_le_bytes());
        block[DESCRIPTION..DESCRIPTION + description.len()].copy_from_slice(&description);
        let checksum = xxh3_64(&block);
        block[16..24].copy_from_slice(&checksum.to_le_bytes());
        block
    }

    /// Reads a header block: magic, version, checksum and description, in this order.
    pub(super) fn decode(path: &str, block: &[u8; HEADER as usize]) -> Result<Header> {
        let number = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
        if block[..8] != MAGIC {
            return Err(wrong(path, "magic", block[..8].escape_ascii(), MAGIC.escape_ascii()));
        }
        if number(8) != VERSION {
            return Err(wrong(path, "format version", number(8), VERSION));
        }
        let mut rest = *block;
        rest[16..24].fill(0);
        let stated = u64::from_le_bytes(block[16..24].try_into().expect("eight bytes"));
        let found = xxh3_64(&rest);
        if found != stated {
            return Err(wrong(path, "header checksum", format!("{found:#018x}"), format!("{stated:#018x}")));
        }
        let description = DESCRIPTION..DESCRIPTION.saturating_add(number(12) as usize);
        let description = block.get(description).unwrap_or_default();
        serde_json::from_slice(description)
            .map_err(|error| wrong(path, "header", error, "a description of this version"))
    }

    /// Refuses a file of another identity, of another layout, or that was not closed; else its layout and index.
    pub(super) fn check(&self, path: &str, want: Identity) -> Result<(Layout, Index)> {
        let (has, wants) = (&self.identity.geometry, &want.geometry);
        let layout = Layout::new(want.geometry, self.slots)?;
        let numbers: [(&'static str, u64, u64); 9] = [
            ("layers", has.layers().into(), wants.layers().into()),
            ("q_heads", has.q_heads().into(), wants.q_heads().into()),
            ("kv_heads", has.kv_heads().into(), wants.kv_heads().into()),
            ("head_dim", has.k_dim().into(), wants.k_dim().into()),
            ("value_dim", has.v_dim().into(), wants.v_dim().into()),
            ("page_size", has.page_tokens().into(), wants.page_tokens().into()),
            ("fingerprint", self.identity.fingerprint, want.fingerprint),
            ("record bytes", self.record_bytes, layout.record as u64),
            ("stride", self.stride, layout.stride as u64),
        ];
        if has.page_format() != wants.page_format() {
            return Err(wrong(path, "format", has.page_format().name(), wants.page_format().name()));
        }
        match numbers.into_iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => Err(wrong(path, what, found, expected)),
            None => match self.index {
                None => Err(wrong(path, "state", "not closed", "closed")),
                Some(index) if index.offset != layout.end() => {
                    Err(wrong(path, "index offset", index.offset, layout.end()))
                }
                Some(index) => Ok((layout, index)),
            },
        }
    }
}

/// The error of a file whose `what` is not as it should be.
pub(super) fn wrong(path: &str, what: &'static str, found: impl Display, expected: impl Display) -> Error {
    Error::WrongFile { path: path.to_owned(), what, found: found.to_string(), expected: expected.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageFormat;

    fn identity() -> Identity {
        Identity { geometry: Geometry::new(2, 8, 4, 64), fingerprint: 0xfeed_0000_0000_0001 }
    }

    fn header() -> Header {
        let index = Index { offset: 4096 + 5 * 16_384, bytes: 80, checksum: u64::MAX };
        let layout = Layout::new(identity().geometry, 5).unwrap();
        Header { index: Some(index), ..Header::new(identity(), &layout) }
    }

    fn what(error: Error) -> &'static str {
        match error {
            Error::WrongFile { what, .. } => what,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_header_reads_back_and_any_flipped_bit_is_seen() {
        let block = header().encode();
        assert_eq!(Header::decode("f", &block).unwrap(), header());
        for bit in 0..block.len() * 8 {
            let mut bad = block;
            bad[bit / 8] ^= 1 << (bit % 8);
            let expected =
                ["magic", "format version", "header checksum"][(bit / 8 >= 8) as usize + (bit / 8 >= 12) as usize];
            assert_eq!(what(Header::decode("f", &bad).unwrap_err()), expected, "bit {bit}");
        }
    }

    #[test]
    fn a_description_that_is_sealed_but_wrong_is_refused() {
        let seal = |mut block: [u8; 4096]| {
            block[16..24].fill(0);
            let checksum = xxh3_64(&block);
            block[16..24].copy_from_slice(&checksum.to_le_bytes());
            block
        };
        let mut long = header().encode();
        long[12..16].fill(0xff);
        assert_eq!(what(Header::decode("f", &seal(long)).unwrap_err()), "header");
        let mut heads = header().encode();
        let at = heads.windows(12).position(|w| w == b"\"kv_heads\":4").unwrap();
        heads[at + 11] = b'3';
        assert_eq!(what(Header::decode("f", &seal(heads)).unwrap_err()), "header");
    }

    #[test]
    fn each_part_that_differs_is_named() {
        let g = identity().geometry;
        let other = |geometry| Identity { geometry, ..identity() };
        for (expected, want) in [
            ("layers", other(Geometry::new(3, 8, 4, 64))),
            ("q_heads", other(Geometry::new(2, 16, 4, 64))),
            ("kv_heads", other(Geometry::new(2, 8, 2, 64))),
            ("head_dim", other(Geometry::new(2, 8, 4, 32).value_dim(64))),
            ("value_dim", other(g.value_dim(32))),
            ("page_size", other(g.page_size(32))),
            ("format", other(g.format(PageFormat::F16))),
            ("fingerprint", Identity { fingerprint: 1, ..identity() }),
        ] {
            assert_eq!(what(header().check("f", want).unwrap_err()), expected);
        }
        assert!(header().check("f", identity()).is_ok());
        assert_eq!(what(Header { record_bytes: 1, ..header() }.check("f", identity()).unwrap_err()), "record bytes");
        assert_eq!(what(Header { stride: 1, ..header() }.check("f", identity()).unwrap_err()), "stride");
        assert_eq!(what(Header { index: None, ..header() }.check("f", identity()).unwrap_err()), "state");
        assert_eq!(what(Header { slots: 6, ..header() }.check("f", identity()).unwrap_err()), "index offset");
    }

    #[test]
    fn the_largest_layout_fits_an_offset_and_a_wrong_geometry_is_refused() {
        let large = Geometry::new(1, 4096, 4096, 256).page_size(256).format(PageFormat::F32);
        assert!(Layout::new(large, u32::MAX).unwrap().end() <= i64::MAX as u64);
        assert!(matches!(Layout::new(Geometry::new(1, 3, 2, 64), 1), Err(Error::Geometry { .. })));
    }
}
