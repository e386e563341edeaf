//! Does a captured decode step serve the next token? Graphs on a caller's stream, replayed while the sequences grow, against
//! the calls that they are made of, to the bit.
//!
//! Without a device it says so and passes, unless `KVTIDE_REQUIRE` names `cuda`.
#![cfg(all(feature = "cuda", feature = "conformance"))]

mod engine;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use engine::{HEADS, Pair, alone, context};
use half::bf16;
use kvtide::backend::cuda::{cudarc, driver_calls};
use kvtide::{Append, Capture, Error, Geometry, PageFormat, Rows, StoreConfig};

fn geometry(format: PageFormat) -> Geometry {
    Geometry::new(2, HEADS[0], HEADS[1], 64).page_size(16).format(format)
}

/// Lengths before the edges of a page, a split and a section, and one that has nothing yet.
const LENS: [u32; 4] = [1020, 252, 0, 13];

#[test]
fn replays_serve_growing_sequences_to_the_bit() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    // The second has states for a row or two at a time, so that several batches are captured.
    let few = 9 * 4 * 68 * 4;
    for (format, state_bytes) in [
        (PageFormat::Bf16, 64 << 20),
        (PageFormat::Bf16, few),
        (PageFormat::Int8, 64 << 20),
        (PageFormat::F32, 64 << 20),
    ] {
        let config = StoreConfig { step_pages: 512, state_bytes, ..StoreConfig::default() };
        let mut pair = Pair::new(&context, geometry(format), config, &LENS);
        let (mut step, mut graph) = (pair.step(1100), None);
        let captures: Vec<_> = (0..6).map(|_| pair.token(&mut step, &mut graph)).collect();
        assert!(captures[0] == Capture::Stale && captures[1..].iter().all(|&c| c == Capture::Valid));
        pair.compare_pages();
    }
}

/// Forks share the page that is written next; others append and truncate between replays.
#[test]
fn replays_follow_forks_and_changes() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    let config = StoreConfig { step_pages: 512, ..StoreConfig::default() };
    let mut pair = Pair::new(&context, geometry(PageFormat::Bf16), config, &[37, 20]);
    let (mut step, mut graph) = (pair.step(200), None);
    let _ = pair.token(&mut step, &mut graph);
    let forks = [&mut pair.graphed, &mut pair.plain].map(|engine| engine.store.fork(&engine.seqs[0]).unwrap());
    let fork_rows = pair.plain.rows(0, 1);
    let _ = pair.token(&mut step, &mut graph);
    pair.append(1, 19);
    let _ = pair.token(&mut step, &mut graph);
    for engine in [&mut pair.graphed, &mut pair.plain] {
        engine.store.truncate(&engine.seqs[0], 33).unwrap();
    }
    for _ in 0..3 {
        assert_eq!(pair.token(&mut step, &mut graph), Capture::Valid);
    }
    pair.compare_pages();
    // What the fork shares has not been written.
    for (engine, fork) in [&mut pair.graphed, &mut pair.plain].into_iter().zip(forks) {
        engine.seqs[0] = fork;
        assert!(engine.rows(0, 1) == fork_rows);
    }
}

#[test]
fn a_pool_that_grows_asks_for_another_capture() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    let config = StoreConfig { step_pages: 1, ..StoreConfig::default() };
    let mut pair = Pair::new(&context, geometry(PageFormat::Bf16), config, &[15, 31]);
    let (mut step, mut graph) = (pair.step(64), None);
    let captures: Vec<_> = (0..20).map(|_| pair.token(&mut step, &mut graph)).collect();
    let stale = captures.iter().filter(|&&capture| capture == Capture::Stale).count();
    assert!((2..8).contains(&stale), "{stale} captures");
    // With pages in reserve nothing grows.
    pair.graphed.seqs.iter().for_each(|seq| pair.graphed.store.reserve(seq, 64).unwrap());
    let _ = pair.token(&mut step, &mut graph);
    assert!((0..12).all(|_| pair.token(&mut step, &mut graph) == Capture::Valid));
    pair.compare_pages();
}

#[test]
fn a_replay_counts_what_is_not_finite() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    for format in [PageFormat::Bf16, PageFormat::Int8] {
        let mut pair = Pair::new(&context, geometry(format), StoreConfig::default(), &[5, 5]);
        let (mut step, mut graph) = (pair.step(20), None);
        let _ = pair.token(&mut step, &mut graph);
        assert_eq!(pair.graphed.store.non_finite().unwrap(), 0);
        pair.graphed.store.advance(&mut step).map(|capture| assert_eq!(capture, Capture::Valid)).unwrap();
        let infinite = bf16::INFINITY.to_le_bytes().repeat(2);
        pair.graphed.store.upload(&pair.graphed.layers[1].v.buffer, 12, &infinite).unwrap();
        graph.unwrap().launch().unwrap();
        assert_eq!(pair.graphed.store.non_finite().unwrap(), 2);
    }
}

