//! Are wrong rows, tiles, views and states of `attend` and `merge` refused?

use super::super::ask::Ask;
use super::super::bench::{Bench, Layout};
use super::super::check::{Check, Failure, Verdict};
use super::super::pages::Placement;
use super::super::scene::{Scene, random_kv};
use super::super::values::poison;
use super::{beyond, misaligned, outside, shape};
use crate::attention::{Grain, SECTION, state_words};
use crate::backend::Backend;
use crate::backend::ops::{Arena, Attend, Merge};
use crate::backend::params::{MergeRow, Row, Tile};
use crate::{Dtype, Error, Geometry, PageFormat, View};

pub(super) fn attend<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let model = Geometry::new(1, 2, 1, 32).format(format);
    let lens = [40, 300];
    let scene = Scene::new(&mut bench, model, &lens, random_kv(&model, Dtype::F32, 340, 83), Placement::SHUFFLED)?;
    let ask = Ask::random(&model, Dtype::F16, Ask::decode(&lens), 84);
    let [batch] = &scene.plan(backend, &ask)[..] else { return Err(Failure("two rows are one batch".into())) };
    let q = bench.tensor(&ask.q, Layout::Dense)?;
    let words = 3 * 2 * state_words(32) as usize;
    let states = bench.filled("states", words, 7)?;
    let (rows, tiles, scale) = (&batch.rows[..], &batch.tiles[..], ask.scale);
    let good = || scene.args(batch, &q, scale, &states);
    let invalid = |e: &Error| matches!(e, Error::Scale { .. });
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0] {
        let args = Attend { scale, ..good() };
        check.refused(&format!("scale {scale}"), backend.attend(&mut bench.stream, &args), invalid);
    }
    for (tile, kind) in [
        (Tile { rows: 3, ..tiles[0] }, shape as fn(&Error) -> bool),
        (Tile { row: 2, ..tiles[0] }, shape),
        (Tile { row: u32::MAX, rows: 2, ..tiles[0] }, shape),
        (Tile { item: 1, ..tiles[0] }, shape),
        (Tile { split: u32::MAX, ..tiles[0] }, beyond),
        (Tile { table: 1 << 20, ..tiles[0] }, outside),
        (Tile { table: u32::MAX, ..tiles[0] }, outside),
    ] {
        let args = Attend { tiles: &[tile], ..good() };
        check.refused(&format!("{tile:?}"), backend.attend(&mut bench.stream, &args), kind);
    }
    for (row, kind) in [
        (Row { state: 3, ..rows[0] }, beyond as fn(&Error) -> bool),
        (Row { state: u32::MAX, ..rows[0] }, beyond),
        (Row { end: 4000, ..rows[0] }, beyond),
        (Row { split: 5, ..rows[0] }, shape),
    ] {
        let args = Attend { rows: &[row, rows[1]], ..good() };
        check.refused(&format!("{row:?}"), backend.attend(&mut bench.stream, &args), kind);
    }
    let args = Attend { arena: Arena { slab_shift: 32, ..good().arena }, ..good() };
    check.refused("32 index bits", backend.attend(&mut bench.stream, &args), beyond);
    let small = bench.filled("small", words - 4, 7)?;
    let args = Attend { states: &small, ..good() };
    check.refused("too few states", backend.attend(&mut bench.stream, &args), outside);
    for (view, kind) in [
        (View { offset: 1, ..q.clone() }, misaligned as fn(&Error) -> bool),
        (View { offset: 2, ..q.clone() }, outside),
        (View { strides: [1 << 40, 32, 1], ..q.clone() }, beyond),
        (View { dtype: Dtype::F32, ..q.clone() }, outside),
    ] {
        let args = Attend { q: &view, ..good() };
        check.refused(
            &format!("Q at {} {:?}", view.offset, view.strides),
            backend.attend(&mut bench.stream, &args),
            kind,
        );
    }
    check.bits("states", &bench.read(&states, words)?, &vec![7; words]);
    check.done()
}

pub(super) fn merge<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let words = 4 * 2 * state_words(16) as usize;
    let states = bench.filled("states", words, 0)?;
    let rows = [MergeRow { state: 0, states: 2, before: 0 }, MergeRow { state: 2, states: 2, before: 0 }];
    let (output, lse) =
        (bench.output(out, [2, 2, 16], Layout::Dense)?, bench.output(Dtype::F32, [2, 2, 1], Layout::Dense)?);
    let view = &output.view;
    let good = Merge {
        states: &states,
        grain: Grain::Section,
        rows: &rows,
        q_heads: 2,
        v_dim: 16,
        out: view,
        lse: Some(&lse.view),
    };
    let copy = || Merge { ..good };
    for v_dim in [0, 4, 12, 20, 264, 1 << 20] {
        let args = Merge { v_dim, ..copy() };
        check.refused(&format!("v_dim {v_dim}"), backend.merge(&mut bench.stream, &args), shape);
    }
    for bad in [(3, 2), (4, 1), (0, 5), (u32::MAX, 1), (0, u32::MAX), (1 << 31, 1)] {
        let rows = [rows[0], MergeRow { state: bad.0, states: bad.1, before: 0 }];
        let args = Merge { rows: &rows, ..copy() };
        check.refused(&format!("states {bad:?}"), backend.merge(&mut bench.stream, &args), beyond);
    }
    for (grain, before) in [(Grain::Section, 1), (Grain::Split, SECTION), (Grain::Split, u32::MAX)] {
        let rows = [rows[0], MergeRow { before, ..rows[1] }];
        let args = Merge { grain, rows: &rows, ..copy() };
        check.refused(&format!("{before} states before"), backend.merge(&mut bench.stream, &args), shape);
    }
    let [row, head, _] = view.strides;
    for (view, kind) in [
        (View { strides: [8, 4, 2], ..view.clone() }, shape as fn(&Error) -> bool),
        (View { strides: [row + 16, head, 1], ..view.clone() }, outside),
        (View { strides: [1 << 40, head, 1], ..view.clone() }, beyond),
        (View { offset: 4, ..view.clone() }, outside),
        (View { offset: 1, ..view.clone() }, misaligned),
    ] {
        let args = Merge { out: &view, ..copy() };
        check.refused(
            &format!("output at {} {:?}", view.offset, view.strides),
            backend.merge(&mut bench.stream, &args),
            kind,
        );
    }
    if out != Dtype::F32 {
        for odd in
            [View { strides: [row - 1, head, 1], ..view.clone() }, View { strides: [row, head - 1, 1], ..view.clone() }]
        {
            let args = Merge { out: &odd, ..copy() };
            check.refused("odd strides of 16 bits", backend.merge(&mut bench.stream, &args), misaligned);
        }
    }
    for (view, kind) in [
        (View { dtype: Dtype::F16, ..lse.view.clone() }, shape as fn(&Error) -> bool),
        (View { offset: 4, ..lse.view.clone() }, outside),
        (View { offset: 2, ..lse.view.clone() }, misaligned),
    ] {
        let args = Merge { lse: Some(&view), ..copy() };
        check.refused("log-sum-exp", backend.merge(&mut bench.stream, &args), kind);
    }
    let (bits, tidy) = output.read(&mut bench)?;
    check.bits("output", &bits, &vec![poison(out); 64]);
    check.holds("memory between the outputs is untouched", tidy);
    check.done()
}
