//! The write tax: append alone, and append with every full page written to host memory as it goes.

use super::{Row, Shape, limits, median, natural, print, tensor};
use kvtide::record::Record;
use kvtide::swap::{HighSpeedSwap, SwapConfig, WriteOut};
use kvtide::tiers::HostTier;
use kvtide::{Append, Backend, Device, PagedStore, StoreConfig};
use serde_json::json;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Tokens that are appended to every layer.
    #[arg(long, default_value_t = 32_768)]
    tokens: u64,
    /// Tokens of one append.
    #[arg(long, default_value_t = 2048)]
    chunk: u64,
    /// Times each is done; the first is the warm-up.
    #[arg(long, default_value_t = 4)]
    rounds: usize,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.shape.backend)?;
    let geometry = args.shape.geometry()?;
    let (record, layers) = (Record::new(geometry), geometry.layers() as usize);
    let chunk = args.chunk.min(args.tokens);
    let (kv_heads, dim) = (geometry.kv_heads(), geometry.k_dim());
    let (dtype, heads) = (natural(geometry.page_format()), [kv_heads, dim]);
    let (k, v) = (tensor(&device, dtype, chunk, heads, 1)?, tensor(&device, dtype, chunk, heads, 2)?);
    let pages = geometry.pages_for(args.tokens) * u64::from(geometry.layers());
    let bytes = pages * record.bytes();

    let config = StoreConfig { step_pages: pages, page_limit: Some(pages), ..StoreConfig::default() };
    let mut resident = PagedStore::with_config(device.clone(), geometry, config)?;
    let mut alone = Vec::new();
    for round in 0..args.rounds {
        let seq = resident.begin();
        resident.synchronize()?;
        let begin = Instant::now();
        for _ in 0..args.tokens / chunk {
            for layer in 0..layers {
                resident.append(layer, &[Append::new(&seq, chunk as u32, k.clone(), v.clone())])?;
            }
        }
        resident.synchronize()?;
        if round > 0 {
            alone.push(begin.elapsed().as_secs_f64() * 1e6);
        }
    }
    drop(resident);

    // Room for all pages: what is measured is writing out, not making room.
    let config = SwapConfig {
        device_budget: (pages + 64) * record.frame_stride(),
        write_out: WriteOut::Eager,
        ..SwapConfig::default()
    };
    let tier = HostTier::new((pages + 64 * u64::from(geometry.layers())) * record.frame_stride());
    let mut swap = HighSpeedSwap::builder(device.clone(), geometry).config(config).tier(tier).build()?;
    let (mut both, mut issued, mut appended_after) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let seq = swap.begin();
        swap.synchronize()?;
        let begin = Instant::now();
        for _ in 0..args.tokens / chunk {
            for layer in 0..layers {
                swap.append(layer, &[Append::new(&seq, chunk as u32, k.clone(), v.clone())])?;
            }
        }
        let enqueued = begin.elapsed();
        let backend = swap.backend().clone();
        let appended = backend.record(swap.stream())?;
        backend.finish(&appended)?;
        let done = begin.elapsed();
        swap.offload(&seq)?;
        swap.synchronize()?;
        if round > 0 {
            both.push(begin.elapsed().as_secs_f64() * 1e6);
            issued.push(enqueued.as_secs_f64() * 1e6);
            appended_after.push(done.as_secs_f64() * 1e6);
        }
    }
    let (link_in, link_out) = limits::link(&device, geometry)?;
    let (alone, both) = (median(alone), median(both));
    let travel = bytes as f64 / link_out * 1e6;
    let hidden = 1.0 - ((both - travel).max(0.0) / alone).min(1.0);
    let mut row = Row::new("append and write out to the host tier", &args.shape, args.tokens, &device, (both, bytes))
        .beside("one contiguous copy to host memory", link_out);
    row.detail = json!({
        "append_alone_us": alone,
        "enqueued_us": median(issued),
        "appended_us": median(appended_after),
        "copy_alone_us": travel,
        "append_hidden_by_the_copies": hidden,
        "link_in_gbs": link_in / 1e9,
        "tiers": swap.stats().tiers,
    });
    print(args.shape.json, &[row], None)?;
    Ok(ExitCode::SUCCESS)
}
