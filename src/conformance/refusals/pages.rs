//! Are wrong runs, moves, views and dims of `append` and `transfer` refused?

use super::super::bench::{Bench, Layout};
use super::super::check::{Check, Verdict};
use super::super::pages::{Pages, Piece, Placement, Tokens};
use super::super::scene::random_kv;
use super::super::values::page_poison;
use super::{beyond, geometry, misaligned, outside, shape};
use crate::attention::{Grain, state_words};
use crate::backend::ops::{Append, Arena, Attend, Place, Transfer};
use crate::backend::params::{AppendRun, Move, Row, Tile};
use crate::backend::{Backend, DeviceBuffer};
use crate::record::Record;
use crate::{Dtype, Error, Geometry, PageFormat, View};

pub(super) fn append<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let model = Geometry::new(1, 2, 2, 32).value_dim(16).page_size(8).format(format);
    let mut pages = Pages::new(&mut bench, model, 5, Placement { slabs: 2, ..Placement::SHUFFLED })?;
    let (k, v) = random_kv(&model, Dtype::F16, 20, 81);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    let table = pages.table(20);
    let good = pages.runs(&tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 20 }]);
    let run = AppendRun { k_offset: 0, v_offset: 0, frame: table[0], slot: 0, tokens: 1, page: 0, reserved: [0; 2] };
    // B01: frame numbers that a narrow product would wrap into the arena.
    let high = [3, 1 << pages.shift | 3, 2 << pages.shift, 1 << 16, 1 << 28, u32::MAX];
    let bad = high.map(|frame| (AppendRun { frame, ..run }, outside as fn(&Error) -> bool));
    let past = [
        (AppendRun { tokens: 0, ..run }, shape as fn(&Error) -> bool),
        (AppendRun { tokens: 9, ..run }, shape),
        (AppendRun { slot: 7, tokens: 2, ..run }, shape),
        (AppendRun { slot: 8, ..run }, shape),
        (AppendRun { slot: u32::MAX, tokens: 2, ..run }, shape),
        (AppendRun { k_offset: 20 * 64 - 63, ..run }, outside),
        (AppendRun { v_offset: 20 * 32 - 31, ..run }, outside),
        (AppendRun { k_offset: u32::MAX, ..run }, beyond),
    ];
    for (bad, kind) in bad.into_iter().chain(past) {
        // A good run in front must not be written either.
        let runs = [good[1], bad];
        let got = backend.append(&mut bench.stream, &pages.args(&tokens, &runs));
        check.refused(&format!("run {bad:?}"), got, kind);
    }
    let k = &tokens.k_view;
    let huge = |at: usize| {
        let mut strides = k.strides;
        strides[at] = u64::MAX / 7;
        View { strides, ..k.clone() }
    };
    let views = [
        (View { offset: 1, ..k.clone() }, misaligned as fn(&Error) -> bool),
        (View { offset: k.buffer.bytes() - 32, ..k.clone() }, outside),
        (View { offset: u64::MAX - 1, ..k.clone() }, outside),
        (View { dtype: Dtype::Bf16, ..k.clone() }, shape),
        (huge(0), beyond),
        (huge(1), beyond),
        (huge(2), beyond),
    ];
    for (view, kind) in views {
        let args = Append { k: &view, ..pages.args(&tokens, &good) };
        check.refused(
            &format!("K at {} strides {:?}", view.offset, view.strides),
            backend.append(&mut bench.stream, &args),
            kind,
        );
    }
    let max = backend.caps().max_slabs as usize;
    if max < 1 << 16 {
        let slabs = vec![pages.slabs[0].clone(); max + 1];
        let args = Append { arena: Arena { slabs: &slabs, ..pages.arena() }, ..pages.args(&tokens, &good) };
        check.refused("one slab too many", backend.append(&mut bench.stream, &args), beyond);
    }
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// B14: a head_dim that is no multiple of 8, or too large, is refused, whoever builds the record.
pub(super) fn dims<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let good = Geometry::new(1, 2, 1, 256).value_dim(256).page_size(8).format(format);
    let pages = Pages::new(&mut bench, good, 3, Placement::PLAIN)?;
    let (k, v) = random_kv(&good, Dtype::F16, 8, 82);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    let states = bench.filled("states", 4 * state_words(256) as usize, 0)?;
    let run = AppendRun { k_offset: 0, v_offset: 0, frame: 0, slot: 0, tokens: 1, page: 0, reserved: [0; 2] };
    let row = Row { start: 0, end: 1, state: 0, split: 0 };
    let tile = Tile { table: 0, row: 0, rows: 1, split: 0, splits: 1, item: 0, reserved: [0; 2] };
    let tables = bench.words("tables", &[0])?;
    for dim in [0, 1, 8, 12, 17, 20, 36, 60, 100, 130, 248 + 4, 255] {
        for bad in [Geometry::new(1, 2, 1, dim).value_dim(64), Geometry::new(1, 2, 1, 64).value_dim(dim)] {
            let bad = bad.page_size(8).format(format);
            check.refused(&format!("a geometry of {dim}"), bad.validate(), geometry);
            let record = Record::new(bad);
            let args = Append { record, ..pages.args(&tokens, std::slice::from_ref(&run)) };
            check.refused(&format!("appending {dim}"), backend.append(&mut bench.stream, &args), geometry);
            let q = &tokens.k_view;
            let (arena, rows, tiles) = (pages.arena(), &[row][..], &[tile][..]);
            let (channels, scale) = (pages.channels(), 1.0);
            let args = Attend {
                record,
                arena,
                tables: &tables,
                q,
                channels,
                scale,
                grain: Grain::Split,
                rows,
                tiles,
                states: &states,
            };
            check.refused(&format!("attending {dim}"), backend.attend(&mut bench.stream, &args), geometry);
            let place = || Place::Frames(pages.arena());
            let args = Transfer { record, from: place(), to: place(), moves: &[Move { from: 0, to: 1 }] };
            check.refused(&format!("moving {dim}"), backend.transfer(&mut bench.stream, &args), geometry);
        }
    }
    for dim in [264, 512, 576, u32::MAX] {
        check.refused(&format!("a geometry of {dim}"), Geometry::new(1, 1, 1, dim).validate(), geometry);
    }
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

