//! Does `merge` fold states as the online softmax does? States made by hand, against float64 and to the bit.

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::fold::{EMPTY, Fold, LACKING, State, random_states, words};
use super::values::{encode, natural};
use crate::attention::Grain;
use crate::backend::ops::Merge;
use crate::backend::params::MergeRow;
use crate::backend::{Backend, Operation};
use crate::{Dtype, PageFormat};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let out = natural(format);
    for layout in Layout::OUTPUTS {
        for dim in [16, 40, 64, 128, 200, 256] {
            let name = format!("random states of {dim} elements, output laid out {layout:?}");
            list.add(Operation::Merge, format, 40_000, name, move |b| random(b, out, layout, dim));
        }
    }
    let mut add = |weight, name: &str, run: fn(&B, Dtype) -> Verdict| {
        list.add(Operation::Merge, format, weight, name, move |b| run(b, out));
    };
    add(1_000, "with and without empty states, in any order", empty);
    add(1_000, "nothing but empty states, or none", nothing);
    add(1_000, "three quarters: the base of log-sum-exp", base);
    add(100_000, "a thousand states of one row", fold);
    add(20_000, "maxima far apart", far_apart);
    add(5_000, "without a log-sum-exp", without_lse);
    if format == PageFormat::Bf16 {
        add(4_000_000, "70,000 rows", many);
    }
}

/// Rows of zero to nine states, some of which rows share.
fn random<B: Backend>(backend: &B, out: Dtype, layout: Layout, dim: usize) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for heads in [1, 3, 8] {
        let states = random_states(40 * heads, 4.0, dim as u64);
        let rows: Vec<_> = (0..14).map(|at| MergeRow { state: at * 3 % 31, states: at * 7 % 10, before: 0 }).collect();
        Fold { states: &states, rows: &rows, heads, dim }.compare(&mut bench, &mut check, out, layout)?;
    }
    check.done()
}

/// B10: minus infinity minus minus infinity. An empty state beside another changes no bit of it.
fn empty<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let one = State { o: 7.5, m: -3.25, l: 2.5 };
    let other = State { o: -1.5, m: 4.0, l: 1.0 };
    let sentinel = State { o: 0.0, m: f32::MIN, l: 0.0 };
    let infinite = State { o: f32::INFINITY, m: f32::NEG_INFINITY, l: 0.0 };
    for lone in [one, other, State { m: 1442.7, ..one }, State { m: -1442.7, ..one }] {
        for blank in [EMPTY, sentinel, infinite] {
            let states = [lone, blank, lone, blank, blank, blank, lone];
            let spans = [(0, 1), (0, 2), (1, 2), (1, 3), (3, 4)];
            let rows = spans.map(|(state, states)| MergeRow { state, states, before: 0 });
            let fold = Fold { states: &states, rows: &rows, heads: 1, dim: 16 };
            let answer = fold.compare(&mut bench, &mut check, out, Layout::Dense)?;
            for row in 1..rows.len() {
                check.bits("output beside empty states", answer.row(row, 5).0, answer.row(0, 5).0);
                check.bits("log-sum-exp beside empty states", answer.row(row, 5).1, answer.row(0, 5).1);
            }
        }
    }
    // A single key: its value comes back to the bit.
    let states = [EMPTY, State { o: 1.25, m: 0.7, l: 1.0 }];
    let rows = [MergeRow { state: 0, states: 2, before: 0 }];
    let answer = Fold { states: &states, rows: &rows, heads: 1, dim: 16 }.run(&mut bench, out, Layout::Dense)?;
    let value: Vec<u32> = (0..16).map(|d| encode(1.25 * (1 + d % 3) as f32, out)).collect();
    check.bits("a lone value", &answer.out, &value);
    check.done()
}

