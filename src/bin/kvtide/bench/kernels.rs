//! Which kernels are timed, and where? Each on every backend that is asked for, one after the other.

use super::compare::pairs;
use super::peers::Peers;
use super::row::{Row, print};
use super::timer::Timer;
use clap::Args as ClapArgs;
use kvtide::{Backend, Device, PageFormat};
use std::path::PathBuf;
use std::process::ExitCode;

/// Where kernels are timed, and how.
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct Kernel {
    /// auto, cpu, wgpu or cuda, or several.
    #[arg(long, value_delimiter = ',', default_value = "auto", default_value_if("compare", "true", "cuda,wgpu"))]
    backend: Vec<String>,
    /// Page formats.
    #[arg(long, value_delimiter = ',', default_value = "bf16")]
    format: Vec<String>,
    /// Calls that the median is taken of.
    #[arg(long, default_value_t = 60)]
    repeats: u32,
    /// Print two backends side by side, and how fast the second is as a share of the first.
    #[arg(long)]
    compare: bool,
    /// Use no subgroups on wgpu, as on adapters without.
    #[arg(long)]
    without_subgroups: bool,
    /// Bytes of a slab of pages at most, on wgpu; less than the pages need makes several.
    #[arg(long)]
    slab_bytes: Option<u64>,
    /// What benches/peers.py wrote: times of other libraries, to stand beside rows of the same work.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Kernel {
    fn open(&self, backend: &str) -> kvtide::Result<Device> {
        #[cfg(feature = "wgpu")]
        if backend == "wgpu" {
            let mut device = kvtide::backend::wgpu::WgpuBackend::open()?;
            if self.without_subgroups {
                device = device.without_subgroups();
            }
            return Ok(self.slab_bytes.into_iter().fold(device, |device, bytes| device.with_slab_bytes(bytes)).into());
        }
        Device::open(backend)
    }
}

/// Kernels of which one device gives rows. What was measured before a failure counts.
pub(super) trait Measure {
    /// What messages call them.
    fn name(&self) -> &'static str;

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()>;
}

/// A subcommand that times kernels.
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct Timed<T: ClapArgs> {
    #[command(flatten)]
    kernel: Kernel,
    #[command(flatten)]
    of: T,
}

impl<T: ClapArgs + Measure> Timed<T> {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        run(&self.kernel, &[&self.of])
    }
}

/// What a subcommand is without arguments.
pub(super) fn defaults<T: ClapArgs>() -> anyhow::Result<T> {
    let command = T::augment_args(clap::Command::new("bench"));
    Ok(T::from_arg_matches(&command.try_get_matches_from(["bench"])?)?)
}

/// Times and prints. A failure is named, and the others go on.
pub(super) fn run(kernel: &Kernel, work: &[&dyn Measure]) -> anyhow::Result<ExitCode> {
    let peers = kernel.peers.as_deref().map(Peers::read).transpose()?.unwrap_or_default();
    let formats: Vec<PageFormat> =
        kernel.format.iter().map(|name| super::format_of(name)).collect::<anyhow::Result<_>>()?;
    let devices: Vec<Device> = kernel.backend.iter().map(|name| kernel.open(name)).collect::<kvtide::Result<_>>()?;
    let compared = match &devices[..] {
        _ if !kernel.compare => None,
        [a, b] if a.caps().backend != b.caps().backend => Some([a.caps().backend, b.caps().backend]),
        _ => anyhow::bail!("--compare takes two different backends"),
    };
    let mut timers: Vec<Timer<'_>> =
        devices.iter().map(|device| Timer::new(device, kernel.repeats)).collect::<anyhow::Result<_>>()?;
    let (mut rows, mut code) = (Vec::new(), ExitCode::SUCCESS);
    for measure in work {
        for timer in &mut timers {
            if let Err(error) = measure.measure(timer, &formats, &mut rows) {
                eprintln!("{} on {}: {error:#}", measure.name(), timer.device.caps().backend);
                code = ExitCode::FAILURE;
            }
        }
    }
    rows.iter_mut().for_each(|row| peers.stand_beside(row));
    print(kernel.json, &rows, compared.map(|backends| pairs(&rows, backends)))?;
    Ok(code)
}
