//! Does a backend keep the contracts? The suite that says so, generic over [`Backend`].
//!
//! A [`Case`] gives a backend one small job and measures the answer: page bytes and moves to the bit, attention against
//! float64 (contract C2), and against itself in another place, batch or order (contract C1, to the bit). Memory that
//! nothing should read is full of NaNs. Many cases are named after a fault that another KV cache had.
//!
//! ```
//! use kvtide::{backend::cpu::CpuBackend, conformance};
//!
//! let quick = |case: &conformance::Case<CpuBackend>| case.weight < 10_000;
//! let report = conformance::run(&CpuBackend::new(), quick, |case, _| println!("{}", case.name));
//! assert_eq!(report.failed, 0, "{:?}", report.failures);
//! ```
//!
//! Cases of ten seconds and more run when `KVTIDE_LONG` is set; `KVTIDE_DUMP` names a larger safetensors file to take
//! real tensors from. A backend outside this crate puts one line of
//! [`conformance_tests!`](crate::conformance_tests) into its tests.

mod append;
mod append_edges;
mod ask;
mod attend;
mod bench;
mod cache;
mod check;
mod chunks;
mod fold;
mod host;
mod identity;
mod int8;
mod large;
mod memory;
mod merge;
mod pages;
mod prefixes;
mod probes;
mod project;
mod queue;
mod real;
mod records;
mod refusals;
mod report;
#[cfg(test)]
pub(crate) mod saboteur;
mod scene;
mod score;
mod sections;
mod steps;
mod store;
mod streams;
mod swap;
#[doc(hidden)]
pub mod testing;
mod transfer;
mod values;
mod views;

pub use check::{Failure, Measure, Verdict};
pub use report::{Fault, Line, Report};

use crate::PageFormat;
use crate::backend::{Backend, Caps, Operation};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// What a case is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject {
    /// Allocation, copies, swaps to host memory, streams and events.
    Memory,
    /// One of the operations.
    Operation(Operation),
    /// [`PagedStore`](crate::PagedStore) over them.
    Store,
    /// [`HighSpeedSwap`](crate::swap::HighSpeedSwap) over them and over tiers.
    Swap,
}

impl Subject {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Subject::Memory => "memory",
            Subject::Operation(operation) => operation.name(),
            Subject::Store => "store",
            Subject::Swap => "swap",
        }
    }
}

/// One question to a backend.
pub struct Case<B: Backend> {
    /// What is asked; no two cases of a format have the same name.
    pub name: String,
    /// What it is about.
    pub subject: Subject,
    /// The pages' format (for `merge` the output's type, for `score` the queries'); `None` where it does not matter.
    pub format: Option<PageFormat>,
    /// About how many multiplications or words it takes; slow adapters skip heavy cases.
    pub weight: u64,
    run: Box<Run<B>>,
}

type Run<B> = dyn Fn(&B) -> Verdict + Send + Sync;

impl<B: Backend> fmt::Debug for Case<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<B: Backend> fmt::Display for Case<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.subject.name(), self.format.map_or("any", PageFormat::name), self.name)
    }
}

/// Weight of cases that take longer than everything else together: run when `KVTIDE_LONG` is set.
const LONG: u64 = 1 << 50;
/// Weight up to which adapters run cases that are known to be very slow.
const LIGHT: u64 = 3_000_000;

