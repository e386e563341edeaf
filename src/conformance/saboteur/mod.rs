//! Would the suite notice? Every deliberate fault of a backend must fail a case of the right operation.

mod backend;
mod faults;

use super::values::{Rng, decode, poison};
use super::{Case, Report, Subject, cases};
use crate::backend::cpu::CpuBackend;
use crate::backend::{Backend, Operation};
use crate::{Dtype, PageFormat};
pub(crate) use backend::Saboteur;
pub(crate) use faults::Fault;
use faults::Fault::*;

/// Runs the selected cases, light ones first, until one fails.
fn report(fault: Fault, select: impl Fn(&Case<Saboteur<CpuBackend>>) -> bool) -> Report {
    let saboteur = Saboteur::new(CpuBackend::new(), fault);
    let mut report = Report::new(saboteur.caps());
    let selected = |case: &Case<_>| case.skip(saboteur.caps()).is_none() && select(case);
    let mut cases: Vec<_> = cases().into_iter().filter(selected).collect();
    cases.sort_by_key(|case| case.weight);
    for case in cases {
        report.add(&case, Some(&case.run(&saboteur)));
        if report.failed > 0 {
            break;
        }
    }
    report
}

/// A fault that the cases of one subject must find in bf16.
fn noticed(fault: Fault, subject: Subject) {
    noticed_with(fault, subject, PageFormat::Bf16);
}

/// A fault that the cases of one subject and format must find.
fn noticed_with(fault: Fault, subject: Subject, format: PageFormat) {
    let report = report(fault, |case| case.subject == subject && case.format.unwrap_or(format) == format);
    assert!(report.failed > 0, "{fault:?} goes unnoticed in {} cases of {}", report.cases, subject.name());
    let [line] = &report.operations[..] else { panic!("one line, not {:?}", report.operations) };
    assert_eq!((line.operation, line.failed), (subject.name(), 1));
}

fn noticed_in(fault: Fault, operation: Operation) {
    noticed(fault, Subject::Operation(operation));
}

#[test]
fn an_honest_backend_passes_through_the_wrapper() {
    let report = report(Honest, |case| case.weight < 30_000);
    assert!(report.passed > 50 && report.failed == 0, "{:?}", report.failures);
}

#[test]
fn faults_of_memory_are_noticed() {
    let faults = [
        UploadsRoundedUp,
        FillsOneWordMore,
        CopiesOneWordLess,
        SizesWrapAround,
        MisalignedOffsetsRoundedDown,
        UploadsLostNowAndThen,
    ];
    faults.into_iter().for_each(|fault| noticed(fault, Subject::Memory));
}

#[test]
fn faults_of_swaps_are_noticed() {
    let faults = [
        LosesTheLastSwap,
        SwapsTwoRecords,
        SwapsInTheWrongOrder,
        IgnoresTheHostOffset,
        WritesBehindTheRecord,
        KnowsOneSlab,
    ];
    faults.into_iter().for_each(|fault| noticed(fault, Subject::Memory));
}

#[test]
fn faults_of_append_are_noticed() {
    let faults = [
        SwapsKAndV,
        RoundsByTruncation,
        WritesWhenToldNotTo,
        LosesTheLastToken,
        WritesTheNextSlot,
        CountsNothing,
        KnowsOneSlab,
        GridOf65535,
    ];
    faults.into_iter().for_each(|fault| noticed_in(fault, Operation::Append));
}

#[test]
fn faults_of_transfer_are_noticed() {
    for fault in [LosesTheLastMove, SwapsTwoMoves, KnowsOneSlab, GridOf65535] {
        noticed_in(fault, Operation::Transfer);
    }
}

#[test]
fn faults_of_attend_are_noticed() {
    let faults = [
        SwapsKAndV,
        KnowsOneSlab,
        DropsTheLastToken,
        ReadsPastTheEnd,
        IgnoresTheWindow,
        AsksOneQueryForAllHeads,
        ScalesWrongly,
        SplitsWrongly,
        DropsTheLastState,
        LogsInBase2,
        FiniteMinusInfinity,
        LeavesEmptyRows,
        UploadsLostNowAndThen,
        GridOf65535,
    ];
    faults.into_iter().for_each(|fault| noticed_in(fault, Operation::Attend));
}

/// Answers that are right to seven digits, but not always the same.
#[test]
fn answers_that_depend_on_the_place_are_noticed() {
    for fault in [DependsOnTheBatch, DependsOnTheSlabs, DependsOnTheTime] {
        let faults = report(fault, |case| case.format == Some(PageFormat::F32) && case.name.starts_with("C1")).failures;
        assert!(!faults.is_empty(), "{fault:?} goes unnoticed");
    }
}

#[test]
fn faults_of_merge_are_noticed() {
    for fault in [DropsTheLastState, LogsInBase2, FiniteMinusInfinity, LeavesEmptyRows, GridOf65535] {
        noticed_in(fault, Operation::Merge);
    }
}

/// A tier that loses pages, mixes them up or keeps what a slot held before, and says that all is well.
#[test]
fn faults_of_tiers_are_noticed() {
    for fault in [LosesTheLastPageOut, LosesTheLastPageIn, TakesTheNeighboursPage, KeepsOldRecords] {
        noticed(fault, Subject::Swap);
    }
}

#[test]
fn faults_of_folds_are_noticed() {
    for fault in [FoldsOneStateLess, FoldsElsewhereOnly, FoldsNothingToNothing, LosesTheSignOfZero, LosesWhatScoresLack]
    {
        noticed_in(fault, Operation::Merge);
    }
}

#[test]
fn faults_of_project_are_noticed() {
    let faults = [
        LosesTheLastToken,
        WritesTheNextSlot,
        ProjectsTheNextSlot,
        OneMatrixForAllHeads,
        ForgetsTheOffset,
        KnowsOneSlab,
        GridOf65535,
    ];
    faults.into_iter().for_each(|fault| noticed_in(fault, Operation::Project));
}

#[test]
fn faults_of_int8_pages_are_noticed() {
    use Operation::{Append, Attend, Project};
    let faults = [
        (ForgetsTheOffset, [Append, Attend, Project].as_slice()),
        (SwapsKAndV, &[Append, Attend]),
        (LosesTheLastToken, &[Append]),
        (WritesTheNextSlot, &[Append]),
        (CountsNothing, &[Append]),
        (DropsTheLastToken, &[Attend]),
        (ReadsPastTheEnd, &[Attend]),
        (ScalesWrongly, &[Attend]),
        (LosesWhatScoresLack, &[Attend]),
    ];
    for (fault, operations) in faults {
        operations.iter().for_each(|&o| noticed_with(fault, Subject::Operation(o), PageFormat::Int8));
    }
}

#[test]
fn faults_of_score_are_noticed() {
    let faults = [
        ScoresOneTokenLess,
        ScoresOneTokenMore,
        ScoresTheFirstRow,
        AsksOneQueryForAllHeads,
        OneMatrixForAllHeads,
        ForgetsTheOffset,
        KnowsOneSlab,
        GridOf65535,
    ];
    faults.into_iter().for_each(|fault| noticed_in(fault, Operation::Score));
}

#[test]
fn the_generator_is_normal_and_repeatable() {
    let draw = || {
        let mut rng = Rng::new(1);
        (0..10_000).map(|_| f64::from(rng.normal())).collect::<Vec<_>>()
    };
    let (values, n) = (draw(), 10_000.0);
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|x| x * x).sum::<f64>() / n;
    assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
    assert_eq!(values, draw());
    assert!(decode(poison(Dtype::Bf16), Dtype::Bf16).is_nan());
}
