//! `kvtide bench`: how fast is this machine, beside what its link, its disk and its memory can do?

mod append;
mod attend;
mod cast;
mod compare;
mod data;
mod graph;
mod kernels;
mod limits;
mod link;
mod merge;
mod peers;
mod predicted;
mod project;
mod row;
mod scene;
mod score;
mod step;
mod stream;
mod timer;
mod transfer;
mod write;

use clap::{Args as ClapArgs, Subcommand};
use data::{natural, noise, tensor};
use kernels::{Kernel, Measure, Timed, defaults};
use kvtide::backend::HostUse;
use kvtide::{Geometry, PageFormat};
use row::{Row, print};
use std::process::ExitCode;

#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    kernel: Kernel,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Decode over a cache that is larger than the device budget, streamed from a tier.
    Stream(stream::Args),
    /// Moves between frames and host memory.
    Link(link::Args),
    /// Append alone, and append with every full page written out.
    Write(write::Args),
    /// Decode steps of many layers: appends and attention, called or replayed as a CUDA graph.
    Step(Timed<step::Args>),
    /// Attention over pages.
    Attend(Timed<attend::Args>),
    /// New tokens into pages.
    Append(Timed<append::Args>),
    /// States into outputs.
    Merge(Timed<merge::Args>),
    /// Copies and gathers of pages.
    Transfer(Timed<transfer::Args>),
    /// Keys of pages onto the basis of a predictor.
    Project(Timed<project::Args>),
    /// Pages by their projected keys.
    Score(Timed<score::Args>),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        None => every_kernel(&args.kernel),
        Some(What::Stream(args)) => stream::run(args),
        Some(What::Link(args)) => link::run(args),
        Some(What::Write(args)) => write::run(args),
        Some(What::Step(timed)) => timed.run(),
        Some(What::Attend(timed)) => timed.run(),
        Some(What::Append(timed)) => timed.run(),
        Some(What::Merge(timed)) => timed.run(),
        Some(What::Transfer(timed)) => timed.run(),
        Some(What::Project(timed)) => timed.run(),
        Some(What::Score(timed)) => timed.run(),
    }
}

/// All kernels, each with the shapes that its subcommand has by default.
fn every_kernel(kernel: &Kernel) -> anyhow::Result<ExitCode> {
    let attend: attend::Args = defaults()?;
    let append: append::Args = defaults()?;
    let merge: merge::Args = defaults()?;
    let transfer: transfer::Args = defaults()?;
    let project: project::Args = defaults()?;
    let score: score::Args = defaults()?;
    kernels::run(kernel, &[&attend, &append, &merge, &transfer, &project, &score])
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

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The kind of host memory that copies are measured with.
const COPY_MEMORY: HostUse = HostUse::Device;
