//! How did a backend do? One line for each operation and format, and the text of every failure.

use super::check::{Measure, Verdict};
use super::{Case, Subject};
use crate::PageFormat;
use crate::backend::{Backend, Caps};

/// The outcome of a run of the suite on one device.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Report {
    /// The backend's name.
    pub backend: &'static str,
    /// The adapter's name.
    pub name: String,
    /// Cases in all.
    pub cases: u32,
    /// Cases within their bounds.
    pub passed: u32,
    /// Cases past their bounds, or ended by an error.
    pub failed: u32,
    /// Cases that were not run here.
    pub skipped: u32,
    /// How long it took.
    pub seconds: f64,
    /// The same for each operation and format.
    pub operations: Vec<Line>,
    /// What failed, and how.
    pub failures: Vec<Fault>,
}

/// The cases of one operation and format.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Line {
    /// The operation, or `memory`.
    pub operation: &'static str,
    /// The format, or `any`.
    pub format: &'static str,
    /// Cases in all.
    pub cases: u32,
    /// Cases within their bounds.
    pub passed: u32,
    /// Cases past their bounds, or ended by an error.
    pub failed: u32,
    /// Cases that were not run here.
    pub skipped: u32,
    /// The error closest to its bound, or furthest past it.
    pub worst: Option<Measure>,
}

/// One failed case.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Fault {
    /// The case, with its operation and format.
    pub case: String,
    /// What went wrong.
    pub why: String,
}

impl Report {
    pub(super) fn new(caps: &Caps) -> Self {
        Report { backend: caps.backend, name: caps.adapter.clone(), ..Report::default() }
    }

    /// Counts a case; `None`: skipped.
    pub(super) fn add<B: Backend>(&mut self, case: &Case<B>, verdict: Option<&Verdict>) {
        let failure = match verdict {
            Some(Err(failure)) => Some(failure.0.clone()),
            Some(Ok(measure)) if !measure.passes() => {
                Some(format!("{} (error {:.3e}, bound {:.1e})", measure.what, measure.error, measure.bound))
            }
            _ => None,
        };
        let [passed, failed, skipped] =
            [verdict.is_some() && failure.is_none(), failure.is_some(), verdict.is_none()].map(u32::from);
        let line = self.line(case.subject, case.format);
        line.cases += 1;
        line.passed += passed;
        line.failed += failed;
        line.skipped += skipped;
        if let Some(Ok(measure)) = verdict
            && line.worst.as_ref().is_none_or(|worst| measure.share() > worst.share())
        {
            line.worst = Some(measure.clone());
        }
        self.cases += 1;
        self.passed += passed;
        self.failed += failed;
        self.skipped += skipped;
        self.failures.extend(failure.map(|why| Fault { case: case.to_string(), why }));
    }

    fn line(&mut self, subject: Subject, format: Option<PageFormat>) -> &mut Line {
        let (operation, format) = (subject.name(), format.map_or("any", PageFormat::name));
        let at = self.operations.iter().position(|l| (l.operation, l.format) == (operation, format));
        let at = at.unwrap_or_else(|| {
            let (cases, passed, failed, skipped) = (0, 0, 0, 0);
            self.operations.push(Line { operation, format, cases, passed, failed, skipped, worst: None });
            self.operations.len() - 1
        });
        &mut self.operations[at]
    }
}
