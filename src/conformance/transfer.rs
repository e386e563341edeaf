//! Does `transfer` move whole records, bit for bit, and touch nothing else? Copies, gathers and scatters.

use super::Cases;
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::pages::{Pages, Placement};
use super::values::Rng;
use crate::backend::ops::{Place, Transfer};
use crate::backend::params::Move;
use crate::backend::{Backend, Operation};
use crate::{Geometry, PageFormat, Result};

/// KV heads, key and value elements, tokens a page.
const SHAPES: [(u32, u32, u32, u32); 6] =
    [(1, 16, 16, 8), (3, 80, 96, 16), (8, 128, 128, 16), (2, 24, 16, 8), (1, 256, 64, 64), (5, 40, 72, 32)];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for (heads, k_dim, v_dim, page) in SHAPES {
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(v_dim).page_size(page).format(format);
        let shape = format!("{heads} heads of {k_dim} and {v_dim}, pages of {page}");
        let weight = 24 * u64::from(heads * page * (k_dim + v_dim));
        list.add(Operation::Transfer, format, weight, format!("copy: {shape}"), move |b| copy(b, geometry));
        for (offset, gap) in [(0, 0), (4, 0), (20, 4), (252, 12), (256, 256)] {
            let name = format!("gather and scatter at {offset}, {gap} bytes apart: {shape}");
            list.add(Operation::Transfer, format, weight, name, move |b| there_and_back(b, geometry, offset, gap));
        }
    }
    let tiny = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    list.add(Operation::Transfer, format, 10_000, "nothing to move", move |b| nothing(b, tiny));
    list.add(Operation::Transfer, format, 50_000, "copies between arenas of all slabs that may be", move |b| {
        all_slabs(b, tiny)
    });
    // The shape of a grid has nothing to do with the format.
    if format == PageFormat::Bf16 {
        list.add(Operation::Transfer, format, 20_000_000, "70,000 gathers and scatters", move |b| many(b, tiny));
        list.add(Operation::Transfer, format, 20_000_000, "70,000 copies", move |b| many_copies(b, tiny));
    }
}

/// An arena of random words, gaps between records included.
pub(super) fn random_arena<B: Backend>(
    bench: &mut Bench<'_, B>,
    geometry: Geometry,
    frames: u32,
    slabs: u32,
) -> Result<Pages<B>> {
    let placement = Placement { slabs, ..Placement::SHUFFLED };
    let mut pages = Pages::new(bench, geometry, frames, placement)?;
    let mut rng = Rng::new(u64::from(frames * slabs));
    for (slab, host) in pages.slabs.iter().zip(&mut pages.host) {
        host.fill_with(|| rng.word());
        bench.backend.upload(&mut bench.stream, slab, 0, bytemuck::cast_slice(host))?;
    }
    Ok(pages)
}

pub(super) fn pairs(from: &[u32], to: &[u32]) -> Vec<Move> {
    from.iter().zip(to).map(|(&from, &to)| Move { from, to }).collect()
}

/// Words of a record.
pub(super) fn words<B: Backend>(pages: &Pages<B>) -> usize {
    pages.record.bytes() as usize / 4
}

/// Within an arena, and between two that number their frames differently.
fn copy<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut a = random_arena(&mut bench, geometry, 14, 3)?;
    let moves = pairs(&a.take(5), &a.take(5));
    let (from, to) = (Place::Frames(a.arena()), Place::Frames(a.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record: a.record, from, to, moves: &moves })?;
    for one in &moves {
        let record = record_at(&a, one.from).to_vec();
        put(&mut a, one.to, &record);
    }
    a.compare(&mut bench, &mut check, 0)?;

    let mut b = random_arena(&mut bench, geometry, 9, 2)?;
    let moves = pairs(&a.take(4), &b.take(4));
    let (from, to) = (Place::Frames(a.arena()), Place::Frames(b.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record: a.record, from, to, moves: &moves })?;
    moves.iter().for_each(|one| put(&mut b, one.to, record_at(&a, one.from)));
    a.compare(&mut bench, &mut check, 0)?;
    b.compare(&mut bench, &mut check, 0)?;
    check.done()
}

pub(super) fn record_at<B: Backend>(pages: &Pages<B>, frame: u32) -> &[u32] {
    let (slab, at) = pages.place(frame);
    &pages.host[slab][at..at + words(pages)]
}

pub(super) fn put<B: Backend>(pages: &mut Pages<B>, frame: u32, record: &[u32]) {
    let (slab, at) = pages.place(frame);
    pages.host[slab][at..at + record.len()].copy_from_slice(record);
}

