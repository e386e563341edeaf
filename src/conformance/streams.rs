//! Is work done in order? On one stream, between streams by events, from several threads, with handles dropped early.

use super::Cases;
use super::bench::Bench;
use super::check::{Check, Failure, Verdict};
use super::memory::random;
use crate::backend::Backend;
use std::time::Instant;

pub(super) fn cases<B: Backend>(list: &mut Cases<B>) {
    list.memory(4_000, "calls on one stream happen in order", one_stream);
    list.memory(100_000, "an event orders two streams", two_streams);
    list.memory(40_000, "host memory is free once an upload has returned", reused_host_memory);
    list.memory(400_000, "handles dropped while work is queued", dropped_handles);
}

/// The cases that come last: what they have broken at times is the device.
pub(super) fn last_cases<B: Backend>(list: &mut Cases<B>) {
    list.memory(40_000, "threads with a stream each", threads);
}

fn one_stream<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let rounds = 50;
    let (work, log) = (bench.filled("work", 64, 0)?, bench.filled("log", rounds * 64, 0)?);
    let mut want = Vec::new();
    for round in 0..rounds {
        // Fill, upload over its middle, copy out: each must see the one before, and none the one after.
        let words = random(32, round as u64);
        backend.fill(&mut bench.stream, &work, 0, 256, round as u32)?;
        backend.upload(&mut bench.stream, &work, 64, bytemuck::cast_slice(&words))?;
        backend.copy(&mut bench.stream, (&work, 0), (&log, round as u64 * 256), 256)?;
        if round % 7 == 0 {
            backend.flush(&mut bench.stream)?;
        }
        let edge = [round as u32; 16];
        want.extend(edge.iter().chain(&words).chain(&edge));
    }
    check.bits("what each copy saw", &bench.read(&log, rounds * 64)?, &want);
    check.done()
}

fn two_streams<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut other = backend.stream()?;
    let words = 4096;
    let (a, b) = (bench.filled("a", words, 0)?, bench.filled("b", words, 0)?);
    let created = backend.record(&mut bench.stream)?;
    backend.flush(&mut bench.stream)?;
    backend.wait(&mut other, &created)?;
    for round in 1..=20u64 {
        let data = random(words, round);
        backend.upload(&mut bench.stream, &a, 0, bytemuck::cast_slice(&data))?;
        let written = backend.record(&mut bench.stream)?;
        backend.flush(&mut bench.stream)?;
        backend.wait(&mut other, &written)?;
        backend.copy(&mut other, (&a, 0), (&b, 0), words as u64 * 4)?;
        let copied = backend.record(&mut other)?;
        backend.flush(&mut other)?;
        // The next round's upload may not overtake the copy.
        backend.wait(&mut bench.stream, &copied)?;
        if round % 5 == 0 {
            backend.synchronize(&mut other)?;
            check.holds("an event is done once its stream is synchronized", backend.is_done(&copied)?);
            check.holds("and so is what it waited for", backend.is_done(&written)?);
            check.bits("the copy on the second stream", &bench.read(&b, words)?, &data);
        }
    }
    check.done()
}

/// B39: a staging buffer that is overwritten while an upload from it is queued.
fn reused_host_memory<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let rounds = 1000;
    let (table, log) = (bench.filled("table", 4, 0)?, bench.filled("log", rounds * 4, 0)?);
    let (mut staging, mut want) = ([0u32; 4], Vec::new());
    for round in 0..rounds as u32 {
        staging = staging.map(|_| round);
        staging[1] = if round % 2 == 0 { 12 } else { 34 };
        want.extend(staging);
        backend.upload(&mut bench.stream, &table, 0, bytemuck::cast_slice(&staging))?;
        staging.fill(u32::MAX);
        backend.copy(&mut bench.stream, (&table, 0), (&log, u64::from(round) * 16), 16)?;
    }
    check.bits("what each upload brought", &bench.read(&log, rounds * 4)?, &want);
    check.done()
}

/// A1: a buffer dropped while a queued copy reads it, and its memory given to another.
fn dropped_handles<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let (rounds, words) = (20, 10_000);
    let kept = bench.filled("kept", rounds * words, 0)?;
    let mut want = Vec::new();
    for round in 0..rounds {
        let data = random(words, round as u64);
        let short_lived = bench.words("short-lived", &data)?;
        let bytes = words as u64 * 4;
        backend.copy(&mut bench.stream, (&short_lived, 0), (&kept, round as u64 * bytes), bytes)?;
        drop(short_lived);
        drop(bench.filled("its successor", words, 0xdead_beef)?);
        want.extend(data);
    }
    check.bits("what was copied", &bench.read(&kept, rounds * words)?, &want);
    check.done()
}

/// Asks for an event until it has happened, while other threads do the same.
fn polling<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let word = bench.filled("a word", 1, 0)?;
    for round in 0..300 {
        backend.fill(&mut bench.stream, &word, 0, 4, round)?;
        let filled = backend.record(&mut bench.stream)?;
        backend.flush(&mut bench.stream)?;
        let start = Instant::now();
        while !backend.is_done(&filled)? {
            if start.elapsed().as_secs() >= 60 {
                return Err(Failure("an event that never happens".into()));
            }
            std::thread::yield_now();
        }
        check.bits("what was filled", &bench.read(&word, 1)?, &[round]);
    }
    check.done()
}

/// A backend is shared by threads, and a stream is sent to one.
fn threads<B: Backend>(backend: &B) -> Verdict {
    let mut check = Check::default();
    let verdicts = std::thread::scope(|scope| {
        let start = |_| {
            let backend = backend.clone();
            scope.spawn(move || [polling(&backend), one_stream(&backend), dropped_handles(&backend)])
        };
        let running: Vec<_> = (0..4).map(start).collect();
        running
            .into_iter()
            .map(|thread| thread.join().map_err(|_| Failure("a thread panicked".into())))
            .collect::<Vec<_>>()
    });
    for verdict in verdicts {
        for measure in verdict? {
            let measure = measure?;
            check.error(&measure.what, measure.error, measure.bound, || "on a thread".into());
        }
    }
    let mut stream = Bench::new(backend)?.stream;
    let sent = std::thread::scope(|scope| {
        let work = || {
            let buffer = backend.alloc("sent", 16)?;
            backend.fill(&mut stream, &buffer, 0, 16, 7)?;
            Ok::<_, crate::Error>(buffer)
        };
        scope.spawn(work).join().map_err(|_| Failure("a thread panicked".into()))
    })??;
    let mut bench = Bench { backend, stream };
    check.bits("what another thread enqueued", &bench.read(&sent, 4)?, &[7; 4]);
    check.done()
}
