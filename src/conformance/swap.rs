//! Do pages come back from host memory as they went? Swaps out and in, bit for bit, and what lies beside them.

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Failure, Verdict};
use super::memory::random;
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::random_kv;
use super::transfer::{pairs, put, random_arena, record_at, words};
use super::values::Rng;
use crate::backend::params::Move;
use crate::backend::{Backend, HostMemory, HostUse, Swap};
use crate::record::Record;
use crate::{Dtype, Geometry, PageFormat, Result};
use std::time::{Duration, Instant};

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
    list.memory(600_000, "a swap right behind an append", behind_append);
    list.memory(100_000, "host memory that is read and written between swaps", host_side);
    list.memory(200_000, "swaps on two streams, ordered by events", two_streams);
    list.memory(200_000, "swaps in and out through the same host records", same_records);
    list.memory(200_000, "dozens of swaps out before the host reads", far_ahead);
    list.memory(200_000, "host memory dropped while swaps are queued", dropped);
    list.memory(40_000, "an event finishes when its work has", finished);
    list.memory(4_000, "swaps out of range, misaligned or too close are refused", refusals);
    list.memory(100, "host memory that no machine has is refused", too_large);
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

/// Nobody waits between the append and the swap, nor between the swap and what the frames are used for next.
fn behind_append<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 32).page_size(8);
    let mut pages = Pages::new(&mut bench, geometry, 12, Placement::SHUFFLED)?;
    let (table, other) = (pages.table(40), pages.table(40));
    let mut host = [HostUse::Device, HostUse::Shared];
    for round in 0..150u64 {
        let usage = host[0];
        host.swap(0, 1);
        let mut records = Records::dense(&bench, usage, 5, &pages.record)?;
        let (k, v) = random_kv(&geometry, Dtype::F32, 40, 1_000 + round);
        let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 40 }])?;
        let order = [3, 0, 1, 4, 2];
        records.out(backend, &mut bench.stream, &pages, &pairs(&table, &order))?;
        records.back(backend, &mut bench.stream, &mut pages, &pairs(&order, &other))?;
        if usage == HostUse::Shared {
            records.compare(&mut bench, &mut check)?;
        }
        if round % 10 == 9 {
            pages.compare(&mut bench, &mut check, 0)?;
        }
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

/// One stream writes frames, the other swaps them out; the first then overwrites them.
fn two_streams<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut other = backend.stream()?;
    for usage in KINDS {
        let mut pages = random_arena(&mut bench, tiny(), 64, 2)?;
        let (frames, copies) = (pages.take(32), pages.take(32));
        let mut records = Records::dense(&bench, usage, 32, &pages.record)?;
        let order: Vec<u32> = (0..32).map(|i| i * 11 % 32).collect();
        for round in 0..20 {
            for (slab, host) in pages.slabs.iter().zip(&mut pages.host) {
                let data = random(host.len(), round);
                backend.upload(&mut bench.stream, slab, 0, bytemuck::cast_slice(&data))?;
                host.copy_from_slice(&data);
            }
            let written = backend.record(&mut bench.stream)?;
            backend.wait(&mut other, &written)?;
            records.out(backend, &mut other, &pages, &pairs(&frames, &order))?;
            records.back(backend, &mut other, &mut pages, &pairs(&order, &copies))?;
            let swapped = backend.record(&mut other)?;
            backend.wait(&mut bench.stream, &swapped)?;
            if round % 5 == 4 {
                pages.compare(&mut bench, &mut check, 0)?;
                records.compare(&mut bench, &mut check)?;
            }
        }
    }
    check.done()
}

