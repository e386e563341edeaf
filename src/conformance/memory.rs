//! Does memory behave? Uploads, copies and fills at word granularity, and what must be refused.

use super::Cases;
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::values::Rng;
use crate::Error;
use crate::backend::{Backend, DeviceBuffer};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>) {
    list.memory(4_000, "uploads of any number of words leave their neighbours alone", neighbours);
    list.memory(4_000, "copies and fills of word ranges", copies_and_fills);
    list.memory(2_000_000, "sums of words", sums);
    list.memory(100, "nothing happens for zero bytes", empty);
    list.memory(100, "misaligned and out-of-bounds ranges are refused", refusals);
    list.memory(100, "buffers that no device can hold are refused", too_large);
}

pub(super) fn random(words: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..words).map(|_| rng.word()).collect()
}

/// B22: a copy that is rounded up overwrites what follows it.
fn neighbours<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (at, words) in [(0, 1), (1, 1), (3, 3), (5, 6), (7, 255), (63, 257), (250, 262)] {
        let (mut host, new) = (random(512, 1), random(words, 2));
        let buffer = bench.words("words", &host)?;
        backend.upload(&mut bench.stream, &buffer, at as u64 * 4, bytemuck::cast_slice(&new))?;
        host[at..at + words].copy_from_slice(&new);
        check.bits("memory around an upload", &bench.read(&buffer, 512)?, &host);
        let mut back = vec![0u32; words];
        backend.download(&mut bench.stream, &buffer, at as u64 * 4, bytemuck::cast_slice_mut(&mut back))?;
        check.bits("a partial download", &back, &new);
    }
    check.done()
}

/// Sums of every length around a block's, and of more than one dimension of a grid of single blocks would hold.
fn sums<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut rng = Rng::new(91);
    let words: Vec<u32> = (0..1 << 19).map(|_| rng.word()).collect();
    let (source, total) = (bench.words("words", &words)?, bench.words("a total", &[7, 9])?);
    let mut want = 7u32;
    for count in [0, 4, 8, 4092, 4096, 4100, 65_532, 1 << 19] {
        backend.sum(&mut bench.stream, &source, count as u64 * 4, &total)?;
        want = words[..count].iter().fold(want, |sum, word| sum.wrapping_add(*word));
        check.bits("a sum", &bench.read(&total, 2)?, &[want, 9]);
    }
    let stream = &mut bench.stream;
    let misaligned = |e: &Error| matches!(e, Error::Misaligned { .. });
    check.refused("half a unit", backend.sum(stream, &source, 8, &total), misaligned);
    let outside = |e: &Error| matches!(e, Error::OutOfBounds { .. });
    check.refused("past the end", backend.sum(stream, &source, (4 << 19) + 16, &total), outside);
    let unsupported = |e: &Error| matches!(e, Error::Unsupported { .. });
    check.refused("in place", backend.sum(stream, &source, 16, &source), unsupported);
    check.done()
}

fn copies_and_fills<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let source = random(700, 3);
    let from = bench.words("source", &source)?;
    for (src, dst, words) in [(0, 0, 1), (1, 2, 3), (65, 7, 256), (500, 0, 200), (3, 499, 5)] {
        let mut host = random(600, 4);
        let to = bench.words("destination", &host)?;
        backend.copy(&mut bench.stream, (&from, src as u64 * 4), (&to, dst as u64 * 4), words as u64 * 4)?;
        host[dst..dst + words].copy_from_slice(&source[src..src + words]);
        let (at, end) = (dst + words, (dst + 2 * words).min(600));
        backend.fill(&mut bench.stream, &to, at as u64 * 4, (end - at) as u64 * 4, 0x8000_0001)?;
        host[at..end].fill(0x8000_0001);
        check.bits("copies and fills", &bench.read(&to, 600)?, &host);
    }
    check.bits("the source of copies", &bench.read(&from, 700)?, &source);
    check.done()
}

