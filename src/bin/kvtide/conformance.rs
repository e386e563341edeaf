//! `kvtide conformance`: do this machine's adapters compute the right numbers?

use crate::table::table;
use indicatif::{ProgressBar, ProgressStyle};
use kvtide::conformance::{self, Case, Line, Measure, Report};
use kvtide::{Backend, Device};
use serde_json::json;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the adapters of this backend: cpu, wgpu or cuda.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Only cases whose operation, format and name contain this, as `--verbose` prints them.
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print every case with its time on stderr.
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (mut devices, missing) = Device::all();
    if let Some(name) = &args.backend {
        devices.retain(|device| device.caps().backend == name);
        if devices.is_empty() {
            match Device::open(name) {
                Ok(device) => devices.push(device),
                Err(error) => {
                    eprintln!("{error}");
                    return Ok(ExitCode::from(2));
                }
            }
        }
    } else {
        missing.iter().for_each(|error| eprintln!("{error}"));
    }
    let mut out = std::io::stdout();
    let mut reports = Vec::new();
    for device in &devices {
        let report = check(device, args);
        if !args.json {
            writeln!(out, "{}", as_text(&report))?;
        }
        reports.push(report);
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&json!({ "adapters": reports }))?)?;
    }
    let failed = reports.iter().any(|report| report.failed > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the suite on one device, with a bar where someone watches.
fn check(device: &Device, args: &Args) -> Report {
    let select = |case: &Case<Device>| args.case.as_ref().is_none_or(|text| case.to_string().contains(text));
    let bar = ProgressBar::new(conformance::cases().iter().filter(|case| select(case)).count() as u64);
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(device.caps().adapter.clone());
    let mut start = Instant::now();
    let report = conformance::run(device, select, |case, verdict| {
        bar.inc(1);
        bar.set_message(case.to_string());
        if args.verbose {
            let word = match verdict {
                None => "skipped",
                Some(Ok(measure)) if measure.passes() => "passed",
                Some(_) => "FAILED",
            };
            bar.suspend(|| eprintln!("{:8.3} s  {word:7}  {case}", start.elapsed().as_secs_f64()));
            start = Instant::now();
        }
    });
    bar.finish_and_clear();
    report
}

fn as_text(report: &Report) -> String {
    let head = ["operation", "format", "cases", "passed", "failed", "skipped", "worst error", "bound", "of"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(report.operations.iter().map(row));
    let mut text = format!(
        "{}: {}: {} cases, {} passed, {} failed, {} skipped, {:.1} s\n{}",
        report.backend,
        report.name,
        report.cases,
        report.passed,
        report.failed,
        report.skipped,
        report.seconds,
        table(&rows)
    );
    for fault in &report.failures {
        text += &format!("FAILED {}\n       {}\n", fault.case, fault.why);
    }
    text
}

fn row(line: &Line) -> Vec<String> {
    let mut cells = vec![line.operation.to_owned(), line.format.to_owned()];
    cells.extend([line.cases, line.passed, line.failed, line.skipped].map(|n| n.to_string()));
    if let Some(Measure { what, error, bound }) = &line.worst {
        let number = |x: &f64| if *x == 0.0 { "0".to_owned() } else { format!("{x:.2e}") };
        let what = what.split(':').next().unwrap_or_default();
        cells.extend([number(error), number(bound), what.to_owned()]);
    }
    cells
}
