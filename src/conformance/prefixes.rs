//! Do states fold into the state that `merge` would go through? Folds of prefixes, merged with the rest, to the bit.

use super::Cases;
use super::ask::Answer;
use super::bench::{Bench, Layout};
use super::check::{Check, Failure, Verdict};
use super::fold::{EMPTY, State, random_states, words};
use super::values::natural;
use crate::attention::Grain;
use crate::backend::ops::{Fold, Merge};
use crate::backend::params::{FoldRow, MergeRow};
use crate::backend::{Backend, Operation};
use crate::{Dtype, Error, PageFormat};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let out = natural(format);
    for dim in [16, 40, 128, 256] {
        let name = format!("every prefix of states of {dim} elements folds as merge does");
        list.add(Operation::Merge, format, 100_000, name, move |b| every_cut(b, out, dim));
    }
    let mut add = |weight, name: &str, run: fn(&B, Dtype) -> Verdict| {
        list.add(Operation::Merge, format, weight, name, move |b| run(b, out));
    };
    add(2_000, "folds of nothing, and of one state", alone);
    add(20_000, "folds in place", in_place);
    // Folding has nothing to do with the output's type.
    if format == PageFormat::Bf16 {
        add(4_000_000, "70,000 folds", many);
        add(1_000, "folds out of range are refused", refusals);
    }
}

/// What may stand in the words of a state that nothing may read.
const UNUSED: u32 = 0x7fc0_dead;

/// States `[state, head]` on the device, whose unused words are NaN.
pub(super) struct States<'a, B: Backend> {
    bench: Bench<'a, B>,
    buffer: B::Buffer,
    heads: usize,
    dim: usize,
    words: Vec<u32>,
}

impl<'a, B: Backend> States<'a, B> {
    pub(super) fn new(backend: &'a B, states: &[State], heads: usize, dim: usize) -> Result<Self, Failure> {
        let mut bench = Bench::new(backend)?;
        let mut words = words(states, dim);
        words.chunks_exact_mut(dim + 4).for_each(|state| state[dim + 3..].fill(UNUSED));
        let buffer = bench.words("states", &words)?;
        Ok(States { bench, buffer, heads, dim, words })
    }

    pub(super) fn fold(&mut self, rows: &[FoldRow]) -> Result<(), Failure> {
        let args = Fold { states: &self.buffer, rows, q_heads: self.heads as u32, v_dim: self.dim as u32 };
        Ok(self.bench.backend.fold(&mut self.bench.stream, &args)?)
    }

    fn merge(&mut self, rows: &[MergeRow], out: Dtype) -> Result<Answer, Failure> {
        self.merge_as(Grain::Section, rows, out)
    }

    pub(super) fn merge_as(&mut self, grain: Grain, rows: &[MergeRow], out: Dtype) -> Result<Answer, Failure> {
        let shape = [rows.len(), self.heads, self.dim];
        let out = self.bench.output(out, shape, Layout::Dense)?;
        let lse = self.bench.output(Dtype::F32, [shape[0], shape[1], 1], Layout::Dense)?;
        let (q_heads, v_dim) = (self.heads as u32, self.dim as u32);
        let args = Merge { states: &self.buffer, grain, rows, q_heads, v_dim, out: &out.view, lse: Some(&lse.view) };
        self.bench.backend.merge(&mut self.bench.stream, &args)?;
        Ok(Answer::read(&mut self.bench, &out, &lse)?)
    }

    /// The words of all heads of state `at`, without the unused ones.
    fn state<'w>(&self, words: &'w [u32], at: u32) -> impl Iterator<Item = &'w [u32]> + use<'w, B> {
        let (state, used) = (self.dim + 4, self.dim + 3);
        words[at as usize * self.heads * state..][..self.heads * state].chunks(state).map(move |s| &s[..used])
    }

    /// All words now; those of every state but the targets must be as they were.
    fn read(&mut self, check: &mut Check, targets: &[u32]) -> Result<Vec<u32>, Failure> {
        let got = self.bench.read(&self.buffer, self.words.len())?;
        let stride = self.heads * (self.dim + 4);
        for (at, (got, was)) in (0..).zip(got.chunks(stride).zip(self.words.chunks(stride))) {
            if !targets.contains(&at) {
                check.bits("states beside the target", got, was);
            }
        }
        Ok(got)
    }
}

