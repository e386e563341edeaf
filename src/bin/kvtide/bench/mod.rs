//! `kvtide bench`: how fast is this machine, beside what its link and its disk can do?

mod append;
mod attend;
mod graph;
mod limits;
mod link;
mod merge;
mod scene;
mod step;
mod stream;
mod timer;
mod transfer;
mod write;

use clap::{Args as ClapArgs, Subcommand};
use kvtide::backend::HostUse;
use kvtide::{Backend, Device, Dtype, Geometry, PageFormat, View};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Decode over a cache that is larger than the device budget, streamed from a tier.
    Stream(stream::Args),
    /// Moves between frames and host memory.
    Link(link::Args),
    /// Attention over pages.
    Attend(attend::Args),
    /// Decode steps of many layers: appends and attention, called or replayed as a CUDA graph.
    Step(step::Args),
    /// New tokens into pages.
    Append(append::Args),
    /// States into outputs.
    Merge(merge::Args),
    /// Copies and gathers of pages.
    Transfer(transfer::Args),
    /// Append alone, and append with every full page written out.
    Write(write::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        What::Stream(args) => stream::run(args),
        What::Link(args) => link::run(args),
        What::Write(args) => write::run(args),
        What::Attend(args) => attend::run(args),
        What::Step(args) => step::run(args),
        What::Append(args) => append::run(args),
        What::Merge(args) => merge::run(args),
        What::Transfer(args) => transfer::run(args),
    }
}

/// Which kernels are timed, and how.
#[derive(Debug, Clone, ClapArgs)]
struct Kernel {
    /// auto, cpu, wgpu or cuda.
    #[arg(long, default_value = "auto")]
    backend: String,
    /// Page formats.
    #[arg(long, value_delimiter = ',', default_value = "bf16")]
    format: Vec<String>,
    /// Calls that the median is taken of.
    #[arg(long, default_value_t = 60)]
    repeats: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Kernel {
    fn formats(&self) -> anyhow::Result<Vec<PageFormat>> {
        self.format.iter().map(|name| format_of(name)).collect()
    }
}

fn format_of(name: &str) -> anyhow::Result<PageFormat> {
    let format = PageFormat::ALL.into_iter().find(|format| format.name() == name);
    format.ok_or_else(|| anyhow::anyhow!("there is no format `{name}`"))
}

/// The model whose cache is benched, and where.
#[derive(Debug, Clone, ClapArgs)]
struct Shape {
    /// auto, cpu, wgpu or cuda.
    #[arg(long, default_value = "auto")]
    backend: String,
    #[arg(long, default_value_t = 32)]
    layers: u32,
    #[arg(long, default_value_t = 32)]
    q_heads: u32,
    #[arg(long, default_value_t = 8)]
    kv_heads: u32,
    #[arg(long, default_value_t = 128)]
    head_dim: u32,
    #[arg(long, default_value_t = 16)]
    page_size: u32,
    /// f32, f16, bf16 or int8.
    #[arg(long, default_value = "bf16")]
    format: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Shape {
    fn geometry(&self) -> anyhow::Result<Geometry> {
        let geometry = Geometry::new(self.layers, self.q_heads, self.kv_heads, self.head_dim);
        Ok(geometry.page_size(self.page_size).format(format_of(&self.format)?).validate()?)
    }

    fn text(&self, tokens: u64) -> String {
        let Shape { layers, q_heads, kv_heads, head_dim, page_size, .. } = self;
        format!("{layers} layers, {q_heads}/{kv_heads} heads of {head_dim}, page {page_size}, {tokens} tokens")
    }
}

/// One measurement, beside its limit in the same run.
#[derive(Debug, Clone, Serialize)]
struct Row {
    op: String,
    shape: String,
    format: String,
    backend: String,
    adapter: String,
    /// What emptied the cache before each call: a write (`W`) or a read (`R`).
    #[serde(skip_serializing_if = "str::is_empty")]
    flush: &'static str,
    /// Median.
    us: f64,
    /// Bytes that had to move.
    bytes: u64,
    gbs: f64,
    /// The limit's time for as many bytes, and what it is.
    limit_us: f64,
    limit: String,
    share: f64,
    /// Whatever else is worth knowing.
    #[serde(skip_serializing_if = "serde_json::Value::is_null")]
    detail: serde_json::Value,
}

impl Row {
    fn new(op: &str, shape: &Shape, tokens: u64, device: &Device, (us, bytes): (f64, u64)) -> Self {
        Row::kernel(op, shape.text(tokens), &shape.format, device, (us, bytes))
    }