/// What cannot be captured is refused before it reaches the stream, so that the capture goes on.
#[test]
fn other_calls_are_refused_while_the_stream_is_captured() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    let mut pair = Pair::new(&context, geometry(PageFormat::Bf16), StoreConfig::default(), &[20]);
    let mut step = pair.step(40);
    // What ordinary calls need is there: an allocation would end the capture.
    pair.graphed.token();
    assert_eq!(pair.graphed.store.advance(&mut step), Ok(Capture::Stale));
    pair.begin_capture();
    let engine = &mut pair.graphed;
    let refused = |what: &str, result: kvtide::Result<()>| {
        assert!(matches!(result, Err(Error::Unsupported { operation: "work", .. })), "{what}: {result:?}");
    };
    let (layer, seq) = (&engine.layers[0], &engine.seqs[0]);
    let append = Append::new(seq, 1, layer.k.clone(), layer.v.clone());
    refused("append", engine.store.append(0, &[append]));
    refused("attend", engine.store.attend(0, &layer.query(&[Rows::decode(seq)])));
    refused("upload", engine.store.upload(&layer.k.buffer, 0, &[0; 4]));
    refused("download", engine.store.download(&layer.k.buffer, 0, &mut [0; 4]));
    refused("synchronize", engine.store.synchronize());
    let len = engine.store.len(seq, 0).unwrap();
    refused("advance", engine.store.advance(&mut step).map(|_| ()));
    assert_eq!(engine.store.len(&engine.seqs[0], 0).unwrap(), len, "nothing has changed");
    assert_eq!(pair.stream.capture_status(), Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE));
    drop(pair.end_capture());
    let engine = &mut pair.graphed;
    let behind = engine.store.append_step(&step, 0, &engine.layers[0].k, &engine.layers[0].v);
    assert_eq!(behind, Err(Error::Behind { sequence: engine.seqs[0].id(), layer: 0 }));
    assert_eq!(engine.store.advance(&mut step), Ok(Capture::Valid));
    let mut graph = Some(pair.capture(&step));
    let seqs = [&pair.graphed.seqs[0], &pair.plain.seqs[0]];
    pair.graphed.store.truncate(seqs[0], 20).unwrap();
    pair.plain.store.truncate(seqs[1], 20).unwrap();
    assert_eq!(pair.token(&mut step, &mut graph), Capture::Valid);
}

/// A driver that lets one wait in a capture would hide a wait of ours.
#[test]
fn a_wait_ends_a_capture() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    let stream = context.new_stream().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    assert!(stream.synchronize().is_err());
    assert!(stream.end_capture(CUgraphInstantiate_flags(0)).is_err());
    assert_eq!(stream.capture_status(), Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE));
}

/// Nothing is allocated and nothing waits while pages, tables and states are there: in ordinary calls, in a step's and in
/// replays.
#[test]
fn a_steady_decode_step_allocates_nothing_and_waits_for_nothing() {
    let (_alone, Some(context)) = (alone(), context()) else { return };
    for format in [PageFormat::Bf16, PageFormat::Int8] {
        let config = StoreConfig { step_pages: 512, ..StoreConfig::default() };
        let mut pair = Pair::new(&context, geometry(format), config, &[270, 40, 3]);
        for engine in [&mut pair.graphed, &mut pair.plain] {
            engine.seqs.iter().for_each(|seq| engine.store.reserve(seq, 310).unwrap());
        }
        let (mut step, mut graph) = (pair.step(310), None);
        let _ = pair.token(&mut step, &mut graph);
        let graph = graph.unwrap();
        let before = driver_calls();
        assert!(before.allocations > 0 && before.waits > 0, "this thread has allocated, and waited for downloads");
        for _ in 0..17 {
            pair.plain.token();
            assert_eq!(pair.graphed.store.advance(&mut step), Ok(Capture::Valid));
            pair.graphed.call(&step);
            assert_eq!(pair.graphed.store.advance(&mut step), Ok(Capture::Valid));
            graph.launch().unwrap();
        }
        assert_eq!(driver_calls(), before);
        pair.graphed.store.synchronize().unwrap();
        assert_eq!(driver_calls().waits, before.waits + 1);
    }
}