fn nothing<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for blank in [EMPTY, State { o: 0.0, m: f32::MIN, l: 0.0 }, State { o: 1.0, m: f32::INFINITY, l: 0.0 }] {
        let rows = [5, 1, 2, 0].map(|states| MergeRow { state: 0, states, before: 0 });
        let fold = Fold { states: &[blank; 15], rows: &rows, heads: 3, dim: 24 };
        let answer = fold.compare(&mut bench, &mut check, out, Layout::Padded)?;
        check.bits("zeros", &answer.out, &vec![0; answer.out.len()]);
        check.bits("minus infinities", &answer.lse, &vec![f32::NEG_INFINITY.to_bits(); answer.lse.len()]);
    }
    let answer = Fold { states: &[EMPTY], rows: &[], heads: 1, dim: 16 }.run(&mut bench, out, Layout::Dense)?;
    check.holds("no rows, no output", answer.out.is_empty() && answer.tidy);
    check.done()
}

/// B11: one key of value 0 and three (or 4095) of value 1, all with score 0.
fn base<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for keys in [3.0, 4095.0] {
        let states = [State { o: 0.0, m: 0.0, l: 1.0 }, State { o: keys, m: 0.0, l: keys }];
        let rows = [MergeRow { state: 0, states: 2, before: 0 }];
        let fold = Fold { states: &states, rows: &rows, heads: 1, dim: 16 };
        let answer = fold.run(&mut bench, out, Layout::Dense)?;
        let want: Vec<f64> = (0..16).map(|d| f64::from(keys) / f64::from(keys + 1.0) * f64::from(1 + d % 3)).collect();
        let lse = f64::from(keys + 1.0).ln() + f64::from(LACKING) * std::f64::consts::LN_2;
        answer.compare(&mut check, &want, &[lse], 16);
    }
    check.done()
}

fn fold<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for spread in [0.1, 3.0, 100.0] {
        let states = random_states(2000, spread, 71);
        let rows = [MergeRow { state: 0, states: 1000, before: 0 }, MergeRow { state: 1, states: 513, before: 0 }];
        Fold { states: &states, rows: &rows, heads: 2, dim: 64 }.compare(&mut bench, &mut check, out, Layout::Dense)?;
    }
    check.done()
}

/// Scores of ±1,000 and beyond: what is far below the maximum vanishes, and nothing overflows.
fn far_apart<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let m = [-1442.0f32, 1442.0, 0.0, 1441.0, -1e6, 1e6, 1e6, -1e9, 1e9];
    let states = m.map(|m| State { o: 1.0 + m.rem_euclid(7.0), m, l: 2.0 });
    let rows: Vec<_> =
        (0..9).flat_map(|state| (1..=9 - state).map(move |states| MergeRow { state, states, before: 0 })).collect();
    let fold = Fold { states: &states, rows: &rows, heads: 1, dim: 32 };
    fold.compare(&mut bench, &mut check, out, Layout::Dense)?;
    check.done()
}

fn without_lse<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let states = random_states(12, 2.0, 72);
    let rows = [MergeRow { state: 0, states: 4, before: 0 }, MergeRow { state: 2, states: 0, before: 0 }];
    let fold = Fold { states: &states, rows: &rows, heads: 3, dim: 48 };
    let with = fold.run(&mut bench, out, Layout::Padded)?;
    let memory = bench.words("states", &words(&states, 48))?;
    let output = bench.output(out, [2, 3, 48], Layout::Padded)?;
    let merge = Merge {
        states: &memory,
        grain: Grain::Section,
        rows: &rows,
        q_heads: 3,
        v_dim: 48,
        out: &output.view,
        lse: None,
    };
    backend.merge(&mut bench.stream, &merge)?;
    let (bits, tidy) = output.read(&mut bench)?;
    check.bits("output bits", &bits, &with.out);
    check.holds("memory between the outputs is untouched", tidy);
    check.done()
}

/// B21: more rows than 65,535 groups of a grid.
fn many<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let states = random_states(70_000, 2.0, 73);
    let rows: Vec<_> =
        (0..70_000u32).map(|at| MergeRow { state: at, states: (at % 3).min(70_000 - at), before: 0 }).collect();
    Fold { states: &states, rows: &rows, heads: 1, dim: 16 }.compare(&mut bench, &mut check, out, Layout::Dense)?;
    check.done()
}
