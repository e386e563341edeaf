//! Do pages come back from host memory as they went? Swaps out and in, bit for bit, and what lies beside them.

mod order;
mod refusals;

pub(super) use refusals::foreign_host_memory;

use super::Cases;
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::memory::random;
use super::pages::Pages;
use super::transfer::{pairs, put, random_arena, record_at, words};
use super::values::Rng;
use crate::backend::params::Move;
use crate::backend::{Backend, HostUse, Swap};
use crate::record::Record;
use crate::{Geometry, PageFormat, Result};

/// KV heads, key and value elements, tokens a page: records that fill their frames, and records that do not.
const SHAPES: [(u32, u32, u32, u32, PageFormat); 5] = [
    (1, 16, 16, 8, PageFormat::Bf16),
    (3, 80, 96, 16, PageFormat::F32),
    (8, 128, 128, 16, PageFormat::F16),
    (5, 40, 72, 32, PageFormat::Bf16),
    (3, 24, 16, 8, PageFormat::F16),
];
const KINDS: [HostUse; 2] = [HostUse::Device, HostUse::Shared];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>) {
    for (heads, k_dim, v_dim, page, format) in SHAPES {
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(v_dim).page_size(page).format(format);
        let weight = 200 * u64::from(heads * page * (k_dim + v_dim));
        let name = format!("swaps of {heads} heads of {k_dim} and {v_dim}, pages of {page}, {}", format.name());
        list.memory(weight, &name, move |b| there_and_back(b, geometry));
    }
    list.memory(600_000, "1,100 scattered pages in one swap", |b| many(b, tiny(), 1_100));
    list.memory(50_000, "host records of two kinds in turn", interleaved);
    list.memory(5_000_000, "300 pages of 64 KiB in one swap", |b| many(b, Geometry::new(1, 8, 8, 128), 300));
    list.memory(600_000, "a swap right behind an append", order::behind_append);
    list.memory(100_000, "host memory that is read and written between swaps", host_side);
    list.memory(200_000, "swaps on two streams, ordered by events", order::two_streams);
    list.memory(200_000, "swaps in and out through the same host records", order::same_records);
    list.memory(200_000, "dozens of swaps out before the host reads", order::far_ahead);
    list.memory(200_000, "host memory dropped while swaps are queued", order::dropped);
    list.memory(40_000, "an event finishes when its work has", order::finished);
    list.memory(4_000, "swaps out of range, misaligned or too close are refused", refusals::refusals);
    list.memory(100, "host memory that no machine has is refused", refusals::too_large);
}

/// The smallest page there is: 512 bytes.
fn tiny() -> Geometry {
    Geometry::new(1, 1, 1, 16).page_size(8)
}

/// Host memory and where its records lie.
struct Records<B: Backend> {
    host: B::Host,
    usage: HostUse,
    offset: u64,
    stride: u64,
    /// The words that it must hold.
    words: Vec<u32>,
}

impl<B: Backend> Records<B> {
    /// Room for `count` records; what the host can write is filled.
    fn new(bench: &Bench<'_, B>, usage: HostUse, count: usize, offset: u64, stride: u64) -> Result<Self> {
        let bytes = offset + count as u64 * stride;
        let host = bench.backend.alloc_host("swapped pages", bytes, usage)?;
        let words = random(bytes as usize / 4, stride + offset);
        if usage == HostUse::Shared {
            bench.backend.write_host(&host, 0, bytemuck::cast_slice(&words))?;
        }
        Ok(Records { host, usage, offset, stride, words })
    }

    /// Records side by side.
    fn dense(bench: &Bench<'_, B>, usage: HostUse, count: usize, record: &Record) -> Result<Self> {
        Self::new(bench, usage, count, 0, record.frame_stride())
    }

    fn args<'a>(&'a self, pages: &'a Pages<B>, moves: &'a [Move]) -> Swap<'a, B::Buffer, B::Host> {
        let (record, arena) = (pages.record, pages.arena());
        Swap { record, arena, host: &self.host, offset: self.offset, stride: self.stride, moves }
    }

    /// First word of a record.
    fn at(&self, index: u32) -> usize {
        (self.offset + u64::from(index) * self.stride) as usize / 4
    }

    fn out(&mut self, backend: &B, stream: &mut B::Stream, pages: &Pages<B>, moves: &[Move]) -> Result<()> {
        backend.swap_out(stream, &self.args(pages, moves))?;
        for one in moves {
            let at = self.at(one.to);
            self.words[at..at + words(pages)].copy_from_slice(record_at(pages, one.from));
        }
        Ok(())
    }

    fn back(&self, backend: &B, stream: &mut B::Stream, pages: &mut Pages<B>, moves: &[Move]) -> Result<()> {
        backend.swap_in(stream, &self.args(pages, moves))?;
        for one in moves {
            put(pages, one.to, &self.words[self.at(one.from)..][..words(pages)]);
        }
        Ok(())
    }

    /// Compares every word of host memory that the host can read, once the stream's work has finished.
    fn compare(&self, bench: &mut Bench<'_, B>, check: &mut Check) -> Result<()> {
        if self.usage == HostUse::Shared {
            let event = bench.backend.record(&mut bench.stream)?;
            bench.backend.finish(&event)?;
            let mut got = vec![0u32; self.words.len()];
            bench.backend.read_host(&self.host, 0, bytemuck::cast_slice_mut(&mut got))?;
            check.bits("host memory", &got, &self.words);
        }
        Ok(())
    }
}

