//! How fast is attention over pages, beside a plain read of the same bytes?

use super::scene::{Cast, Scene};
use super::timer::{Flush, Timer};
use super::{Kernel, Row, print};
use kvtide::backend::DeviceBuffer;
use kvtide::{Backend, Device};
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    kernel: Kernel,
    /// Shapes: sequences x tokens : query heads / KV heads / elements / page.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1x131072:32/8/128/16,64x4096:32/8/128/16,16x8192:32/8/128/16,1x8192:32/8/128/16,\
                         1x131072:64/8/128/16,16x8192:28/4/128/16,16x8192:16/2/64/16"
    )]
    shape: Vec<Cast>,
    /// Query rows a sequence: 1 is a decode step, more are the last tokens of a prefill chunk.
    #[arg(long, default_value_t = 1)]
    rows: u32,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.kernel.backend)?;
    let mut timer = Timer::new(&device, args.kernel.repeats)?;
    let mut rows = Vec::new();
    for cast in &args.shape {
        for &format in &args.kernel.formats()? {
            let scene = Scene::new(&device, &mut timer.stream, cast, format)?;
            let ask = scene.ask(&device, &mut timer.stream, args.rows.clamp(1, cast.tokens))?;
            let bytes = scene.bytes();
            let whole = device.alloc("bench read", bytes.min(device.caps().max_slab_bytes))?;
            device.fill(&mut timer.stream, &whole, 0, whole.bytes() / 4 * 4, 0x3f81_3f80)?;
            for flush in Flush::BOTH {
                let us = timer.median_us(flush, |stream| scene.attend(&device, stream, &ask))?;
                // A buffer that one binding cannot hold is read in part, and the time scaled.
                let part = whole.bytes() / 16 * 16;
                let read = timer.read_us(flush, &whole, part)? * bytes as f64 / part as f64;
                let shape = format!("{cast}, {} rows each", args.rows);
                let row = Row::kernel("attend", shape, format.name(), &device, (us, bytes));
                rows.push(row.flushed(flush.name()).beside_us("a plain read of the same bytes", read));
            }
        }
    }
    print(args.kernel.json, &rows)?;
    Ok(ExitCode::SUCCESS)
}
