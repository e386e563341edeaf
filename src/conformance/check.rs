//! When is an answer right? Comparisons that keep the error closest to its bound, or furthest past it.

use super::values::decode;
use crate::{Dtype, Error};

/// The worst error that a case met, beside what is allowed.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Measure {
    /// What was compared, and where it was worst when that is too bad.
    pub what: String,
    /// The error: a relative or absolute difference, or the number of elements that differ.
    pub error: f64,
    /// The largest error that passes; 0 where bits are compared.
    pub bound: f64,
}

impl Measure {
    /// Whether the error is within its bound.
    pub fn passes(&self) -> bool {
        self.error <= self.bound
    }

    /// Error as a share of its bound: above 1 fails.
    pub fn share(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.bound }
    }
}

/// Why a case could not be measured: the backend's error, or a fault in its answer that has no size.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure(pub String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error.to_string())
    }
}

/// What a case found.
pub type Verdict = Result<Measure, Failure>;

/// Relative bound of contract C2 for outputs of a type.
pub(super) fn epsilon(out: Dtype) -> f64 {
    match out {
        Dtype::F32 => 1e-5,
        Dtype::F16 => 5e-4,
        Dtype::Bf16 => 4e-3,
    }
}

/// Collects the comparisons of one case.
#[derive(Debug, Default)]
pub(super) struct Check {
    worst: Option<Measure>,
}

impl Check {
    /// The case's verdict; a case that compared nothing has failed.
    pub(super) fn done(self) -> Verdict {
        self.worst.ok_or_else(|| Failure("the case compared nothing".into()))
    }

    /// Whether something is past its bound already.
    pub(super) fn has_failed(&self) -> bool {
        self.worst.as_ref().is_some_and(|worst| !worst.passes())
    }

    /// Notes an error; what is not finite counts as the largest. `place` says where, once that matters.
    pub(super) fn error(&mut self, what: &str, error: f64, bound: f64, place: impl FnOnce() -> String) {
        let error = if error.is_finite() { error } else { f64::MAX };
        let share = if error == 0.0 { 0.0 } else { error / bound };
        if self.worst.as_ref().is_none_or(|worst| share > worst.share()) {
            let what = if error > bound { format!("{what}: {}", place()) } else { what.to_owned() };
            self.worst = Some(Measure { what, error, bound });
        }
    }

    /// Elements (or words) that must be the same to the bit.
    pub(super) fn bits(&mut self, what: &str, got: &[u32], want: &[u32]) {
        if got.len() != want.len() {
            return self.error(what, f64::INFINITY, 0.0, || format!("{} words, not {}", got.len(), want.len()));
        }
        let differ = got.iter().zip(want).filter(|(g, w)| g != w).count();
        let first = || got.iter().zip(want).position(|(g, w)| g != w).unwrap_or(0);
        self.error(what, differ as f64, 0.0, || {
            let at = first();
            format!("first at {at} of {}: {:#010x}, not {:#010x}", got.len(), got[at], want[at])
        });
    }

    /// Something that is either so or not.
    pub(super) fn holds(&mut self, what: &str, so: bool) {
        self.error(what, if so { 0.0 } else { 1.0 }, 0.0, || "it is not so".into());
    }

    /// A call that must be refused with an error of the right kind.
    pub(super) fn refused<T>(&mut self, what: &str, got: Result<T, Error>, kind: fn(&Error) -> bool) {
        match got {
            Ok(_) => self.error(what, 1.0, 0.0, || "accepted".into()),
            Err(error) if kind(&error) => self.error("refusals", 0.0, 0.0, String::new),
            Err(error) => self.error(what, 1.0, 0.0, || format!("refused for another reason: {error}")),
        }
    }

    /// Output vectors of `dim` elements against float64, by contract C2: the relative L2 distance of each vector, and
    /// each element against its vector's largest magnitude. Where all is zero, so is the answer.
    pub(super) fn output(&mut self, got: &[u32], dtype: Dtype, want: &[f64], dim: usize) {
        if got.len() != want.len() {
            return self.error("output", f64::INFINITY, 0.0, || format!("{} elements, not {}", got.len(), want.len()));
        }
        let (epsilon, name) = (epsilon(dtype), dtype.name());
        let (of_vector, of_element) = (format!("L2 of {name} output"), format!("element of {name} output"));
        for (vector, (got, want)) in got.chunks_exact(dim).zip(want.chunks_exact(dim)).enumerate() {
            let got = || got.iter().map(|&bits| f64::from(decode(bits, dtype)));
            let largest = want.iter().fold(0.0f64, |m, w| m.max(w.abs()));
            if largest == 0.0 {
                let noise = got().filter(|&x| x != 0.0).count();
                self.error("zeros in the output", noise as f64, 0.0, || format!("vector {vector} is not zero"));
                continue;
            }
            let (mut distance, mut norm) = (0.0, 0.0);
            for (d, (got, want)) in got().zip(want).enumerate() {
                distance += (got - want).powi(2);
                norm += want.powi(2);
                let place = || format!("vector {vector}, element {d}: {got:e}, not {want:e}");
                self.error(&of_element, (got - want).abs() / largest, 8.0 * epsilon, place);
            }
            self.error(&of_vector, (distance / norm).sqrt(), epsilon, || format!("vector {vector}"));
        }
    }

    /// Log-sum-exps against float64: 1e-4 absolute, or four spacings of f32 where those are wider; −∞ to the bit.
    pub(super) fn lse(&mut self, got: &[u32], want: &[f64]) {
        if got.len() != want.len() {
            return self.error("log-sum-exp", f64::INFINITY, 0.0, || format!("{}, not {}", got.len(), want.len()));
        }
        for (at, (&bits, &want)) in got.iter().zip(want).enumerate() {
            let got = f32::from_bits(bits);
            let place = || format!("number {at} is {got}, not {want}");
            if want == f64::NEG_INFINITY {
                let differs = u8::from(bits != f32::NEG_INFINITY.to_bits());
                self.error("log-sum-exp of nothing", differs.into(), 0.0, place);
            } else {
                let bound = (want.abs() * 2f64.powi(-21)).max(1e-4);
                self.error("log-sum-exp", (f64::from(got) - want).abs(), bound, place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_furthest_past_its_bound_wins() {
        let mut check = Check::default();
        check.bits("same", &[1, 2], &[1, 2]);
        check.error("small", 1e-6, 1e-5, String::new);
        assert_eq!(check.worst.as_ref().map(|m| m.what.as_str()), Some("small"));
        check.error("nan", f64::NAN, 1e-5, || "here".into());
        check.error("large", 2e-5, 1e-5, String::new);
        let worst = check.done().unwrap();
        assert!(worst.what == "nan: here" && !worst.passes());
        assert!(Check::default().done().is_err());
    }

    #[test]
    fn nan_outputs_and_finite_sentinels_fail() {
        let mut check = Check::default();
        check.output(&[f32::NAN.to_bits()], Dtype::F32, &[1.0], 1);
        assert!(!check.done().unwrap().passes());
        for sentinel in [-1e30f32, f32::NAN, 0.0] {
            let mut check = Check::default();
            check.lse(&[sentinel.to_bits()], &[f64::NEG_INFINITY]);
            assert!(!check.done().unwrap().passes());
        }
    }
}
