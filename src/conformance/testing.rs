//! How do tests run the suite? What `conformance_tests!` expands to calls in here.

use super::{Subject, cases, host, memory, run, store};
use crate::backend::Backend;
use crate::{PageFormat, Result};

/// The devices that opened. Prints why the others did not, and what a lone test should not pass over in silence.
///
/// # Panics
/// When none opened and `KVTIDE_REQUIRE` (a list with commas) names the backend.
fn present<'a, B: Backend>(name: &str, devices: &'a [Result<B>]) -> Vec<&'a B> {
    for error in devices.iter().filter_map(|device| device.as_ref().err()) {
        eprintln!("{name}: not run: {error}");
    }
    let found: Vec<&B> = devices.iter().filter_map(|device| device.as_ref().ok()).collect();
    if found.is_empty() {
        let required = std::env::var("KVTIDE_REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|r| r.trim() == name),
            "{name}: KVTIDE_REQUIRE names it, but it has no device"
        );
        eprintln!("{name}: not run: no device");
    }
    found
}

/// Runs the cases of one subject and format on every device.
///
/// # Panics
/// When a case fails.
pub fn check<B: Backend>(name: &str, devices: &[Result<B>], subject: Subject, format: Option<PageFormat>) {
    assert!(cases::<B>().iter().any(|case| case.subject == subject && case.format == format), "no such cases");
    let mut failures = Vec::new();
    for device in present(name, devices) {
        let report = run(device, |case| case.subject == subject && case.format == format, |_, _| ());
        eprintln!("{name}: {}: {} passed, {} skipped", report.name, report.passed, report.skipped);
        failures.extend(report.failures.iter().map(|f| format!("{}: {}: {}", report.name, f.case, f.why)));
    }
    assert!(failures.is_empty(), "{} cases failed\n{}", failures.len(), failures.join("\n"));
}

/// Gives every device the buffers of another, opened a second time.
///
/// # Panics
/// When one is accepted.
pub fn check_foreign<B: Backend>(name: &str, devices: &[Result<B>], others: &[Result<B>]) {
    for (here, there) in present(name, devices).into_iter().zip(present(name, others)) {
        let verdicts = [
            memory::foreign_buffers(here, there),
            host::foreign_host_memory(here, there),
            store::foreign_memory(here, there),
        ];
        for verdict in verdicts {
            match verdict {
                Ok(measure) => assert!(measure.passes(), "{}: {}", here.caps().adapter, measure.what),
                Err(failure) => panic!("{}: {}", here.caps().adapter, failure.0),
            }
        }
    }
}

/// Stamps a module of `#[test]`s, one for each operation and format, that run the conformance suite on a backend.
///
/// Takes the module's name (which `KVTIDE_REQUIRE` may list), the backend's type, and an expression that opens its
/// devices: a `Vec<kvtide::Result<Backend>>`. Where none opens, the tests say so and pass, unless it is required.
///
/// ```
/// kvtide::conformance_tests!(
///     cpu,
///     kvtide::backend::cpu::CpuBackend,
///     vec![Ok(kvtide::backend::cpu::CpuBackend::new())]
/// );
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($name:ident, $backend:ty, $devices:expr) => {
        mod $name {
            #[allow(unused_imports, reason = "the backend's type and the expression may name what is in scope outside")]
            use super::*;

            /// Each test opens its own, so that a device that one of them breaks does not fail the others.
            fn devices() -> Vec<$crate::Result<$backend>> {
                $devices
            }

            fn check(subject: $crate::conformance::Subject, format: Option<$crate::PageFormat>) {
                $crate::conformance::testing::check(stringify!($name), &devices(), subject, format);
            }

            #[test]
            fn memory() {
                check($crate::conformance::Subject::Memory, None);
            }

            #[test]
            fn foreign_buffers() {
                $crate::conformance::testing::check_foreign(stringify!($name), &devices(), &devices());
            }

            $crate::conformance_tests!(@operation append, Append, int8);
            $crate::conformance_tests!(@operation transfer, Transfer, int8);
            $crate::conformance_tests!(@operation attend, Attend, int8);
            $crate::conformance_tests!(@operation merge, Merge,);
            $crate::conformance_tests!(@operation project, Project, int8);
            $crate::conformance_tests!(@operation score, Score,);
            $crate::conformance_tests!(@subject store, $crate::conformance::Subject::Store, int8);
            $crate::conformance_tests!(@subject swap, $crate::conformance::Subject::Swap, int8);
        }
    };
    (@operation $module:ident, $operation:ident, $($int8:ident)?) => {
        $crate::conformance_tests!(
            @subject $module,
            $crate::conformance::Subject::Operation($crate::backend::Operation::$operation),
            $($int8)?
        );
    };
    (@subject $module:ident, $subject:expr, $($int8:ident)?) => {
        mod $module {
            fn check(format: $crate::PageFormat) {
                super::check($subject, Some(format));
            }

            #[test]
            fn f32() {
                check($crate::PageFormat::F32);
            }

            #[test]
            fn f16() {
                check($crate::PageFormat::F16);
            }

            #[test]
            fn bf16() {
                check($crate::PageFormat::Bf16);
            }

            $(
                #[test]
                fn $int8() {
                    check($crate::PageFormat::Int8);
                }
            )?
        }
    };
}