impl<B: Backend> Case<B> {
    /// Runs the case. A panic of the backend is a failure like any other.
    pub fn run(&self, backend: &B) -> Verdict {
        catch_unwind(AssertUnwindSafe(|| (self.run)(backend))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(Failure(format!("panicked: {text}")))
        })
    }

    /// Why the case does not run on a device.
    pub fn skip(&self, caps: &Caps) -> Option<&'static str> {
        let supported = match (self.subject, self.format) {
            (Subject::Operation(operation), Some(format)) => caps.supports(operation, format),
            (Subject::Store | Subject::Swap, Some(format)) => {
                [Operation::Append, Operation::Transfer, Operation::Attend].iter().all(|&o| caps.supports(o, format))
            }
            _ => true,
        };
        let is = |names: &[&str]| names.iter().any(|name| caps.adapter.contains(name));
        // Formats whose heavy cases show nothing that those of bf16 and int8 do not.
        let repeats = matches!(self.format, Some(PageFormat::F32 | PageFormat::F16));
        let slow = is(&["SwiftShader", "emulated"]) || (repeats && is(&["llvmpipe"]));
        match self.weight {
            _ if !supported => Some("the backend does not have it"),
            weight if weight >= LONG && std::env::var_os("KVTIDE_LONG").is_none() => Some("KVTIDE_LONG is not set"),
            weight if slow && weight > LIGHT && weight < LONG => Some("too heavy for this adapter"),
            _ => None,
        }
    }
}

/// The list that the files of this folder add their cases to.
struct Cases<B: Backend>(Vec<Case<B>>);

impl<B: Backend> Cases<B> {
    fn add(
        &mut self,
        operation: Operation,
        format: PageFormat,
        weight: u64,
        name: impl Into<String>,
        run: impl Fn(&B) -> Verdict + Send + Sync + 'static,
    ) {
        let (subject, format) = (Subject::Operation(operation), Some(format));
        self.0.push(Case { name: name.into(), subject, format, weight, run: Box::new(run) });
    }

    fn store(
        &mut self,
        format: PageFormat,
        weight: u64,
        name: &str,
        run: impl Fn(&B) -> Verdict + Send + Sync + 'static,
    ) {
        let (subject, format) = (Subject::Store, Some(format));
        self.0.push(Case { name: name.into(), subject, format, weight, run: Box::new(run) });
    }

    fn swap(
        &mut self,
        format: PageFormat,
        weight: u64,
        name: &str,
        run: impl Fn(&B) -> Verdict + Send + Sync + 'static,
    ) {
        let (subject, format) = (Subject::Swap, Some(format));
        self.0.push(Case { name: name.into(), subject, format, weight, run: Box::new(run) });
    }

    fn memory(&mut self, weight: u64, name: &str, run: impl Fn(&B) -> Verdict + Send + Sync + 'static) {
        self.0.push(Case { name: name.into(), subject: Subject::Memory, format: None, weight, run: Box::new(run) });
    }
}

/// Every case.
pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list = Cases(Vec::new());
    memory::cases(&mut list);
    streams::cases(&mut list);
    host::cases(&mut list);
    type Group<B> = fn(&mut Cases<B>, PageFormat);
    let groups: [Group<B>; 18] = [
        append::cases,
        append_edges::cases,
        transfer::cases,
        attend::cases,
        probes::cases,
        queue::cases,
        identity::cases,
        sections::cases,
        chunks::cases,
        int8::cases,
        real::cases,
        large::cases,
        views::cases,
        project::cases,
        refusals::cases,
        store::cases,
        steps::cases,
        swap::cases,
    ];
    for group in groups {
        PageFormat::ALL.into_iter().for_each(|format| group(&mut list, format));
    }
    let of_tensors: [Group<B>; 5] =
        [merge::cases, prefixes::cases, sections::merge_cases, score::cases, refusals::tensor_cases];
    for group in of_tensors {
        PageFormat::NATIVE.into_iter().for_each(|format| group(&mut list, format));
    }
    streams::last_cases(&mut list);
    list.0
}

/// Runs the selected cases that the device can run, calling `progress` after each; the others count as skipped.
pub fn run<B: Backend>(
    backend: &B,
    select: impl Fn(&Case<B>) -> bool,
    mut progress: impl FnMut(&Case<B>, Option<&Verdict>),
) -> Report {
    let start = Instant::now();
    let mut report = Report::new(backend.caps());
    for case in cases::<B>().iter().filter(|case| select(case)) {
        let verdict = case.skip(backend.caps()).is_none().then(|| case.run(backend));
        report.add(case, verdict.as_ref());
        progress(case, verdict.as_ref());
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}