/// Out in any order, some of them again, and back into another arena: in runs and one by one, with and without room
/// between host records.
fn there_and_back<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let record = Record::new(geometry.validate()?);
    let frame = record.frame_stride();
    let places = [(0, frame), (256, frame), (0, frame + 256), (1024, record.file_stride()), (0, 3 * frame + 512)];
    for (offset, stride) in places {
        for usage in KINDS {
            let mut a = random_arena(&mut bench, geometry, 16, 3)?;
            let mut b = random_arena(&mut bench, geometry, 14, 2)?;
            let mut records = Records::new(&bench, usage, 11, offset, stride)?;
            let frames = a.take(15);
            let all = pairs(&frames[..11], &[7, 0, 3, 4, 1, 8, 2, 10, 9, 5, 6]);
            records.out(backend, &mut bench.stream, &a, &all)?;
            records.compare(&mut bench, &mut check)?;
            // A run, a single record and the last one: their neighbours stay.
            records.out(backend, &mut bench.stream, &a, &pairs(&frames[11..], &[4, 3, 7, 10]))?;
            let back = b.take(12);
            records.back(backend, &mut bench.stream, &mut b, &pairs(&[2, 4, 3, 0], &back[..4]))?;
            records.back(backend, &mut bench.stream, &mut b, &pairs(&[1, 5, 6, 7, 8, 9, 10, 5], &back[4..]))?;
            records.out(backend, &mut bench.stream, &a, &[])?;
            records.back(backend, &mut bench.stream, &mut b, &[])?;
            a.compare(&mut bench, &mut check, 0)?;
            b.compare(&mut bench, &mut check, 0)?;
            records.compare(&mut bench, &mut check)?;
        }
    }
    check.done()
}

/// The records of one swap lie between those of another: a page's layers side by side.
fn interleaved<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (heads, usage) in [1, 3].into_iter().flat_map(|heads| KINDS.map(|usage| (heads, usage))) {
        let geometry = Geometry::new(1, heads, heads, 40).value_dim(48).page_size(8);
        let mut pages = random_arena(&mut bench, geometry, 48, 2)?;
        let frame = pages.record.frame_stride();
        let mut records = Records::new(&bench, usage, 12, 0, 2 * frame)?;
        let (frames, order) = (pages.take(48), (0..12).collect::<Vec<_>>());
        for (kind, from) in frames[..24].chunks(12).enumerate() {
            records.offset = kind as u64 * frame;
            records.out(backend, &mut bench.stream, &pages, &pairs(from, &order))?;
        }
        for (kind, to) in frames[24..].chunks(12).enumerate() {
            records.offset = kind as u64 * frame;
            records.back(backend, &mut bench.stream, &mut pages, &pairs(&order, to))?;
        }
        pages.compare(&mut bench, &mut check, 0)?;
        records.compare(&mut bench, &mut check)?;
    }
    check.done()
}

/// Half of them side by side in frames and records, which backends may move in long runs, and half scattered.
fn many<B: Backend>(backend: &B, geometry: Geometry, count: usize) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for usage in KINDS {
        let mut a = random_arena(&mut bench, geometry, count as u32, 4)?;
        let mut b = random_arena(&mut bench, geometry, count as u32, 3)?;
        let [mut from, mut to] = [a.take(count), b.take(count)];
        for frames in [&mut from, &mut to] {
            frames.sort_unstable();
            Rng::new(1).shuffle(&mut frames[count / 2..]);
        }
        let records: Vec<u32> = (0..count as u32 / 2).chain((count as u32 / 2..count as u32).rev()).collect();
        let mut host = Records::dense(&bench, usage, count, &a.record)?;
        host.out(backend, &mut bench.stream, &a, &pairs(&from, &records))?;
        host.back(backend, &mut bench.stream, &mut b, &pairs(&records, &to))?;
        b.compare(&mut bench, &mut check, 0)?;
        a.compare(&mut bench, &mut check, 0)?;
        host.compare(&mut bench, &mut check)?;
    }
    check.done()
}

/// What the host writes comes in, what goes out is read, and both leave the words beside them alone.
fn host_side<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut pages = random_arena(&mut bench, tiny(), 24, 2)?;
    let frames = pages.take(24);
    let mut records = Records::new(&bench, HostUse::Shared, 8, 256, 768)?;
    for round in 0..24u32 {
        let index = round * 5 % 8;
        let (at, record) = (records.at(index), words(&pages));
        let new = random(record + 2, round.into());
        // A word more on either side than the record.
        records.words[at - 1..at + record + 1].copy_from_slice(&new);
        backend.write_host(&records.host, (at as u64 - 1) * 4, bytemuck::cast_slice(&new))?;
        let to = frames[round as usize];
        records.back(backend, &mut bench.stream, &mut pages, &[Move { from: index, to }])?;
        // The record that the host writes next.
        let moves = [Move { from: frames[round as usize * 7 % 24], to: (index + 5) % 8 }];
        records.out(backend, &mut bench.stream, &pages, &moves)?;
        let swapped = backend.record(&mut bench.stream)?;
        backend.finish(&swapped)?;
        if round % 4 == 3 {
            let mut part = [0u32; 3];
            backend.read_host(&records.host, at as u64 * 4 + 8, bytemuck::cast_slice_mut(&mut part))?;
            check.bits("a part of host memory", &part, &records.words[at + 2..at + 5]);
            records.compare(&mut bench, &mut check)?;
        }
    }
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}