/// Frames into a buffer of records, in any order, and from there into frames of another arena.
fn there_and_back<B: Backend>(backend: &B, geometry: Geometry, offset: u64, gap: u64) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut a = random_arena(&mut bench, geometry, 10, 3)?;
    let mut b = random_arena(&mut bench, geometry, 12, 2)?;
    let record = a.record;
    let stride = record.bytes() + gap;
    let (stride_words, first) = (stride as usize / 4, offset as usize / 4);
    let mut host = vec![0xabcd_0123; first + 9 * stride_words];
    let buffer = bench.words("records", &host)?;
    let records = || Place::Records { buffer: &buffer, offset, stride };

    let gather = pairs(&a.take(6), &[7, 0, 3, 4, 1, 8]);
    let from = Place::Frames(a.arena());
    backend.transfer(&mut bench.stream, &Transfer { record, from, to: records(), moves: &gather })?;
    for one in &gather {
        let at = first + one.to as usize * stride_words;
        host[at..at + words(&a)].copy_from_slice(record_at(&a, one.from));
    }
    check.bits("gathered records", &bench.read(&buffer, host.len())?, &host);

    let scatter = pairs(&[4, 8, 0, 3, 2], &b.take(5));
    let to = Place::Frames(b.arena());
    backend.transfer(&mut bench.stream, &Transfer { record, from: records(), to, moves: &scatter })?;
    for one in &scatter {
        let at = first + one.from as usize * stride_words;
        let moved = host[at..at + words(&b)].to_vec();
        put(&mut b, one.to, &moved);
    }
    b.compare(&mut bench, &mut check, 0)?;
    a.compare(&mut bench, &mut check, 0)?;
    check.bits("records after the scatter", &bench.read(&buffer, host.len())?, &host);
    check.done()
}

fn nothing<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let a = random_arena(&mut bench, geometry, 4, 2)?;
    let (from, to) = (Place::Frames(a.arena()), Place::Frames(a.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record: a.record, from, to, moves: &[] })?;
    a.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// Each side may have as many slabs as the device allows (up to 16 here), whatever the other has.
fn all_slabs<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let slabs = backend.caps().max_slabs.min(16);
    let mut a = random_arena(&mut bench, geometry, 5 * slabs, slabs)?;
    let mut b = random_arena(&mut bench, geometry, 7 * slabs, slabs)?;
    let moves = pairs(&a.take(5 * slabs as usize), &b.take(5 * slabs as usize));
    let (from, to) = (Place::Frames(a.arena()), Place::Frames(b.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record: a.record, from, to, moves: &moves })?;
    moves.iter().for_each(|one| put(&mut b, one.to, record_at(&a, one.from)));
    a.compare(&mut bench, &mut check, 0)?;
    b.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// B21: a source may be moved many times; each destination is written once.
fn many<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let count = 70_000u32;
    let mut a = random_arena(&mut bench, geometry, 50, 3)?;
    let (frames, record) = (a.take(50), a.record);
    let (stride, words) = (record.bytes(), words(&a));
    let buffer = bench.filled("records", count as usize * words, 0)?;
    let gather: Vec<_> = (0..count).map(|to| Move { from: frames[to as usize * 7 % 50], to }).collect();
    let records = || Place::Records { buffer: &buffer, offset: 0, stride };
    let from = Place::Frames(a.arena());
    backend.transfer(&mut bench.stream, &Transfer { record, from, to: records(), moves: &gather })?;
    let mut want = Vec::with_capacity(count as usize * words);
    gather.iter().for_each(|one| want.extend_from_slice(record_at(&a, one.from)));
    check.bits("gathered records", &bench.read(&buffer, want.len())?, &want);

    let mut b = random_arena(&mut bench, geometry, count, 4)?;
    let scatter: Vec<_> =
        b.take(count as usize).into_iter().zip(0..count).map(|(to, from)| Move { from, to }).collect();
    let to = Place::Frames(b.arena());
    backend.transfer(&mut bench.stream, &Transfer { record, from: records(), to, moves: &scatter })?;
    scatter.iter().for_each(|one| put(&mut b, one.to, &want[one.from as usize * words..][..words]));
    b.compare(&mut bench, &mut check, 0)?;
    check.done()
}

fn many_copies<B: Backend>(backend: &B, geometry: Geometry) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut a = random_arena(&mut bench, geometry, 70_050, 4)?;
    let (sources, targets) = (a.take(50), a.take(70_000));
    let moves: Vec<_> = targets.iter().zip(sources.iter().cycle()).map(|(&to, &from)| Move { from, to }).collect();
    let (from, to) = (Place::Frames(a.arena()), Place::Frames(a.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record: a.record, from, to, moves: &moves })?;
    for one in &moves {
        let record = record_at(&a, one.from).to_vec();
        put(&mut a, one.to, &record);
    }
    a.compare(&mut bench, &mut check, 0)?;
    check.done()
}
