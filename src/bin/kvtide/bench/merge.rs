//! How fast are states merged into outputs?

use super::scene::upload;
use super::timer::{Flush, Timer};
use super::{Measure, Row, noise};
use kvtide::attention::state_words;
use kvtide::backend::ops::Merge;
use kvtide::backend::params::MergeRow;
use kvtide::{Backend, Dtype, PageFormat, View};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Output rows.
    #[arg(long, default_value_t = 64)]
    rows: u32,
    /// States of each row.
    #[arg(long, value_delimiter = ',', default_value = "2,16")]
    states: Vec<u32>,
    #[arg(long, default_value_t = 32)]
    heads: u32,
    /// Elements of a head.
    #[arg(long, default_value_t = 128)]
    dim: u32,
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "merge"
    }

    fn measure(&self, timer: &mut Timer<'_>, _: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        for &each in &self.states {
            let words = u64::from(self.rows * each * self.heads) * u64::from(state_words(self.dim));
            let mut next = noise(7);
            let mut values: Vec<f32> = (0..words).map(|_| (next() >> 40) as f32 / (1 << 24) as f32).collect();
            // Sums are positive.
            let stride = state_words(self.dim) as usize;
            values.chunks_exact_mut(stride).for_each(|state| state[self.dim as usize + 1] += 1.0);
            let states = upload(device, &mut timer.stream, bytemuck::cast_slice(&values))?;
            let merged: Vec<MergeRow> =
                (0..self.rows).map(|row| MergeRow { state: row * each, states: each, before: 0 }).collect();
            let outputs = u64::from(self.rows * self.heads * self.dim) * 2;
            let out = View::dense(device.alloc("bench output", outputs)?, Dtype::Bf16, self.heads, self.dim);
            let bytes = words * 4 + outputs;
            for flush in Flush::BOTH {
                let (q_heads, v_dim) = (self.heads, self.dim);
                let merge = Merge {
                    states: &states,
                    grain: kvtide::attention::Grain::Section,
                    rows: &merged,
                    q_heads,
                    v_dim,
                    out: &out,
                    lse: None,
                };
                let us = timer.median_us(flush, |stream| device.merge(stream, &merge))?;
                let read = timer.read_us(flush, &states, words * 4)?;
                let shape = format!("{} rows of {each} states, {q_heads} heads of {v_dim}", self.rows);
                let row = Row::kernel("merge", shape, "bf16", device, (us, bytes));
                rows.push(row.flushed(flush.name()).beside_us("a plain read of the states", read));
            }
        }
        Ok(())
    }
}
