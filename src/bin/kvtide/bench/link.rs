//! How fast do pages move between frames and host memory, scattered as they are, beside one long copy?

use super::limits::{self, Spread};
use super::{Row, Shape, print};
use kvtide::Device;
use kvtide::record::Record;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Pages of one move.
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1024,4096")]
    pages: Vec<u32>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.shape.backend)?;
    let geometry = args.shape.geometry()?;
    let record = Record::new(geometry);
    let best = limits::link(&device, geometry)?;
    let mut rows = Vec::new();
    for &pages in &args.pages {
        for (spread, what) in [
            (Spread::Contiguous, "side by side"),
            (Spread::Frames, "frames scattered"),
            (Spread::Both, "both sides scattered"),
        ] {
            let speed = limits::swap(&device, geometry, pages, spread)?;
            let bytes = u64::from(pages) * record.bytes();
            for (op, speed, best) in [("swap_in", speed.0, best.0), ("swap_out", speed.1, best.1)] {
                let measured = (bytes as f64 / speed * 1e6, bytes);
                let tokens = u64::from(pages) * u64::from(geometry.page_tokens());
                let row = Row::new(&format!("{op}, {pages} pages, {what}"), &args.shape, tokens, &device, measured);
                rows.push(row.beside("one contiguous copy", best));
            }
        }
    }
    print(args.shape.json, &rows, None)?;
    Ok(ExitCode::SUCCESS)
}