fn empty<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let host = random(16, 5);
    let (a, b) = (bench.words("a", &host)?, bench.words("b", &host)?);
    for at in [0, 8, 64] {
        backend.upload(&mut bench.stream, &a, at, &[])?;
        backend.download(&mut bench.stream, &a, at, &mut [])?;
        backend.copy(&mut bench.stream, (&a, at), (&b, 64 - at), 0)?;
        backend.fill(&mut bench.stream, &a, at, 0, 1)?;
    }
    backend.flush(&mut bench.stream)?;
    check.bits("memory", &bench.read(&a, 16)?, &host);
    check.bits("memory", &bench.read(&b, 16)?, &host);
    check.done()
}

fn refusals<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let host = random(16, 6);
    let (a, b) = (bench.words("a", &host)?, bench.words("b", &host)?);
    let (end, stream) = (a.bytes(), &mut bench.stream);
    let misaligned = |e: &Error| matches!(e, Error::Misaligned { .. });
    for (at, bytes) in [(1, 4), (2, 8), (0, 3), (4, 25), (0, 1)] {
        let mut data = vec![0; bytes as usize];
        check.refused("misaligned upload", backend.upload(stream, &a, at, &data), misaligned);
        check.refused("misaligned download", backend.download(stream, &a, at, &mut data), misaligned);
        check.refused("misaligned source", backend.copy(stream, (&a, at), (&b, 0), bytes), misaligned);
        check.refused("misaligned destination", backend.copy(stream, (&a, 0), (&b, at), bytes), misaligned);
        check.refused("misaligned fill", backend.fill(stream, &a, at, bytes, 0), misaligned);
    }
    let outside = |e: &Error| matches!(e, Error::OutOfBounds { .. });
    for (at, bytes) in [(end, 4), (end - 4, 8), (0, end + 4), (u64::MAX - 3, 8)] {
        let mut data = vec![0; bytes as usize];
        check.refused("upload past the end", backend.upload(stream, &a, at, &data), outside);
        check.refused("download past the end", backend.download(stream, &a, at, &mut data), outside);
        check.refused("copy from past the end", backend.copy(stream, (&a, at), (&b, 0), bytes), outside);
        check.refused("copy to past the end", backend.copy(stream, (&a, 0), (&b, at), bytes), outside);
        check.refused("fill past the end", backend.fill(stream, &a, at, bytes, 0), outside);
    }
    check.bits("memory after refusals", &bench.read(&a, 16)?, &host);
    check.bits("memory after refusals", &bench.read(&b, 16)?, &host);
    check.done()
}

/// B01: what cannot be had is refused and never wraps around.
fn too_large<B: Backend>(backend: &B) -> Verdict {
    let mut check = Check::default();
    for bytes in [1 << 60, u64::MAX - 3, u64::MAX] {
        let typed = |e: &Error| matches!(e, Error::OutOfMemory { .. } | Error::Limit { .. });
        check.refused("an impossible allocation", backend.alloc("too large", bytes), typed);
    }
    check.done()
}

/// Whether a device refuses the buffers of another, in memory calls of every kind.
pub(super) fn foreign_buffers<B: Backend>(here: &B, there: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(here)?, Check::default());
    let (ours, theirs) = (bench.filled("ours", 4, 0)?, Bench::new(there)?.filled("theirs", 4, 0)?);
    let wrong = |e: &Error| matches!(e, Error::WrongDevice { .. });
    let stream = &mut bench.stream;
    check.refused("upload", here.upload(stream, &theirs, 0, &[0; 4]), wrong);
    check.refused("download", here.download(stream, &theirs, 0, &mut [0; 4]), wrong);
    check.refused("copy from", here.copy(stream, (&theirs, 0), (&ours, 0), 4), wrong);
    check.refused("copy to", here.copy(stream, (&ours, 0), (&theirs, 0), 4), wrong);
    check.refused("fill", here.fill(stream, &theirs, 0, 4, 0), wrong);
    check.done()
}
