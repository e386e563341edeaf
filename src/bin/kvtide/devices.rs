//! `kvtide devices`: which adapters are here, what limits them, and why is a backend missing?

use crate::table::table;
use kvtide::backend::{Caps, Operation};
use kvtide::{Backend, Device, Error};
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;

/// Every backend that this library has.
const BACKENDS: [&str; 3] = ["cpu", "wgpu", "cuda"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (devices, mut missing) = Device::all();
    let caps: Vec<&Caps> = devices.iter().map(Backend::caps).collect();
    // Backends that are not compiled in are missing too.
    for name in BACKENDS {
        let known = caps.iter().any(|caps| caps.backend == name) || missing.iter().any(|error| backend(error) == name);
        if !known && let Err(error) = Device::open(name) {
            missing.push(error);
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let devices: Vec<_> = caps.iter().map(|caps| as_json(caps)).collect();
        let missing: Vec<_> = missing.iter().map(|e| json!({ "backend": backend(e), "reason": reason(e) })).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&json!({ "devices": devices, "missing": missing }))?)?;
    } else {
        caps.iter().try_for_each(|caps| writeln!(out, "{}", as_text(caps)))?;
        missing.iter().try_for_each(|e| writeln!(out, "{}: not available: {}", backend(e), reason(e)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The backend that an error is about.
fn backend(error: &Error) -> &'static str {
    match error {
        Error::Unavailable { backend, .. } | Error::Device { backend, .. } | Error::Timeout { backend, .. } => backend,
        // Only adapters of wgpu have named limits.
        Error::Limit { .. } => "wgpu",
        _ => "device",
    }
}

fn reason(error: &Error) -> String {
    match error {
        Error::Unavailable { reason, .. } => reason.clone(),
        error => error.to_string(),
    }
}

fn formats(caps: &Caps, operation: Operation) -> Vec<&'static str> {
    (caps.formats)(operation).iter().map(|format| format.name()).collect()
}

fn as_json(caps: &Caps) -> Value {
    let formats: Value = Operation::ALL.map(|o| (o.name().to_owned(), json!(formats(caps, o)))).into_iter().collect();
    let limits: Value = caps.limits.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    json!({
        "backend": caps.backend,
        "name": caps.adapter,
        "max_slabs": caps.max_slabs,
        "max_slab_bytes": caps.max_slab_bytes,
        "query_tile": caps.query_tile,
        "formats": formats,
        "limits": limits,
    })
}

fn as_text(caps: &Caps) -> String {
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let mut rows = vec![row("slabs", format!("up to {} of {}", caps.max_slabs, size(caps.max_slab_bytes)))];
    rows.push(row("query tile", format!("{} query vectors", caps.query_tile)));
    rows.extend(Operation::ALL.map(|operation| row(operation.name(), formats(caps, operation).join(", "))));
    let limit = |value: u64| if value >= u32::MAX.into() { "unlimited".to_owned() } else { value.to_string() };
    rows.extend(caps.limits.iter().map(|&(name, value)| row(name, limit(value))));
    format!("{}: {}\n{}", caps.backend, caps.adapter, table(&rows))
}

/// Bytes in the largest binary unit that leaves at least one.
fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(4);
    let value = bytes as f64 / f64::from(power * 10).exp2();
    format!("{value:.*} {}", usize::from(value.fract() != 0.0), units[power as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!([1, 4096, 128 << 20, 3 << 29, 1 << 40].map(size), ["1 B", "4 KiB", "128 MiB", "1.5 GiB", "1 TiB"]);
    }

    #[test]
    fn the_cpu_is_described_in_text_and_json() {
        let device = Device::open("cpu").expect("the CPU is always there");
        let text = as_text(device.caps());
        assert!(
            text.starts_with("cpu: ") && text.contains("attend") && text.contains("f32, f16, bf16, int8"),
            "{text}"
        );
        assert_eq!(as_json(device.caps())["formats"]["append"], json!(["f32", "f16", "bf16", "int8"]));
    }
}