/// States of all kinds: far apart, empty in some heads, and zeros of either sign.
pub(super) fn sources(count: usize, heads: usize, seed: u64) -> Vec<State> {
    let mut states = random_states(count * heads, 4.0, seed);
    for (at, state) in states.iter_mut().enumerate() {
        match at % 7 {
            2 => state.o = -state.o,
            4 => state.m *= 300.0,
            _ => {}
        }
    }
    // The first states of the last head: zeros below zero, whose sign a sum with zero would lose.
    for state in 0..3 {
        states[state * heads + heads - 1] = State { o: -0.0, m: state as f32, l: 1.5 };
    }
    states
}

/// For every cut: the fold of the states before it, followed by copies of those behind it, merges into the same bits as
/// all of them.
fn every_cut<B: Backend>(backend: &B, out: Dtype, dim: usize) -> Verdict {
    let mut check = Check::default();
    for (heads, count) in [(1, 4), (3, 9)] {
        let all = sources(count, heads, dim as u64);
        let (mut states, mut folds) = (all.clone(), Vec::new());
        let mut rows = vec![MergeRow { state: 0, states: count as u32, before: 0 }];
        for cut in 0..=count {
            let to = (states.len() / heads) as u32;
            states.extend(vec![State { o: f32::NAN, m: f32::NAN, l: f32::NAN }; heads]);
            states.extend(&all[cut * heads..]);
            folds.push(FoldRow { state: 0, states: cut as u32, to, reserved: 0 });
            rows.push(MergeRow { state: to, states: (count - cut) as u32 + 1, before: 0 });
        }
        let mut states = States::new(backend, &states, heads, dim)?;
        states.fold(&folds)?;
        let targets: Vec<u32> = folds.iter().map(|fold| fold.to).collect();
        states.read(&mut check, &targets)?;
        let answer = states.merge(&rows, out)?;
        for row in 1..rows.len() {
            let (got, want) = (answer.row(row, rows.len()), answer.row(0, rows.len()));
            check.bits("output of a folded prefix", got.0, want.0);
            check.bits("log-sum-exp of a folded prefix", got.1, want.1);
        }
    }
    check.done()
}

/// Nothing leaves a sum of 0; a lone state is copied as it is, whatever stands beside it.
fn alone<B: Backend>(backend: &B, out: Dtype) -> Verdict {
    let mut check = Check::default();
    let infinite = State { o: f32::INFINITY, m: f32::NEG_INFINITY, l: 0.0 };
    for lone in [State { o: -0.0, m: -0.0, l: 1.0 }, State { o: 1.5, m: -1442.0, l: 3.0 }] {
        let states = [EMPTY, lone, infinite, EMPTY, lone, EMPTY, lone, lone];
        let rows = [(0, 0, 4), (2, 2, 5), (0, 3, 6), (1, 1, 7)];
        let rows = rows.map(|(state, states, to)| FoldRow { state, states, to, reserved: 0 });
        let mut states = States::new(backend, &states, 1, 24)?;
        states.fold(&rows)?;
        let got = states.read(&mut check, &[4, 5, 6, 7])?;
        for nothing in [4, 5] {
            let sums: Vec<u32> = states.state(&got, nothing).map(|words| words[25]).collect();
            check.bits("the sum of nothing", &sums, &[0]);
        }
        for (to, from) in [(6, 1), (7, 1)] {
            for (to, from) in states.state(&got, to).zip(states.state(&states.words, from)) {
                check.bits("a lone state", to, from);
            }
        }
        let answer = states.merge(&[4, 5].map(|state| MergeRow { state, states: 1, before: 0 }), out)?;
        check.bits("the output of nothing", &answer.out, &vec![0; answer.out.len()]);
        check.bits("the log-sum-exp of nothing", &answer.lse, &[f32::NEG_INFINITY.to_bits(); 2]);
    }
    check.done()
}