/// A record that is swapped in is overwritten by the next swap out, as soon as an event says that it may be.
fn same_records<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut other = backend.stream()?;
    for usage in KINDS {
        let mut pages = random_arena(&mut bench, tiny(), 320, 3)?;
        let frames = pages.take(320);
        let filled = backend.record(&mut bench.stream)?;
        backend.wait(&mut other, &filled)?;
        let mut records = Records::dense(&bench, usage, 8, &pages.record)?;
        let order = [4, 5, 6, 1, 0, 7, 3, 2];
        for (from, to) in frames[..160].chunks(8).zip(frames[160..].chunks(8)) {
            records.out(backend, &mut bench.stream, &pages, &pairs(from, &order))?;
            let out = backend.record(&mut bench.stream)?;
            backend.wait(&mut other, &out)?;
            records.back(backend, &mut other, &mut pages, &pairs(&order, to))?;
            let back = backend.record(&mut other)?;
            backend.wait(&mut bench.stream, &back)?;
        }
        pages.compare(&mut bench, &mut check, 0)?;
        records.compare(&mut bench, &mut check)?;
    }
    check.done()
}

/// Nothing is read before all is queued; later swaps overwrite what earlier ones bring.
fn far_ahead<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut pages = random_arena(&mut bench, tiny(), 240, 3)?;
    let frames = pages.take(240);
    let mut records = Records::dense(&bench, HostUse::Shared, 32, &pages.record)?;
    for (round, from) in (0..).zip(frames.chunks(6)) {
        let to: Vec<u32> = (0..6).map(|i| (round * 5 + i * 7) % 32).collect();
        records.out(backend, &mut bench.stream, &pages, &pairs(from, &to))?;
    }
    records.compare(&mut bench, &mut check)?;
    check.done()
}

/// The last handle goes while swaps through it are queued, and other memory takes its place.
fn dropped<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut pages = random_arena(&mut bench, tiny(), 320, 2)?;
    let frames = pages.take(320);
    for (round, (from, to)) in frames[..160].chunks(8).zip(frames[160..].chunks(8)).enumerate() {
        let usage = KINDS[round % 2];
        let mut records = Records::dense(&bench, usage, 8, &pages.record)?;
        let order = [0, 1, 2, 3, 7, 6, 5, 4];
        records.out(backend, &mut bench.stream, &pages, &pairs(from, &order))?;
        records.back(backend, &mut bench.stream, &mut pages, &pairs(&order, to))?;
        drop(records);
        drop(Records::<B>::dense(&bench, usage, 8, &pages.record)?);
    }
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

fn finished<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let nothing = backend.record(&mut bench.stream)?;
    backend.finish(&nothing)?;
    check.holds("an event of an empty stream is done", backend.is_done(&nothing)?);
    let mut pages = random_arena(&mut bench, tiny(), 64, 2)?;
    let frames = pages.take(64);
    let mut records = Records::dense(&bench, HostUse::Shared, 64, &pages.record)?;
    let moves = pairs(&frames, &(0..64).rev().collect::<Vec<_>>());
    for round in 0..20 {
        let before = backend.record(&mut bench.stream)?;
        records.out(backend, &mut bench.stream, &pages, &moves)?;
        let after = backend.record(&mut bench.stream)?;
        let start = Instant::now();
        while round % 2 == 0 && !backend.is_done(&after)? {
            if start.elapsed().as_secs() >= 60 {
                return Err(Failure("a swap that never happens".into()));
            }
            std::thread::yield_now();
        }
        backend.finish(&after)?;
        backend.finish(&before)?;
        check.holds("a finished event is done", backend.is_done(&after)? && backend.is_done(&before)?);
        let told = backend.elapsed(&before, &after)?;
        check.holds("a swap takes less than a minute", told.is_none_or(|time| time < Duration::from_secs(60)));
        records.compare(&mut bench, &mut check)?;
    }
    check.done()
}

