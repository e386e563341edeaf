//! Will int8 hurt the keys of this store? A few of them read back from the device and looked at.

use super::{PagedStore, Sequence};
use crate::backend::Backend;
use crate::backend::ops::split_frame;
use crate::record::Record;
use crate::{Dtype, KeyCheck, Result};
use half::{bf16, f16};

impl<B: Backend> PagedStore<B> {
    /// Looks at the first keys of a sequence in a layer ([`KeyCheck::TOKENS`] at most), as they are stored: where keys are
    /// calibrated, at what is left to quantise. In a quantised store whose keys should be calibrated it warns, once a layer.
    /// Pages of other formats are looked at too: would int8 do?
    ///
    /// Waits for the device, and reads 64 tokens of pages back: once a model is enough, for example after the first prefill.
    ///
    /// # Errors
    /// Unknown sequences or layers; what the device reports.
    pub fn check_keys(&mut self, layer: usize, seq: &Sequence) -> Result<KeyCheck> {
        self.reap();
        let pages = self.first_pages(layer, seq)?;
        self.check_pages(layer, &pages)
    }

    /// The pages that hold a sequence's first tokens, with the number of tokens to look at in each.
    pub(crate) fn first_pages(&self, layer: usize, seq: &Sequence) -> Result<Vec<(u32, u32)>> {
        let (pages, page_size) = (self.pages(seq, layer)?, self.geometry().page_tokens());
        let tokens = pages.len.min(KeyCheck::TOKENS.into()) as u32;
        let of_page = |(at, &page): (usize, &u32)| (page, (tokens - at as u32 * page_size).min(page_size));
        let count = tokens.div_ceil(page_size) as usize;
        Ok(pages.table[..count].iter().enumerate().map(of_page).collect())
    }

    /// Looks at the first tokens of pages that are in frames.
    pub(crate) fn check_pages(&mut self, layer: usize, pages: &[(u32, u32)]) -> Result<KeyCheck> {
        let (record, shift) = (self.record, self.pool.shift());
        let mut bytes = vec![0; record.bytes() as usize];
        let mut keys = Vec::new();
        for &(page, tokens) in pages {
            let (slab, index) = split_frame(self.pool.frame(page), shift);
            let (pool, offset) = (&mut self.pool, u64::from(index) * record.frame_stride());
            pool.backend.download(&mut pool.stream, &pool.slabs[slab as usize], offset, &mut bytes)?;
            read_keys(&record, &bytes, tokens, &mut keys);
        }
        let check = KeyCheck::new(self.geometry(), &keys)?;
        let (head, noise) = check.worst();
        if record.format().is_quantized() && check.hurts() && self.warned.insert(layer) {
            let calibrated = self.key_calibration().is_some();
            tracing::warn!(layer, head, noise, calibrated, "int8 loses what varies in these keys: calibrate them anew");
        }
        Ok(check)
    }
}

/// Appends the keys `[token, kv_head, k_dim]` of a record's first tokens: as they are, or codes times the row's scale.
fn read_keys(record: &Record, bytes: &[u8], tokens: u32, keys: &mut Vec<f32>) {
    let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    for (slot, head) in (0..tokens).flat_map(|slot| (0..record.geometry().kv_heads()).map(move |head| (slot, head))) {
        let (at, elements) = (record.key(head, slot) as usize, 0..record.geometry().k_dim() as usize);
        match record.format().dtype() {
            Some(Dtype::F32) => keys.extend(elements.map(|i| float(at + 4 * i))),
            Some(Dtype::F16) => keys.extend(elements.map(|i| f16::from_bits(half(at + 2 * i)).to_f32())),
            Some(Dtype::Bf16) => keys.extend(elements.map(|i| bf16::from_bits(half(at + 2 * i)).to_f32())),
            None => {
                let scale = float(record.key_scale(head, slot) as usize);
                keys.extend(elements.map(|i| f32::from(bytes[at + i] as i8) * scale));
            }
        }
    }
}
