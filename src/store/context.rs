//! Views of a sequence's pages for whoever runs their own kernels.

use super::{PagedStore, Sequence};
use crate::Result;
use crate::backend::Backend;
use crate::backend::ops::{Arena, Place, Transfer, split_frame};
use crate::backend::params::Move;
use crate::record::Record;

/// A sequence's pages of one layer as one run of records: `[page, kv_head, slot, element]`, K and V apart.
///
/// Without a copy when the frames lie side by side, gathered into a buffer of its own otherwise. The view shows the
/// sequence as it was when it was taken; a view without a copy must not be used after the next write or release.
#[derive(Debug, Clone)]
pub struct ContextView<Buf> {
    /// The memory.
    pub buffer: Buf,
    /// Bytes from its start to the first record.
    pub offset: u64,
    /// Records.
    pub pages: u64,
    /// Valid tokens; later slots of the last record hold anything.
    pub tokens: u64,
    /// Layout of each record.
    pub record: Record,
    /// Whether the records were copied.
    pub gathered: bool,
}

impl<Buf> ContextView<Buf> {
    /// Byte offset of the key of a token and KV head in the buffer.
    pub fn key(&self, token: u64, head: u32) -> u64 {
        let (base, slot) = self.slot(token);
        base + self.record.key(head, slot)
    }

    /// Byte offset of the value of a token and KV head in the buffer.
    pub fn value(&self, token: u64, head: u32) -> u64 {
        let (base, slot) = self.slot(token);
        base + self.record.value(head, slot)
    }

    /// Byte offset of the scale of the key of a token and KV head in the buffer, in quantised formats.
    pub fn key_scale(&self, token: u64, head: u32) -> u64 {
        let (base, slot) = self.slot(token);
        base + self.record.key_scale(head, slot)
    }

    /// Byte offset of the scale of the value of a token and KV head in the buffer, in quantised formats.
    pub fn value_scale(&self, token: u64, head: u32) -> u64 {
        let (base, slot) = self.slot(token);
        base + self.record.value_scale(head, slot)
    }

    /// Bytes from one record to the next.
    pub fn stride(&self) -> u64 {
        self.record.frame_stride()
    }

    fn slot(&self, token: u64) -> (u64, u32) {
        let page_size = u64::from(self.record.geometry().page_tokens());
        (self.offset + token / page_size * self.stride(), (token % page_size) as u32)
    }
}

/// One sequence in an [`AttentionContext`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceContext {
    /// First word of its page table in the tables buffer.
    pub table: u32,
    /// Entries of the table.
    pub pages: u32,
    /// Valid tokens.
    pub tokens: u64,
}

/// Page tables and lengths of some sequences in one layer, for a caller's own attention kernel.
#[derive(Debug, Clone)]
pub struct AttentionContext<Buf> {
    /// The slabs of frames that table entries name.
    pub slabs: Vec<Buf>,
    /// Index bits of a frame number: see [`record`](crate::record).
    pub slab_shift: u32,
    /// The tables: u32 frame numbers on the device.
    pub tables: Buf,
    /// Layout of a page.
    pub record: Record,
    /// The sequences, in the order asked for.
    pub sequences: Vec<SequenceContext>,
}

impl<B: Backend> PagedStore<B> {
    /// A contiguous view of what a sequence holds in a layer. Everything enqueued so far is handed to the device first, so
    /// that work submitted to it afterwards sees the view complete.
    ///
    /// # Errors
    /// Unknown sequences or layers, or no memory for the gathered copy.
    pub fn context(&mut self, layer: usize, seq: &Sequence) -> Result<ContextView<B::Buffer>> {
        self.reap();
        let pages = self.pages(seq, layer)?;
        let count = self.geometry().pages_for(pages.len);
        let frames: Vec<u32> = pages.table[..count as usize].iter().map(|&page| self.pool.frame(page)).collect();
        let (tokens, stride, record) = (pages.len, self.record.frame_stride(), self.record);
        let shift = self.pool.shift();
        let run = frames.first().filter(|first| {
            let slab = split_frame(**first, shift).0;
            frames.iter().zip(**first..).all(|(&frame, next)| frame == next && split_frame(frame, shift).0 == slab)
        });
        if let Some(&first) = run {
            let (slab, index) = split_frame(first, shift);
            let buffer = self.pool.slabs[slab as usize].clone();
            let offset = u64::from(index) * stride;
            self.flush()?;
            return Ok(ContextView { buffer, offset, pages: count, tokens, record, gathered: false });
        }
        let moves: Vec<Move> = frames.iter().zip(0..).map(|(&from, to)| Move { from, to }).collect();
        let pool = &mut self.pool;
        let buffer = pool.backend.alloc("kvtide gathered context", (count * stride).max(stride))?;
        if !moves.is_empty() {
            let from = Place::Frames(Arena { slabs: &pool.slabs, slab_shift: shift });
            let to = Place::Records { buffer: &buffer, offset: 0, stride };
            pool.backend.transfer(&mut pool.stream, &Transfer { record, from, to, moves: &moves })?;
        }
        self.flush()?;
        Ok(ContextView { buffer, offset: 0, pages: count, tokens, record, gathered: true })
    }

    /// Page tables and lengths for a caller's own kernel. Everything enqueued so far is handed to the device first.
    ///
    /// # Errors
    /// Unknown sequences or layers.
    pub fn attention_context(&mut self, layer: usize, seqs: &[&Sequence]) -> Result<AttentionContext<B::Buffer>> {
        self.reap();
        seqs.iter().try_for_each(|seq| self.pages(seq, layer).map(|_| ()))?;
        let mut sequences = Vec::with_capacity(seqs.len());
        for seq in seqs {
            let pages = &mut self.sequences.get_mut(&seq.id()).expect("looked up before")[layer];
            self.pool.upload_table(pages)?;
            let table = pages.span.map_or(0, |span| span.base);
            sequences.push(SequenceContext { table, pages: pages.table.len() as u32, tokens: pages.len });
        }
        let tables = self.pool.tables()?;
        let (slabs, slab_shift) = (self.pool.slabs.clone(), self.pool.shift());
        self.flush()?;
        Ok(AttentionContext { slabs, slab_shift, tables, record: self.record, sequences })
    }
}