    /// A row about one kernel.
    fn kernel(op: &str, shape: String, format: &str, device: &Device, (us, bytes): (f64, u64)) -> Self {
        let caps = device.caps();
        Row {
            op: op.into(),
            shape,
            format: format.into(),
            flush: "",
            backend: caps.backend.into(),
            adapter: caps.adapter.clone(),
            us,
            bytes,
            gbs: bytes as f64 / us / 1e3,
            limit_us: 0.0,
            limit: String::new(),
            share: 0.0,
            detail: serde_json::Value::Null,
        }
    }

    fn flushed(mut self, flush: &'static str) -> Self {
        self.flush = flush;
        self
    }

    /// Compares with the time of a limit.
    fn beside_us(mut self, limit: &str, us: f64) -> Self {
        self.limit = limit.into();
        self.limit_us = us;
        self.share = us / self.us;
        self
    }

    /// Compares with a limit in bytes a second.
    fn beside(mut self, limit: &str, bytes_per_second: f64) -> Self {
        self.limit = limit.into();
        self.limit_us = self.bytes as f64 / bytes_per_second * 1e6;
        self.share = self.limit_us / self.us;
        self
    }
}

fn print(json: bool, rows: &[Row]) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    if json {
        let command: Vec<String> = std::env::args().skip(1).collect();
        let object =
            serde_json::json!({ "command": command.join(" "), "version": env!("CARGO_PKG_VERSION"), "rows": rows });
        writeln!(out, "{}", serde_json::to_string_pretty(&object)?)?;
        return Ok(());
    }
    for row in rows {
        let Row { op, shape, format, backend, flush, us, gbs, limit, share, detail, .. } = row;
        let flush = if flush.is_empty() { String::new() } else { format!(" after {flush}") };
        let time = if *us < 1e4 { format!("{us:.1} µs") } else { format!("{:.1} ms", us / 1e3) };
        writeln!(out, "{op} of {format} on {backend}{flush}: {shape}")?;
        writeln!(out, "    {time}, {gbs:.2} GB/s, {:.1} % of {limit}", share * 100.0)?;
        if !detail.is_null() {
            writeln!(out, "    {detail}")?;
        }
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Xorshift: numbers without a pattern.
fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// Finite random elements in device memory: `rows × heads × dim`.
fn tensor(
    device: &Device,
    rows: u64,
    heads: u32,
    dim: u32,
    seed: u64,
) -> anyhow::Result<View<kvtide::backend::DeviceMemory>> {
    let words = rows * u64::from(heads) * u64::from(dim) / 2;
    let mut next = noise(seed);
    // Sign and mantissa are random, the exponents those of 0.5 to 2.
    let word = || (next() >> 16) as u32 & 0x807f_807f | 0x3f80_3f00;
    let data: Vec<u32> = std::iter::repeat_with(word).take(words as usize).collect();
    let buffer = device.alloc("bench", words * 4)?;
    let mut stream = device.stream()?;
    device.upload(&mut stream, &buffer, 0, bytemuck::cast_slice(&data))?;
    device.synchronize(&mut stream)?;
    Ok(View::dense(buffer, Dtype::Bf16, heads, dim))
}

/// The kind of host memory that copies are measured with.
const COPY_MEMORY: HostUse = HostUse::Device;