fn refusals<B: Backend>(backend: &B) -> Verdict {
    use crate::Error;
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut pages = random_arena(&mut bench, tiny(), 6, 2)?;
    let [frame, other] = pages.take(2)[..] else { return Err(Failure("two frames were asked for".into())) };
    let records = Records::new(&bench, HostUse::Shared, 4, 0, 512)?;
    let stream = &mut bench.stream;
    let outside: fn(&Error) -> bool = |e| matches!(e, Error::OutOfBounds { .. });
    let misaligned: fn(&Error) -> bool = |e| matches!(e, Error::Misaligned { .. });
    let shape: fn(&Error) -> bool = |e| matches!(e, Error::Shape { .. });
    // Offset, stride, frame and host record.
    let bad = [
        (0, 512, frame, 4, outside),
        (256, 512, frame, 3, outside),
        (0, 768, frame, 3, outside),
        (0, 512, frame, u32::MAX, outside),
        (u64::MAX - 255, 512, frame, 0, outside),
        (0, u64::MAX - 255, frame, 2, outside),
        (0, 512, 3, 0, outside),
        (0, 512, 2 << pages.shift, 0, outside),
        (0, 512, u32::MAX, 0, outside),
        (128, 512, frame, 0, misaligned),
        (4, 512, frame, 0, misaligned),
        (0, 640, frame, 0, misaligned),
        (0, 256, frame, 0, shape),
        (0, 0, frame, 0, shape),
    ];
    for (offset, stride, frame_number, index, kind) in bad {
        // A good move in front must not happen either.
        let name = format!("frame {frame_number}, host record {index} at {offset}, {stride} bytes apart");
        let out = [(frame, 1), (frame_number, index)].map(|(from, to)| Move { from, to });
        let back = [(0, other), (index, frame_number)].map(|(from, to)| Move { from, to });
        let args = |moves| Swap { offset, stride, ..records.args(&pages, moves) };
        check.refused(&format!("out: {name}"), backend.swap_out(stream, &args(&out)), kind);
        check.refused(&format!("in: {name}"), backend.swap_in(stream, &args(&back)), kind);
    }
    let end = records.host.bytes();
    for (at, bytes, kind) in [(end, 4, outside), (end - 4, 8, outside), (u64::MAX - 3, 8, outside)]
        .into_iter()
        .chain([(2, 4, misaligned), (4, 6, misaligned)])
    {
        let mut data = vec![0; bytes];
        check.refused("reading host memory", backend.read_host(&records.host, at, &mut data), kind);
        check.refused("writing host memory", backend.write_host(&records.host, at, &data), kind);
    }
    backend.read_host(&records.host, end, &mut [])?;
    backend.write_host(&records.host, end, &[])?;
    pages.compare(&mut bench, &mut check, 0)?;
    records.compare(&mut bench, &mut check)?;
    check.done()
}

fn too_large<B: Backend>(backend: &B) -> Verdict {
    use crate::Error;
    let mut check = Check::default();
    for usage in KINDS {
        for bytes in [1 << 60, u64::MAX - 3, u64::MAX] {
            let typed = |e: &Error| matches!(e, Error::OutOfMemory { .. } | Error::Limit { .. });
            check.refused("impossible host memory", backend.alloc_host("too large", bytes, usage), typed);
        }
        let empty = backend.alloc_host("nothing", 0, usage)?;
        check.holds("host memory of no bytes", HostMemory::bytes(&empty) == 0);
    }
    check.done()
}

/// Whether a device refuses the host memory, the frames and the events of another.
pub(super) fn foreign_host_memory<B: Backend>(here: &B, there: &B) -> Verdict {
    use crate::Error;
    let (mut bench, mut check) = (Bench::new(here)?, Check::default());
    let mut away = Bench::new(there)?;
    let pages = random_arena(&mut bench, tiny(), 4, 1)?;
    let theirs = random_arena(&mut away, tiny(), 4, 1)?;
    let [near, far] = [&bench, &away].map(|bench| Records::dense(bench, HostUse::Shared, 4, &pages.record));
    let (near, far) = (near?, far?);
    let wrong = |e: &Error| matches!(e, Error::WrongDevice { .. });
    let moves = [Move { from: 0, to: 1 }];
    for (what, args) in [("host memory", far.args(&pages, &moves)), ("frames", near.args(&theirs, &moves))] {
        check.refused(&format!("{what} out"), here.swap_out(&mut bench.stream, &args), wrong);
        check.refused(&format!("{what} in"), here.swap_in(&mut bench.stream, &args), wrong);
    }
    check.refused("reading", here.read_host(&far.host, 0, &mut [0; 4]), wrong);
    check.refused("writing", here.write_host(&far.host, 0, &[0; 4]), wrong);
    near.compare(&mut bench, &mut check)?;
    far.compare(&mut away, &mut check)?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}
