//! Do swaps happen in order, and do they happen at all? Behind appends, on two streams, with handles dropped early.

use super::super::bench::{Bench, Layout};
use super::super::check::{Check, Failure, Verdict};
use super::super::memory::random;
use super::super::pages::{Pages, Piece, Placement, Tokens};
use super::super::scene::random_kv;
use super::super::transfer::{pairs, random_arena};
use super::{KINDS, Records, tiny};
use crate::backend::{Backend, HostUse};
use crate::{Dtype, Geometry};
use std::time::{Duration, Instant};

/// Nobody waits between the append and the swap, nor between the swap and what the frames are used for next.
pub(super) fn behind_append<B: Backend>(backend: &B) -> Verdict {
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

/// One stream writes frames, the other swaps them out; the first then overwrites them.
pub(super) fn two_streams<B: Backend>(backend: &B) -> Verdict {
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
pub(super) fn same_records<B: Backend>(backend: &B) -> Verdict {
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
pub(super) fn far_ahead<B: Backend>(backend: &B) -> Verdict {
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
pub(super) fn dropped<B: Backend>(backend: &B) -> Verdict {
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

pub(super) fn finished<B: Backend>(backend: &B) -> Verdict {
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
