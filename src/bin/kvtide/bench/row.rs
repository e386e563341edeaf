//! What was measured, beside what, and how is it told?

use super::Shape;
use super::compare::{Pair, lines};
use kvtide::{Backend, Device};
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// One measurement, beside its limit in the same run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) op: String,
    pub(super) shape: String,
    pub(super) format: String,
    pub(super) backend: String,
    pub(super) adapter: String,
    /// What emptied the cache before each call: a write (`W`) or a read (`R`).
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) flush: &'static str,
    /// Median.
    pub(super) us: f64,
    /// Bytes that had to move.
    bytes: u64,
    gbs: f64,
    /// The limit's time for as many bytes, and what it is.
    limit_us: f64,
    limit: String,
    pub(super) share: f64,
    /// The fastest other library at the same work in the same session, and its time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peer_us: Option<f64>,
    /// Whatever else is worth knowing.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(super) detail: Value,
}

impl Row {
    pub(super) fn new(op: &str, shape: &Shape, tokens: u64, device: &Device, (us, bytes): (f64, u64)) -> Self {
        Row::kernel(op, shape.text(tokens), &shape.format, device, (us, bytes))
    }

    /// A row about one kernel.
    pub(super) fn kernel(op: &str, shape: String, format: &str, device: &Device, (us, bytes): (f64, u64)) -> Self {
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
            peer: None,
            peer_us: None,
            detail: Value::Null,
        }
    }

    pub(super) fn flushed(mut self, flush: &'static str) -> Self {
        self.flush = flush;
        self
    }

    /// What was done, wherever it was.
    pub(super) fn work(&self) -> [&str; 4] {
        [&self.op, &self.shape, &self.format, self.flush]
    }

    /// Adds to what else is worth knowing.
    pub(super) fn note(&mut self, what: &str, value: impl Into<Value>) {
        self.detail[what] = value.into();
    }

    /// Compares with the time of a limit.
    pub(super) fn beside_us(mut self, limit: &str, us: f64) -> Self {
        self.limit = limit.into();
        self.limit_us = us;
        self.share = us / self.us;
        self
    }

    /// Compares with a limit in bytes a second.
    pub(super) fn beside(mut self, limit: &str, bytes_per_second: f64) -> Self {
        self.limit = limit.into();
        self.limit_us = self.bytes as f64 / bytes_per_second * 1e6;
        self.share = self.limit_us / self.us;
        self
    }
}

/// What one run of this binary found, as a file keeps it.
#[derive(Debug, Serialize)]
struct Report<'a> {
    command: String,
    version: &'static str,
    date: String,
    /// Of the checkout that the command ran in.
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    rows: &'a [Row],
    #[serde(skip_serializing_if = "Option::is_none")]
    compare: Option<Vec<Pair>>,
}

/// Prints rows for people, or as a table of pairs, or all as one JSON object.
pub(super) fn print(json: bool, rows: &[Row], compare: Option<Vec<Pair>>) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    if json {
        let command: Vec<String> = std::env::args().skip(1).collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let (command, version) = (command.join(" "), env!("CARGO_PKG_VERSION"));
        let report = Report { command, version, date: date(now), commit: commit(), rows, compare };
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(());
    }
    if let Some(pairs) = compare {
        write!(out, "{}", lines(&pairs))?;
        return Ok(());
    }
    for row in rows {
        let Row { op, shape, format, backend, flush, us, gbs, limit, share, detail, .. } = row;
        let flush = if flush.is_empty() { String::new() } else { format!(" after {flush}") };
        let time = if *us < 1e4 { format!("{us:.1} µs") } else { format!("{:.1} ms", us / 1e3) };
        writeln!(out, "{op} of {format} on {backend}{flush}: {shape}")?;
        writeln!(out, "    {time}, {gbs:.2} GB/s, {:.1} % of {limit}", share * 100.0)?;
        if let (Some(peer), Some(peer_us)) = (&row.peer, row.peer_us) {
            writeln!(out, "    {peer}: {peer_us:.1} µs, {:.2} × ours", peer_us / us)?;
        }
        if !detail.is_null() {
            writeln!(out, "    {detail}")?;
        }
    }
    Ok(())
}

fn commit() -> Option<String> {
    let git = Command::new("git").args(["describe", "--always", "--dirty", "--exclude=*"]).output().ok()?;
    let name = String::from_utf8(git.stdout).ok()?.trim().to_owned();
    (git.status.success() && !name.is_empty()).then_some(name)
}

/// The day, in UTC, that is so many seconds after the start of 1970.
fn date(seconds: u64) -> String {
    let leap = |year: u64| u64::from(year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut month, mut day) = (1970, 1, seconds / 86_400);
    while day >= 365 + leap(year) {
        day -= 365 + leap(year);
        year += 1;
    }
    for days in [31, 28 + leap(year), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", day + 1)
}

/// A row of work that nobody did.
#[cfg(test)]
pub(super) fn sample(backend: &str, op: &str, shape: &str, flush: &'static str, us: f64) -> Row {
    let device = Device::Cpu(kvtide::backend::cpu::CpuBackend::new());
    let row = Row::kernel(op, shape.into(), "bf16", &device, (us, 1 << 20)).flushed(flush);
    Row { backend: backend.into(), ..row }.beside_us("a limit", us / 2.0)
}

#[cfg(test)]
#[test]
fn days_have_dates() {
    let of = |day: u64| date(day * 86_400 + 86_399);
    assert_eq!([0, 58, 59, 364, 365].map(of), ["1970-01-01", "1970-02-28", "1970-03-01", "1970-12-31", "1971-01-01"]);
    assert_eq!([11_016, 11_017, 19_782, 47_540].map(of), ["2000-02-29", "2000-03-01", "2024-02-29", "2100-02-28"]);
    assert_eq!(of(47_541), "2100-03-01");
}
