//! The companion binary: what this machine's adapters are, whether they compute the right numbers, and how fast.

mod bench;
mod conformance;
mod devices;
mod table;

use clap::{Parser, Subcommand};
use std::io::{self, ErrorKind};
use std::process::ExitCode;

/// Look at the devices that kvtide can use, and check them.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List every backend and adapter, and why a backend is missing.
    Devices(devices::Args),
    /// Run the conformance suite: exit code 1 when a case fails, 2 when the backend asked for has no device.
    Conformance(conformance::Args),
    /// Measure.
    Bench(bench::Args),
}

fn main() -> anyhow::Result<ExitCode> {
    let done = match Cli::parse().command {
        Command::Devices(args) => devices::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    match done {
        // Whoever read the output has seen enough.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            Ok(ExitCode::SUCCESS)
        }
        done => done,
    }
}
