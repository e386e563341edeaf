//! How fast do new tokens get into pages, beside a copy of the same bytes?

use super::scene::{Cast, Scene};
use super::timer::{Flush, Timer};
use super::{Kernel, Row, print, tensor};
use kvtide::backend::params::AppendRun;
use kvtide::{Backend, Device};
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    kernel: Kernel,
    /// Sequences x tokens that each gets : query heads / KV heads / elements / page.
    #[arg(long, value_delimiter = ',', default_value = "1x8192:32/8/128/16,64x1:32/8/128/16")]
    shape: Vec<Cast>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.kernel.backend)?;
    let mut timer = Timer::new(&device, args.kernel.repeats)?;
    let mut rows = Vec::new();
    for cast in &args.shape {
        for &format in &args.kernel.formats()? {
            let scene = Scene::new(&device, &mut timer.stream, cast, format)?;
            let geometry = *scene.record.geometry();
            let (page, heads, dim) = (geometry.page_tokens(), geometry.kv_heads(), geometry.k_dim());
            let total = u64::from(cast.sequences) * u64::from(cast.tokens);
            let (k, v) = (tensor(&device, total, heads, dim, 1)?, tensor(&device, total, heads, dim, 2)?);
            let mut runs = Vec::new();
            for (frames, seq) in scene.frames.iter().zip(0..) {
                for (&frame, at) in frames.iter().zip((0..cast.tokens).step_by(page as usize)) {
                    let offset = (seq * cast.tokens + at) * heads * dim;
                    let tokens = page.min(cast.tokens - at);
                    let (k_offset, v_offset) = (offset, offset);
                    runs.push(AppendRun { k_offset, v_offset, frame, slot: 0, tokens, page: 0, reserved: [0; 2] });
                }
            }
            // What is read, in bf16, and what is written.
            let (read, written) = (total * u64::from(heads * dim) * 4, scene.bytes());
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| device.append(stream, &scene.append(&k, &v, &runs)))?;
                let copy = timer.copy_us(flush, (read + written) / 2)?;
                let row = Row::kernel("append", cast.to_string(), format.name(), &device, (us, read + written));
                rows.push(row.flushed(flush.name()).beside_us("a copy of the same bytes", copy));
            }
        }
    }
    print(args.kernel.json, &rows)?;
    Ok(ExitCode::SUCCESS)
}
