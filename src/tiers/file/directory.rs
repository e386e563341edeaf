//! What each slot holds: its generation and the checksum of its bytes, in memory while the file is open.

use super::format::{Index, Layout, wrong};
use super::lock;
use crate::{Error, PageFault, Result};
use std::sync::Mutex;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes of an entry in the index.
const ENTRY: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Entry {
    /// 0: nothing that can be read.
    generation: u64,
    checksum: u64,
}

/// The entries of all slots.
#[derive(Debug)]
pub(super) struct Directory {
    entries: Mutex<Vec<Entry>>,
}

/// The checksum of a record: of its bytes, its slot and its generation.
pub(super) fn checksum(slot: u32, generation: u64, record: &[u8]) -> u64 {
    xxh3_64_with_seed(record, generation ^ u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Directory {
    /// Nothing written yet.
    pub(super) fn new(layout: &Layout) -> Result<Self> {
        let (mut entries, slots) = (Vec::new(), layout.slots as usize);
        entries.try_reserve_exact(slots).map_err(|_| Error::OutOfMemory {
            backend: "store file",
            bytes: u64::from(layout.slots) * ENTRY as u64,
            purpose: "generation and checksum of each slot".to_owned(),
        })?;
        entries.resize(slots, Entry::default());
        Ok(Directory { entries: Mutex::new(entries) })
    }

    /// The slot's generation; 0 when it holds nothing.
    pub(super) fn generation(&self, slot: u32) -> u64 {
        lock(&self.entries).get(slot as usize).map_or(0, |entry| entry.generation)
    }

    /// The slot is about to be overwritten: what it held is gone.
    pub(super) fn clear(&self, slot: u32) {
        self.set(slot, 0, 0);
    }

    /// The slot holds these bytes now.
    pub(super) fn set(&self, slot: u32, generation: u64, checksum: u64) {
        lock(&self.entries)[slot as usize] = Entry { generation, checksum };
    }

    /// Whether `record`, as read, is what was written to `slot` as `generation`.
    pub(super) fn verify(&self, slot: u32, generation: u64, record: &[u8]) -> Result<(), PageFault> {
        let entry = lock(&self.entries)[slot as usize];
        if entry.generation != generation {
            return Err(PageFault::Generation { slot, found: entry.generation, expected: generation });
        }
        let found = checksum(slot, generation, record);
        if found != entry.checksum {
            return Err(PageFault::Corrupt { slot, generation, found, expected: entry.checksum });
        }
        Ok(())
    }

    /// The bytes of the index with the caller's `blob`, and its place in the header.
    pub(super) fn encode(&self, layout: &Layout, blob: &[u8]) -> (Vec<u8>, Index) {
        let entries = lock(&self.entries);
        let mut bytes = Vec::with_capacity(entries.len() * ENTRY + blob.len());
        for entry in entries.iter() {
            bytes.extend_from_slice(&entry.generation.to_le_bytes());
            bytes.extend_from_slice(&entry.checksum.to_le_bytes());
        }
        bytes.extend_from_slice(blob);
        let index = Index { offset: layout.end(), bytes: bytes.len() as u64, checksum: xxh3_64(&bytes) };
        (bytes, index)
    }

    /// Reads an index: the directory, and the caller's bytes.
    pub(super) fn decode(path: &str, layout: &Layout, index: &Index, mut bytes: Vec<u8>) -> Result<(Self, Vec<u8>)> {
        let found = xxh3_64(&bytes);
        if found != index.checksum {
            return Err(wrong(path, "index checksum", format!("{found:#018x}"), format!("{:#018x}", index.checksum)));
        }
        let size = (layout.slots as usize).saturating_mul(ENTRY);
        if bytes.len() < size {
            return Err(wrong(path, "index length", bytes.len(), format!("at least {size}")));
        }
        let blob = bytes.split_off(size);
        let number = |at: &[u8]| u64::from_le_bytes(at.try_into().expect("eight bytes"));
        let entries =
            bytes.chunks_exact(ENTRY).map(|e| Entry { generation: number(&e[..8]), checksum: number(&e[8..]) });
        Ok((Directory { entries: Mutex::new(entries.collect()) }, blob))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { record: 8, stride: 4096, slots: 3 };

    #[test]
    fn a_record_is_bound_to_its_slot_and_generation() {
        let directory = Directory::new(&LAYOUT).unwrap();
        directory.set(1, 7, checksum(1, 7, b"12345678"));
        assert_eq!(directory.verify(1, 7, b"12345678"), Ok(()));
        assert!(matches!(directory.verify(1, 7, b"12345679"), Err(PageFault::Corrupt { slot: 1, generation: 7, .. })));
        assert_eq!(directory.verify(1, 6, b"12345678"), Err(PageFault::Generation { slot: 1, found: 7, expected: 6 }));
        assert_eq!(directory.verify(0, 7, b""), Err(PageFault::Generation { slot: 0, found: 0, expected: 7 }));
        let sums = [(1, 7), (2, 7), (1, 8)].map(|(slot, generation)| checksum(slot, generation, b"12345678"));
        assert!(sums[0] != sums[1] && sums[0] != sums[2]);
    }

    #[test]
    fn an_index_reads_back_and_a_damaged_one_is_refused() {
        let directory = Directory::new(&LAYOUT).unwrap();
        directory.set(2, u64::MAX, 5);
        let (bytes, index) = directory.encode(&LAYOUT, b"blob");
        let (back, blob) = Directory::decode("f", &LAYOUT, &index, bytes.clone()).unwrap();
        assert_eq!(
            (back.generation(2), back.generation(1), back.generation(9), &blob[..]),
            (u64::MAX, 0, 0, &b"blob"[..])
        );
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = Directory::decode("f", &LAYOUT, &index, bad).unwrap_err();
            assert!(matches!(error, Error::WrongFile { what: "index checksum", .. }), "bit {bit}");
        }
        let short = bytes[..40].to_vec();
        let index = Index { checksum: xxh3_64(&short), ..index };
        let error = Directory::decode("f", &LAYOUT, &index, short).unwrap_err();
        assert!(matches!(error, Error::WrongFile { what: "index length", .. }));
    }
}
