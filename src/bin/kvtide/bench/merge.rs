//! How fast are states merged into outputs?

use super::scene::upload;
use super::timer::{Flush, Timer};
use super::{Kernel, Row, noise, print};
use kvtide::attention::state_words;
use kvtide::backend::ops::Merge;
use kvtide::backend::params::MergeRow;
use kvtide::{Backend, Device, Dtype, View};
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    kernel: Kernel,
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

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.kernel.backend)?;
    let mut timer = Timer::new(&device, args.kernel.repeats)?;
    let mut rows = Vec::new();
    for &each in &args.states {
        let words = u64::from(args.rows * each * args.heads) * u64::from(state_words(args.dim));
        let mut next = noise(7);
        let mut values: Vec<f32> = (0..words).map(|_| (next() >> 40) as f32 / (1 << 24) as f32).collect();
        // Sums are positive.
        let stride = state_words(args.dim) as usize;
        values.chunks_exact_mut(stride).for_each(|state| state[args.dim as usize + 1] += 1.0);
        let states = upload(&device, &mut timer.stream, bytemuck::cast_slice(&values))?;
        let merged: Vec<MergeRow> =
            (0..args.rows).map(|row| MergeRow { state: row * each, states: each, before: 0 }).collect();
        let outputs = u64::from(args.rows * args.heads * args.dim) * 2;
        let out = View::dense(device.alloc("bench output", outputs)?, Dtype::Bf16, args.heads, args.dim);
        let bytes = words * 4 + outputs;
        for flush in Flush::BOTH {
            let (q_heads, v_dim) = (args.heads, args.dim);
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
            let shape = format!("{} rows of {each} states, {q_heads} heads of {v_dim}", args.rows);
            let row = Row::kernel("merge", shape, "bf16", &device, (us, bytes));
            rows.push(row.flushed(flush.name()).beside_us("a plain read of the states", read));
        }
    }
    print(args.kernel.json, &rows)?;
    Ok(ExitCode::SUCCESS)
}