/// The first source is overwritten, by the bits that a fold elsewhere gives, and again by a fold of that fold.
fn in_place<B: Backend>(backend: &B, _: Dtype) -> Verdict {
    let mut check = Check::default();
    for (heads, dim) in [(1, 16), (8, 256), (5, 128), (3, 40)] {
        let (rows, each) = (12u32, 7u32);
        let mut all = sources((rows * each) as usize, heads, 5);
        // Not all of a row is empty: then only the sum would count.
        all.chunks_exact_mut(each as usize * heads).for_each(|row| {
            row[..heads].iter_mut().zip(1..).for_each(|(s, n)| *s = State { o: n as f32, m: 0.5, l: 2.0 });
        });
        let mut apart = all.clone();
        apart.extend(vec![EMPTY; rows as usize * heads]);
        let row = |at: u32, states, to| FoldRow { state: at * each, states, to, reserved: 0 };
        let mut apart = States::new(backend, &apart, heads, dim)?;
        apart.fold(&(0..rows).map(|at| row(at, each, rows * each + at)).collect::<Vec<_>>())?;
        let want = apart.read(&mut check, &(rows * each..rows * (each + 1)).collect::<Vec<_>>())?;
        let mut within = States::new(backend, &all, heads, dim)?;
        within.fold(&(0..rows).map(|at| row(at, each, at * each)).collect::<Vec<_>>())?;
        let got = within.read(&mut check, &(0..rows).map(|at| at * each).collect::<Vec<_>>())?;
        for at in 0..rows {
            for (got, want) in within.state(&got, at * each).zip(apart.state(&want, rows * each + at)) {
                check.bits("a fold in place", got, want);
            }
        }
    }
    check.done()
}

/// B21: more rows than 65,535 groups of a grid.
fn many<B: Backend>(backend: &B, _: Dtype) -> Verdict {
    let mut check = Check::default();
    let count = 70_000u32;
    let states: Vec<State> = (0..count)
        .map(|n| State { o: n as f32, m: (n % 5) as f32, l: 1.0 })
        .chain(vec![EMPTY; count as usize])
        .collect();
    let mut states = States::new(backend, &states, 1, 16)?;
    let rows: Vec<_> = (0..count).map(|n| FoldRow { state: n, states: 1, to: count + n, reserved: 0 }).collect();
    states.fold(&rows)?;
    let got = states.bench.read(&states.buffer, states.words.len())?;
    for n in 0..count {
        for (got, want) in states.state(&got, count + n).zip(states.state(&states.words, n)) {
            check.bits("one of many folds", got, want);
        }
    }
    check.done()
}

fn refusals<B: Backend>(backend: &B, _: Dtype) -> Verdict {
    let mut check = Check::default();
    let mut states = States::new(backend, &random_states(12, 1.0, 9), 2, 16)?;
    let good = FoldRow { state: 0, states: 3, to: 0, reserved: 0 };
    let bad = [
        FoldRow { state: 4, ..good },
        FoldRow { states: 7, ..good },
        FoldRow { to: 6, ..good },
        FoldRow { to: u32::MAX, ..good },
        FoldRow { state: u32::MAX, ..good },
        FoldRow { states: u32::MAX, ..good },
    ];
    let kind = |e: &Error| matches!(e, Error::OutOfBounds { .. } | Error::TooLarge { .. });
    let stream = &mut states.bench.stream;
    for row in bad {
        let args = Fold { states: &states.buffer, rows: &[good, row], q_heads: 2, v_dim: 16 };
        check.refused(&format!("{row:?}"), backend.fold(stream, &args), kind);
    }
    for v_dim in [0, 4, 12, 264, u32::MAX] {
        let args = Fold { states: &states.buffer, rows: &[good], q_heads: 1, v_dim };
        check.refused(&format!("{v_dim} elements"), backend.fold(stream, &args), |e| matches!(e, Error::Shape { .. }));
    }
    states.fold(&[])?;
    states.read(&mut check, &[])?;
    check.done()
}
