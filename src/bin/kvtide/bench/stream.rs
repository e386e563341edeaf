//! Decode steps over a cache of which the device holds a part: time, bytes, and the share of what the link or disk can do.

use super::{Row, Shape, limits, median, natural, print, tensor};
use anyhow::ensure;
use indicatif::ProgressBar;
use kvtide::backend::{DeviceBuffer, DeviceMemory};
use kvtide::record::Record;
use kvtide::swap::{HighSpeedSwap, SwapConfig};
use kvtide::tiers::{FileTier, HostTier, Tier};
use kvtide::{Append, Backend, Device, Dtype, PagedStore, Query, Rows, View};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 131_072)]
    tokens: u64,
    /// The device holds one part in this many of the pages.
    #[arg(long, default_value_t = 8)]
    part: u64,
    /// host, file or cascade.
    #[arg(long, default_value = "host")]
    tier: String,
    /// The file of a file tier; it is replaced.
    #[arg(long, default_value = "kvtide-bench.store")]
    path: PathBuf,
    /// Decode steps that are timed.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    #[arg(long, default_value_t = 256)]
    tile_pages: u32,
    #[arg(long)]
    tiles_ahead: Option<u32>,
    /// Compare the outputs of the last step with those of a cache that never left the device, bit for bit.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = Device::open(&args.shape.backend)?;
    let geometry = args.shape.geometry()?;
    let record = Record::new(geometry);
    let layers = geometry.layers() as usize;
    let pages = geometry.pages_for(args.tokens + args.steps as u64 + 1) * u64::from(geometry.layers());
    let config = SwapConfig {
        device_budget: pages / args.part * record.frame_stride(),
        tile_pages: args.tile_pages,
        tiles_ahead: args.tiles_ahead,
        ..SwapConfig::default()
    };
    let bytes = (pages + 64 * u64::from(geometry.layers())) * record.file_stride();
    let tier: Box<dyn Tier<Device>> = match &args.tier[..] {
        "host" => Box::new(HostTier::new(bytes)),
        "file" => Box::new(FileTier::create(&args.path, bytes)),
        "cascade" => Box::new(FileTier::create(&args.path, bytes).host_cache(bytes / 2)),
        other => anyhow::bail!("there is no tier `{other}`"),
    };
    let mut swap = HighSpeedSwap::builder(device.clone(), geometry).config(config).boxed_tier(tier).build()?;
    let mut resident = PagedStore::new(device.clone(), geometry)?;

    let chunk = 4096.min(args.tokens);
    let (kv_heads, dim) = (geometry.kv_heads(), geometry.k_dim());
    let (dtype, heads) = (natural(geometry.page_format()), [kv_heads, dim]);
    let (k, v) = (tensor(&device, dtype, chunk, heads, 1)?, tensor(&device, dtype, chunk, heads, 2)?);
    let q = tensor(&device, dtype, 1, [geometry.q_heads(), dim], 3)?;
    let out =
        View::dense(device.alloc("out", u64::from(geometry.q_heads() * dim) * 4)?, Dtype::F32, geometry.q_heads(), dim);

    let (seq, twin) = (swap.begin(), resident.begin());
    let bar = ProgressBar::new(args.tokens).with_message("filling");
    let begin = Instant::now();
    let mut filled = 0;
    while filled < args.tokens {
        let tokens = (chunk / 2).min(args.tokens - filled) as u32;
        for layer in 0..layers {
            // Shifted a little, so that layers and chunks differ.
            let shift = (7 * layer as u64 + 13 * filled / chunk) % (chunk / 2).max(1);
            let (k, v) = (k.clone().from_row(shift), v.clone().from_row(shift));
            swap.append(layer, &[Append::new(&seq, tokens, k.clone(), v.clone())])?;
            if args.check {
                resident.append(layer, &[Append::new(&twin, tokens, k, v)])?;
            }
        }
        filled += u64::from(tokens);
        bar.set_position(filled);
    }
    swap.synchronize()?;
    let fill = begin.elapsed();
    bar.finish_and_clear();

    let before = swap.stats();
    let mut times = Vec::new();
    let mut moved = Vec::new();
    for step in 0..=args.steps {
        let (begin, streamed) = (Instant::now(), swap.stats().streamed_pages);
        for layer in 0..layers {
            swap.append(layer, &[Append::new(&seq, 1, k.clone(), v.clone())])?;
            swap.attend(layer, &Query::new(&[Rows::decode(&seq)], q.clone(), out.clone()))?;
        }
        swap.synchronize()?;
        // The first step is the warm-up.
        if step > 0 {
            times.push(begin.elapsed().as_secs_f64() * 1e6);
            moved.push(swap.stats().streamed_pages - streamed);
        }
    }
    let after = swap.stats();
    if args.check {
        check(&mut swap, &mut resident, (&seq, &twin), (&k, &v), (&q, &out), args.steps as u64)?;
    }
    moved.sort_unstable();
    let bytes = moved[moved.len() / 2] * record.bytes();
    ensure!(bytes > 0, "nothing was streamed: the device holds everything");
    let (link_in, link_out) = limits::link(&device, geometry)?;
    let op = format!("decode step streamed from the {} tier", args.tier);
    let row = Row::new(&op, &args.shape, args.tokens, &device, (median(times), bytes));
    let mut row = match &args.tier[..] {
        "host" => row.beside("one contiguous copy from host memory", link_in),
        _ => row.beside("a plain direct read of the file", limits::disk(&args.path, bytes.max(1 << 30))?),
    };
    let steps = args.steps as u32 + 1;
    row.detail = json!({
        "frames": after.frames,
        "pages": pages,
        "fill_s": fill.as_secs_f64(),
        "link_in_gbs": link_in / 1e9,
        "link_out_gbs": link_out / 1e9,
        "hits_a_step": (after.attend.hits - before.attend.hits) / u64::from(steps),
        "misses_a_step": (after.attend.misses - before.attend.misses) / u64::from(steps),
        "travelled_ms_a_step": ((after.attend.travelled - before.attend.travelled) / steps).as_secs_f64() * 1e3,
        "waited_ms_a_step": ((after.attend.waited - before.attend.waited) / steps).as_secs_f64() * 1e3,
        "tiers": after.tiers,
        "checked": args.check,
    });
    print(args.shape.json, &[row], None)?;
    if args.tier != "host" {
        drop(swap);
        std::fs::remove_file(&args.path)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The outputs of one more step, bit for bit.
fn check(
    swap: &mut HighSpeedSwap<Device>,
    resident: &mut PagedStore<Device>,
    (seq, twin): (&kvtide::Sequence, &kvtide::Sequence),
    (k, v): (&View<DeviceMemory>, &View<DeviceMemory>),
    (q, out): (&View<DeviceMemory>, &View<DeviceMemory>),
    steps: u64,
) -> anyhow::Result<()> {
    for layer in 0..swap.geometry().layers() as usize {
        for _ in 0..=steps {
            resident.append(layer, &[Append::new(twin, 1, k.clone(), v.clone())])?;
        }
        let bytes = out.buffer.bytes() as usize;
        let mut bits = [vec![0u8; bytes], vec![0u8; bytes]];
        swap.attend(layer, &Query::new(&[Rows::decode(seq)], q.clone(), out.clone()))?;
        swap.download(&out.buffer, 0, &mut bits[0])?;
        resident.attend(layer, &Query::new(&[Rows::decode(twin)], q.clone(), out.clone()))?;
        resident.download(&out.buffer, 0, &mut bits[1])?;
        ensure!(bits[0] == bits[1], "layer {layer}: the outputs differ");
        ensure!(bits[0].iter().any(|byte| *byte != 0), "layer {layer}: the output is empty");
    }
    Ok(())
}
