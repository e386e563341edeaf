//! What do states fold into? States made by hand, and their fold in float64.

use super::ask::Answer;
use super::bench::{Bench, Layout};
use super::check::{Check, Failure};
use super::values::Rng;
use crate::Dtype;
use crate::attention::Grain;
use crate::backend::Backend;
use crate::backend::ops::Merge;
use crate::backend::params::MergeRow;
use std::f64::consts::LN_2;

/// The states of one head: o (all elements alike but for their sign), m and l.
#[derive(Debug, Clone, Copy)]
pub(super) struct State {
    pub(super) o: f32,
    pub(super) m: f32,
    pub(super) l: f32,
}

/// What nothing visible leaves; what l = 0 makes of o and m must not matter.
pub(super) const EMPTY: State = State { o: f32::NAN, m: f32::NAN, l: 0.0 };

/// What all scores of a row lack, in base 2: the c of every state that saw something.
pub(super) const LACKING: f32 = 3.25;

/// States as words, `[state, head]`; element d of o is `o × (1 + d % 3)`, NaN where nothing may be read.
pub(super) fn words(states: &[State], dim: usize) -> Vec<u32> {
    let mut words = Vec::new();
    for state in states {
        words.extend((0..dim).map(|d| (state.o * (1 + d % 3) as f32).to_bits()));
        let c = if state.l == 0.0 { f32::NAN } else { LACKING };
        words.extend([state.m, state.l, c, 0.0].map(f32::to_bits));
    }
    words
}

/// Rows of states that are merged: `rows[r]` holds, for each of its states, one [`State`] a head.
pub(super) struct Fold<'a> {
    pub(super) states: &'a [State],
    pub(super) rows: &'a [MergeRow],
    pub(super) heads: usize,
    pub(super) dim: usize,
}

impl Fold<'_> {
    pub(super) fn run<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        out: Dtype,
        layout: Layout,
    ) -> Result<Answer, Failure> {
        self.run_as(bench, out, layout, Grain::Section)
    }

    /// The answer where a state covers this; those of splits start wherever in a section.
    fn run_as<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        out: Dtype,
        layout: Layout,
        grain: Grain,
    ) -> Result<Answer, Failure> {
        let states = bench.words("states", &words(self.states, self.dim))?;
        let section = grain.states_of_a_section();
        let rows = self.rows.iter().map(|row| MergeRow { before: (row.state + row.states) % section, ..*row });
        let rows: Vec<MergeRow> = rows.collect();
        let shape = [self.rows.len(), self.heads, self.dim];
        let (out, lse) =
            (bench.output(out, shape, layout)?, bench.output(Dtype::F32, [shape[0], shape[1], 1], layout)?);
        let merge = Merge {
            states: &states,
            grain,
            rows: &rows,
            q_heads: self.heads as u32,
            v_dim: self.dim as u32,
            out: &out.view,
            lse: Some(&lse.view),
        };
        bench.backend.merge(&mut bench.stream, &merge)?;
        Ok(Answer::read(bench, &out, &lse)?)
    }

    /// Output and log-sum-exp in float64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for row in self.rows {
            for head in 0..self.heads {
                let state = |at: u32| self.states[at as usize * self.heads + head];
                let live: Vec<State> = (row.state..row.state + row.states).map(state).filter(|s| s.l != 0.0).collect();
                let top = live.iter().fold(f64::NEG_INFINITY, |m, s| m.max(s.m.into()));
                let (mut o, mut l) = (0.0, 0.0);
                for s in &live {
                    let weight = (f64::from(s.m) - top).exp2();
                    o += weight * f64::from(s.o);
                    l += weight * f64::from(s.l);
                }
                let o = if live.is_empty() { 0.0 } else { o / l };
                out.extend((0..self.dim).map(|d| o * (1 + d % 3) as f64));
                let whole = top + l.log2() + f64::from(LACKING);
                lse.push(if live.is_empty() { f64::NEG_INFINITY } else { whole * LN_2 });
            }
        }
        (out, lse)
    }

    pub(super) fn compare<B: Backend>(
        &self,
        bench: &mut Bench<'_, B>,
        check: &mut Check,
        out: Dtype,
        layout: Layout,
    ) -> Result<Answer, Failure> {
        let answer = self.run(bench, out, layout)?;
        let (want, lse) = self.reference();
        answer.compare(check, &want, &lse, self.dim as u32);
        self.run_as(bench, out, layout, Grain::Split)?.compare(check, &want, &lse, self.dim as u32);
        Ok(answer)
    }
}

pub(super) fn random_states(count: usize, spread: f32, seed: u64) -> Vec<State> {
    let mut rng = Rng::new(seed);
    let mut state = || match rng.below(8) {
        0 => EMPTY,
        _ => State { o: 1.0 + 3.0 * rng.normal().abs(), m: spread * rng.normal(), l: 1.0 + 20.0 * rng.normal().abs() },
    };
    (0..count).map(|_| state()).collect()
}