pub(super) fn transfer<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let model = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let pages = Pages::new(&mut bench, model, 6, Placement { slabs: 2, ..Placement::PLAIN })?;
    let (record, bytes) = (pages.record, pages.record.bytes());
    let word = page_poison(format);
    let words = 4 * bytes as usize / 4;
    let buffer = bench.filled("records", words, word)?;
    let end = buffer.bytes();
    let at = |offset, stride| Place::Records { buffer: &buffer, offset, stride };
    let frames = || Place::Frames(pages.arena());
    let unsupported = |e: &Error| matches!(e, Error::Unsupported { .. });
    let both = Transfer { record, from: at(0, bytes), to: at(0, bytes), moves: &[Move { from: 0, to: 1 }] };
    check.refused("records to records", backend.transfer(&mut bench.stream, &both), unsupported);
    // Offset and stride of the records, and which record a frame goes to.
    let places = [
        (2, bytes, 0, misaligned as fn(&Error) -> bool),
        (1, bytes, 0, misaligned),
        (0, bytes + 2, 0, misaligned),
        (0, bytes - 4, 0, shape),
        (0, 0, 0, shape),
        (4, bytes, 3, outside),
        (0, bytes, 4, outside),
        (end - bytes + 4, bytes, 0, outside),
        (0, bytes * 2, 2, outside),
        (0, bytes, u32::MAX, beyond),
        (u64::MAX - 3, bytes, 1, beyond),
        (0, u64::MAX - 3, 1, beyond),
    ];
    for (offset, stride, index, kind) in places {
        let moves = [Move { from: 0, to: 0 }, Move { from: 0, to: index }];
        let args = Transfer { record, from: frames(), to: at(offset, stride), moves: &moves[1..] };
        let name = format!("record {index} at {offset}, {stride} bytes apart");
        check.refused(&name, backend.transfer(&mut bench.stream, &args), kind);
        let moves = [Move { from: index, to: 0 }];
        let args = Transfer { record, from: at(offset, stride), to: frames(), moves: &moves };
        check.refused(&name, backend.transfer(&mut bench.stream, &args), kind);
    }
    for frame in [3, 1 << pages.shift | 3, 2 << pages.shift, u32::MAX] {
        for bad in [Move { from: frame, to: 1 }, Move { from: 0, to: frame }] {
            let moves = [Move { from: 0, to: 2 }, bad];
            let args = Transfer { record, from: frames(), to: frames(), moves: &moves };
            check.refused(&format!("{bad:?}"), backend.transfer(&mut bench.stream, &args), outside);
        }
    }
    check.bits("records", &bench.read(&buffer, words)?, &vec![word; words]);
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}
